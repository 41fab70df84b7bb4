"""Batch norm folded into weights: the same results in fewer calls, with parameters that stay what they are."""

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import GPU, needs_compiler
from cuda_emulation import EmulatedCuda
from plan_nets import layer

import blobmem
from blobmem import TEST, TRAIN, Net, SharedBlobError
from blobmem.devices import HOST
from blobmem.net.captured import Captured

pytestmark = needs_compiler
MODELS = Path(__file__).parents[2] / "models"

DATA = """name: "folded" layer { name: "data" type: "Input" top: "data"
  input_param { shape { dim: 4 dim: 3 dim: 6 dim: 6 } } }
"""
SCALE = """scale_param { bias_term: true filler { type: "gaussian" mean: 1 std: 0.3 }
  bias_filler { type: "gaussian" std: 0.3 } }"""
CONV = 'convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" }'
FC = 'inner_product_param { num_output: 5 weight_filler { type: "xavier" } bias_filler { type: "gaussian" }'


def norm(name, bottom, top=None, scale=True):
    """BatchNorm and perhaps a Scale in place."""
    top = top or bottom
    return layer("BatchNorm", f"{name}n", bottom, top) + layer("Scale", f"{name}s", top, top, SCALE) * scale


def text(more='bias_filler { type: "gaussian" } }', own=None, transpose="false"):
    """A convolution, another one whose BatchNorm has no Scale, and an inner product, each normalised."""
    top = own or "c"
    return (
        DATA
        + layer("Convolution", "c", "data", "c", f"{CONV} {more}")
        + norm("c", "c", own)
        + layer("ReLU", "cr", top, top)
        + layer("Convolution", "d", top, "d", f"{CONV} bias_term: false }}")
        + norm("d", "d", scale=False)
        + layer("InnerProduct", "ip", "d", "ip", f"{FC} transpose: {transpose} }}")
        + norm("ip", "ip")
        + layer("TanH", "t", "ip", "t")
    )


def emulated(last=True, **options):
    device = EmulatedCuda(**options)
    device.channels_last, device.deterministic = last, False
    return device


def made(given, device, passes=("fold",), dtype="float32", memory="keep", seed=3, **options):
    net = Net(given, TEST, device=device, seed=seed, forward_only=True, memory=memory, passes=passes, dtype=dtype,
              **options)  # fmt: skip
    fill(net)
    return net


def fill(net):
    """Statistics, and images."""
    rng = np.random.default_rng(0)
    for node in net.nodes:
        if node.layer.type == "BatchNorm":
            mean, variance, factor = node.layer.blobs
            mean.data[...], factor.data[...] = rng.normal(size=mean.shape), 2
            variance.data[...] = rng.random(variance.shape) + 0.5
    net.blobs["data"].data[...] = rng.normal(size=net.blobs["data"].shape)


def run(net):
    net.run_forward()
    return net.blobs[net.outputs[0]].cpu_data().astype(np.float32)


def ops(net):
    return Counter(str(step.call.op) for step in net.compiled()[0]._program())


def close(one, other, dtype="float32"):
    tolerance = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}[dtype]
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


FOLDED = {"conv_relu_forward": 1, "conv_forward": 1, "inner_product_forward": 1, "tanh_forward": 1}


DEVICES = pytest.mark.parametrize(
    "device", [pytest.param(emulated, id="emulated"), pytest.param(lambda: emulated(False), id="channels second"), GPU]
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("memory", ["keep", "inference"])
@DEVICES
def test_results_are_the_same_in_fewer_calls(dtype, memory, device):
    expected = run(made(text(), HOST, ()))
    net = made(text(), device(), dtype=dtype, memory=memory)
    for _ in range(4):
        close(run(net), expected, dtype)
    assert ops(net) == FOLDED


def test_weights_of_transposed_products_and_convolutions_without_bias():
    given = text("bias_term: false }", transpose="true")
    net = made(given, emulated())
    close(run(net), run(made(given, HOST, ())))
    assert ops(net) == FOLDED


def test_parameters_stay_what_they_are_and_off_the_device(tmp_path):
    net, apart = (made(text(), emulated(), passes) for passes in (("fold",), ()))
    run(net)
    for path, each in (("one", net), ("other", apart)):
        each.save(tmp_path / path)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    weights, folded = net.params["c"][0], net.internals["c/folded_weights"]
    assert weights.data_view.memory.gpu_capacity == 0 and folded.data_view.memory.gpu_capacity == weights.nbytes
    assert folded.dtype == weights.dtype and not np.array_equal(folded.cpu_data(), weights.cpu_data())


@pytest.mark.parametrize("last", [False, True])
def test_every_blob_of_a_net_that_keeps_them_has_its_values(last):
    net, apart = made(text(own="n"), emulated(last)), made(text(own="n"), HOST, ())
    run(net), run(apart)
    for name in net.blobs:
        close(net.blobs[name].cpu_data(), apart.blobs[name].cpu_data())
    assert ops(net)["batch_norm_scale_inference"] == 1  # of c, which somebody may read


def test_a_top_that_nobody_reads_is_not_made_and_says_so():
    net, apart = made(text(own="n"), emulated(), memory="inference"), made(text(own="n"), HOST, ())
    for _ in range(2):
        close(run(net), run(apart))
    assert ops(net) == FOLDED
    with pytest.raises(SharedBlobError, match=r"batch norm is folded.*keep=\['c'\]"):
        net.blobs["c"].cpu_data()
    kept = made(text(own="n"), emulated(), memory="inference", keep=["c"])
    close(run(kept), run(apart))
    close(kept.blobs["c"].cpu_data(), apart.blobs["c"].cpu_data())
    net.reshape()  # which plans anew
    close(run(net), run(apart))


@pytest.mark.parametrize("what", ["read by others", "scaled by a blob", "not by itself"])
def test_what_is_no_batch_norm_of_one_convolution_stays(what):
    given = text(own="n")
    if what == "read by others":
        given += layer("TanH", "t2", "c", "t2")
    if what == "scaled by a blob":
        gamma = layer("Input", "g", "", "g", "input_param { shape { dim: 4 } }").replace('bottom: "" ', "")
        given = gamma + text().replace(norm("c", "c"), layer("BatchNorm", "cn", "c", "c") + layer(
            "Scale", "cs", "c g", "c", "scale_param { axis: 1 }"))  # fmt: skip
    if what == "not by itself":
        given = text().replace(
            norm("c", "c"), layer("Power", "p", "c", "c", "power_param { scale: 2 }") + norm("c", "c")
        )
    net, apart = made(given, emulated(), memory="inference"), made(given, HOST, ())
    for times in (1, 2):
        for each in (net, apart):
            if "g" in each.blobs:
                each.blobs["g"].data[...] = times * np.arange(4)
        for name, values in apart.forward().items():
            close(net.forward()[name], values)
    assert ops(net)["conv_relu_forward"] == 0
    assert "c/folded_weights" in net.internals or what != "scaled by a blob"  # into which batch norm alone is folded


# -------------------------------------------------------------------- parameters that change


@pytest.mark.parametrize("name, index", [("c", 0), ("c", 1), ("cn", 0), ("cn", 2), ("cs", 0), ("ips", 1)])
def test_weights_follow_what_a_script_writes(name, index):
    net, apart = made(text(), emulated()), made(text(), HOST, ())
    for _ in range(4):  # captured by then
        run(net)
    for step in range(3):
        for each in (net, apart):
            each.params[name][index].data[...] += 0.5 + step
        for _ in range(2):
            close(run(net), run(apart))


def test_weights_are_made_once(monkeypatch):
    net = made(text(), emulated())
    made_of, follower = [], None
    for _ in range(5):
        run(net)
        if follower is None:
            follower = net._follower
            monkeypatch.setattr(
                follower._schedule,
                "run",
                lambda *span, original=follower._schedule.run: (made_of.append(span), original(*span)),
            )
    net.blobs["data"].reshape(2, 3, 6, 6)
    run(net)
    net.params["c"][0].cpu_data()
    run(net)
    assert made_of == []
    net.params["ip"][0].data[...] *= 2
    run(net), run(net)
    assert made_of == [(2, 3)] and net._follower is follower
    assert any(isinstance(piece, Captured) for found in net.compiled()[0]._captured.values() for piece in found)


def trained(device):
    """A solver whose train net has the layers of `text`."""
    data = """layer { name: "data" type: "DummyData" top: "data" top: "wanted" dummy_data_param {
      data_filler { type: "gaussian" } data_filler { type: "gaussian" }
      shape { dim: 4 dim: 3 dim: 6 dim: 6 } shape { dim: 4 dim: 5 } } }"""
    given = text().replace(DATA, data) + layer("EuclideanLoss", "loss", "t wanted", "loss")
    param = blobmem.proto.caffe_pb2.SolverParameter(base_lr=0.05, lr_policy="fixed", random_seed=3)
    param.net_param.CopyFrom(blobmem.proto.text.read_net(given))
    return blobmem.get_solver(param, device=device)


def test_weights_follow_a_solver_whose_steps_are_captured():
    device = emulated()
    solver = trained(device)
    net, apart = (
        Net(text(), TEST, device=device, params_from=solver.net, forward_only=True, passes=passes)
        for passes in (("fold",), ())
    )
    for each in (net, apart):
        each.blobs["data"].data[...] = np.random.default_rng(0).normal(size=(4, 3, 6, 6))
    seen = []
    for _ in range(6):
        solver.step(3)
        for _ in range(2):
            close(run(net), run(apart))
        seen.append(run(net))
    assert all(not np.allclose(one, other) for one, other in pairwise(seen))


def test_weights_follow_arrays_that_move_and_blobs_that_are_shared():
    device = emulated()
    net, other = (made(text(), device, seed=seed) for seed in (3, 4))
    run(net), run(other)
    net.params["c"][0].share_data(other.params["c"][0])
    other.params["c"][0].data[...] += 1
    apart = made(text(), HOST, ())
    apart.params["c"][0].data[...] = other.params["c"][0].cpu_data()
    close(run(net), run(apart))
    net.move_to(HOST)
    close(run(net), run(apart))
    assert "c/folded_weights" not in {
        operand.blob.name for each in net.compiled()[0].calls for operand in each.present()
    }


# -------------------------------------------------------------------- who has it, and until when


@pytest.mark.parametrize("look", ["callback", "debug_info", "part", "layer by layer"])
def test_whoever_looks_between_the_layers_finds_what_they_make(look, caplog):
    net, apart = made(text(), emulated(), memory="inference", keep=["c"]), made(text(), HOST, ())
    run(net)
    seen = {}
    names = net.layer_names
    with caplog.at_level(logging.WARNING):
        for each in (net, apart):
            if look == "callback":
                each.after_forward(
                    lambda at, each=each: (
                        seen.setdefault((each, at), each.blobs["c"].cpu_data().copy()) if at == 1 else None
                    )
                )
                run(each)
            elif look == "debug_info":
                each.debug_info = True
                seen[each, 1] = run(each)
            else:
                each.run_forward(0, names.index("c"))
                seen[each, 1] = each.blobs["c"].cpu_data().copy()
                each.run_forward(names.index("cn"), names.index("cs" if look == "layer by layer" else "t"))
    close(seen[net, 1], seen[apart, 1])
    assert "computes batch norm by itself from now on" in caplog.text and "fold" not in net.passes
    assert ops(net)["conv_relu_forward"] == 0


def test_a_part_that_divides_nothing_ends_nothing():
    net, apart = made(text(), emulated()), made(text(), HOST, ())
    for each in (net, apart):
        run(each)
        each.params["d"][0].data[...] *= 2
        each.run_forward(each.layer_names.index("d"))
    close(net.blobs["t"].cpu_data(), apart.blobs["t"].cpu_data())
    assert net.passes == {"fold"} and ops(net) == FOLDED


def test_halves_and_tf32_that_only_run_forward_have_it_by_themselves():
    def passes(dtype="float16", phase=TEST, device=None, **options):
        return Net(text(), phase, device=device or emulated(), dtype=dtype, **options)

    assert passes(forward_only=True).passes == {"fold"}
    assert passes(memory="inference").passes == {"fold", "parts", "slices"}
    assert passes("float32", memory="inference").passes == {"parts", "slices"}
    rounding = emulated()
    rounding.math = "tf32"
    assert passes("float32", device=rounding, forward_only=True).passes == {"fold"}
    assert passes("float32", device=rounding).passes == frozenset()
    assert passes().passes == passes(forward_only=True, passes=()).passes == frozenset()
    with pytest.raises(ValueError, match="'fold' is for a net that only runs forward"):
        passes(passes=("fold",))
    device = emulated()
    device.deterministic = True
    assert "conv_relu_forward" not in ops(made(text(), device, dtype="float16"))


def test_a_train_phase_has_statistics_of_its_own():
    net = Net(text(), TRAIN, device=emulated(), seed=3, forward_only=True, passes=("fold",))
    assert ops(net)["batch_norm_scale_forward"] == 2 and net._folded is None


# -------------------------------------------------------------------- sums behind convolutions


def residual(bottoms="p b", relu=True, more=""):
    """A block with a projection, and one whose sum is normalised before anything else reads it."""

    def normalised(name, bottom, bias="bias_term: false"):
        return layer("Convolution", name, bottom, name, f"{CONV} {bias} }}") + norm(name, name)

    return (
        DATA
        + normalised("p", "data")
        + normalised("a", "data", 'bias_filler { type: "gaussian" }')
        + layer("ReLU", "ar", "a", "a")
        + normalised("b", "a")
        + layer("Eltwise", "x", bottoms, "x")
        + layer("ReLU", "xr", "x", "x") * relu
        + more
        + layer("Convolution", "d", "x", "d", f"{CONV} bias_term: false }}")
        + layer("Eltwise", "y", "x d", "y")
        + norm("y", "y", "yn")
        + layer("ReLU", "yr", "yn", "yn")
        + layer("Convolution", "e", "yn", "e", f"{CONV} }}")
        + layer("Eltwise", "z", "e y", "z")
    )


@DEVICES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bottoms, relu", [("p b", True), ("b p", False)])
def test_planned_halves_sum_while_they_convolve(device, dtype, bottoms, relu):
    expected = run(made(residual(bottoms, relu), HOST, ()))
    for memory in ("keep", "inference"):
        net = made(residual(bottoms, relu), device(), dtype=dtype, memory=memory)
        for _ in range(4):
            close(run(net), expected, dtype)
        found = ops(net)
        assert found["conv_sum_forward"] == 2 * (memory == "inference")
        assert found["sum_batch_norm_scale_inference"] == 1
    with pytest.raises(SharedBlobError, match=r"keep=\['b'\]"):
        net.blobs["b"].cpu_data()


@pytest.mark.parametrize("what", ["kept", "read by others", "float32"])
def test_a_sum_apart_from_its_convolution(what):
    given = residual(more=layer("TanH", "t", "b", "t") if what == "read by others" else "")
    options = {"memory": "inference", "dtype": "float32" if what == "float32" else "float16"}
    net = made(given, emulated(), keep=["b"] if what == "kept" else [], **options)
    run(net)
    assert ops(net)["conv_sum_forward"] == (0 if what == "float32" else 1)  # that of z


def test_resnet50_in_57_calls():
    """53 convolutions, with all that is between them, two pools, the inner product and the softmax."""
    net = Net(MODELS / "resnet50" / "deploy.prototxt", TEST, device=emulated(), dtype="float16", memory="inference")
    found = ops(net)
    assert (found["conv_relu_forward"], found["conv_sum_forward"], found["conv_forward"]) == (33, 16, 4)
    assert found.total() == 57


def test_resnet50_v2_in_75_calls():
    """53 convolutions, 16 sums with the batch norm behind each; batch norms of images and of the first pool, two pools,
    the inner product and the softmax."""
    for dtype, expected in (
        ("float16", {"conv_relu_forward": 33, "conv_forward": 20}),
        ("float32", {"conv_forward": 53}),
    ):
        net = Net(MODELS / "resnet50_v2" / "deploy.prototxt", TEST, device=emulated(), dtype=dtype, memory="inference")
        found = ops(net)
        assert {op: found[op] for op in expected} == expected
        assert found["sum_batch_norm_scale_inference"] == 16
        assert found.total() == (75 if dtype == "float16" else 108)
