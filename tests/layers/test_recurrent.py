"""RNN, LSTM and LSTMUnit as layers: what they compute, carry, keep, share and refuse."""

import time

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice, build_nets
from blobmem.devices import HOST
from blobmem.layers.base import Context, create_layer
from blobmem.proto import caffe_pb2
from blobmem.solvers import get_solver

FILLERS = 'weight_filler { type: "uniform" min: -0.6 max: 0.6 } bias_filler { type: "uniform" min: -0.3 max: 0.3 }'


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def dims(*shape):
    return "shape { " + " ".join(f"dim: {d}" for d in shape) + " }"


def inputs(**shapes):
    return "".join(
        f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ {dims(*shape)} }} }}\n'
        for name, shape in shapes.items()
    )


def layer(type_, bottoms="x cont", tops="y", name="l", options="", units=4):
    blobs = " ".join([f'bottom: "{b}"' for b in bottoms.split()] + [f'top: "{t}"' for t in tops.split()])
    return f"""layer {{ name: "{name}" type: "{type_}" {blobs}
        recurrent_param {{ num_output: {units} {FILLERS} {options} }} }}\n"""


def sequence_net(type_, steps=5, streams=2, size=3, phase=TRAIN, device=HOST, extra="", **options):
    """x and cont through one layer; cont is 1."""
    text = "force_backward: true\n" + inputs(x=(steps, streams, size), cont=(steps, streams))
    net = Net(text + layer(type_, **options) + extra, phase, device=device, seed=3)
    net.blobs["cont"].data[...] = 1
    return net


def outputs(net, x, top="y"):
    net.blobs["x"].data[...] = x
    net.run_forward()
    return net.blobs[top].cpu_data().copy()


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same(a, b, tolerance=2e-6):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=1e-30))


# -------------------------------------------------------------------- against a net that is unrolled


def small_layer(type_, name, bottoms, tops="", fields=""):
    blobs = " ".join([f'bottom: "{b}"' for b in bottoms.split()] + [f'top: "{t}"' for t in tops.split()])
    return f'layer {{ name: "{name}" type: "{type_}" {blobs} {fields} }}\n'


def product(name, bottom, top, outputs, *params, axis=2):
    names = " ".join(f'param {{ name: "{param}" }}' for param in params)
    bias = "true" if len(params) > 1 else "false"
    fields = f"inner_product_param {{ num_output: {outputs} axis: {axis} bias_term: {bias} }}"
    return small_layer("InnerProduct", name, bottom, top, f"{names} {fields}")


def unrolled(type_, steps, streams, size, statics, units):
    """The layer as Caffe makes it: many small ones for each step."""
    rows = units * (4 if type_ == "LSTM" else 1)
    along, state = range(steps), ["h", "c"] if type_ == "LSTM" else ["h"]
    text = "force_backward: true\n" + inputs(
        x=(steps, streams, size), cont=(steps, streams), s=(streams, statics),
        **{f"{name}0": (1, streams, units) for name in state},
    )  # fmt: skip
    text += product("xw", "x", "xw", rows, "w_x", "b")
    text += product("sw", "s", "sw", rows, "w_static", axis=1)
    text += small_layer("Reshape", "sr", "sw", "sums", f"reshape_param {{ {dims(1, streams, rows)} }}")
    for name in ("xw", "cont"):
        tops = " ".join(f"{name}_{t}" for t in along)
        text += small_layer("Slice", f"{name}_slices", name, tops, "slice_param { axis: 0 }")
    for t in along:
        text += small_layer("Scale", f"scale{t}", f"h{t} cont_{t}", f"kept{t}", "scale_param { axis: 0 }")
        text += product(f"hw{t}", f"kept{t}", f"hw{t}", rows, "w_h")
        text += small_layer("Eltwise", f"z{t}", f"hw{t} xw_{t} sums", f"z{t}")
        if type_ == "LSTM":
            text += small_layer("LSTMUnit", f"unit{t}", f"c{t} z{t} cont_{t}", f"c{t + 1} h{t + 1}")
        else:
            text += small_layer("TanH", f"tanh{t}", f"z{t}", f"h{t + 1}")
            text += product(f"ow{t}", f"h{t + 1}", f"ow{t}", units, "w_o", "b_o")
            text += small_layer("TanH", f"o{t}", f"ow{t}", f"o{t}")
    outputs = [f"h{t + 1}" if type_ == "LSTM" else f"o{t}" for t in along]
    text += small_layer("Concat", "all", " ".join(outputs), "y", "concat_param { axis: 0 }")
    return text + "".join(small_layer("Power", f"{n}_end", f"{n}{steps}", f"{n}_last") for n in state)


@pytest.mark.parametrize("type_", ["RNN", "LSTM"])
def test_same_as_unrolled(type_, device):
    steps, streams, size, statics, units = 4, 3, 5, 2, 6
    states = ["h", "c"] if type_ == "LSTM" else ["h"]
    whole = Net(unrolled(type_, steps, streams, size, statics, units), TRAIN, device=device)
    bottoms, tops = " ".join(["x cont s", *(f"{n}0" for n in states)]), " ".join(["y", *(f"{n}_last" for n in states)])
    text = "force_backward: true\n" + inputs(
        x=(steps, streams, size), cont=(steps, streams), s=(streams, statics),
        **{f"{name}0": (1, streams, units) for name in states},
    )  # fmt: skip
    net = Net(
        text + layer(type_, bottoms, tops, options="expose_hidden: true", units=units), TRAIN, device=device, seed=3
    )
    learned = {entry.name: entry.blob for entry in whole.learnable}
    names = ["w_x", "b", "w_static", "w_h"] + ["w_o", "b_o"] * (type_ == "RNN")
    for name, blob in zip(names, net.params["l"], strict=True):
        blob.data[...] = values(len(name), *blob.shape) / 2
        learned[name].data[...] = blob.cpu_data()
    for i, name in enumerate(net.inputs):
        net.blobs[name].data[...] = values(i, *net.blobs[name].shape)
    net.blobs["cont"].data[...] = [[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1]]
    for name in net.inputs:
        whole.blobs[name].data[...] = net.blobs[name].cpu_data()
    for one in (net, whole):
        one.run_forward()
        for i, name in enumerate(tops.split()):
            one.blobs[name].diff[...] = values(10 + i, *one.blobs[name].shape)
        one.run_backward()
    for name in tops.split():
        same(net.blobs[name].cpu_data(), whole.blobs[name].cpu_data())
    for name in bottoms.replace("cont ", "").split():
        same(net.blobs[name].cpu_diff(), whole.blobs[name].cpu_diff())
    for name, blob in zip(names, net.params["l"], strict=True):
        same(blob.cpu_diff(), learned[name].cpu_diff())


# -------------------------------------------------------------------- the carried state


@pytest.mark.parametrize("type_", ["RNN", "LSTM"])
def test_a_pass_goes_on_where_the_last_one_ended(type_, device):
    x = values(1, 12, 2, 3)
    whole = outputs(sequence_net(type_, steps=12, device=device), x)
    parts = sequence_net(type_, steps=4, device=device)
    for first in (0, 4, 8):
        same(outputs(parts, x[first : first + 4]), whole[first : first + 4])
    parts.blobs["cont"].data[0] = [0, 1]
    y = outputs(parts, x[:4])
    same(y[:, 0], whole[:4, 0])
    assert not np.allclose(y[:, 1], whole[:4, 1], atol=1e-3)


@pytest.mark.parametrize("type_", ["RNN", "LSTM"])
def test_the_state_survives_other_numbers_of_steps_and_streams(type_, device):
    x = values(1, 11, 3, 3)
    whole = outputs(sequence_net(type_, steps=11, streams=3, device=device), x)
    net = sequence_net(type_, steps=4, streams=3, device=device)
    outputs(net, x[:4])
    for first, steps, streams in ((4, 5, 3), (9, 1, 2), (10, 1, 1)):
        net.blobs["x"].reshape(steps, streams, 3)
        net.blobs["cont"].reshape(steps, streams)
        net.blobs["cont"].data[...] = 1
        y = outputs(net, x[first : first + steps, :streams])
        same(y, whole[first : first + steps, :streams])


@pytest.mark.parametrize("type_", ["RNN", "LSTM"])
def test_new_streams_begin_with_zero(type_, device):
    x = values(1, 4, 5, 3)
    net = sequence_net(type_, steps=4, streams=2, device=device)
    outputs(net, x[:, :2])
    net.blobs["x"].reshape(4, 5, 3)
    net.blobs["cont"].reshape(4, 5)
    net.blobs["cont"].data[...] = 1
    y = outputs(net, x)
    fresh = outputs(sequence_net(type_, steps=4, streams=5, device=device), x)
    same(y[:, 2:], fresh[:, 2:])
    assert not np.allclose(y[:, :2], fresh[:, :2], atol=1e-3)


@pytest.mark.parametrize("type_", ["RNN", "LSTM"])
def test_exposed_states_are_handed_over(type_, device):
    x, states = values(1, 8, 2, 3), ["h", "c"] if type_ == "LSTM" else ["h"]
    expected = outputs(sequence_net(type_, steps=8, device=device), x)

    def exposed(steps):
        text = inputs(x=(steps, 2, 3), cont=(steps, 2), **dict.fromkeys(states, (1, 2, 4)))
        tops = " ".join(["y", *(f"{name}_last" for name in states)])
        return Net(text + layer(type_, " ".join(["x cont", *states]), tops, options="expose_hidden: true"), TEST,
                   device=device, seed=3)  # fmt: skip

    net, given = exposed(4), dict.fromkeys(states, 0)
    for first in (0, 4, 4):
        out = net.forward(
            x=x[first : first + 4], cont=np.ones((4, 2)), **{n: np.full((1, 2, 4), v) for n, v in given.items()}
        )
        same(out["y"], expected[first : first + 4])
        if not first:  # the last pass again from the same state: nothing is carried
            given = {name: out[f"{name}_last"].copy() for name in states}
    assert "l/hidden" not in net.internals


DATA = """
name: "sequences"
layer { name: "data" type: "DummyData" top: "x" top: "target" dummy_data_param {
  data_filler { type: "gaussian" } data_filler { type: "gaussian" }
  shape { dim: 6 dim: 3 dim: 5 } shape { dim: 6 dim: 3 dim: 4 } } include { phase: TRAIN } }
layer { name: "data" type: "DummyData" top: "x" top: "target" dummy_data_param {
  data_filler { type: "gaussian" } data_filler { type: "gaussian" }
  shape { dim: 4 dim: 3 dim: 5 } shape { dim: 4 dim: 3 dim: 4 } } include { phase: TEST } }
layer { name: "one" type: "DummyData" top: "cont" include { phase: TRAIN } dummy_data_param {
  data_filler { type: "constant" value: 1 } shape { dim: 6 dim: 3 } } }
layer { name: "one" type: "DummyData" top: "cont" include { phase: TEST } dummy_data_param {
  data_filler { type: "constant" value: 1 } shape { dim: 4 dim: 3 } } }
""" + layer("LSTM", tops="a", name="a", units=7) + layer("RNN", "a cont", "y", name="b") + """
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "target" top: "loss" }
"""  # fmt: skip


def test_train_and_test_nets_do_not_share_their_states(device):
    shared, alone = build_nets(DATA, device=device, seed=5), build_nets(DATA, share=False, device=device, seed=5)
    for name in ("a/hidden", "a/cell", "b/hidden"):
        assert "reads it before replacing it" in shared.reports[0].unshared[name]
    assert {"a", "y"} <= set(shared.reports[0].shared)
    losses = []
    for nets in (shared, alone):
        run = []
        for _ in range(3):
            run += [nets.train.run_forward(), nets.tests[0].run_forward(), nets.train.run_forward()]
            nets.train.clear_param_diffs()
            nets.train.run_backward()
            run += [blob.cpu_diff().tobytes() for blobs in nets.train.params.values() for blob in blobs]
        losses.append(run)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_training_goes_on_bit_for_bit_after_a_snapshot(dtype, tmp_path, device):
    (tmp_path / "net.prototxt").write_text(DATA)
    text = f"""net: "{tmp_path}/net.prototxt" base_lr: 0.05 lr_policy: "fixed" max_iter: 8 test_iter: 1 test_interval: 2
        snapshot_prefix: "{tmp_path}/s" """
    (tmp_path / "solver.prototxt").write_text(text)

    def losses(solver, count):
        seen = []
        solver.add_callback(on_iteration=lambda _, loss: seen.append(loss), on_test=lambda test: seen.append(test.loss))
        solver.step(count)
        return seen

    whole, first, second = (
        get_solver(tmp_path / "solver.prototxt", device=device, seed=seed, dtype=dtype) for seed in (3, 3, 99)
    )
    expected = losses(whole, 6)
    before = losses(first, 3)
    second.step(2)  # it carries something else already
    second.restore(first.snapshot())
    assert before + losses(second, 3) == expected
    for blob, other in zip(whole.net.params["a"], second.net.params["a"], strict=True):
        assert blob.cpu_data().tobytes() == other.cpu_data().tobytes()


def test_states_that_do_not_fit(caplog):
    one, other = sequence_net("LSTM", streams=2), sequence_net("LSTM", streams=3)
    for net in (one, other):
        net.blobs["x"].data[...] = 1
        net.run_forward()
    state = one.layers[-1].state_dict()
    other.layers[-1].load_state_dict(state)
    assert "layer 'l'" in caplog.text
    assert "(1, 2, 4)" in caplog.text
    assert not other.internals["l/hidden"].cpu_data().any()
    assert not other.internals["l/cell"].cpu_data().any()
    kept = one.internals["l/hidden"].cpu_data().copy()
    for damage in ({"hidden": "!"}, {"hidden": "AAAA"}, {"shape": 3}, {"shape": [1, 2]}, {"cell": None}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            one.layers[-1].load_state_dict(state | damage)
    with pytest.raises(KeyError):
        one.layers[-1].load_state_dict({"shape": [1, 2, 4]})
    np.testing.assert_array_equal(one.internals["l/hidden"].cpu_data(), kept)


# -------------------------------------------------------------------- gradients


@pytest.mark.parametrize("type_", ["RNN", "LSTM"])
def test_backward_again_gives_the_same(type_, device):
    net = sequence_net(type_, device=device)
    outputs(net, values(1, 5, 2, 3))
    dy = values(2, 5, 2, 4)
    first = net.backward(y=dy)["x"].copy()
    grads = [blob.cpu_diff().copy() for blob in net.params["l"]]
    np.testing.assert_array_equal(net.backward(y=dy)["x"], first)
    for blob, grad in zip(net.params["l"], grads, strict=True):
        same(blob.cpu_diff(), 2 * grad)


@pytest.mark.parametrize("type_", ["RNN", "LSTM"])
def test_a_layer_above_may_work_in_place(type_, device):
    results = []
    for top in ("y", "z"):
        extra = f'layer {{ name: "s" type: "TanH" bottom: "y" top: "{top}" }}'
        net = sequence_net(type_, device=device, extra=extra)
        ys = [outputs(net, values(n, 5, 2, 3), top) for n in (1, 2)]
        net.backward(**{top: values(3, 5, 2, 4)})
        results.append([*ys, net.blobs["x"].cpu_diff(), *(blob.cpu_diff() for blob in net.params["l"])])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("unused", ["y", "h_last", "y h_last"])
@pytest.mark.parametrize("type_", ["RNN", "LSTM"])
def test_gradients_that_nobody_gives_are_zero(type_, unused, device):
    """As those of an encoder's outputs, of which only the last state is used."""
    states = ["h", "c"] if type_ == "LSTM" else ["h"]
    bottoms, tops = ["x", "cont", *states], ["y", *(f"{name}_last" for name in states)]
    shapes = inputs(x=(4, 2, 3), cont=(4, 2), **dict.fromkeys(states, (1, 2, 4)))
    text = shapes + layer(type_, " ".join(bottoms), " ".join(tops), options="expose_hidden: true")
    text += small_layer("Power", "used", tops[-1], "z")
    ends = "".join(small_layer("ArgMax", f"{name}_end", name, f"{name}_best") for name in unused.split())
    results = []
    for ending in (ends, ""):
        net = Net("force_backward: true\n" + text + ending, TRAIN, device=device, seed=3)
        for i, name in enumerate(bottoms):
            net.blobs[name].data[...] = values(i, *net.blobs[name].shape)
        net.run_forward()
        for i, name in enumerate(["z", *tops]):
            left_over = 7 if ending else 0
            net.blobs[name].diff[...] = left_over if name in unused else values(i, *net.blobs[name].shape)
        net.run_backward()
        results.append([net.blobs[name].cpu_diff() for name in ("x", "h")] + [b.cpu_diff() for b in net.params["l"]])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_parameters_without_a_learning_rate_get_no_gradient():
    frozen = layer("LSTM").replace('type: "LSTM"', 'type: "LSTM" param { lr_mult: 0 } param { } param { lr_mult: 0 }')
    text = inputs(x=(5, 2, 3), cont=(5, 2), target=(5, 2, 4)) + frozen
    net = Net(text + small_layer("EuclideanLoss", "loss", "y target", "loss"), TRAIN, seed=3)
    outputs(net, values(1, 5, 2, 3))
    net.run_backward()
    assert [blob.cpu_diff().any() for blob in net.params["l"]] == [False, True, False]


# -------------------------------------------------------------------- size


def test_many_steps_are_no_more_calls():
    start = time.perf_counter()
    counts = []
    for steps in (2, 2800):
        net = sequence_net("LSTM", steps=steps, streams=8, size=64, units=128)
        outputs(net, values(1, steps, 8, 64))
        net.backward(y=values(2, steps, 8, 128))
        assert np.isfinite(net.blobs["x"].cpu_diff()).all()
        counts.append(([len(schedule.calls) for schedule in net.compiled()], len(net.blobs), len(net.internals)))
    assert counts[0] == counts[1] == ([1, 1], 3, 5)
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("type_, kept", [("RNN", 6 * 2 * 4), ("LSTM", (5 * 4 + 6 + 1) * 2 * 4)], ids=["RNN", "LSTM"])
def test_keeps_only_what_backward_needs(type_, kept):
    def bytes_kept(**options):
        text = "force_backward: true\n" + inputs(x=(5, 2, 3), cont=(5, 2)) + layer(type_)
        net = Net(text, TRAIN, device=SimulatedDevice(), seed=3, **options)
        net.run_forward()
        carried = {"l/hidden", "l/cell"} & set(net.internals)
        assert sum(net.internals[name].data_view.memory.gpu_capacity for name in carried) > 0
        return sum(b.nbytes for n, b in net.internals.items() if n not in carried and b.data_view.memory.gpu_capacity)

    assert bytes_kept() == 4 * kept
    assert bytes_kept(forward_only=True) == 0


def test_the_second_pass_allocates_nothing():
    device = SimulatedDevice()
    net = sequence_net("LSTM", device=device)
    for count in range(2):
        before = device.statistics.snapshot()
        net.run_forward()
        net.run_backward()
        if count:
            assert (device.statistics - before).allocator_calls == 0


# -------------------------------------------------------------------- parameters and options


@pytest.mark.parametrize("type_, shapes", [
    ("RNN", [(4, 6), (4,), (4, 5), (4, 4), (4, 4), (4,)]), ("LSTM", [(16, 6), (16,), (16, 5), (16, 4)]),
], ids=["RNN", "LSTM"])  # fmt: skip
def test_parameters_have_the_shapes_and_order_of_caffe(type_, shapes):
    text = inputs(x=(3, 2, 3, 2), cont=(3, 2), s=(2, 5)) + layer(type_, "x cont s", options="debug_info: true")
    net = Net(text, TRAIN, seed=3)
    assert [blob.shape for blob in net.params["l"]] == shapes
    for blob in net.params["l"]:
        assert 0.3 * (1 + (blob.num_axes > 1)) * 0.5 < np.abs(blob.cpu_data()).max() <= 0.3 * (1 + (blob.num_axes > 1))
    other = Net(text, TRAIN, seed=4)
    other.copy_from(net.to_proto())
    for blob, copied in zip(net.params["l"], other.params["l"], strict=True):
        np.testing.assert_array_equal(blob.cpu_data(), copied.cpu_data())


@pytest.mark.parametrize("text, message", [
    (layer("LSTM", units=0), r"'l' \(LSTM\), num_output: expected 1 or more, got 0"),
    (layer("LSTM", "x"), "bottom: expected 2 to 5, got 1"),
    (layer("RNN", "x cont s h c"), "bottom: expected 2 to 4, got 5"),
    (layer("LSTM", "x cont s h"), r"bottom: expected 2 or 3 without expose_hidden \(x, cont, x_static or not\), got 4"),
    (layer("LSTM", "x cont h", "y a b", options="expose_hidden: true"),
     r"4 or 5 with expose_hidden \(x, cont, x_static or not, hidden before, cell before\), got 3"),
    (layer("LSTM", tops="y a b"), r"top: expected 1 without expose_hidden \(output\), got 3"),
    (layer("LSTM", "x cont h c", options="expose_hidden: true"),
     r"top: expected 3 with expose_hidden \(output, hidden after, cell after\), got 1"),
    (layer("LSTM", tops="x"), "top: expected other blobs than the bottoms"),
    (layer("LSTM", "s cont"), r"bottom: expected cont of shape \(2, 7\)"),
    (layer("LSTM", "scalar cont"), "bottom: expected a value or more for each step"),
    (layer("LSTM", "empty cont"), "a value or more for each step"),
    (layer("LSTM", "none cont0"), "bottom: expected 1 or more steps"),
    (layer("LSTM", "x x"), r"bottom: expected cont of shape \(5, 2\)"),
    (layer("RNN", "x cont x"), "bottom: expected 2 streams of"),
    (layer("LSTM", "x cont h s", "y a b", options="expose_hidden: true"), r"bottom: expected a state of shape \(1, 2, 4\)"),
    (small_layer("LSTMUnit", "l", "h g", "c_1 h_1"), "bottom: expected 3, got 2"),
    (small_layer("LSTMUnit", "l", "h g cont1", "h h_1"), "top: expected other blobs than the bottoms"),
    (small_layer("LSTMUnit", "l", "x g cont1", "a b"), r"expected a cell of shape \(1, N, D\)"),
    (small_layer("LSTMUnit", "l", "h c cont1", "a b"), r"expected gates of shape \(1, 2, 16\)"),
    (small_layer("LSTMUnit", "l", "h g cont", "a b"), r"expected cont of shape \(1, 2\)"),
], ids=[
    "no-units", "one-bottom", "five-bottoms", "states-unasked", "states-missing", "tops-unasked", "tops-missing",
    "in-place", "shape-of-x", "axes-of-x", "values-of-x", "no-steps", "cont", "static", "state", "unit-bottoms",
    "unit-in-place", "unit-cell", "unit-gates", "unit-cont",
])  # fmt: skip
def test_what_does_not_fit_is_said(text, message):
    shapes = inputs(x=(5, 2, 3), cont=(5, 2), s=(2, 7), h=(1, 2, 4), c=(1, 2, 4), g=(1, 2, 16), cont1=(1, 2), scalar=(),
                    empty=(5, 2, 0), none=(0, 2, 3), cont0=(0, 2))  # fmt: skip
    with pytest.raises(NetError, match=message):
        Net(shapes + text, TRAIN)


def test_shapes_that_change_and_do_not_fit():
    net = sequence_net("LSTM")
    net.blobs["x"].reshape(5, 2, 4)
    with pytest.raises(NetError, match=r"expected 1 or more steps, streams, and 3 values, got blob 'x' \(5 x 2 x 4\)"):
        net.forward()


def test_the_abstract_type_names_the_real_ones():
    with pytest.raises(NetError, match=r"unknown type 'Recurrent'.*LSTM.*RNN"):
        create_layer(caffe_pb2.LayerParameter(name="r", type="Recurrent"), Context(HOST))
