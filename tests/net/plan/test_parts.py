"""Nets whose first layers take the batch in parts: the same results, in as many bytes as a part has."""

import logging
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda

from blobmem import TEST, TRAIN, Net, OutOfDeviceMemory, SharedBlobError, SimulatedDevice, build_nets
from blobmem.devices import HOST
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.footprint import purposes_of
from blobmem.memory import Side
from blobmem.memory.slot import Slot
from blobmem.net import schedule
from blobmem.net.captured import Captured
from blobmem.net.plan import parts
from blobmem.ops.registry import Op

NETS = Path(__file__).parents[2] / "data" / "nets"
MODELS = Path(__file__).parents[3] / "models"


def emulated(last=False, **options):
    device = EmulatedCuda(**options)
    device.channels_last, device.deterministic = last, False
    return device


DEVICES = [
    pytest.param(lambda: HOST, id="host"),
    pytest.param(SimulatedDevice, id="simulated"),
    pytest.param(emulated, id="emulated", marks=needs_compiler),
    pytest.param(lambda: emulated(True), id="channels last", marks=needs_compiler),
]


@pytest.fixture(autouse=True)
def _small_nets(monkeypatch):
    """Bytes that would not be worth it are."""
    monkeypatch.setattr(parts, "_LITTLE", 0)
    monkeypatch.setattr(parts, "_CALL", 0)


def conv(name, bottom, outputs, more="kernel_size: 3 pad: 1"):
    return (
        f'layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{'
        f' num_output: {outputs} {more} weight_filler {{ type: "xavier" }} bias_filler {{ type: "gaussian" }} }} }}\n'
        f'layer {{ name: "{name}/relu" type: "ReLU" bottom: "{name}" top: "{name}" }}\n'
    )


def text(batch, side=16):
    """Large arrays, then small ones: 16 planes, pooled twice, and an inner product."""
    return (
        f'name: "wide" layer {{ name: "in" type: "Input" top: "x"'
        f" input_param {{ shape {{ dim: {batch} dim: 4 dim: {side} dim: {side} }} }} }}\n"
        + conv("a", "x", 16)
        + conv("b", "a", 16)
        + 'layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "b" top: "sum" }\n'
        'layer { name: "norm" type: "LRN" bottom: "sum" top: "norm" }\n'
        'layer { name: "pool" type: "Pooling" bottom: "norm" top: "pool" pooling_param { kernel_size: 4 stride: 4 } }\n'
        + conv("c", "pool", 16)
        + 'layer { name: "join" type: "Concat" bottom: "pool" bottom: "c" top: "join" }\n'
        'layer { name: "fc" type: "InnerProduct" bottom: "join" top: "fc" inner_product_param { num_output: 5'
        ' weight_filler { type: "xavier" } } }\n'
        'layer { name: "prob" type: "Softmax" bottom: "fc" top: "prob" }\n'
    )


def wide(device, batch=32, side=16, **options):
    options.setdefault("memory", "inference")
    net = Net(text(batch, side), TEST, device=device, seed=3, forward_only=True, **options)
    fill(net)
    return net


def fill(net, seed=0):
    rng = np.random.default_rng(seed)
    for name in net.inputs:
        net.blobs[name].data[...] = rng.standard_normal(net.blobs[name].shape)


def assert_close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


# -------------------------------------------------------------------- the same results


@pytest.mark.parametrize("side", [16, 17], ids=["parts are views of the input", "parts are copied from the input"])
def test_results_are_those_of_the_whole_batch(device, side):
    expected = wide(device, 16, side, memory="keep").forward()["prob"].copy()
    results = {}
    for memory in ("keep", "inference"):
        net = wide(device, 16, side, memory=memory, passes=("parts",))
        for _ in range(2):
            results[memory] = net.forward()["prob"].copy()
            assert_close(results[memory], expected)
        copies = [each for each in net._parts.calls if each.op == "take_items"]
        views = side == 16 and not getattr(device, "channels_last", False)
        assert len(copies) == (0 if views else 2), (
            "one for each part, whose bytes begin amid a line of 512, or are turned"
        )
    np.testing.assert_array_equal(results["keep"], results["inference"])


@pytest.mark.parametrize("name", ["inception_small", "resnet_small"])
def test_the_small_nets_give_the_results_of_the_whole_batch(device, name):
    options = {"device": device, "seed": 3, "batch": 16, "forward_only": True}
    traces = []
    for passes in ((), ("parts",)):
        net = Net(NETS / f"{name}.prototxt", TEST, memory="inference", passes=passes, **options)
        net.run_forward()
        net.run_forward()
        traces.append({name: net.blobs[name].cpu_data().copy() for name in net.outputs})
        assert (net._parts is not None) == bool(passes)
    for output, values in traces[0].items():
        assert_close(traces[1][output], values)


@needs_compiler
@pytest.mark.parametrize("memory", ["keep", "inference"])
def test_each_part_has_its_own_part_of_the_input_in_a_graph(memory):
    """What calls of a graph use is prepared before any of them runs."""
    device = emulated(True)
    whole, net = wide(device, 16, memory="keep"), wide(device, 16, memory=memory, passes=("parts",))
    for seed in range(5):
        for each in (whole, net):
            fill(each, seed)
        assert_close(net.forward()["prob"], whole.forward()["prob"])
    pieces = next(iter(net.compiled()[0]._captured.values()))
    assert any(isinstance(piece, Captured) and piece._graphs for piece in pieces)


def test_with_keep_every_array_is_whole(device):
    whole, divided = (wide(device, 16, memory="keep", passes=passes) for passes in ((), ("parts",)))
    for net in (whole, divided, divided):
        net.run_forward()
    assert not divided._parts.absent
    for name, blob in whole.blobs.items():
        assert_close(divided.blobs[name].cpu_data(), blob.cpu_data())


def test_a_blob_that_moves_takes_its_parts_along():
    net, other = wide(HOST, memory="keep", passes=("parts",)), wide(HOST, memory="keep")
    expected = net.forward()["prob"].copy()
    net.blobs["pool"].share_data(other.blobs["pool"])
    net.forward()
    np.testing.assert_array_equal(net.blobs["prob"].cpu_data(), expected)
    assert net.blobs["pool"].cpu_data().any()
    assert_close(other.blobs["pool"].cpu_data(), net.blobs["pool"].cpu_data())


@pytest.mark.parametrize("batches", [(32, 17, 64, 40), (5, 32)])
def test_other_batches_take_parts_that_divide_them_or_none(device, batches):
    if device.family == "cuda":
        batches = [batch // 2 for batch in batches]
    net, whole = wide(device, batches[0]), wide(device, batches[0], memory="keep")
    for batch in batches:
        for each in (net, whole):
            each.blobs["x"].reshape(batch, 4, 16, 16)
            fill(each, batch)
        assert_close(net.forward()["prob"], whole.forward()["prob"])
        divides = any(batch % count == 0 and batch // count >= 8 for count in range(2, 17))
        assert (net._parts is not None) == divides


# -------------------------------------------------------------------- exact bytes


def test_bytes_are_those_of_parts_and_what_crosses():
    """Four parts of 8, as long as arrays are large: what is in use at most is two arrays of one part and a pool's top."""
    device = SimulatedDevice()
    net = wide(device, 32)
    net.run_forward()
    image = 16 * 16 * 16 * 4
    assert net._parts.pieces[0].shape[0] == 8 and net.layer_names[net._parts.layers[1]] == "pool"
    scratch = max(unit.scratch for unit in net.compiled()[0].units())
    assert not scratch and net.planned().nbytes == 2 * 8 * image + 32 * image // 16
    assert device.statistics.bytes_held == sum(n.nbytes for n in net.needs() if n.side is Side.DEVICE)
    before = device.statistics.allocations
    net.run_forward()
    assert device.statistics.allocations == before


def test_the_host_takes_smaller_parts():
    """There they take no longer: eight parts of 8, where a device takes four of 16."""
    on_host, elsewhere = (wide(device, 64) for device in (HOST, SimulatedDevice()))
    image = 16 * 16 * 16 * 4
    assert on_host.planned().nbytes == 2 * 8 * image + 64 * image // 16
    assert elsewhere.planned().nbytes == 2 * 16 * image + 64 * image // 16
    assert_close(on_host.forward()["prob"], elsewhere.forward()["prob"])


@needs_compiler
@pytest.mark.parametrize("memory", ["keep", "inference"])
@pytest.mark.parametrize("passes", [(), ("parts",)], ids=["whole", "parts"])
def test_channels_last_bytes_are_those_predicted(memory, passes):
    """The input is on the device as it came, and channels last: all of it, or a part at a time, in the arena if any."""
    device = emulated(True)
    net = wide(device, 16, memory=memory, passes=passes)
    predicted = sum(need.nbytes for need in net.needs() if need.side is Side.DEVICE)
    net.run_forward()
    net.run_forward()
    x = net.blobs["x"].data_view.memory
    assert device.statistics.bytes_held == predicted and x.gpu_capacity == net.blobs["x"].nbytes
    if not passes:
        assert x.reordered.array.gpu_capacity == net.blobs["x"].nbytes
    else:
        assert x.reordered is None
        pieces = [piece for piece in net.pieces if piece.name.startswith("x (part")]
        assert [piece.shape[0] for piece in pieces] == [8, 8] if memory == "inference" else [8]
        turned = [piece.data_view.memory.reordered.array for piece in pieces]
        assert all(isinstance(array, Slot) == (memory == "inference") for array in turned)


MODEL_PARTS = {
    ("caffenet", 256): (8, "relu6"),  # the top of pool5 would be there in both orders
    ("vgg16", 64): (4, "pool2"),
    ("googlenet", 32): (4, "pool4/3x3_s2"),
    ("resnet50", 32): (4, "res5a_branch2a_relu"),
    ("resnet50", 256): (4, "res5a_branch2a_relu"),
    ("inception_v3", 256): (4, "reduction_b_pool"),
}


@pytest.mark.parametrize("model, batch", MODEL_PARTS)
def test_the_models_hold_little_more_than_half(monkeypatch, model, batch):
    """Without scratch, which differs more between algorithms than between numbers of parts."""
    monkeypatch.setattr(Op, "workspace_bytes", lambda *operands, **attributes: 0)
    held = []
    for passes in ((), ("parts",)):
        device = PredictedCuda(math="tf32")
        path = MODELS / model / "deploy.prototxt"
        net = Net(path, TEST, batch=batch, device=device, seed=1, memory="inference", passes=passes)
        held.append(sum(need.nbytes for need in net.needs() if need.side is Side.DEVICE))
        net.run_forward()
        net.run_forward()
        assert device.statistics.bytes_held == held[-1]
    assert (batch // net.pieces[0].shape[0], net.layer_names[net._parts.layers[1]]) == MODEL_PARTS[model, batch]
    assert held[1] < 0.65 * held[0]


def test_little_is_left_alone(monkeypatch):
    assert wide(HOST)._parts is None
    monkeypatch.setattr(parts, "_LITTLE", 1 << 30)
    net = wide(HOST)
    net.run_forward()
    assert net._parts is None


def test_on_the_host_calls_have_bytes_too(monkeypatch):
    monkeypatch.setattr(parts, "_CALL", 1 << 20)
    nets = [wide(device) for device in (HOST, SimulatedDevice())]
    for net in nets:
        net.run_forward()
    assert [net._parts is None for net in nets] == [True, False]


@pytest.mark.parametrize("much, share, items", [(0.55, 0.3, 16), (0.3, 0.6, 32), (0.9, 0.3, None)])
def test_little_is_saved_where_it_is_much_of_the_net(monkeypatch, much, share, items):
    """A net of 2.3 MiB, 2.0 of them arrays: in parts of 32 these take half of that, of 16 a quarter, of 8 a sixth."""
    for name, value in {"LITTLE": 1 << 30, "LEAST": 0, "MUCH": much, "ENOUGH_OF_LITTLE": share}.items():
        monkeypatch.setattr(parts, f"_{name}", value)
    net = wide(SimulatedDevice(), 64)
    net.run_forward()
    assert (net.pieces[0].shape[0] if net.pieces else None) == items


@pytest.mark.parametrize("part", [0.6, 0.3])
def test_as_many_parts_as_it_takes_where_there_is_no_room_for_the_batch(part):
    free = SimulatedDevice()
    expected = wide(free, passes=()).forward()["prob"].copy()
    beside = wide(SimulatedDevice(), passes=()).needs()
    arena = max(need.nbytes for need in beside)
    limit = free.statistics.peak_bytes - int((1 - part) * arena)
    with pytest.raises(OutOfDeviceMemory):
        wide(SimulatedDevice(limit), passes=()).forward()
    device = SimulatedDevice(limit)
    net = wide(device, passes=("slices",))
    assert_close(net.forward()["prob"], expected)
    assert 32 // net.pieces[0].shape[0] == (2 if part > 0.5 else 4)
    assert device.statistics.peak_bytes <= limit
    net.before_forward(lambda layer: None)  # a callback about layers ends the parts
    with pytest.raises(OutOfDeviceMemory):
        net.forward()


# -------------------------------------------------------------------- what can be read, and what ends it


def test_what_is_never_whole_is_refused(device):
    net = wide(device, 16)
    net.run_forward()
    for touch in (lambda: net.blobs["a"].data, lambda: net.blobs["sum"].cpu_data(), lambda: net.forward(blobs=["b"])):
        with pytest.raises(SharedBlobError, match=r"never there as a whole.*keep=\['(a|b|sum)'\]"):
            touch()
    net.run_forward()


def test_what_is_kept_is_whole(device):
    whole, net = wide(device, 16, memory="keep"), wide(device, 16, keep=["a", "norm"])
    for each in (whole, net, net):
        each.run_forward()
    assert net._parts is not None
    for name in ("a", "norm"):
        assert_close(net.blobs[name].cpu_data(), whole.blobs[name].cpu_data())


@pytest.mark.parametrize("how", ["end", "start", "callback", "debug"])
def test_runs_of_single_layers_take_the_whole_batch(caplog, how):
    caplog.set_level(logging.WARNING)
    whole, net = wide(SimulatedDevice(), memory="keep"), wide(SimulatedDevice())
    whole.run_forward()
    net.run_forward()
    smaller, seen = net.planned().nbytes, []
    if how == "end":
        assert_close(net.forward(end="b/relu")["b"], whole.blobs["b"].cpu_data())
    elif how == "start":
        with pytest.raises(SharedBlobError):
            net.forward(start="norm")
    elif how == "callback":
        net.after_forward(lambda index: seen.append(index))
        net.forward()
        assert seen == list(range(len(net.nodes)))
    else:
        net.debug_info = True
        net.forward()
    assert "takes its batch as a whole from now on" in caplog.text and not net.passes
    assert_close(net.forward()["prob"], whole.blobs["prob"].cpu_data())
    assert net.planned().nbytes > smaller and caplog.text.count("as a whole") == 1


def test_what_follows_the_parts_runs_by_itself():
    net = wide(SimulatedDevice(), memory="keep", passes=["parts"])
    expected = net.forward()["prob"].copy()
    net.blobs["prob"].data[...] = 0
    after = net.layer_names[net._parts.layers[1] + 1]
    np.testing.assert_array_equal(net.forward(start=after)["prob"], expected)
    assert net.passes == {"parts"}


def test_an_interruption_leaves_a_net_that_runs(monkeypatch):
    net = wide(SimulatedDevice())
    expected = net.forward()["prob"].copy()
    run = schedule.Schedule.run

    def interrupted(calls, start=0, stop=None):
        run(calls, start, 12)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(schedule.Schedule, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            net.run_forward()
    np.testing.assert_array_equal(net.forward()["prob"], expected)


def test_a_net_that_moves_takes_parts_there():
    device = SimulatedDevice()
    net = wide(device)
    expected = net.forward()["prob"].copy()
    net.move_to(HOST)
    np.testing.assert_array_equal(net.forward()["prob"], expected)
    assert device.statistics.bytes_held == 0 and net._parts is not None


# -------------------------------------------------------------------- where there are none


@needs_compiler
def test_a_deterministic_device_takes_the_whole_batch():
    device = emulated()
    device.deterministic = True
    net = wide(device, 16)
    net.run_forward()
    assert net._parts is None


def test_test_nets_of_a_solver_take_the_whole_batch():
    nets = build_nets(NETS / "inception_small.prototxt", memory="train", test_batches=[32], device=HOST)
    nets.tests[0].run_forward()
    assert nets.tests[0]._parts is None


def test_wrong_passes_are_refused():
    with pytest.raises(ValueError, match="passes are parts, fold, slices; there is none called 'fast'"):
        wide(HOST, passes=["fast"])
    with pytest.raises(ValueError, match="forward_only=True"):
        Net(text(16), TRAIN, device=HOST, passes=["parts"])
    assert wide(HOST, memory="keep").passes == frozenset() and wide(HOST).passes == {"parts", "slices"}


@pytest.mark.parametrize(
    "layer",
    [
        'type: "MVN" mvn_param { across_channels: true }',
        'type: "Reduction" reduction_param { axis: 0 }',
        'type: "Concat" concat_param { axis: 0 } bottom: "a"',
        'type: "BatchNorm" batch_norm_param { use_global_stats: false }',
    ],
    ids=lambda layer: layer.split('"')[1],
)
def test_what_mixes_items_or_is_not_known_ends_the_parts(layer):
    head = text(32).partition('layer { name: "norm"')[0]
    body = head + f'layer {{ name: "mix" bottom: "sum" top: "mix" {layer} }}\n'
    nets = [Net(body, TEST, device=HOST, seed=3, memory="inference", passes=passes) for passes in ((), ("parts",))]
    results = []
    for net in nets:
        fill(net)
        results.append(net.forward()["mix"].copy())
    assert_close(*results)
    mix = nets[1].layer_names.index("mix")
    assert nets[1]._parts is None or nets[1]._parts.layers[1] < mix


def test_pieces_have_a_purpose():
    net = wide(SimulatedDevice())
    plan, purposes = net.planned(), purposes_of(net)
    assert {purposes[tenant.memory] for tenant in plan.tenants if tenant.memory is not None} == {"data"}
