"""Summaries: numbers of well-known nets, and the rule of each type by hand."""

import tracemalloc
from pathlib import Path

import pytest

from blobmem.layers.base import layer_types
from blobmem.net.builder import specs_of
from blobmem.summary import RULES, summary

MODELS = Path(__file__).parents[1] / "models"


@pytest.mark.parametrize(
    ("model", "multiply_adds", "parameters"),
    [
        ("alexnet", 724_406_816, 60_965_224),
        ("caffenet", 724_406_816, 60_965_224),
        ("googlenet", 1.5826e9, 6_998_552),
        ("resnet50", 3.87e9, 25_557_096),
        ("vgg16", 15.47e9, 138_357_544),
        ("lenet", 288_000 + 1_600_000 + 400_000 + 5_000, 431_080),
    ],
)
def test_published_numbers(model, multiply_adds, parameters):
    _, (spec,) = specs_of(MODELS / model / "deploy.prototxt")
    result = summary(spec, batch=1)
    assert result.batch == 1
    assert result.total("multiply_adds") == pytest.approx(
        multiply_adds, rel=0 if isinstance(multiply_adds, int) else 5e-3
    )
    assert result.total("parameters") == parameters


def test_multiply_adds_and_bytes_grow_with_the_batch():
    _, (spec,) = specs_of(MODELS / "lenet" / "deploy.prototxt")
    one, ten = summary(spec, batch=1), summary(spec, batch=10)
    for column in ("multiply_adds", "bytes"):
        assert ten.total(column) == 10 * one.total(column) > 0
    assert ten.total("parameters") == one.total("parameters")


def test_running_statistics_are_no_parameters():
    _, (spec,) = specs_of(MODELS / "resnet50" / "deploy.prototxt")
    rows = {row.name: row for row in summary(spec, batch=1).rows}
    assert (rows["bn_conv1"].parameters, rows["bn_conv1"].statistics) == (0, 64 + 64 + 1)
    assert (rows["scale_conv1"].parameters, rows["scale_conv1"].statistics) == (128, 0)


def test_nothing_is_allocated():
    spec, _ = specs_of(MODELS / "vgg16" / "train_val.prototxt")
    summary(spec)  # imports
    tracemalloc.start()
    try:
        result = summary(spec)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.total("bytes") > 2**30 and 4 * result.total("parameters") > 2**29
    assert peak < 2**24


IN = 'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 dim: 5 dim: 5 } } }'
PAIR = 'layer { name: "in" type: "Input" top: "x" top: "z" input_param { shape { dim: 2 dim: 6 } shape { dim: 2 dim: 6 } } }'
SEQUENCE = """layer { name: "in" type: "Input" top: "x" top: "cont" top: "s"
  input_param { shape { dim: 7 dim: 2 dim: 6 } shape { dim: 7 dim: 2 } shape { dim: 2 dim: 4 } } }"""
CONVOLUTION = "convolution_param { num_output: 4 kernel_size: 3 group: 2 stride: 2 pad: 1 }"
RECURRENT = 'recurrent_param { num_output: 3 weight_filler { type: "xavier" } }'


@pytest.mark.parametrize(
    ("before", "layer", "expected"),
    [
        # 2 items of 3 x 3 places, 4 outputs, 3 channels each, 9 places of the window
        (IN, f'type: "Convolution" bottom: "x" top: "y" {CONVOLUTION}', 2 * 9 * 4 * 3 * 9),
        # each of 6 x 25 inputs goes to 2 outputs of its group, 9 places each
        (IN, f'type: "Deconvolution" bottom: "x" top: "y" {CONVOLUTION}', 2 * 25 * 6 * 2 * 9),
        (
            IN,
            'type: "DepthwiseConvolution" bottom: "x" top: "y" convolution_param { kernel_size: 3 }',
            2 * 9 * 6 * 9,
        ),
        (IN, 'type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 3 }', 2 * 150 * 3),
        (
            IN,
            'type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 3 axis: 3 transpose: true }',
            2 * 6 * 5 * 5 * 3,
        ),
        (IN, 'type: "Scale" bottom: "x" top: "x"', 300),
        (IN, 'type: "BatchNorm" bottom: "x" top: "y"', 300),
        (IN, 'type: "PReLU" bottom: "x" top: "y"', 300),
        (IN, 'type: "Interp" bottom: "x" top: "y" interp_param { height: 2 width: 3 }', 4 * 2 * 6 * 6),
        (IN, 'type: "Pooling" bottom: "x" top: "y" pooling_param { kernel_size: 2 }', 0),
        (IN, 'type: "LRN" bottom: "x" top: "y"', 0),
        (IN, 'type: "Axpy" bottom: "g" bottom: "x" bottom: "x" top: "y"', 300),
        (PAIR, 'type: "Eltwise" bottom: "x" bottom: "z" top: "y"', 0),
        (PAIR, 'type: "Eltwise" bottom: "x" bottom: "z" top: "y" eltwise_param { operation: PROD }', 12),
        (PAIR, 'type: "Eltwise" bottom: "x" bottom: "z" top: "y" eltwise_param { coeff: 1 coeff: -1 }', 24),
        (PAIR, 'type: "Eltwise" bottom: "x" bottom: "z" top: "y" eltwise_param { operation: MAX }', 0),
        (SEQUENCE, f'type: "RNN" bottom: "x" bottom: "cont" top: "y" {RECURRENT}', 7 * 2 * (6 * 3 + 3 * 3 + 3 * 3)),
        (
            SEQUENCE,
            f'type: "LSTM" bottom: "x" bottom: "cont" bottom: "s" top: "y" {RECURRENT}',
            7 * 2 * 12 * (6 + 3) + 2 * 12 * 4 + 3 * 7 * 2 * 3,
        ),
    ],
    ids=["conv", "deconv", "depthwise", "ip", "ip-axis", "scale", "bn", "prelu", "interp", "pool", "lrn", "axpy", "sum",
         "prod", "coeff", "max", "rnn", "lstm"],
)  # fmt: skip
def test_multiply_adds(before, layer, expected):
    if '"g"' in layer:
        before += 'layer { name: "g" type: "Input" top: "g" input_param { shape { dim: 2 dim: 6 } } }'
    spec, _ = specs_of(f'{before}\nlayer {{ name: "layer" {layer} }}')
    assert summary(spec).rows[-1].multiply_adds == expected


def test_an_lstms_step():
    spec, _ = specs_of("""
layer { name: "in" type: "Input" top: "c" top: "g" top: "cont"
  input_param { shape { dim: 1 dim: 2 dim: 5 } shape { dim: 1 dim: 2 dim: 20 } shape { dim: 1 dim: 2 } } }
layer { name: "unit" type: "LSTMUnit" bottom: "c" bottom: "g" bottom: "cont" top: "d" top: "h" }
""")
    assert summary(spec).rows[-1].multiply_adds == 3 * 10


def test_rules_are_of_types_that_there_are():
    assert set(RULES) <= set(layer_types())


def test_memory_counts_once():
    spec, _ = specs_of("""
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 3 } }
layer { name: "relu" type: "ReLU" bottom: "y" top: "y" }
layer { name: "flat" type: "Reshape" bottom: "y" top: "flat" reshape_param { shape { dim: -1 } } }
layer { name: "exp" type: "Exp" bottom: "flat" top: "e" }
""")
    assert [row.bytes for row in summary(spec).rows] == [48, 24, 0, 0, 24]


def test_shared_parameters_count_where_they_are():
    layer = """layer {{ name: "{0}" type: "InnerProduct" bottom: "x" top: "{0}" param {{ name: "w" }} param {{ name: "{1}" }}
      inner_product_param {{ num_output: 3 }} }}"""
    spec, _ = specs_of(
        'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 } } }\n'
        + layer.format("a", "p")
        + layer.format("b", "q")
    )
    assert [row.parameters for row in summary(spec).rows] == [0, 21, 3]
