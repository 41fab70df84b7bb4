"""Planned nets that keep images channels last: an array may then have two places, and only one of them in the arena."""

from pathlib import Path

import numpy as np
import pytest
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda

import blobmem.memory
from blobmem import TRAIN, Net, SharedBlobError, build_nets
from blobmem.memory.slot import Slot
from blobmem.net import steps

pytestmark = needs_compiler
NETS = Path(__file__).parents[2] / "data" / "nets"


def device():
    result = EmulatedCuda()
    result.channels_last = True
    return result


def iterate(net):
    net.clear_param_diffs()
    trace = [net.run_forward()]
    net.run_backward()
    return trace + [entry.blob.cpu_diff().copy() for entry in net.learnable]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["inception_small", "resnet_small"])
def test_the_same_bits_with_a_test_pass_between(name):
    traces = []
    for memory in ("keep", "train"):
        nets = build_nets(
            NETS / f"{name}.prototxt", device=device(), seed=3, memory=memory, train_batch=2, test_batches=[1]
        )
        trace = []
        for _ in range(2):
            trace += [*iterate(nets.train), nets.tests[0].run_forward()]
        traces.append(trace)
    assert_same(*traces)
    plan = nets.train._plan
    kinds = {(isinstance(memory, Slot), memory.reordered is not None) for memory in plan.memories}
    either = (False, False) if name == "resnet_small" else (True, True)  # none, where its calls run as one; or both
    assert kinds == {(True, False), (False, True), either}, "how an array can have its places"
    assert all(memory.reordered is None or isinstance(memory.reordered.array, Slot) for memory in plan.memories)


def test_what_is_read_was_turned_over_or_is_refused():
    """After each layer: every blob that is there has the numbers that it has in a net that keeps all."""
    seen = {}
    for memory in ("keep", "train"):
        net, numbers = (
            Net(NETS / "inception_small.prototxt", TRAIN, device=device(), seed=3, memory=memory, batch=2),
            {},
        )
        seen[memory] = numbers

        def look(index, net=net, numbers=numbers):
            for name in net.top_names[net.layer_names[index]] if index < 8 else list(net.blobs)[index % 5 :: 5]:
                try:
                    numbers[index, name] = net.blobs[name].cpu_data().copy()
                except SharedBlobError:
                    continue

        net.after_forward(look)
        net.run_forward()
        net.run_forward()
    for place, values in seen["train"].items():
        np.testing.assert_array_equal(values, seen["keep"][place], err_msg=str(place))
    assert len(seen["train"]) > len(net.nodes)


def resolved_in(net, monkeypatch):
    """How many steps have to look again at their arrays in an iteration."""
    found, real = [], steps.Step._resolve
    net.clear_param_diffs()
    with monkeypatch.context() as patch:
        patch.setattr(blobmem.memory, "debug", False)  # which has all looked at each time
        patch.setattr(steps.Step, "_resolve", lambda step, *rest: (found.append(step), real(step, *rest)))
        net.run_forward()
        net.run_backward()
    return len(found)


def test_from_the_second_pass_on_no_more_steps_look_again_than_where_all_is_kept(monkeypatch):
    """An array that is used in both orders has to; those that lie over it need not."""
    counts = []
    for memory in ("keep", "train"):
        net = Net(NETS / "resnet_small.prototxt", TRAIN, device=device(), seed=3, memory=memory, batch=2)
        iterate(net)
        counts.append(resolved_in(net, monkeypatch))
    kept, planned = counts
    assert 0 < planned <= kept < 20


def test_reshape_from_and_to():
    text = (NETS / "inception_small.prototxt").read_text()
    text = text.replace('"DummyData"', '"Input"').replace("dummy_data_param", "input_param")
    text = "\n".join(line for line in text.splitlines() if "data_filler" not in line)
    traces = []
    for memory in ("keep", "train"):
        net, trace = Net(text, TRAIN, device=device(), seed=3, memory=memory), []
        for batch in (2, 1, 2):
            rng = np.random.default_rng(batch)
            net.blobs["data"].reshape(batch, 3, 16, 16)
            net.blobs["label"].reshape(batch)
            net.blobs["data"].data[...] = rng.standard_normal((batch, 3, 16, 16))
            trace += iterate(net)
        traces.append(trace)
    assert_same(*traces)
