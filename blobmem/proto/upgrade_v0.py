"""From V0 layers (2013, `layers { layer { type: "conv" } }`) to V1 layers (2014, `layers { type: CONVOLUTION }`).

V0 kept the settings of all layer types in one message and padded images with layers of their own. What goes where is
what Caffe's own upgrade does, except that a setting which a layer's type never had is reported instead of logged.
"""

from __future__ import annotations

import difflib
from typing import Any

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.compat import is_repeated

_TYPES = {
    "accuracy": "ACCURACY",
    "bnll": "BNLL",
    "concat": "CONCAT",
    "conv": "CONVOLUTION",
    "data": "DATA",
    "dropout": "DROPOUT",
    "euclidean_loss": "EUCLIDEAN_LOSS",
    "flatten": "FLATTEN",
    "hdf5_data": "HDF5_DATA",
    "hdf5_output": "HDF5_OUTPUT",
    "im2col": "IM2COL",
    "images": "IMAGE_DATA",
    "infogain_loss": "INFOGAIN_LOSS",
    "innerproduct": "INNER_PRODUCT",
    "lrn": "LRN",
    "multinomial_logistic_loss": "MULTINOMIAL_LOGISTIC_LOSS",
    "pool": "POOLING",
    "relu": "RELU",
    "sigmoid": "SIGMOID",
    "softmax": "SOFTMAX",
    "softmax_loss": "SOFTMAX_LOSS",
    "split": "SPLIT",
    "tanh": "TANH",
    "window_data": "WINDOW_DATA",
}

# V0 type to the V1 sub-message that took over its settings.
_SETTINGS = {
    "concat": "concat_param",
    "conv": "convolution_param",
    "data": "data_param",
    "dropout": "dropout_param",
    "hdf5_data": "hdf5_data_param",
    "images": "image_data_param",
    "infogain_loss": "infogain_loss_param",
    "innerproduct": "inner_product_param",
    "lrn": "lrn_param",
    "pool": "pooling_param",
    "window_data": "window_data_param",
}

# V0 field to its name in the sub-message, and the V0 types that have it.
_FIELDS = {
    "num_output": ("num_output", ("conv", "innerproduct")),
    "biasterm": ("bias_term", ("conv", "innerproduct")),
    "weight_filler": ("weight_filler", ("conv", "innerproduct")),
    "bias_filler": ("bias_filler", ("conv", "innerproduct")),
    "pad": ("pad", ("conv", "pool")),
    "kernelsize": ("kernel_size", ("conv", "pool")),
    "stride": ("stride", ("conv", "pool")),
    "group": ("group", ("conv",)),
    "pool": ("pool", ("pool",)),
    "dropout_ratio": ("dropout_ratio", ("dropout",)),
    "local_size": ("local_size", ("lrn",)),
    "alpha": ("alpha", ("lrn",)),
    "beta": ("beta", ("lrn",)),
    "k": ("k", ("lrn",)),
    "source": ("source", ("data", "hdf5_data", "images", "window_data", "infogain_loss")),
    "batchsize": ("batch_size", ("data", "hdf5_data", "images", "window_data")),
    "rand_skip": ("rand_skip", ("data", "images")),
    "shuffle_images": ("shuffle", ("images",)),
    "new_height": ("new_height", ("images",)),
    "new_width": ("new_width", ("images",)),
    "concat_dim": ("concat_dim", ("concat",)),
    "det_fg_threshold": ("fg_threshold", ("window_data",)),
    "det_bg_threshold": ("bg_threshold", ("window_data",)),
    "det_fg_fraction": ("fg_fraction", ("window_data",)),
    "det_context_pad": ("context_pad", ("window_data",)),
    "det_crop_mode": ("crop_mode", ("window_data",)),
}

# V0 field to its name in transform_param, whatever the layer's type.
_TRANSFORM = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}

_KEPT = ("name", "blobs", "blobs_lr", "weight_decay")


def merge_padding(net: Any) -> int:
    """Takes the "padding" layers out of `net` (in place) and pads the convolutions and poolings after them instead.

    Returns how many were taken out. NetError where another type of layer reads a padding layer's top, since nothing but
    the padding layer itself could pad there.
    """
    layers = list(net.layers)
    padding: dict[str, Any] = {}  # top to the padding layer that wrote it last
    for layer in layers:
        if layer.layer.type == "padding":
            _check_padding(layer, padding)
        else:
            _absorb_padding(layer, padding)
        for top in layer.top:
            padding.pop(top, None)
            if layer.layer.type == "padding":
                padding[top] = layer
    kept = [layer for layer in layers if layer.layer.type != "padding"]
    if len(kept) < len(layers):
        copies = caffe_pb2.NetParameter(layers=kept).layers
        del net.layers[:]
        net.layers.MergeFrom(copies)
    return len(layers) - len(kept)


def _check_padding(layer: Any, padding: dict[str, Any]) -> None:
    """NetError unless `layer` pads one blob, and one that is not padded already."""
    if len(layer.bottom) != 1 or len(layer.top) != 1:
        raise NetError(
            f"layer '{layer.layer.name}': a padding layer has one bottom and one top, "
            f"this one {len(layer.bottom)} and {len(layer.top)}"
        )
    if layer.bottom[0] in padding:
        raise NetError(f"layer '{layer.layer.name}': pads what is padded already; give one padding layer the sum")


def _absorb_padding(layer: Any, padding: dict[str, Any]) -> None:
    """Lets `layer` read what the padding layer before it read, and pad by itself."""
    for i, bottom in enumerate(layer.bottom):
        source = padding.get(bottom)
        if source is None:
            continue
        if layer.layer.type not in ("conv", "pool") or len(layer.bottom) != 1:
            raise NetError(
                f"layer '{layer.layer.name or layer.name}': reads the padding layer '{source.layer.name}', which only "
                f"a conv or pool layer with one bottom can; move the padding or make it part of a convolution"
            )
        layer.layer.pad = source.layer.pad
        layer.bottom[i] = source.bottom[0]


def upgrade_v0_layer(layer: Any) -> list[str]:
    """Turns one V1LayerParameter that holds a V0 layer into a V1 layer, in place.

    Returns the settings that the layer's type does not have, one phrase each; they had no effect in V0 either.
    NetError for an unknown type.
    """
    old = caffe_pb2.V0LayerParameter()
    old.CopyFrom(layer.layer)
    layer.ClearField("layer")
    ignored: list[str] = []
    for field, value in old.ListFields():
        if field.name == "type":
            layer.type = caffe_pb2.V1LayerParameter.LayerType.Value(_v1_type(old))
        elif field.name in _KEPT:
            _assign(layer, field.name, value)
        elif field.name in _TRANSFORM:
            _assign(layer.transform_param, _TRANSFORM[field.name], value)
        elif field.name == "hdf5_output_param" and old.type == "hdf5_output":
            layer.hdf5_output_param.CopyFrom(value)
        else:
            name, types = _FIELDS.get(field.name, ("", ()))
            if old.type in types:
                _assign(getattr(layer, _SETTINGS[old.type]), name, value)
            else:
                ignored.append(f"{field.name} of {old.type or 'untyped'} layer '{old.name}'")
    return ignored


def _v1_type(old: Any) -> str:
    name = _TYPES.get(old.type)
    if name is None:
        near = difflib.get_close_matches(old.type, _TYPES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"V0 has {', '.join(sorted(_TYPES))} and padding"
        raise NetError(f"layer '{old.name}': unknown V0 layer type '{old.type}'; {hint}")
    return name


def _assign(message: Any, name: str, value: Any) -> None:
    """Sets a field, of any kind; a single value for a repeated field becomes its one entry."""
    field = message.DESCRIPTOR.fields_by_name[name]
    if is_repeated(field):
        target = getattr(message, name)
        del target[:]
        target.extend(value if hasattr(value, "__len__") else [value])
    elif field.message_type is not None:
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)
