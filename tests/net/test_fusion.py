"""Arrays that a BatchNorm and a Scale in place have in common, and which calls of theirs run as one."""

import importlib

import numpy as np
import pytest
from cuda_devices import DEVICES, needs_compiler
from cuda_emulation import EmulatedCuda
from plan_nets import DATA, assert_same, conv, iterate, layer, loss, made, run_layer_by_layer

from blobmem import TRAIN, Blob, Layer, Net, SharedBlobError, SimulatedDevice, register_layer
from blobmem.devices import HOST
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.memory import Side
from blobmem.net import fusion
from blobmem.net.fusion import groups
from blobmem.net.plan.again import Less
from blobmem.net.plan.evict import lowest
from blobmem.net.plan.places import draft
from blobmem.net.plan.ways import again_in, taken_apart
from blobmem.ops.call import call, memories, overwrite, overwrite_diff, read, read_diff
from blobmem.ops.registry import table

RECOMPUTE = importlib.import_module("blobmem.net.plan.recompute")  # the package has a function of that name


def net_of(
    scale, bottom="c", norm="", of_scale="scale_param { bias_term: true bias_filler { value: 0.5 } }", relu=True
):
    """Data, a convolution, normalisation, a Scale that puts its top in `scale`, a ReLU and a loss."""
    text = f"""
    layer {{ name: "data" type: "DummyData" top: "data" top: "t" dummy_data_param {{
      data_filler {{ type: "gaussian" }} data_filler {{ type: "gaussian" }}
      shape {{ dim: 3 dim: 4 dim: 5 dim: 5 }} shape {{ dim: 3 dim: 2 }} }} }}
    layer {{ name: "c" type: "Convolution" bottom: "data" top: "c" convolution_param {{ num_output: 4 kernel_size: 3
      bias_term: false weight_filler {{ type: "xavier" }} }} }}
    layer {{ name: "bn" type: "BatchNorm" bottom: "{bottom}" top: "n" {norm} }}
    layer {{ name: "s" type: "Scale" bottom: "n" top: "{scale}" {of_scale} }}
    layer {{ name: "ip" type: "InnerProduct" bottom: "{scale}" top: "ip"
      inner_product_param {{ num_output: 2 weight_filler {{ type: "xavier" }} }} }}
    layer {{ name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "t" top: "loss" }}
    """
    place = text.index('layer { name: "ip"')
    return text[:place] + f'layer {{ name: "r" type: "ReLU" bottom: "{scale}" top: "{scale}" }}\n' * relu + text[place:]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def gradients(net, steps=2):
    net.clear_param_diffs()
    for _ in range(steps):
        net.run_forward()
        net.run_backward()
    return {(entry.layer, entry.index): entry.blob.cpu_diff().copy() for entry in net.learnable}


def assert_close(found, expected):
    for place, values in expected.items():
        np.testing.assert_allclose(
            found[place], values, rtol=0, atol=1e-5 * np.abs(values).max(initial=0), err_msg=str(place)
        )


def copies(net):
    return [call.layer_name for call in net.compiled()[0].calls if call.op == "copy"]


def test_what_is_normalised_is_kept_once(device):
    net, apart = (Net(net_of(scale), TRAIN, device=device, seed=2) for scale in ("n", "apart"))
    assert_close(gradients(net), gradients(apart))
    arrays = [net.internals[name].data_view.memory for name in ("bn/normalized", "s/bottom")]
    assert arrays[0] is arrays[1] and copies(net) == []
    side = Side.HOST if device.is_host else Side.DEVICE
    needs = {need.memory: need.nbytes for need in net.needs(backward=True) if need.side is side}
    assert [memory.name for memory, nbytes in needs.items() if nbytes == 4 * 3 * 4 * 3 * 3] == [
        "c", "n", "bn/normalized", "n.diff", "c.diff",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"bottom": "data"},  # below which nothing learns
        {"norm": "batch_norm_param { use_global_stats: true }"},
    ],
)
def test_what_a_batch_norm_does_not_keep_a_scale_keeps(device, options):
    net, apart = (Net(net_of(scale, **options), TRAIN, device=device, seed=2) for scale in ("n", "apart"))
    assert_close(gradients(net), gradients(apart))
    assert copies(net) == ["s"]


def test_without_backward_nothing_is_kept(device):
    net = Net(net_of("n"), TRAIN, device=device, seed=2, forward_only=True)
    net.run_forward()
    used = {operand.blob.name for call in net.compiled()[0].calls for operand in call.present()}
    assert copies(net) == [] and not used & {"bn/normalized", "s/bottom"}


def test_moved_elsewhere_it_is_still_kept_once():
    net, other = (Net(net_of("n"), TRAIN, device=device, seed=2) for device in (SimulatedDevice(), HOST))
    for _ in range(2):
        found, expected = gradients(net), gradients(other)
        for place, values in expected.items():
            np.testing.assert_array_equal(found[place], values)
        net.move_to(HOST)
    assert copies(net) == [] and net.internals["s/bottom"].data_view.memory.device is HOST


# -------------------------------------------------------------------- calls that run as one


def backward_ops(net):
    return [step.call.op for step in net.compiled()[1]._program()]


@needs_compiler
@pytest.mark.parametrize("memory", ["keep", "train"])
@pytest.mark.parametrize("learns", [True, False])
def test_a_bias_that_learns_nothing_still_shuts_the_relu(memory, learns):
    """Nothing in the calls for the gradients says whether there is one."""
    scale = "scale_param { bias_term: true bias_filler { value: 0.5 } }"
    scale += "" if learns else " param { lr_mult: 1 } param { lr_mult: 0 }"
    net, host = (
        Net(net_of("n", of_scale=scale), TRAIN, device=d, seed=2, memory=memory) for d in (EmulatedCuda(), HOST)
    )
    assert_close(gradients(net), gradients(host))
    assert backward_ops(net).count("relu_backward") == (not learns)


@needs_compiler
def test_a_top_is_not_made_anew_for_what_finds_again_where_the_relu_was_shut():
    """But for a part of a pass it is, in which the calls run one by one."""
    pool = 'layer { name: "p" type: "Pooling" bottom: "n" top: "p" pooling_param { pool: AVE kernel_size: 2 } }\n'
    text = net_of("n").replace('layer { name: "ip"', pool + 'layer { name: "ip"')
    text = text.replace('name: "ip" type: "InnerProduct" bottom: "n"', 'name: "ip" type: "InnerProduct" bottom: "p"')
    nets = [Net(text, TRAIN, device=EmulatedCuda(), seed=2, memory=memory) for memory in ("keep", "train")]
    kept, found = (gradients(net) for net in nets)
    for place, values in kept.items():
        np.testing.assert_array_equal(found[place], values, err_msg=str(place))
    assert [backward_ops(net).count("batch_norm_scale_backward") for net in nets] == [1, 1]
    assert "scale_relu_forward" not in backward_ops(nets[1]) and "bn/recomputed" in nets[1].internals
    for net in nets:
        net.clear_param_diffs()
        net.state.iteration = 0
        net.run_forward()
        for index in reversed(range(len(net.nodes))):
            net.run_backward(index, index)
    for one, other in zip(*(net.learnable for net in nets), strict=True):
        np.testing.assert_array_equal(one.blob.cpu_diff(), other.blob.cpu_diff())


@needs_compiler
def test_what_is_made_anew_for_others_is_made_in_one_go():
    net = Net(net_of("n"), TRAIN, device=EmulatedCuda(), seed=2, memory="train")
    ops = backward_ops(net)
    assert ops.count("scale_relu_forward") == 1 and ops.count("batch_norm_scale_backward") == 1
    assert not {"scale_forward", "relu_forward"} & {*ops}


# -------------------------------------------------------------------- residual sums

SCALE = """scale_param { bias_term: true filler { type: "gaussian" mean: 1 std: 0.3 }
  bias_filler { type: "gaussian" std: 0.3 } }"""


def normalised(name, bottom, relu=False):
    """A convolution, its normalisation and a Scale, all in one array, and perhaps a ReLU."""
    text = (
        conv(name, bottom) + layer("BatchNorm", f"{name}n", name, name) + layer("Scale", f"{name}s", name, name, SCALE)
    )
    return text + layer("ReLU", f"{name}r", name, name) * relu


def summed(name, bottoms, slope=""):
    return layer("Eltwise", name, bottoms, name) + layer("ReLU", f"{name}r", name, name, slope)


def residual(projected="p b", identical="x d", slope="", more=""):
    """A block with a projection and one without."""
    text = DATA + normalised("p", "data") + normalised("a", "data", relu=True) + normalised("b", "a") + more
    text += summed("x", projected, slope) + normalised("c", "x", relu=True) + normalised("d", "c")
    return text + summed("y", identical, slope) + conv("e", "y") + loss("e")


def emulated(last):
    device = EmulatedCuda()
    device.channels_last = last
    return device


def ops(net):
    """Of forward and of backward, how many scale, normalise or sum, but for gradients."""
    counted = ("batch_norm_scale_sum_relu_forward", "scale_sum_relu_forward", "sum_relu_forward", "scale_forward")
    found = [[step.call.op for step in schedule._program()] for schedule in net.compiled()]
    return [{op: each.count(op) for op in counted if op in each} for each in found]


ONE_PASS = [{"batch_norm_scale_sum_relu_forward": 2}, {"scale_sum_relu_forward": 2}]


@needs_compiler
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("projected, identical, slope", [
    ("p b", "x d", ""), ("b p", "d x", ""), ("p b", "d x", "relu_param { negative_slope: 0.1 }"),
])  # fmt: skip
def test_residual_sums_take_one_pass_each_and_have_the_same_bits(monkeypatch, last, projected, identical, slope):
    monkeypatch.setattr(RECOMPUTE, "SHARE", 1)  # a small net moves little else
    text = residual(projected, identical, slope)
    kept, net = (made(text, emulated(last), memory) for memory in ("keep", "train"))
    assert_same([*iterate(net), *iterate(net)], [*iterate(kept), *iterate(kept)])
    assert ops(kept) == [{"sum_relu_forward": 2}, {}]
    assert ops(net) == ONE_PASS
    for each in (net, kept):
        run_layer_by_layer(each)
    found, expected = ([entry.blob.cpu_diff() for entry in each.learnable] for each in (net, kept))
    atol = 1e-6 * max(abs(diff).max() for diff in expected)
    for one, other in zip(found, expected, strict=True):  # the former has a norm and its scale as one op even so
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol)


@needs_compiler
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("projected, memory", [("p b", "keep"), ("b p", "train")])
def test_gradients_are_summed_where_a_batch_norm_reads_them(monkeypatch, last, projected, memory):
    """To the bits of two calls; what they come to is written where somebody may look at it."""
    net = made(residual(projected), emulated(last), memory)
    found = iterate(net)
    calls = [step.call for step in net.compiled()[1]._program()]
    (fused,) = (each for each in calls if each.op == "sums_relu_batch_norm_scale_backward")
    assert (fused.operands[3] is None) == (memory == "train")
    assert "sums_relu_backward" not in [each.op for each in calls]
    monkeypatch.setitem(fusion._MATCHES, "sum_arrays", (fusion._sums_backward,))
    apart = made(residual(projected), emulated(last), memory)
    assert_same(found, iterate(apart))
    assert backward_ops(apart).count("sums_relu_backward") == 1
    if memory == "keep":
        for name in ("x", "p", "b"):
            assert_same(*([each.blobs[name].cpu_diff()] for each in (net, apart)))


def test_no_more_calls_run_as_one_than_may():
    net = made(residual(), PredictedCuda(), "train")
    schedule = net.compiled()[1]
    ops, passing = table("cuda"), net._passing(schedule.calls)
    at, group = next(each for each in groups(schedule.calls, ops, passing).items() if "sums_relu_b" in each[1].call.op)
    for most, op in ((group.stop - at, group.call.op), (group.stop - at - 1, "sums_relu_backward"), (1, None)):
        schedule.calls[at].together = most
        found = groups(schedule.calls, ops, passing).get(at)
        assert (found and found.call.op) == op


def test_what_there_is_no_room_for_at_once_runs_apart():
    """Which takes an array less at its fullest: it has four of them at once, and what follows two."""
    device = PredictedCuda()
    device.workspace_limit = 0
    net = made(residual().replace("dim: 6 dim: 5", "dim: 512 dim: 512"), device, "train", passes=())
    net.compiled()
    least, array = [], 3 * 4 * 512 * 512 * 4
    for room in (5 * array, 0):
        way, _ = taken_apart(net, room)
        least.append(lowest(way.found, way.load) // array)
    assert least == [4, 3]


@needs_compiler
def test_what_nobody_reads_but_a_sum_is_not_there_and_says_so():
    kept, net = (made(residual(), emulated(True), memory) for memory in ("keep", "train"))
    kept.run_forward()
    net.run_forward(last=net.layer_names.index("xr"))
    with pytest.raises(SharedBlobError, match=r"keep=\['b'\]"):  # though its bytes are nobody else's yet
        net.blobs["b"].cpu_data()
    net.run_forward()
    for name in "bd":
        with pytest.raises(SharedBlobError, match=rf"keep=\['{name}'\]"):
            net.blobs[name].cpu_data()
    beside = made(residual(), emulated(True), "train", keep=["x"])
    beside.run_forward()
    with pytest.raises(SharedBlobError, match=r"would read 'd'.*keep=\['d'\]"):
        beside.run_forward(beside.layer_names.index("y"))
    scale, last = net.layer_names.index("ds"), len(net.nodes) - 1
    net.state.iteration = 0
    net.run_forward(last=scale)
    assert_same([net.blobs["d"].cpu_data()], [kept.blobs["d"].cpu_data()])
    assert net.run_forward(scale + 1, last) == kept.run_forward(scale + 1, last)
    net.run_backward()
    made_between = "pn/recomputed"  # what p is made anew in, for the sum
    with pytest.raises(SharedBlobError, match="has no bytes now"):
        net.internals[made_between].cpu_data()


@needs_compiler
def test_what_a_layer_makes_only_where_its_calls_run_one_by_one_has_no_bytes():
    net = made(residual(), emulated(True), "train")
    net.run_forward()
    drawn = draft(net, net.compiled(), net.read_after())
    between, elsewhere = set(), set()
    for unit in (unit for units in drawn.units for unit in units):
        ran, own = {*memories(unit.calls[-1:])}, {*memories(unit.calls)}
        parted = len({each.layer for each in unit.calls}) > 1  # a run of one of the layers makes it
        between |= set() if parted else own - ran
        elsewhere |= own if parted else ran
    assert between - elsewhere and drawn.lives.uses.keys().isdisjoint(between - elsewhere)
    assert elsewhere <= {*drawn.lives.uses}


def averaged(text):
    """The net with an average in place of a product, which has a workspace of its own."""
    pool = layer("Pooling", "g", "e", "g", "pooling_param { pool: AVE global_pooling: true }")
    end = pool + layer("Flatten", "ip", "g", "ip") + layer("EuclideanLoss", "loss", "ip t", "loss")
    return text[: text.index('layer { name: "ip"')] + end


@needs_compiler
@pytest.mark.parametrize("last, projected, slope", [
    (False, "p b", ""), (True, "b p", "relu_param { negative_slope: 0.1 }"),
])  # fmt: skip
def test_what_is_convolved_again_is_normalised_as_it_is_made(monkeypatch, last, projected, slope):
    """If it is large; to rounding, so not where the same bits are wanted."""
    text = averaged(residual(projected, slope=slope)).replace("dim: 6 dim: 5", "dim: 40 dim: 32")

    def run(limit=None, exact=False):
        device = EmulatedCuda(limit)
        device.channels_last, device.deterministic = last, exact
        net = made(text, device, "train")
        trace = iterate(net)
        return trace, device.statistics.peak_bytes, backward_ops(net)

    expected, needed, ops = run()
    assert "conv_batch_norm_given" not in ops and "conv_forward" not in ops
    limit = int(0.6 * needed)
    monkeypatch.setattr(fusion, "LARGE", 1 << 14)
    found, peak, ops = run(limit)
    assert peak <= limit and ops.count("conv_batch_norm_given") > 1 and "conv_forward" not in ops
    most = max(np.abs(np.asarray(each)).max() for each in expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * most)
    assert "conv_batch_norm_given" not in run(limit, exact=True)[2]


@pytest.mark.parametrize("other, dtype, large, joined", [
    ("data", "float32", 0, True), ("c", "float32", 0, False), ("data", "float16", 0, True),
    ("data", "float32", 3 * 2 * 6 * 5 * 4 + 1, False),
])  # fmt: skip
def test_what_is_convolved_is_written_where_others_read_it_too(monkeypatch, other, dtype, large, joined):
    """And where it is small."""
    monkeypatch.setattr(fusion, "LARGE", large)
    text = DATA + conv("c", "data", outputs=2) + layer("BatchNorm", "n", "c", "n") + layer("Scale", "s", "n", "n")
    text += layer("Eltwise", "y", f"{other} n", "y") + loss("y")
    net = made(text, PredictedCuda(), "keep", dtype=dtype)
    again = again_in(net, net._made(Less(), 1))
    found = groups(again.calls, again.ops, {each.memory for call in again.calls for each in call.present()})
    assert ("conv_batch_norm_given" in [each.call.op for each in found.values()]) == joined


TILED = (
    DATA + layer("Tile", "t2", "data", "t2", "tile_param { tiles: 2 }") + conv("c", "data")
    + layer("Eltwise", "y", "t2 c", "y") + layer("Power", "z", "y", "z", "power_param { power: 2 }") + loss("z")
)  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("how, joined", [("", True), ("float32", False), ("convolved", False)])
def test_what_is_repeated_is_read_once_by_the_sum_behind_a_convolution(last, how, joined):
    """In halves, and where nobody else reads it."""
    text, dtype = TILED, "float32" if how == "float32" else "float16"
    if how == "convolved":
        text = text.replace('"c" type: "Convolution" bottom: "data"', '"c" type: "Convolution" bottom: "t2"')
    kept, net = (made(text, emulated(last), memory, dtype=dtype) for memory in ("keep", "train"))
    for each in (kept, net):
        each.run_forward()
        each.run_backward()
    ran = [step.call.op for step in net.compiled()[0]._program()]
    assert ("tile_forward" not in ran, "conv_sum_forward" in ran) == (joined, how != "float32")
    for one, other in zip(net.learnable, kept.learnable, strict=True):
        found, expected = (each.blob.cpu_diff().astype(np.float32) for each in (one, other))
        close = 1e-2 if dtype == "float16" else 1e-6
        np.testing.assert_allclose(found, expected, rtol=0, atol=close * np.abs(expected).max())
    if joined:
        with pytest.raises(SharedBlobError, match=r"keep=\['t2'\]"):
            net.blobs["t2"].cpu_data()


LATER = layer("Power", "later", "b", "z", "power_param { power: 2 }") + layer("Silence", "si", "z", "").replace(
    'top: ""', ""
)


@register_layer
class TurnsOnHost(Layer):
    """y = -x, by functions; in place."""

    type = "TurnsOnHost"

    def reshape(self, bottom, top):
        pass

    def forward(self, bottom, top):
        yield call(lambda x, y: np.negative(x, out=y), read(bottom[0]), overwrite(top[0]))

    def backward(self, bottom, top, propagate_down):
        yield call(lambda dy, dx: np.negative(dy, out=dx), read_diff(top[0]), overwrite_diff(bottom[0]))


@needs_compiler
@pytest.mark.parametrize("how", ["kept", "viewed", "used on the host", "read later", "weighted"])
def test_what_somebody_may_read_is_written(how):
    text = residual()
    if how == "read later":
        text += LATER
    if how == "used on the host":
        norm = layer("BatchNorm", "bn", "b", "b")
        text = text.replace(norm, layer("TurnsOnHost", "turns", "b", "b") + norm)
    if how == "weighted":
        text = text.replace('"x" type: "Eltwise"', '"x" type: "Eltwise" eltwise_param { coeff: 1 coeff: 2 }')
    kept = made(text, emulated(True), "keep")
    net = made(text, emulated(True), "train", keep=["b"] if how == "kept" else [])
    mine = Blob(*net.blobs["b"].shape, device=net.device)
    if how == "viewed":
        mine.share_data(net.blobs["b"])
    assert_same(iterate(net), iterate(kept))
    assert ops(net)[0]["batch_norm_scale_sum_relu_forward"] == 1
    if how in ("kept", "viewed", "used on the host"):
        assert_same([net.blobs["b"].cpu_data()], [kept.blobs["b"].cpu_data()])


@needs_compiler
def test_a_top_that_backward_reads_is_written():
    """Where a user has laid it over an array that another layer has read before."""
    early = conv("q", "data") + layer("Power", "early", "q", "z", "power_param { power: 2 }")
    text = residual().replace(conv("a", "data"), early + conv("a", "data"))
    text = text.replace(loss("e"), layer("Eltwise", "f", "e z", "f") + loss("f"))
    kept, net = (made(text, emulated(True), memory) for memory in ("keep", "train"))
    for each in (net, kept):
        each.blobs["b"].share_data(each.blobs["q"])
    assert_same(iterate(net), iterate(kept))
    assert ops(net)[0]["batch_norm_scale_sum_relu_forward"] == 1


WINDOW = {"stride": (1, 1), "pad": (0, 0), "dilation": (1, 1), "group": 1, "layout": "NHWC"}


def convolved(what, later=(), outputs=64, taps=1):
    """The calls of a convolution of 64 channels and of what a batch norm does in slices, and of who reads later; which
    memories there are, by name."""
    shapes = {
        "x": (2, 3, 5, 64),
        "w": (outputs, 64, taps, taps),
        **dict.fromkeys(("top", "y", "dy", "dx", "z"), (2, 3, 5, outputs)),
    }
    shapes |= {"mean": (2 * outputs,), "inv_std": (outputs,), "sums": (2 * outputs,)}
    blobs = {name: Blob(*shape, name=name) for name, shape in shapes.items()}
    folded, of = (30, outputs, 1), blobs.__getitem__
    given = read(of("mean")), read(of("inv_std"))
    normalised = call("batch_norm_given", read(of("top"), folded), overwrite(of("y"), folded), None, *given)
    xhat, dy = read(of("y"), folded), read(of("dy"), folded)
    calls = {
        "moments": [call("batch_norm_moments", read(of("top"), folded), overwrite(of("sums")), before=0, last=True)],
        "sums": [normalised, call("batch_norm_sums", xhat, None, None, dy, overwrite(of("sums")), relu=False, first=True)],
        "gradient": [normalised, call(
            "batch_norm_backward_given", xhat, given[1], None, None, dy, overwrite(of("dx"), folded), read(of("sums")),
            relu=False, count=30,
        )],
    }[what]  # fmt: skip
    first = call("conv_forward", read(of("x")), read(of("w")), None, overwrite(of("top")), **WINDOW)
    rest = [call("copy", read(of(name)), overwrite(of("z"))) for name in later]
    return [first, *calls, *rest], {name: blob.data_view.memory for name, blob in blobs.items()}


@pytest.mark.parametrize("what, later, op, written", [
    ("moments", (), "conv_moments", ()), ("moments", ["top"], "conv_moments", ["top"]),
    ("sums", (), "conv_batch_norm_sums", ()), ("sums", ["y"], "conv_batch_norm_sums", ["y"]),
    ("gradient", (), "conv_batch_norm_backward_given", ["dx"]),
    ("gradient", ["dx"], "conv_batch_norm_backward_given", ["dx"]),
])  # fmt: skip
def test_what_is_convolved_for_its_sums_is_written_where_others_read_it(what, later, op, written):
    calls, memories = convolved(what, later)
    found = groups(calls, table("cuda"), {*memories.values()}, PredictedCuda(math="tf32"))[0]
    assert found.call.op == op and found.stop == len(calls) - len(later)
    used = {operand.memory for operand in found.call.present()}
    assert [name for name in ("top", "y", "dx") if memories[name] in used] == list(written)
    made = {"top"} if what == "moments" else {"top", "y"}
    assert {each.memory for each in found.skipped} == {memories[name] for name in made.difference(written)}


@pytest.mark.parametrize("what", ["moments", "sums", "gradient"])
@pytest.mark.parametrize("taps, outputs, math", [(3, 64, "tf32"), (1, 36, "tf32"), (1, 64, "fp32"), (1, 64, None)])
def test_what_no_kernel_convolves_for_its_sums_is_made_before(what, taps, outputs, math):
    """Nor is anything known of kernels without a device."""
    calls, memories = convolved(what, outputs=outputs, taps=taps)
    device = None if math is None else PredictedCuda(math=math)
    found = groups(calls, table("cuda"), {*memories.values()}, device)
    assert {each.call.op for each in found.values()} <= {"conv_batch_norm_given"}


@pytest.mark.parametrize("what", ["sums", "gradient"])
def test_what_is_convolved_for_its_gradient_is_made_before_where_all_of_it_is_read(what):
    calls, memories = convolved(what, ["top", "y"])
    found = groups(calls, table("cuda"), {*memories.values()}, PredictedCuda(math="tf32"))
    assert not found
