"""Silence, Split and the layers that are aliases: what they move, and what they do not."""

import numpy as np
import pytest

from blobmem import TEST, TRAIN, Net, NetError

HEAD = (
    'force_backward: true layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 4 } } }\n'
)


def net_of(text, phase=TRAIN):
    net = Net(HEAD + text, phase, seed=1)
    net.blobs["x"].data[...] = np.arange(24).reshape(2, 3, 4)
    return net


def test_silence_gives_a_zero_gradient():
    net = net_of('layer { name: "s" type: "Silence" bottom: "x" }')
    net.blobs["x"].diff[...] = 7
    net.run_forward()
    net.run_backward()
    assert net.outputs == []
    assert not net.blobs["x"].cpu_diff().any()


def test_split_shares_data_and_adds_gradients():
    net = net_of('layer { name: "s" type: "Split" bottom: "x" top: "a" top: "b" top: "c" }')
    net.run_forward()
    for scale, name in enumerate("abc", 1):
        assert net.blobs[name].data_view == net.blobs["x"].data_view
        net.blobs[name].diff[...] = scale
    net.run_backward()
    assert (net.blobs["x"].cpu_diff() == 6).all()


def test_the_gradient_of_a_top_that_nobody_writes_is_not_added():
    text = """
        layer { name: "in" type: "Input" top: "x" top: "l" input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
        layer { name: "p" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 3 } }
        layer { name: "a" type: "Accuracy" bottom: "y" bottom: "l" top: "a" }
        layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "l" top: "loss" }
    """
    net = Net(text, TRAIN, seed=1)
    (split,) = [call for call in net.compiled()[1].calls if call.layer_name == "y_p_0_split"]
    assert [operand.blob.name for operand in split.operands] == ["y_p_0_split_1", "y"]


@pytest.mark.parametrize(
    "text, shape",
    [
        ('layer { name: "f" type: "Flatten" bottom: "x" top: "y" }', (2, 12)),
        ('layer { name: "f" type: "Flatten" bottom: "x" top: "y" flatten_param { axis: 0 end_axis: 1 } }', (6, 4)),
        (
            'layer { name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param { shape { dim: 0 dim: -1 } } }',
            (2, 12),
        ),
        (
            'layer { name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param { axis: 1 num_axes: 1 shape { dim: 1 dim: 3 } } }',
            (2, 1, 3, 4),
        ),
        (
            'layer { name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param { axis: -1 num_axes: 0 shape { dim: 1 } } }',
            (2, 3, 4, 1),
        ),
        ('layer { name: "c" type: "Concat" bottom: "x" top: "y" }', (2, 3, 4)),
        ('layer { name: "s" type: "Slice" bottom: "x" top: "y" }', (2, 3, 4)),
    ],
)
def test_aliases_move_no_byte(text, shape):
    net = net_of(text)
    assert net.blobs["y"].shape == shape
    forward, backward = net.compiled()
    assert not forward.calls and not backward.calls
    net.run_forward()
    assert net.blobs["y"].data_view.memory is net.blobs["x"].data_view.memory
    np.testing.assert_array_equal(net.blobs["y"].cpu_data().ravel(), np.arange(24))
    net.blobs["y"].diff[...] = 2
    assert (net.blobs["x"].cpu_diff() == 2).all()


@pytest.mark.parametrize(
    "text, message",
    [
        ('layer { name: "e" type: "Eltwise" bottom: "x" top: "y" }', "bottom: expected 2 or more, got 1"),
        (
            'layer { name: "e" type: "Eltwise" bottom: "x" bottom: "x" top: "y" eltwise_param { coeff: 1 } }',
            "coeff: expected none or 2",
        ),
        (
            'layer { name: "e" type: "Eltwise" bottom: "x" bottom: "x" top: "y" eltwise_param { operation: PROD coeff: 1 coeff: 1 } }',
            "coeff: expected none for a product",
        ),
        (
            'layer { name: "c" type: "Concat" bottom: "x" bottom: "x" top: "y" concat_param { axis: 7 } }',
            "axis: expected an axis of",
        ),
        ('layer { name: "s" type: "Slice" bottom: "x" top: "a" top: "b" }', "slice_point: expected points, as 3"),
        (
            'layer { name: "s" type: "Slice" bottom: "x" top: "a" top: "b" slice_param { slice_point: 3 } }',
            "slice_point: expected rising points",
        ),
        ('layer { name: "f" type: "Flatten" bottom: "x" top: "x" }', "top: expected another name"),
        (
            'layer { name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param { shape { dim: -1 dim: -1 } } }',
            "at most one -1",
        ),
        (
            'layer { name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param { shape { dim: 5 } } }',
            "expected 24 values",
        ),
        (
            'layer { name: "b" type: "Scale" bottom: "x" top: "y" scale_param { axis: 2 num_axes: 3 } }',
            "num_axes: expected at most",
        ),
        (
            'layer { name: "l" type: "LRN" bottom: "x" top: "y" lrn_param { local_size: 4 } }',
            "local_size: expected an odd number, got 4",
        ),
        (
            'layer { name: "a" type: "ArgMax" bottom: "x" top: "y" argmax_param { top_k: 13 } }',
            "top_k: expected 1 to 12, got 13",
        ),
    ],
)
def test_what_does_not_fit_is_said(text, message):
    with pytest.raises(NetError, match=message):
        net_of(text)


def test_dropout_in_a_test_net_is_the_identity():
    net = net_of('layer { name: "d" type: "Dropout" bottom: "x" top: "x" }', TEST)
    assert not net.compiled()[0].calls


@pytest.mark.parametrize("layer, options, other", [
    pytest.param('type: "Concat" bottom: "x" bottom: "x" top: "y"', "concat_param { concat_dim: 2 }",
                 "concat_param { axis: -1 }", id="concat_dim"),
    pytest.param('type: "Slice" bottom: "x" top: "y" top: "z"', "slice_param { slice_dim: 2 slice_point: 1 }",
                 "slice_param { axis: 2 slice_point: 1 }", id="slice_dim"),
])  # fmt: skip
def test_the_old_name_of_an_axis(layer, options, other):
    results = []
    for given in (options, other):
        net = net_of(f'layer {{ name: "l" {layer} {given} }}')
        results.append(net.forward()["y"].copy())
    np.testing.assert_array_equal(*results)
    both = options.replace("}", "axis: 1 }")
    with pytest.raises(NetError, match="expected axis alone"):
        net_of(f'layer {{ name: "l" {layer} {both} }}')


@pytest.mark.parametrize("dims, shape", [
    pytest.param("dim: 0 dim: -1", (0, 12), id="an axis kept"),
    pytest.param("dim: 0 dim: 2 dim: -1", (0, 2, 6), id="an axis divided"),
    pytest.param("dim: -1 dim: 0 dim: 4", (0, 3, 4), id="items inferred"),
    pytest.param("dim: 0 dim: 0 dim: 0", (0, 3, 4), id="all kept"),
])  # fmt: skip
def test_reshape_of_no_items(dims, shape):
    net = net_of(f'layer {{ name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param {{ shape {{ {dims} }} }} }}')
    net.blobs["x"].reshape(0, 3, 4)
    net.forward()
    assert net.blobs["y"].shape == shape


def test_a_reshape_that_does_not_fit_no_items_is_said():
    net = net_of(
        'layer { name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param { shape { dim: 0 dim: -1 dim: 6 } } }'
    )
    net.blobs["x"].reshape(0, 3, 5)
    with pytest.raises(NetError, match="shape: expected dimensions that divide 0 values evenly"):
        net.forward()


def test_statistics_of_no_items_are_left_alone():
    net = net_of('layer { name: "b" type: "BatchNorm" bottom: "x" top: "y" }')
    net.forward()
    before = [blob.cpu_data().copy() for blob in net.params["b"]]
    net.blobs["x"].reshape(0, 3, 4)
    net.forward()
    net.backward()
    for blob, values in zip(net.params["b"], before, strict=True):
        np.testing.assert_array_equal(blob.cpu_data(), values)
