"""What several layers refuse alike."""

from __future__ import annotations

from blobmem.layers.base import Layer


def refuse_in_place(layer: Layer) -> None:
    """Raise NetError if a top is one of the bottoms, for layers that would read values they have overwritten."""
    for name in layer.param.top:
        if name in layer.param.bottom:
            raise layer.error("top", "another name than the bottoms': this type cannot work in place", f"'{name}'")


def refuse_gradient(layer: Layer, index: int, what: str) -> None:
    """Raise NetError if the prototxt asks for the gradient of bottom `index`, which has none."""
    asked = layer.param.propagate_down
    if index < len(asked) and asked[index]:
        raise layer.error("propagate_down", f"false for the {what}, which have no gradient", "true")
