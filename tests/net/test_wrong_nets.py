"""Nets that cannot be: one message each, with the file, the layer, the field, and what was expected."""

import gc

import numpy as np
import pytest

from blobmem import TEST, TRAIN, Net, NetError, OutOfDeviceMemory, SimulatedDevice
from blobmem.layers.base import layer_types
from blobmem.memory.blob import Blob

HEAD = """name: "wrong"
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 4 } } }
"""


def layer(kind, options="", name="a", bottom='bottom: "x"', top='top: "y"'):
    return f'layer {{ name: "{name}" type: "{kind}" {bottom} {top} {options} }}\n'


def shaped(dims):
    return layer("Input", f"input_param {{ shape {{ {dims} }} }}", bottom="")


def product(options="", outputs=2, **names):
    return layer("InnerProduct", f"{options} inner_product_param {{ num_output: {outputs} }}", **names)


WRONG = {
    "negative dimension": (shaped("dim: 2 dim: -1"), r"'a' \(Input\), shape: .*cannot be negative, got \(2, -1\)"),
    "count beyond 64 bits": (shaped("dim: 9000000000 dim: 9000000000"), r"'a' \(Input\), shape: .*more than 64 TiB"),
    "count beyond, of nothing": (shaped("dim: 0 dim: 9000000000000000000"), r"'a' \(Input\), shape: .*than 64 TiB"),
    "dimension beyond 64 bits": (shaped("dim: 9223372036854775808"), r":3:\d+: layer 'a', input_param.shape: dim is"),
    "too many axes": (shaped("dim: 1 " * 33), r"'a' \(Input\), shape: .*at most 32 axes, got 33"),
    "product beyond": (layer("Tile", "tile_param { tiles: 2147483647 }") + layer("Tile", "tile_param { tiles: 2147483647 }",
                       name="b", bottom='bottom: "y"', top='top: "z"'), r"'b' \(Tile\), shapes: .*64 TiB.*bottoms are, got blob 'y'"),
    "cycle": (layer("ReLU", bottom='bottom: "z"') + layer("TanH", name="b", bottom='bottom: "y"', top='top: "z"'),
              r"'a' \(ReLU\), bottom 0: no layer before it produces blob 'z' .*; layer 'b' does, and comes later"),
    "own top": (layer("ReLU", bottom='bottom: "y"'), r"'a' \(ReLU\), bottom 0: no layer before it produces blob 'y'"),
    "absent bottom": (layer("ReLU", bottom='bottom: "q"'), r"'a' \(ReLU\), bottom 0: .*blob 'q' \(the last ones are: x\)"),
    "nameless bottom": (layer("ReLU", bottom='bottom: ""'), r"'a' \(ReLU\), bottom 0: .*blob ''"),
    "nameless top": (layer("ReLU", top='top: ""'), r"'a' \(ReLU\), top: expected a name, got ''"),
    "no bottom": (layer("ReLU", bottom=""), r"'a' \(ReLU\), bottom: expected 1, got 0 \(none\)"),
    "no top": (layer("ReLU", top=""), r"'a' \(ReLU\), top: expected 1, got 0 \(none\)"),
    "top twice": (layer("Split", top='top: "y" top: "y"'), r"'a' \(Split\), top: expected a name that no earlier .*'y'"),
    "top of another": (layer("ReLU") + layer("TanH", name="b"), r"'b' \(TanH\), top: expected a name that no earlier"),
    "no type": ('layer { name: "a" bottom: "x" top: "y" }', "'a': unknown type ''; known types: AbsVal, "),
    "near type": (layer("InnerProducts"), "'a': unknown type 'InnerProducts'; did you mean InnerProduct"),
    "unknown field": (layer("ReLU", "relu_param { slope: 1 }"), r":3:\d+: layer 'a', relu_param: unknown field 'slope'"),
    "enum name": (layer("Pooling", "pooling_param { pool: MAXIMUM }"), r"layer 'a', pooling_param: pool is 'MAXIMUM': "
                  "expected one of MAX, AVE, STOCHASTIC, without quotes; did you mean MAX"),
    "enum number": (layer("Pooling", "pooling_param { pool: 7 }"), "pooling_param: pool is '7': expected one of MAX, AVE"),
    "text for a number": (layer("Pooling", 'pooling_param { kernel_size: "2" }'), "kernel_size is \"2\": expected a whole"),
    "negative for unsigned": (layer("Pooling", "pooling_param { pad: -1 }"), "pad is '-1': expected a whole number from 0"),
    "fraction for whole": (layer("Pooling", "pooling_param { pad: 1.5 }"), "pad is '1.5': expected a whole number"),
    "number for a text": (layer("ReLU", bottom="bottom: 7"), r"layer 'a': bottom is '7': expected a text in quotes"),
    "param entries": (product("param {} param {} param {}"), r"'a' \(InnerProduct\), param: expected at most 2 entries"),
    "loss weights": (layer("Split", "loss_weight: 1", top='top: "y" top: "z"'),
                     r"'a' \(Split\), loss_weight: expected none or 2 values, one for each top, got 1"),
    "loss weights of an automatic top": (layer("EuclideanLoss", "loss_weight: 1 loss_weight: 1", bottom='bottom: "x" ' * 2, top=""),
                                         r"'a' \(EuclideanLoss\), loss_weight: expected none or 1 values"),
    "propagate_down": (layer("ReLU", "propagate_down: true " * 2), r"'a' \(ReLU\), propagate_down: expected none or 1"),
    "both rules": (layer("ReLU", "include { phase: TRAIN } exclude { stage: \"s\" }"), "either include or exclude rules"),
    "shape of a shared parameter": (
        product('param { name: "w" }') + product('param { name: "w" }', outputs=3, name="b", top='top: "z"'),
        r"'b' \(InnerProduct\), param 0: expected the shape of 'w' in layer 'a', .*2 x 48.*got .*3 x 48"),
    "count of a shared parameter": (
        product('param { name: "w" }') + product('param { name: "w" share_mode: PERMISSIVE }', outputs=3, name="b", top='top: "z"'),
        "param 0: expected the count of 'w' in layer 'a'"),
    "filler that does not fit": (
        layer("InnerProduct", 'inner_product_param { num_output: 2 weight_filler { type: "bilinear" } }'),
        r"layer 'a': filler 'bilinear': expected 4 axes .*got shape \(2, 48\)"),
    "no channels": (shaped("dim: 1 dim: 0 dim: 4 dim: 4") + layer("Convolution", "convolution_param { num_output: 1 kernel_size: 1 }",
                    name="b", bottom='bottom: "y"', top='top: "z"'), r"'b' \(Convolution\), bottom: expected 1 channel or more"),
    "no rows": (shaped("dim: 1 dim: 1 dim: 0 dim: 4") + layer("Pooling", "pooling_param { kernel_size: 2 stride: 3 }",
                name="b", bottom='bottom: "y"', top='top: "z"'), r"'b' \(Pooling\), kernel_size: expected a window that fits"),
    "no rows to convolve": (
        shaped("dim: 1 dim: 1 dim: 0 dim: 4") + layer("Deconvolution", "convolution_param { num_output: 1 kernel_size: 3 }",
        name="b", bottom='bottom: "y"', top='top: "z"'), r"'b' \(Deconvolution\), kernel_size: expected a window that fits"),
    "pad without end": (layer("Pooling", "pooling_param { kernel_size: 4000000000 pad: 3999999999 stride: 4000000000 }"),
                        r"'a' \(Pooling\), pad: expected 1048576 or less"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_the_message(case, tmp_path):
    text, message = WRONG[case]
    path = tmp_path / "wrong.prototxt"
    path.write_text(HEAD + text)
    device = SimulatedDevice()
    with pytest.raises(NetError, match=message) as raised:
        Net(path, TRAIN, device=device)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)
    assert device.statistics.allocations == 0


def test_nothing_of_a_refused_net_is_left():
    """Also where the last of its parameters is the wrong one."""
    gc.collect()
    before = sum(isinstance(found, Blob) for found in gc.get_objects())
    text = HEAD + product() + product('param { name: "w" } param { name: "w" }', name="b", top='top: "z"')
    with pytest.raises(NetError, match="param 1"):
        Net(text, TRAIN)
    gc.collect()
    assert sum(isinstance(found, Blob) for found in gc.get_objects()) <= before


def test_parameters_beyond_the_machines_memory():
    text = shaped("dim: 2 dim: 4000") + product(outputs=4_000_000_000, name="b", bottom='bottom: "y"', top='top: "z"')
    with pytest.raises(OutOfDeviceMemory, match=r"more of the host's memory, most of it .* for 'b/0'.*are free"):
        Net(text, TRAIN)


def test_a_batch_beyond_the_machines_memory_changes_nothing():
    net = Net(HEAD + layer("ReLU"), TRAIN)
    net.run_forward()
    held = {name: blob.data_view.memory.cpu_capacity for name, blob in net.blobs.items()}
    net.blobs["x"].reshape(2**37, 3, 4, 4)
    with pytest.raises(OutOfDeviceMemory, match="host's memory"):
        net.run_forward()
    assert {name: blob.data_view.memory.cpu_capacity for name, blob in net.blobs.items()} == held
    net.blobs["x"].reshape(2, 3, 4, 4)
    net.run_forward()


STRIDES = [(9, 2, 0), (50, 2, 0), (2**31 - 1, 2, 1), (2**32 - 1, 2**32 - 1, 3)]


@pytest.mark.parametrize("method", ["MAX", "AVE"])
@pytest.mark.parametrize("stride, kernel, pad", STRIDES, ids=str)
def test_windows_and_strides_beyond_the_plane(method, stride, kernel, pad):
    """They give what the least ones beyond the plane give, and take no memory of their own size."""
    options = "pooling_param {{ pool: {} kernel_size: {} stride: {} pad: {} }}"
    tops = []
    for k, s in ((kernel, stride), (min(kernel, 10), min(stride, 7))):
        net = Net(HEAD + layer("Pooling", options.format(method, k, s, pad)), TEST)
        net.blobs["x"].data[...] = np.arange(96).reshape(2, 3, 4, 4)
        net.run_forward()
        tops.append(net.blobs["y"].cpu_data().copy())
    np.testing.assert_array_equal(*tops)


OURS = [kind for kind, cls in layer_types().items() if cls.__module__.startswith("blobmem.")]


@pytest.mark.parametrize("kind", OURS)
def test_every_type_refuses_bottoms_that_are_nothing(kind):
    """Scalars, empty and of too many axes, as many as the type may take: a NetError naming the layer, or a net."""
    cls = layer_types()[kind]
    for dims in ("", "dim: 0", "dim: 1 " * 32):
        bottoms = "".join(f'bottom: "i{index}" ' for index in range(cls.bottoms[0]))
        inputs = "".join(
            layer("Input", f"input_param {{ shape {{ {dims} }} }}", name=f"i{index}", bottom="", top=f'top: "i{index}"')
            for index in range(cls.bottoms[0])
        )
        tops = "".join(f'top: "t{index}" ' for index in range(cls.tops[0]))
        try:
            net = Net(inputs + layer(kind, bottom=bottoms, top=tops), TRAIN, seed=1)
            for name in net.inputs:
                net.blobs[name].data[...] = 0
            if kind not in ("MemoryData", "Python"):
                net.run_forward()
                net.run_backward()
        except NetError as error:
            assert "layer 'a'" in str(error)
