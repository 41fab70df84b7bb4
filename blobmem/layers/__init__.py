"""The layers, a module per family; each states its shapes and parameters, and emits its calls."""

from blobmem.layers import combine, convolution, inner_product, loss, lrn, metric, neuron, norm, pooling, shape, source
from blobmem.layers.base import TEST, TRAIN, Layer, create_layer, layer_types, register_layer, set_random_seed

__all__ = [
    "TEST",
    "TRAIN",
    "Layer",
    "combine",
    "convolution",
    "create_layer",
    "inner_product",
    "layer_types",
    "loss",
    "lrn",
    "metric",
    "neuron",
    "norm",
    "pooling",
    "register_layer",
    "set_random_seed",
    "shape",
    "source",
]
