"""Arrays that a BatchNorm and a Scale in place have in common, and which calls of theirs run as one."""

import numpy as np
import pytest
from cuda_devices import DEVICES, needs_compiler
from cuda_emulation import EmulatedCuda

from blobmem import TRAIN, Net, SimulatedDevice
from blobmem.devices import HOST
from blobmem.memory import Side


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
    for layer, values in kept.items():
        np.testing.assert_array_equal(found[layer], values, err_msg=layer)
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
