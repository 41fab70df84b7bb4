"""Footprints: the bytes that a train net and its test nets hold on a device, by purpose, before anything runs.

A footprint is the capacity held on the device side after one training and one test iteration, before rounding to
chunks. It follows from the schedules alone; `measure` runs them and asks the device.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blobmem.devices import Device, SimulatedDevice
from blobmem.devices.cuda.card import Card, card
from blobmem.devices.cuda.device import CudaDevice
from blobmem.memory import Side, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.views import ALIGNMENT
from blobmem.memory.workspace import workspace
from blobmem.net.builder import Nets, Specs, build_nets, is_solver, specs_of
from blobmem.net.net import Net
from blobmem.net.schedule import Need
from blobmem.proto.text import read_solver
from blobmem.solvers import Updater, updater_for

PURPOSES = ("params", "gradients", "solver state", "data", "diffs", "internal", "workspace", "input buffers")
SCHEMES = ("separate", "weights", "blobs")
CHUNK = 2 << 20

Bytes = dict[str, int]


@dataclass(slots=True)
class Held:
    """What one net adds to what those before it hold.

    Attributes:
        batch: items in a batch.
        purposes: bytes by purpose, on the device, before rounding.
        rounding: what a device that maps chunks of 2 MiB holds beyond them, about: memories share chunks at their ends.
        host: bytes in use on the host side.
        blob_bytes: bytes of all blobs counted one by one, splits too, as Caffe counts what it needs "for data".
    """

    batch: int
    purposes: Bytes
    rounding: int
    host: int
    blob_bytes: int

    @property
    def total(self) -> int:
        """Bytes of all purposes, on the device, before rounding."""
        return sum(self.purposes.values())


@dataclass(slots=True)
class Scheme:
    """A footprint under one way of sharing: `train`, then `tests` in order, each beyond all before it.

    Attributes:
        measured: bytes of the train net, then what each test net added when it first ran; None unless asked for.
        cards: on a GPU, what is in use there before the train net's first iteration, after it, and after each test
            net's; empty elsewhere.
    """

    name: str
    train: Held
    tests: list[Held] = field(default_factory=list)
    unshared: list[dict[str, str]] = field(default_factory=list)
    measured: list[int] | None = None
    cards: list[Card] = field(default_factory=list)

    @property
    def predicted(self) -> list[int]:
        """Bytes of the train net, then what each test net adds."""
        return [self.train.total, *(held.total for held in self.tests)]


_STATED = re.compile(r"(?m)^\s*#\s*input-shape:\s*(\S+)=(\d+(?:x\d+)*)\s*$")


def parse_input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """("data", (3, 227, 227)) from "data=3x227x227". Raises ValueError."""
    match = re.fullmatch(r"([^=\s]+)=(\d+(?:x\d+)*)", text.strip())
    if match is None:
        raise ValueError(f"'{text}' is no input shape: write BLOB=CHANNELSxHEIGHTxWIDTH, for instance data=3x227x227")
    return match[1], tuple(int(dim) for dim in match[2].split("x"))


def stated_shapes(specs: Specs) -> dict[str, tuple[int, ...]]:
    """Shapes of one item that the nets' files state in lines `# input-shape: data=3x227x227`."""
    train, tests = specs
    shapes: dict[str, tuple[int, ...]] = {}
    for source in dict.fromkeys(spec.source for spec in (train, *tests)):
        if source and os.path.exists(source):
            text = Path(source).read_text("utf-8", "replace")
            shapes.update((name, tuple(map(int, dims.split("x")))) for name, dims in _STATED.findall(text))
    return shapes


def footprint(
    model: Any,
    *,
    train_batch: int | None = None,
    test_batches: Sequence[int] = (),
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    schemes: Iterable[str] = SCHEMES,
    measured: bool = False,
    make_device: Callable[[], Device] | None = None,
) -> dict[str, Scheme]:
    """The footprint of a solver or net file under each scheme. Needs no data.

    Args:
        model: path of a solver or net prototxt, or its message.
        train_batch, test_batches: batch sizes instead of the file's; a net file has as many test nets as batches.
        input_shapes: top name -> shape of one item, for data layers whose database is absent.
        schemes: "separate", "weights" (parameters shared, as Caffe does), "blobs" (shared by name).
        measured: also run one training and one test iteration per scheme, on zeros for images.
        make_device: makes the device whose workspaces count and, if measured, that is measured; one for each scheme.
            None makes simulated ones.

    Raises NetError for anything wrong in the files, or a shape that neither they nor input_shapes state.
    """
    specs = specs_of(model)
    solver = read_solver(model) if is_solver(model) else None
    shapes = {**stated_shapes(specs), **(input_shapes or {})}
    options = {"train_batch": train_batch, "test_batches": test_batches, "input_shapes": shapes}
    result = {}
    for name in schemes:
        device = SimulatedDevice(compute=False) if make_device is None else make_device()
        nets, update = _build(specs, solver, name, options, device)
        result[name] = _account(name, nets, update)
        if measured:
            result[name].measured, result[name].cards = _measure(nets, update)
        del nets, update  # the next scheme finds the device's memory as this one did
        gc.collect()
        workspace(device).trim()
    return result


def _build(
    specs: Specs, solver: Any, scheme: str, options: dict[str, Any], device: Device
) -> tuple[Nets, Updater | None]:
    nets = build_nets(
        specs, share=scheme == "blobs", share_params=scheme != "separate", device=device, seed=0, **options
    )
    return nets, None if solver is None else updater_for(solver, nets.train)


def _account(name: str, nets: Nets, update: Updater | None) -> Scheme:
    held = _Capacities({}, {})
    needs = nets.train.needs(backward=True)
    solver_state = update.state_blobs() if update is not None else []
    if update is not None:
        needs += update.needs()
    scheme = Scheme(name, _add(nets.train, needs, held, solver_state))
    for net, report in zip(nets.tests, nets.reports, strict=True):
        scheme.tests.append(_add(net, net.needs(), held, []))
        scheme.unshared.append(report.unshared)
    return scheme


@dataclass(slots=True)
class _Capacities:
    """Bytes of each memory on the two sides, so far."""

    device: dict[SyncedMemory, int]
    host: dict[SyncedMemory, int]

    def grow(self, memory: SyncedMemory, side: Side, nbytes: int) -> int:
        """Note that a memory needs so many bytes; how many more these are."""
        known = self.device if side is Side.DEVICE else self.host
        more = max(0, nbytes - known.get(memory, 0))
        known[memory] = known.get(memory, 0) + more
        return more

    def rounding(self) -> int:
        """What whole chunks, which memories share at their ends, take beyond the device's bytes."""
        aligned = sum(_up(nbytes, ALIGNMENT) for nbytes in self.device.values())
        return _up(aligned, CHUNK) - sum(self.device.values())


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _add(net: Net, needs: Iterable[Need], held: _Capacities, solver_state: Sequence[Blob]) -> Held:
    """Add a net's needs to what is held; the bytes that this took."""
    purpose = _purposes(net, solver_state)
    added = dict.fromkeys(PURPOSES, 0)
    rounding, host = held.rounding(), 0
    for memory, side, nbytes in needs:
        more = held.grow(memory, side, nbytes)
        if side is Side.DEVICE:
            added[purpose.get(memory, "data")] += more
        else:
            host += more
    # parameters start on the host, and losses are read there
    parameters = [blob for blobs in net.params.values() for blob in blobs]
    for blob in (*parameters, *net.losses()):
        memory = blob.data_view.memory
        host += held.grow(memory, Side.HOST, max(memory.cpu_capacity, blob.nbytes))
    blob_bytes = sum(blob.nbytes for blob in net.blobs.values())
    return Held(batch_of(net), added, held.rounding() - rounding, host, blob_bytes)


def _purposes(net: Net, solver_state: Sequence[Blob]) -> dict[SyncedMemory, str]:
    result = {workspace(net.device): "workspace"}
    for layer in (node.layer for node in net.nodes):
        for name, blob in layer.internal.items():
            result[blob.data_view.memory] = "input buffers" if name in layer.input_buffers else "internal"
    for blob in net.blobs.values():
        result[blob.data_view.memory] = "data"
        if blob.has_diff:
            result[blob.diff_view.memory] = "diffs"
    for blobs in net.params.values():
        for blob in blobs:
            result[blob.data_view.memory] = "params"
            if blob.has_diff:
                result[blob.diff_view.memory] = "gradients"
    for blob in solver_state:
        result[blob.data_view.memory] = "solver state"
    for memory, purpose in list(result.items()):
        if memory.reordered is not None:
            result[memory.reordered.array] = purpose
    return result


def batch_of(net: Net) -> int:
    """Items in a batch: the first axis of the first top."""
    first = next(iter(net.blobs.values()), None)
    return first.shape[0] if first is not None and first.shape else 1


def _measure(nets: Nets, update: Updater | None) -> tuple[list[int], list[Card]]:
    """Run one training iteration and one test iteration of each test net; the bytes that each added on the device.

    On a GPU also what is in use there before and after each.
    """
    device = nets.train.device
    levels, cards = [], []

    def look() -> None:
        levels.append(device.statistics.bytes_held)
        if isinstance(device, CudaDevice):
            cards.append(card(device))

    for net in (nets.train, *nets.tests):
        feed_zeros(net)
    look()
    nets.train.clear_param_diffs()
    nets.train.run_forward()
    nets.train.run_backward()
    if update is not None:
        update.run(0)
    look()
    for net in nets.tests:
        net.run_forward()
        look()
    return [b - a for a, b in itertools.pairwise(levels)], cards


def feed_zeros(net: Net) -> None:
    """Let the net's data layers of images give images of zeros, of class 0, instead of what is in their sources."""
    for node in net.nodes:
        if hasattr(node.layer, "load_images"):
            node.layer.load_images = _zeros


def _zeros(position: int, seed: int, *arrays: np.ndarray | None) -> None:
    for array in arrays:
        if array is not None:
            array[...] = 0


def reduction(schemes: Mapping[str, Scheme], test: int) -> float:
    """Share of a test net's extra bytes that sharing blobs saves, against sharing weights; 0 to 1."""
    before, after = schemes["weights"].tests[test].total, schemes["blobs"].tests[test].total
    return 1 - after / before if before else 0.0


def to_json(schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """The footprints as plain values: bytes, by scheme."""
    return {"schemes": {name: _scheme_json(scheme) for name, scheme in schemes.items()}}


def _scheme_json(scheme: Scheme) -> dict[str, Any]:
    result: dict[str, Any] = {
        "train_bytes": scheme.train.total,
        "train_batch": scheme.train.batch,
        "train_purposes": scheme.train.purposes,
        "train_rounding_bytes": scheme.train.rounding,
        "train_host_bytes": scheme.train.host,
        "total_bytes": sum(scheme.predicted),
        "tests": [
            {
                "batch": held.batch,
                "extra_bytes": held.total,
                "purposes": held.purposes,
                "rounding_bytes": held.rounding,
                "host_bytes": held.host,
                "blob_bytes": held.blob_bytes,
                "unshared": unshared,
            }
            for held, unshared in zip(scheme.tests, scheme.unshared, strict=True)
        ],
    }
    if scheme.measured is not None:
        result["measured"] = scheme.measured
    if scheme.cards:
        result["cards"] = [{**moment._asdict(), "others": moment.others} for moment in scheme.cards]
    return result
