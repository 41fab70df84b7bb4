"""Which blobs of a net in half precision are of float32, and the layers that convert between the two.

Layers say of each bottom and top whether it is of the net's dtype or has to be exact (`Layer.bottom_kinds`,
`top_kinds`). Functions on messages only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blobmem.errors import NetError
from blobmem.layers.base import ANY, EXACT, NET, SAME, WANTED, Layer, layer_types
from blobmem.proto import caffe_pb2


def insert_conversions(param: Any, source: str = "") -> tuple[Any, frozenset[str]]:
    """A copy of a net, splits inserted, with a Convert layer before each bottom that is not of the dtype that its layer
    takes, and the names of the blobs of float32.

    Raises NetError for a layer that works in place on such a bottom.
    """
    wanted = _wanted(param)
    exact: set[str] = set()
    result = caffe_pb2.NetParameter()
    result.CopyFrom(param)
    del result.layer[:]
    for layer in param.layer:
        kept = caffe_pb2.LayerParameter()
        kept.CopyFrom(layer)
        bottoms = [name in exact for name in layer.bottom]
        for at, takes in enumerate(_takes(layer, bottoms)):
            if takes is None or takes == bottoms[at]:
                continue
            if layer.bottom[at] in layer.top:
                where = f"{source}: " if source else ""
                raise NetError(
                    f"{where}layer '{layer.name}' ({layer.type}), top: in half precision '{layer.bottom[at]}' is of "
                    "float32, which this layer does not work on in place: give the top another name"
                )
            kept.bottom[at] = _add_conversion(result, layer, at)
            bottoms[at] = takes
            exact.update([kept.bottom[at]] if takes else ())
        result.layer.append(kept)
        for at, name in enumerate(layer.top):
            kind = _kind(_class(layer).top_kinds, at)
            same = kind is SAME and bool(bottoms) and bottoms[min(at, len(bottoms) - 1)]
            if kind is EXACT or same or (kind is WANTED and name in wanted):
                exact.add(name)
    return result, frozenset(exact)


def _add_conversion(result: Any, layer: Any, at: int) -> str:
    """A layer before bottom `at`; the name of its top."""
    name = f"{layer.bottom[at]}_{layer.name}_{at}_convert"
    result.layer.add(name=name, type="Convert", phase=layer.phase, bottom=[layer.bottom[at]], top=[name])
    return name


def _takes(layer: Any, bottoms: Sequence[bool]) -> Iterator[bool | None]:
    """Of each bottom whether the layer takes it exact, or in the net's dtype; None for as it is."""
    kinds = [_kind(_class(layer).bottom_kinds, at) for at in range(len(bottoms))]
    alike = [bottom for bottom, kind in zip(bottoms, kinds, strict=True) if kind is SAME]
    for kind in kinds:
        yield None if kind is ANY else all(alike) if kind is SAME else kind is EXACT


def _wanted(param: Any) -> set[str]:
    """The blobs that some layer takes exact, by way of layers whose tops are as their bottoms, too."""
    wanted: set[str] = set()
    for layer in reversed(param.layer):
        kinds = _class(layer).bottom_kinds
        tops = [_kind(_class(layer).top_kinds, at) is SAME and name in wanted for at, name in enumerate(layer.top)]
        last = len(layer.bottom) - 1
        for at, name in enumerate(layer.bottom):
            follows = any(top and min(place, last) == at for place, top in enumerate(tops))
            if _kind(kinds, at) is EXACT or follows:
                wanted.add(name)
    return wanted


def _class(layer: Any) -> type[Layer]:
    return layer_types().get(layer.type, Layer)  # what is unknown is said when it is made


def _kind(kinds: Sequence[str], at: int) -> str:
    return kinds[min(at, len(kinds) - 1)] if kinds else NET
