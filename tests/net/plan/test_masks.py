"""Gradients of ReLUs out of what is there anyway: the same bits, where nobody can tell, and what need not be kept."""

import itertools

import numpy as np
import pytest
from cuda_devices import DEVICES, needs_compiler
from cuda_emulation import EmulatedCuda
from plan_nets import DATA, ask_at_random, assert_same, conv, iterate, layer, lives_on, loss, made

from blobmem import SharedBlobError
from blobmem.devices import HOST

RELU = layer("ReLU", "r", "c", "c")
ASIDE = layer("ReLU", "r", "c", "s")


def pool(bottom="c", options="kernel_size: 2 stride: 2", top="p"):
    return layer("Pooling", "p", bottom, top, f"pooling_param {{ {options} }}")


def net_of(*middle, last="p"):
    return DATA + conv("c", "data") + "".join(middle) + conv("d", last) + loss("d")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def same_bits(text, device, **options):
    """Nets that keep all and that do not, after two iterations that gave the same."""
    nets = [made(text, device, memory, **more) for memory, more in (("keep", {}), ("train", options))]
    assert_same(*([*iterate(each), *iterate(each)] for each in nets))
    return nets


# -------------------------------------------------------------------- before pools

WINDOWS = {
    "apart": "kernel_size: 2 stride: 2",
    "overlapping": "kernel_size: 3 stride: 2",
    "much": "kernel_size: 3 stride: 1 pad: 1",
    "padded": "kernel_size: 2 stride: 2 pad: 1",
    "with gaps": "kernel_size: 2 stride: 3",
    "beyond the plane": "kernel_size: 1 stride: 4",
    "oblong": "kernel_h: 1 kernel_w: 4 stride_h: 2 stride_w: 1",
    "large": "kernel_size: 6 stride: 1",
}
ODD = np.array([np.nan, np.inf, *[-np.inf, -0.0, 0.0, 1, 2, -1, -1e-40, 1e-40] * 9], np.float32)


def gradients_of_odd_inputs(text, device):
    """The bits of the inputs' gradients, which are the same where c is kept and where it is not."""
    found = []
    for memory in ("keep", "train"):
        net, rng = made(text, device, memory), np.random.default_rng(7)
        for name in net.inputs:
            net.blobs[name].data[...] = rng.choice(ODD, net.blobs[name].shape)
        net.run_forward()
        net.run_backward()
        assert lives_on(net, "c") == (memory == "keep")
        found.append([net.blobs[name].cpu_diff().view(np.uint32) for name in net.inputs])
    assert_same(*found)
    return found[0]


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_any_numbers_before_a_pool_give_the_same_bits(device, windows):
    """Ties, nothing above zero, what is not a number: in what is pooled and in its gradient."""
    text = 'name: "odd" force_backward: true layer { name: "x" type: "Input" top: "x" top: "g" input_param {'
    plane = made(
        text + " shape { dim: 9 dim: 2 dim: 7 dim: 6 } } }" + pool("x", windows), HOST, "keep"
    ).blobs["p"].shape  # fmt: skip
    text += f" shape {{ dim: 9 dim: 2 dim: 7 dim: 6 }} shape {{ {' '.join(f'dim: {size}' for size in plane)} }} }} }}"
    text += layer("Bias", "c", "x", "c") + RELU + pool(options=windows)
    text += layer("Eltwise", "e", "p g", "e", "eltwise_param { operation: PROD } loss_weight: 1")
    values = gradients_of_odd_inputs(text, device)[0].view(np.float32)
    assert (values == 0).any() and (values != 0).any()


NORMALISED = layer("BatchNorm", "n", "c", "c") + layer("Scale", "sc", "c", "c", "scale_param { bias_term: true }")
POOLED = {
    "at once": net_of(RELU, pool()),
    "with a mask as a blob": net_of(RELU, pool().replace('top: "p"', 'top: "p" top: "m"'), layer("Silence", "q", "m", "q"))
    .replace(' top: "q"', ""),
    "normalised": net_of(NORMALISED, RELU, pool()),
    "read in between": net_of(RELU, pool(), layer("Power", "e", "p", "e"), last="e"),
    "read by two": net_of(RELU, pool(), conv("f", "p"), layer("Eltwise", "e", "p f", "e"), last="e"),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLED)
def test_what_is_pooled_is_not_kept(device, name):
    nets = same_bits(POOLED[name], device)
    assert [lives_on(net, "c") for net in nets] == [True, False]
    assert not any(each.endswith("/recomputed") for each in nets[1].internals)


@needs_compiler
@pytest.mark.parametrize("name", POOLED)
def test_channels_last_too(name):
    device = EmulatedCuda()
    device.channels_last = True
    nets = same_bits(POOLED[name], device)
    assert not lives_on(nets[1], "c")


LEFT = {
    "leaky": (net_of(RELU.replace('top: "c" ', 'top: "c" relu_param { negative_slope: 0.1 }'), pool()), {}),
    "kept": (net_of(RELU, pool()), {"keep": ["c"]}),
    "its top kept": (net_of(RELU, pool()), {"keep": ["p"]}),
    "pooled twice": (
        net_of(RELU, pool(), pool(top="o").replace('name: "p"', 'name: "o"'), layer("Eltwise", "e", "p o", "e"), last="e"),
        {},
    ),
    "the mean": (net_of(RELU, pool(options="pool: AVE kernel_size: 2 stride: 2")), {}),
    "at random": (net_of(RELU, pool(options="pool: STOCHASTIC kernel_size: 2 stride: 2")), {}),
    "dropped before": (net_of(RELU, layer("Dropout", "u", "c", "c"), pool()), {}),
    "dropped behind": (net_of(RELU, pool(), layer("Dropout", "u", "p", "p")), {}),
    "more comes out": (net_of(RELU, pool(options="kernel_size: 2 stride: 1 pad: 1")), {}),
    "an output": (net_of(RELU, pool(), layer("Power", "e", "c", "e"), last="e"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_relu_before_a_pool_is_left_as_it_is(name):
    text, options = LEFT[name]
    nets = same_bits(text, HOST, **options)
    assert lives_on(nets[1], "c") and not any(each.array.diff for each in nets[1].planned()._remade.values())


def test_a_gradient_that_a_script_fills_is_left_as_it_is(device):
    """There is no loss: a pass backward begins with what a script has written, once."""
    text, grads = DATA + conv("c", "data") + RELU + pool() + layer("ArgMax", "m", "p", "m"), []
    for memory in ("keep", "train"):
        net = made(text, device, memory)
        net.blobs["p"].diff[...] = np.random.default_rng(1).standard_normal(net.blobs["p"].shape)
        before = net.blobs["p"].cpu_diff().copy()
        for _ in range(2):
            net.clear_param_diffs()
            net.run_forward()
            net.run_backward()
            grads.append(net.params["c"][0].cpu_diff().copy())
        np.testing.assert_array_equal(net.blobs["p"].cpu_diff(), before)
    assert_same(grads[:2], grads[2:])


# -------------------------------------------------------------------- with tops of their own

BESIDE = {
    "zero": net_of(ASIDE, last="s"),
    "leaky": net_of(layer("ReLU", "r", "c", "s", "relu_param { negative_slope: 0.1 }"), last="s"),
    "read by two": net_of(ASIDE, conv("f", "s"), layer("Eltwise", "e", "s f", "e"), last="e"),
}
STAYING = {
    "falling": (net_of(layer("ReLU", "r", "c", "s", "relu_param { negative_slope: -0.1 }"), last="s"), {}),
    "read besides": (net_of(ASIDE, conv("f", "c"), layer("Eltwise", "e", "s f", "e"), last="e"), {}),
    "changed": (net_of(ASIDE, layer("Dropout", "u", "s", "s"), last="s"), {}),
    "kept": (net_of(ASIDE, last="s"), {"keep": ["c"]}),
    "its top kept": (net_of(ASIDE, last="s"), {"keep": ["s"]}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_bottom_is_not_kept_where_the_top_will_do(device, name):
    nets = same_bits(BESIDE[name], device)
    assert [lives_on(net, "c") for net in nets] == [True, False]


@pytest.mark.parametrize("name", STAYING)
def test_a_bottom_is_kept_where_the_top_will_not_do(name):
    text, options = STAYING[name]
    nets = same_bits(text, HOST, **options)
    assert lives_on(nets[1], "c") and not any(each.array.diff for each in nets[1].planned()._remade.values())


def test_any_numbers_beside_give_the_same_bits(device):
    text = 'name: "odd" force_backward: true layer { name: "x" type: "Input" top: "x" top: "g" input_param {'
    text += " shape { dim: 999 } shape { dim: 999 } } }" + layer("Bias", "c", "x", "c", "bias_param { axis: 0 }")
    text += ASIDE + layer("Eltwise", "e", "s g", "e", "eltwise_param { operation: PROD } loss_weight: 1")
    gradients_of_odd_inputs(text, device)


# -------------------------------------------------------------------- passes in parts

PARTS = {"pool": POOLED["at once"], "top": BESIDE["zero"]}


@pytest.mark.parametrize("name", PARTS)
def test_layer_by_layer_the_bits_are_the_same(device, name):
    grads = []
    for memory in ("keep", "train"):
        net = made(PARTS[name], device, memory)
        net.clear_param_diffs()
        for index in range(len(net.nodes)):
            net.run_forward(index, index)
        for index in reversed(range(len(net.nodes))):
            net.run_backward(index, index)
        grads.append([entry.blob.cpu_diff() for entry in net.learnable])
    assert_same(*grads)


@pytest.mark.parametrize("name", PARTS)
def test_what_was_made_otherwise_since_is_an_error(device, name):
    """The layers below have run once more, by themselves: the ReLU's gradient would be that of the pass before."""
    net, kept = (made(PARTS[name], device, memory, keep=["d"]) for memory in ("train", "keep"))
    net.run_forward()
    net.run_forward(last=net.layer_names.index("c"))
    with pytest.raises(SharedBlobError):
        net.run_backward(first=net.layer_names.index("d"))
    net.state.iteration = 0
    assert_same(iterate(net), iterate(kept))


WAYS = ["forward", "start", "between", "backward", "down from", "down to"]


@pytest.mark.parametrize("name, seed", [*itertools.product(PARTS, range(3))])
def test_any_order_of_calls_gives_the_same_numbers_or_an_error(device, name, seed):
    net, kept = (made(PARTS[name], device, memory, keep=["d"]) for memory in ("train", "keep"))
    ask_at_random(seed, net, kept, WAYS)
