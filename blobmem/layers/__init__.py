"""The layers, a module per family; each states its shapes and parameters, and emits its calls.

Names of layer types that begin with a capital and are not attributes are functions of `blobmem.net_spec`, as in scripts
for pycaffe: after `from blobmem import layers as L`, `L.Convolution(bottom, num_output=20)` describes such a layer. The
class that carries it out is in its family's module, or in `layer_types()`.
"""

from typing import TYPE_CHECKING

from blobmem.layers import (
    activation,
    axpy,
    class_loss,
    combine,
    convolution,
    crop,
    depthwise,
    detection,
    im2col,
    index,
    inner_product,
    loss,
    lrn,
    metric,
    mvn,
    neuron,
    norm,
    normalize,
    pair_loss,
    pooling,
    python,
    recurrent,
    reduction,
    region,
    reorder,
    resample,
    shape,
    source,
    spp,
    tile,
)
from blobmem.layers.base import TEST, TRAIN, Layer, create_layer, layer_types, register_layer, set_random_seed

__all__ = [
    "TEST",
    "TRAIN",
    "Layer",
    "activation",
    "axpy",
    "class_loss",
    "combine",
    "convolution",
    "create_layer",
    "crop",
    "depthwise",
    "detection",
    "im2col",
    "index",
    "inner_product",
    "layer_types",
    "loss",
    "lrn",
    "metric",
    "mvn",
    "neuron",
    "norm",
    "normalize",
    "pair_loss",
    "pooling",
    "python",
    "recurrent",
    "reduction",
    "region",
    "register_layer",
    "reorder",
    "resample",
    "set_random_seed",
    "shape",
    "source",
    "spp",
    "tile",
]


if not TYPE_CHECKING:  # a type checker shall still find misspelt names

    def __getattr__(name: str) -> object:
        if not name[:1].isupper():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from blobmem.net_spec import layer_function

        return layer_function(name)
