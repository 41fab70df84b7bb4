"""pycaffe's face of a net: blobs and layers by name, whole data sets in batches, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.errors import NetError, SharedBlobError
from blobmem.layers.base import Layer
from blobmem.layers.source import MemoryData
from blobmem.memory.blob import Blob
from blobmem.net.build import Node

if TYPE_CHECKING:
    from blobmem.net.plan import Plan
    from blobmem.net.schedule import Span
    from blobmem.net.sharing import SharingGroup

Callback = Callable[[int], Any]
"""Called with the position of a layer in the net."""


class Access:
    """What scripts written for pycaffe do with a net; `Net` is the rest of it."""

    blobs: dict[str, Blob]
    inputs: list[str]
    outputs: list[str]
    layers: list[Layer]
    layer_names: list[str]
    nodes: list[Node]
    identity: Any
    group: SharingGroup
    _plan: Plan | None

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {
            "before_forward": [], "after_forward": [], "before_backward": [], "after_backward": [],
        }  # fmt: skip

    if TYPE_CHECKING:  # what Net has

        def run_forward(self, first: int = 0, last: int | None = None) -> float: ...
        def run_backward(self, first: int | None = None, last: int = 0) -> None: ...
        def _span(self, backward: bool, first: int, last: int) -> Span: ...
        def _watch_state(self) -> None: ...

    # ---------------------------------------------------------------- passes

    def forward(
        self, blobs: Iterable[str] | None = None, start: str | None = None, end: str | None = None, **inputs: Any
    ) -> dict[str, np.ndarray]:
        """Run forward, from layer `start` to layer `end` (names, inclusive), and return output arrays by name.

        Args:
            blobs: names of further blobs to return.
            inputs: arrays for the net's inputs by name; all of them or none.

        Raises KeyError for an unknown name, ValueError if the inputs given are not the net's, or of another batch size.
        """
        if inputs:
            self._set_inputs(inputs)
        last = len(self.nodes) - 1 if end is None else self._position(end)
        first = 0 if start is None else self._position(start)
        names = self.outputs if end is None else self.nodes[last].top_names
        wanted = {name: self.blobs[name] for name in dict.fromkeys([*names, *(blobs or ())])}
        with self.group.lock:
            self._check_kept(self._span(False, first, last), wanted, diff=False)
            self.run_forward(first, last)
            return {name: _kept(blob, diff=False) for name, blob in wanted.items()}

    def backward(
        self, diffs: Iterable[str] | None = None, start: str | None = None, end: str | None = None, **top_diffs: Any
    ) -> dict[str, np.ndarray]:
        """Run backward, from layer `start` down to layer `end` (names, inclusive), and return gradients by name.

        Args:
            diffs: names of further blobs whose gradients to return.
            top_diffs: gradients of the net's outputs (or of `start`'s tops) by name; all of them or none.

        Raises KeyError for an unknown name, ValueError if the gradients given are not those of the outputs.
        """
        first = len(self.nodes) - 1 if start is None else self._position(start)
        if top_diffs:
            expected = self.outputs if start is None else self.nodes[first].top_names
            if set(top_diffs) != set(expected):
                raise ValueError(f"backward takes the gradients of {', '.join(expected)}; got {', '.join(top_diffs)}")
            for name, values in top_diffs.items():
                _assign(self.blobs[name].diff, values, name)
        last = 0 if end is None else self._position(end)
        names = self.inputs if end is None else self.nodes[last].bottom_names
        wanted = {name: self.blobs[name] for name in dict.fromkeys([*names, *(diffs or ())])}
        with self.group.lock:
            self._check_kept(self._span(True, last, first), wanted, diff=True)
            self.run_backward(first, last)
            return {name: _kept(blob, diff=True) for name, blob in wanted.items()}

    def forward_all(self, blobs: Iterable[str] | None = None, **inputs: Any) -> dict[str, np.ndarray]:
        """Run forward over arrays of any length, batch by batch; the outputs of all items by name.

        The last batch is filled up with zeros, whose outputs are left out. Args and errors as for `forward`.
        """
        found = self._over_batches(inputs, lambda batch: (self.forward(blobs=blobs, **batch), {}))
        return found[0]

    def forward_backward_all(
        self, blobs: Iterable[str] | None = None, diffs: Iterable[str] | None = None, **values: Any
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Run forward and backward over arrays of any length, batch by batch.

        Args:
            blobs, diffs: names of further blobs whose data, and whose gradients, to return.
            values: arrays for the net's inputs by name, and gradients of its outputs by name.

        Returns the outputs and the inputs' gradients of all items, by name. Errors as for `forward` and `backward`.
        """

        def run(batch: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
            outputs = self.forward(blobs=blobs, **{name: batch[name] for name in self.inputs if name in batch})
            outputs = {name: np.array(array) for name, array in outputs.items()}
            return outputs, self.backward(
                diffs=diffs, **{name: batch[name] for name in self.outputs if name in batch and name not in self.inputs}
            )

        return self._over_batches(values, run)

    def _over_batches(
        self,
        values: Mapping[str, Any],
        run: Callable[[Mapping[str, Any]], tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]],
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        arrays = {name: np.asarray(array) for name, array in values.items()}
        lengths = {len(array) for array in arrays.values()}
        if len(lengths) != 1 or not self.inputs:
            raise ValueError(f"expected arrays of one length for {', '.join(self.inputs) or 'a net with inputs'}")
        (total,) = lengths
        parts: tuple[dict[str, list[np.ndarray]], dict[str, list[np.ndarray]]] = ({}, {})
        for count, batch in _batches(arrays, total, self.blobs[self.inputs[0]].shape[0]):
            for gathered, found in zip(parts, run(batch), strict=True):
                for name, array in found.items():
                    # a scalar, as losses are, is one value for the batch
                    gathered.setdefault(name, []).append(np.array(array[:count] if array.ndim else array[None]))
        outputs, gradients = ({name: np.concatenate(all_) for name, all_ in part.items()} for part in parts)
        return outputs, gradients

    def _check_kept(self, span: Span, wanted: Mapping[str, Blob], diff: bool) -> None:
        """Raise SharedBlobError, before anything runs, if what is to be returned will be another net's or array's."""
        memories = {name: (blob.diff_view if diff else blob.data_view).memory for name, blob in wanted.items()}
        self.group.check(self.identity, {memory: memory in span.written for memory in memories.values()})
        for name, memory in memories.items():
            if self._plan is not None and (memory in span.spent or memory in span.overrun):
                raise SharedBlobError(self._plan.spent.about_blob(name, self.identity, memory.name))

    def _set_inputs(self, inputs: Mapping[str, Any]) -> None:
        if set(inputs) != set(self.inputs):
            raise ValueError(f"the inputs of this net are {', '.join(self.inputs) or 'none'}; got {', '.join(inputs)}")
        for name, values in inputs.items():
            blob = self.blobs[name]
            if np.ndim(values) and blob.shape and np.shape(values)[0] != blob.shape[0]:
                raise ValueError(
                    f"input '{name}' is for a batch of {blob.shape[0]}, got {np.shape(values)[0]}: "
                    "call net.blobs[name].reshape(...) first"
                )
            _assign(blob.data, values, name)

    def set_input_arrays(self, data: np.ndarray, labels: np.ndarray) -> None:
        """Have the net's MemoryData layer serve these arrays, (items, channels, height, width) and (items,).

        Arrays of the tops' dtypes that are C-contiguous and writable are not copied: each pass reads what is in them
        then. Raises NetError if there is no such layer, ValueError if the arrays do not fit it.
        """
        for node in self.nodes:
            if isinstance(node.layer, MemoryData):
                node.layer.reset(data, labels)
                return
        raise NetError(f"{self.identity} has no MemoryData layer to give arrays to")

    # ---------------------------------------------------------------- names

    @property
    def layer_dict(self) -> dict[str, Layer]:
        """The layers by name."""
        return dict(zip(self.layer_names, self.layers, strict=True))

    @property
    def blob_loss_weights(self) -> dict[str, float]:
        """For each blob by name, its weight in the net's loss; 0 for most."""
        weights = dict.fromkeys(self.blobs, 0.0)
        for node in self.nodes:
            weights.update((name, node.layer.loss_weight(index)) for index, name in enumerate(node.top_names))
        return weights

    @property
    def _blob_names(self) -> list[str]:
        return list(self.blobs)

    @property
    def _layer_names(self) -> list[str]:
        return self.layer_names

    # blobs by position, as converters of models go through a net

    @property
    def _blobs(self) -> list[Blob]:
        return list(self.blobs.values())

    @property
    def _inputs(self) -> list[int]:
        return self._ids(self.inputs)

    @property
    def _outputs(self) -> list[int]:
        return self._ids(self.outputs)

    def _top_ids(self, layer: int) -> list[int]:
        return self._ids(self.nodes[layer].top_names)

    def _bottom_ids(self, layer: int) -> list[int]:
        return self._ids(self.nodes[layer].bottom_names)

    def _ids(self, names: Iterable[str]) -> list[int]:
        names_of_all = list(self.blobs)
        return [names_of_all.index(name) for name in names]

    @property
    def _blob_loss_weights(self) -> list[float]:
        return list(self.blob_loss_weights.values())

    def _set_input_arrays(self, data: np.ndarray, labels: np.ndarray) -> None:
        self.set_input_arrays(data, labels)

    def _forward(self, start: int, end: int) -> float:
        return self.run_forward(start, end)

    def _backward(self, start: int, end: int) -> None:
        self.run_backward(start, end)

    def _position(self, layer: str) -> int:
        try:
            return self.layer_names.index(layer)
        except ValueError:
            raise KeyError(f"no layer '{layer}' in {self.identity}; layers: {', '.join(self.layer_names)}") from None

    # ---------------------------------------------------------------- callbacks

    @property
    def watches_backward(self) -> bool:
        """Whether a callback is called during backward."""
        return bool(self._callbacks["before_backward"] or self._callbacks["after_backward"])

    def before_forward(self, callback: Callback) -> None:
        """Have a function called before each layer's forward, with the layer's position in the net."""
        self._callbacks["before_forward"].append(callback)
        self._watch_state()

    def after_forward(self, callback: Callback) -> None:
        """Have a function called after each layer's forward, with the layer's position in the net."""
        self._callbacks["after_forward"].append(callback)
        self._watch_state()

    def before_backward(self, callback: Callback) -> None:
        """Have a function called before each layer's backward, with the layer's position in the net."""
        self._callbacks["before_backward"].append(callback)

    def after_backward(self, callback: Callback) -> None:
        """Have a function called after each layer's backward, with the layer's position in the net."""
        self._callbacks["after_backward"].append(callback)


def _batches(arrays: Mapping[str, np.ndarray], total: int, size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Batches with how many of their items are the caller's; the rest of the last is zero."""
    for start in range(0, total, size):
        count = min(size, total - start)
        batch = {name: array[start : start + count] for name, array in arrays.items()}
        if count < size:
            batch = {n: np.concatenate([a, np.zeros((size - count, *a.shape[1:]), a.dtype)]) for n, a in batch.items()}
        yield count, batch


def _kept(blob: Blob, diff: bool) -> np.ndarray:
    """The blob's array for a caller to keep: a copy where another net is going to write the same memory."""
    if (blob.diff_view if diff else blob.data_view).memory.shared:
        return np.array(blob.cpu_diff() if diff else blob.cpu_data())
    return blob.diff if diff else blob.data


def _assign(array: np.ndarray, values: Any, name: str) -> None:
    try:
        array[...] = values
    except ValueError:
        raise ValueError(f"'{name}' has shape {array.shape}, got values of shape {np.shape(values)}") from None
