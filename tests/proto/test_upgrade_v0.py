"""V0 nets, with their padding layers, brought up to date."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.upgrade import upgrade_net


def parse(text: str):
    return text_format.Parse(text, caffe_pb2.NetParameter())


# The shape of AlexNet, cut down to one of each kind of layer that it has.
V0_NET = """
name: "alex"
layers {
  layer { name: "data" type: "data" source: "db" meanfile: "mean" batchsize: 256 cropsize: 227 mirror: true scale: 0.5
          rand_skip: 3 }
  top: "data" top: "label"
}
layers {
  layer { name: "conv1" type: "conv" num_output: 96 kernelsize: 11 stride: 4 biasterm: false
          weight_filler { type: "gaussian" std: 0.01 } bias_filler { type: "constant" value: 0. }
          blobs_lr: 1. blobs_lr: 2. weight_decay: 1. weight_decay: 0. }
  bottom: "data" top: "conv1"
}
layers { layer { name: "relu1" type: "relu" } bottom: "conv1" top: "conv1" }
layers { layer { name: "norm1" type: "lrn" local_size: 5 alpha: 0.0001 beta: 0.75 k: 2 } bottom: "conv1" top: "norm1" }
layers { layer { name: "pool1" type: "pool" pool: AVE kernelsize: 3 stride: 2 } bottom: "norm1" top: "pool1" }
layers { layer { name: "pad2" type: "padding" pad: 2 } bottom: "pool1" top: "pad2" }
layers { layer { name: "conv2" type: "conv" num_output: 256 group: 2 kernelsize: 5 } bottom: "pad2" top: "conv2" }
layers { layer { name: "fc" type: "innerproduct" num_output: 10 weight_filler { type: "xavier" } }
         bottom: "conv2" top: "fc" }
layers { layer { name: "drop" type: "dropout" dropout_ratio: 0.4 } bottom: "fc" top: "fc" }
layers { layer { name: "loss" type: "softmax_loss" } bottom: "fc" bottom: "label" }
"""

V2_NET = """
name: "alex"
layer { name: "data" type: "Data" top: "data" top: "label"
        data_param { source: "db" batch_size: 256 rand_skip: 3 }
        transform_param { mean_file: "mean" crop_size: 227 mirror: true scale: 0.5 } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
        param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
        convolution_param { num_output: 96 kernel_size: 11 stride: 4 bias_term: false
          weight_filler { type: "gaussian" std: 0.01 } bias_filler { type: "constant" value: 0 } } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "norm1" type: "LRN" bottom: "conv1" top: "norm1"
        lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 k: 2 } }
layer { name: "pool1" type: "Pooling" bottom: "norm1" top: "pool1"
        pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "conv2" type: "Convolution" bottom: "pool1" top: "conv2"
        convolution_param { pad: 2 num_output: 256 group: 2 kernel_size: 5 } }
layer { name: "fc" type: "InnerProduct" bottom: "conv2" top: "fc"
        inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "drop" type: "Dropout" bottom: "fc" top: "fc" dropout_param { dropout_ratio: 0.4 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" }
"""


def test_an_alexnet() -> None:
    net = parse(V0_NET)
    done = upgrade_net(net)
    assert net == parse(V2_NET)
    assert done.steps == ["10 V0 layers (1 of them padding)", "9 V1 layers"]
    assert done.ignored == []


def test_binary_with_blobs_and_inputs() -> None:
    old = parse('input: "d" input_dim: [1, 3, 9, 9] layers { layer { name: "c" type: "conv" } bottom: "d" top: "c" }')
    old.layers[0].layer.blobs.add(num=1, channels=1, height=1, width=2, data=[3, 4])
    blob = caffe_pb2.BlobProto.FromString(old.layers[0].layer.blobs[0].SerializeToString())
    net = caffe_pb2.NetParameter.FromString(old.SerializeToString())
    upgrade_net(net)
    assert [layer.type for layer in net.layer] == ["Input", "Convolution"]
    assert list(net.layer[1].blobs) == [blob]


def layers(*parts: str) -> str:
    """V0 layers from "NAME TYPE BOTTOM>TOP fields"."""
    out = []
    for part in parts:
        name, kind, blobs, fields = (part + " ").split(" ", 3)
        bottom, top = blobs.split(">")
        bottoms = " ".join(f'bottom: "{b}"' for b in bottom.split(",") if b)
        out.append(f'layers {{ layer {{ name: "{name}" type: "{kind}" {fields} }} {bottoms} top: "{top}" }}')
    return 'input: "d" input_dim: [1, 1, 1, 1]' + "\n".join(out)


def test_one_padding_before_two_layers_and_in_place() -> None:
    net = parse(
        layers(
            "p padding d>d pad: 3",
            "a conv d>a",
            "b pool d>d pad: 1",
            "p2 padding d>e pad: 2",
            "c conv d>c",
            "e pool e>f",
        )
    )
    done = upgrade_net(net)
    a, b, c, e = net.layer[1:]
    assert [layer.bottom[0] for layer in (a, b, c, e)] == ["d"] * 4
    assert list(a.convolution_param.pad) == [3]
    assert b.pooling_param.pad == 3
    assert not c.convolution_param.pad, "the padding applies to e, not to the d it read"
    assert e.pooling_param.pad == 2
    assert done.steps[0] == "6 V0 layers (2 of them padding)"


@pytest.mark.parametrize(
    "text,message",
    [
        (layers("p padding d>p pad: 1", "r relu p>r"), "layer 'r': reads the padding layer 'p'"),
        (layers("p padding d>p pad: 1", "r conv p,d>r"), "layer 'r': reads the padding layer 'p'"),
        (layers("p padding d>p pad: 1", "q padding p>q pad: 1"), "layer 'q': pads what is padded already"),
        (layers("p padding d,d>p pad: 1"), "layer 'p': a padding layer has one bottom and one top"),
        (layers("c conw d>c"), "layer 'c': unknown V0 layer type 'conw'; did you mean 'conv'"),
        (layers("c zzzzzz d>c"), "V0 has accuracy, .*window_data and padding"),
    ],
)
def test_what_no_upgrade_can_do(text: str, message: str) -> None:
    with pytest.raises(NetError, match=message):
        upgrade_net(parse(text))


SETTINGS = [
    ("conv", "pad: 1", "convolution_param { pad: 1 }"),
    ("pool", "pad: 1", "pooling_param { pad: 1 }"),
    ("pool", "pool: STOCHASTIC", "pooling_param { pool: STOCHASTIC }"),
    ("innerproduct", "biasterm: false", "inner_product_param { bias_term: false }"),
    ("innerproduct", "bias_filler { value: 1 }", "inner_product_param { bias_filler { value: 1 } }"),
    ("concat", "concat_dim: 0", "concat_param { concat_dim: 0 }"),
    ("hdf5_data", 'source: "s" batchsize: 2', 'hdf5_data_param { source: "s" batch_size: 2 }'),
    ("hdf5_output", 'hdf5_output_param { file_name: "f" }', 'hdf5_output_param { file_name: "f" }'),
    ("infogain_loss", 'source: "s"', 'infogain_loss_param { source: "s" }'),
    (
        "images",
        'source: "s" batchsize: 2 rand_skip: 3 shuffle_images: true new_height: 4 new_width: 5 cropsize: 6',
        'image_data_param { source: "s" batch_size: 2 rand_skip: 3 shuffle: true new_height: 4 new_width: 5 } '
        "transform_param { crop_size: 6 }",
    ),
    (
        "window_data",
        'source: "s" batchsize: 2 det_fg_threshold: 0.1 det_bg_threshold: 0.2 det_fg_fraction: 0.3 '
        'det_context_pad: 4 det_crop_mode: "square" mirror: true',
        'window_data_param { source: "s" batch_size: 2 fg_threshold: 0.1 bg_threshold: 0.2 fg_fraction: 0.3 '
        'context_pad: 4 crop_mode: "square" } transform_param { mirror: true }',
    ),
]


@pytest.mark.parametrize("kind,old,new", SETTINGS)
def test_settings(kind: str, old: str, new: str) -> None:
    net = parse(f'layers {{ layer {{ name: "l" type: "{kind}" {old} }} }}')
    done = upgrade_net(net)
    net.layer[0].ClearField("type")
    assert net == parse(f'layer {{ name: "l" {new} }}')
    assert done.ignored == []


TYPES = {
    "accuracy": "Accuracy",
    "bnll": "BNLL",
    "concat": "Concat",
    "conv": "Convolution",
    "data": "Data",
    "dropout": "Dropout",
    "euclidean_loss": "EuclideanLoss",
    "flatten": "Flatten",
    "hdf5_data": "HDF5Data",
    "hdf5_output": "HDF5Output",
    "im2col": "Im2col",
    "images": "ImageData",
    "infogain_loss": "InfogainLoss",
    "innerproduct": "InnerProduct",
    "lrn": "LRN",
    "multinomial_logistic_loss": "MultinomialLogisticLoss",
    "pool": "Pooling",
    "relu": "ReLU",
    "sigmoid": "Sigmoid",
    "softmax": "Softmax",
    "softmax_loss": "SoftmaxWithLoss",
    "split": "Split",
    "tanh": "TanH",
    "window_data": "WindowData",
}


@pytest.mark.parametrize("old,new", TYPES.items())
def test_types(old: str, new: str) -> None:
    net = parse(f'layers {{ layer {{ name: "l" type: "{old}" }} }}')
    upgrade_net(net)
    assert net.layer[0].type == new


def test_settings_of_other_types_are_told_and_dropped() -> None:
    net = parse('layers { layer { name: "r" type: "relu" num_output: 3 new_num: 2 scale: 2 } }')
    done = upgrade_net(net)
    assert net == parse('layer { name: "r" type: "ReLU" transform_param { scale: 2 } }')
    assert done.ignored == ["num_output of relu layer 'r'", "new_num of relu layer 'r'"]
    assert "ignored num_output of relu layer 'r', new_num" in str(done)


def test_v0_and_v1_layers_in_one_net() -> None:
    net = parse(
        'layers { layer { name: "a" type: "relu" } include { phase: TEST } } '
        'layers { name: "b" type: POWER power_param { power: 2 } }'
    )
    upgrade_net(net)
    assert net == parse(
        'layer { name: "a" type: "ReLU" include { phase: TEST } } '
        'layer { name: "b" type: "Power" power_param { power: 2 } }'
    )
