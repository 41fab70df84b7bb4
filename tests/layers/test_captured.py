"""Every recorded case and every type of layer, in both phases: what is captured, on two streams, gives the bits of what
is not, on one.

A layer is here as soon as it has a row in `layer_cases`.
"""

import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from late_streams import LateCuda
from layer_nets import OF_THE_HOST, TEXTS, fill

from blobmem import TEST, TRAIN, Net, layer_types
from blobmem.net import captured
from blobmem.proto.text import read_net

RUNS = 4  # one by itself, one captured, one replayed, and one replayed that adds to gradients or is the first to


def test_every_type_of_layer_is_here():
    ours = {name for name, cls in layer_types().items() if cls.__module__.startswith("blobmem.")}
    assert ours - OF_THE_HOST == {layer.type for text in TEXTS.values() for layer in read_net(text).layer} - OF_THE_HOST


def trace(name, phase, device):
    """The bytes of all arrays after each of some passes, and how many were written to."""
    net = Net(TEXTS[name], phase, device=device, seed=1, backward_streams=2)
    fill(net, name)
    params = [blob for blobs in net.params.values() for blob in blobs]
    found = []
    for run in range(RUNS):
        if run < RUNS - 1:
            net.clear_param_diffs()
        net.run_forward()
        for blob in (net.blobs[each] for each in net.outputs if net.blobs[each].shape):
            blob.diff[...] = run + 1
        net.run_backward()
        blobs = [*net.blobs.values(), *params]
        found.append([blob.cpu_data().tobytes() for blob in blobs] + [blob.cpu_diff().tobytes() for blob in blobs])
    return net, found


@pytest.mark.parametrize("make", [pytest.param(LateCuda, id="emulated", marks=needs_compiler), EXACT_GPU])
@pytest.mark.parametrize("phase", [TRAIN, TEST], ids=["train", "test"])
@pytest.mark.parametrize("name", TEXTS)
def test_captured_is_what_eager_is(name, phase, make, monkeypatch):
    monkeypatch.setattr(captured, "LEAST", 1)
    monkeypatch.setattr(captured, "_RUNS", 1)
    twin = make()
    twin.graphs, twin.streams = False, 1
    net, found = trace(name, phase, make())
    assert found == trace(name, phase, twin)[1]
    for backward, schedule in enumerate(net.compiled()):
        reasons = net.why_eager(bool(backward))
        assert all(not reason or "host" in reason for reason in reasons.values()), reasons
        pieces = [piece for run in schedule._captured.values() for piece in run if isinstance(piece, captured.Captured)]
        assert bool(pieces) == ("" in reasons.values())
        # a constant is made once, and needs no graph; shapes that depend on values are other calls in each pass
        wanted = [] if net._dynamic else [piece for piece in pieces if not all(step.once for step in piece.steps)]
        assert all(piece.graphs for piece in wanted)
