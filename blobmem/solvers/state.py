"""The state of a solver as files hold it, binary (a SolverState message) or HDF5, both as Caffe writes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2, hdf5
from blobmem.proto.arrays import blob_array, blob_shape, fill_blob, shape_matches
from blobmem.proto.text import read_binary

_MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Slot:
    """A history array that a solver expects.

    Attributes:
        owner: the parameter it belongs to, for messages.
        shape, dtype: what it has to become.
    """

    owner: str
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Slots:
    """All history arrays that a solver expects, in a file's order.

    Attributes:
        arrays: one for each.
        whose: net and solver type, for messages.
    """

    arrays: Sequence[Slot]
    whose: str

    def check_count(self, count: int, source: str) -> None:
        """Raise NetError unless a file has as many."""
        if count != len(self.arrays):
            raise NetError(
                f"{source}: {count} history arrays, expected {len(self.arrays)} for {self.whose}: it is the state of "
                "another net or solver type"
            )


@dataclass(frozen=True, slots=True)
class State:
    """What a solverstate says.

    Attributes:
        iter: iterations that are behind.
        current_step: steps of the learning rate that are behind.
        learned_net: path of the parameters' file; "" for none.
        history: all first history arrays of the parameters, then all second ones.
    """

    iter: int
    current_step: int
    learned_net: str
    history: Sequence[np.ndarray]

    def to_proto(self) -> Any:
        """The SolverState message. NetError for an array beyond 2 GiB."""
        message = caffe_pb2.SolverState(iter=self.iter, current_step=self.current_step)
        if self.learned_net:
            message.learned_net = self.learned_net
        for array in self.history:
            fill_blob(message.history.add(), array)
        return message

    def to_hdf5(self) -> bytes:
        """The bytes of the HDF5 file."""
        items: list[tuple[str, Any]] = [("iter", self.iter), ("current_step", self.current_step), ("history", None)]
        if self.learned_net:
            items.append(("learned_net", self.learned_net))
        items += [(f"history/{index}", array) for index, array in enumerate(self.history)]
        return hdf5.encode(items)


def read(path: str | os.PathLike[str], slots: Slots) -> State:
    """The state in a file of either kind, its history checked against what is expected.

    Raises NetError naming the file and the array for whatever is wrong.
    """
    source = os.fspath(path)
    state = _read_hdf5(source, slots) if hdf5.is_hdf5(source) else _read_binary(source, slots)
    for name in ("iter", "current_step"):
        value = getattr(state, name)
        if not 0 <= value <= _MAX_INT:
            raise NetError(f"{source}: {name} is {value}, expected 0 or more, in 32 bits")
    return state


def _read_binary(source: str, slots: Slots) -> State:
    message = read_binary(source, caffe_pb2.SolverState)
    return State(message.iter, message.current_step, message.learned_net, parse_history(message, source, slots))


def parse_history(message: Any, source: str, slots: Slots) -> list[np.ndarray]:
    """The history in a SolverState message. NetError naming the parameter whose array does not fit."""
    slots.check_count(len(message.history), source)
    arrays = []
    for slot, proto in zip(slots.arrays, message.history, strict=True):
        try:
            values = blob_array(proto)
            if not shape_matches(proto, slot.shape):
                raise NetError(f"shape {blob_shape(proto)}, expected {slot.shape}")
            if values is None and 0 not in slot.shape:
                raise NetError("it has no values")
        except NetError as error:
            raise NetError(f"{source}: history of {slot.owner}: {error}") from None
        arrays.append(np.empty(slot.shape, slot.dtype) if values is None else values.reshape(slot.shape))
    return arrays


def _read_hdf5(source: str, slots: Slots) -> State:
    with hdf5.File(source) as file:
        members = file.members("history")
        if members is None:
            raise NetError(f"{source} has no group /history: it is not a solver's state")
        slots.check_count(len(members), source)
        datasets = [file.dataset(f"history/{index}") for index in range(len(slots.arrays))]
        for slot, dataset in zip(slots.arrays, datasets, strict=True):
            if dataset.shape != slot.shape:
                raise NetError(f"{dataset.where} has shape {dataset.shape}, expected {slot.shape} for {slot.owner}")
        return State(
            file.integer("iter"),
            file.integer("current_step"),
            file.text("learned_net") or "",
            [dataset.read(slot.dtype) for slot, dataset in zip(slots.arrays, datasets, strict=True)],
        )
