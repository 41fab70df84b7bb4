"""Tops that are bottoms: what works so, and what is refused because it would read what it has overwritten."""

import numpy as np
import pytest

from blobmem import TEST, NetError

REFUSED = {
    "Accuracy": ("", ["x", "t"]),
    "ArgMax": ("", ["x"]),
    "BatchReindex": ("", ["x", "t"]),
    "Concat": ("", ["x", "t"]),
    "Convolution": ("convolution_param { num_output: 3 kernel_size: 1 }", ["x"]),
    "Crop": ("", ["x", "t"]),
    "Deconvolution": ("convolution_param { num_output: 3 kernel_size: 1 }", ["x"]),
    "Embed": ("embed_param { num_output: 3 input_dim: 4 }", ["t"]),
    "Filter": ("", ["x", "t"]),
    "Flatten": ("", ["x"]),
    "Im2col": ("convolution_param { kernel_size: 1 }", ["x"]),
    "InnerProduct": ("inner_product_param { num_output: 16 axis: 2 }", ["x"]),
    "Pooling": ("pooling_param { kernel_size: 1 }", ["x"]),
    "Reduction": ("", ["x"]),
    "Reshape": ("reshape_param { shape { dim: 0 dim: 0 dim: 0 dim: 0 } }", ["x"]),
    "SPP": ("spp_param { pyramid_height: 1 }", ["x"]),
    "Tile": ("tile_param { tiles: 1 }", ["x"]),
}


@pytest.mark.parametrize("type_", REFUSED)
def test_is_refused(layer_net, type_):
    options, bottoms = REFUSED[type_]
    names = " ".join(f'bottom: "{name}"' for name in bottoms)
    with pytest.raises(NetError, match=rf"layer 'l' \({type_}\), top: expected another name than the bottoms'"):
        layer_net(
            f'layer {{ name: "l" type: "{type_}" {names} top: "{bottoms[0]}" {options} }}', x=(2, 3, 4, 4), t=(2,)
        )


def test_a_slice_of_several_is_refused(layer_net):
    with pytest.raises(NetError, match="top: expected another name"):
        layer_net('layer { name: "l" type: "Slice" bottom: "x" top: "x" top: "y" }', x=(2, 4))


WORKS = {
    "lrn": 'type: "LRN" lrn_param { local_size: 3 alpha: 2 }',
    "lrn within": 'type: "LRN" lrn_param { local_size: 3 alpha: 2 norm_region: WITHIN_CHANNEL }',
    "mvn": 'type: "MVN"',
    "batch norm": 'type: "BatchNorm"',
    "softmax": 'type: "Softmax"',
}


@pytest.mark.parametrize("phase", [0, TEST], ids=["TRAIN", "TEST"])
@pytest.mark.parametrize("text", WORKS.values(), ids=WORKS.keys())
def test_gives_the_same(layer_net, device, text, phase):
    results = []
    for top in ("y", "a"):
        chain = f"""
            layer {{ name: "p" type: "Power" bottom: "x" top: "a" power_param {{ scale: 3 }} }}
            layer {{ name: "l" bottom: "a" top: "{top}" {text} }}
        """
        net = layer_net(chain, phase, device=device, x=(2, 7, 5, 6))
        y = net.forward()[top].copy()
        dx = net.backward(**{top: np.arange(420).reshape(y.shape) % 7})["x"].copy()
        results.append((y, dx))
    for apart, in_place in zip(*results, strict=True):
        assert np.abs(apart).max() > 1e-3
        np.testing.assert_array_equal(in_place, apart)
