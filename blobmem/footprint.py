"""Footprints: the bytes that a train net and its test nets hold on a device, by purpose, before anything runs.

A footprint is the capacity held on the device side after one training and one test iteration, before rounding to
chunks. It follows from the schedules alone; `measure` runs them and asks the device. Of an arena, in which arrays take
turns, each purpose has what it has there at the fullest moment, and "gaps" has the rest.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blobmem.devices import Device, SimulatedDevice
from blobmem.devices.cuda.card import Card, card
from blobmem.devices.cuda.device import CudaDevice
from blobmem.devices.pages import round_up
from blobmem.memory import Side, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.views import ALIGNMENT
from blobmem.memory.workspace import workspace, workspaces
from blobmem.net.build import uncollected
from blobmem.net.builder import Nets, Specs, build_nets, is_solver, specs_of
from blobmem.net.needs import Need
from blobmem.net.net import Net
from blobmem.net.plan import Plan
from blobmem.proto.text import read_solver
from blobmem.solvers import Updater, updater_for

PURPOSES = ("params", "gradients", "solver state", "data", "diffs", "internal", "workspace", "input buffers", "gaps")
PLANNED, BOUND = "planned", "lower bound"
SCHEMES = ("separate", "weights", "blobs", PLANNED, BOUND)
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
        measured: bytes of the train net, then what each test net added when it first ran; None unless asked for, and of
            the lower bound.
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
    dtype: Any = np.float32,
    schemes: Iterable[str] = SCHEMES,
    measured: bool = False,
    make_device: Callable[[], Device] | None = None,
    backward_streams: int | str = 1,
) -> dict[str, Scheme]:
    """The footprint of a solver or net file under each scheme. Needs no data.

    Args:
        model: path of a solver or net prototxt, or its message.
        train_batch, test_batches: batch sizes instead of the file's; a net file has as many test nets as batches.
        input_shapes: top name -> shape of one item, for data layers whose database is absent.
        dtype: as for Net.
        schemes: "separate", "weights" (parameters shared, as Caffe does), "blobs" (shared by name), "planned" (arrays
            take turns in one arena, as `blobmem train` does), "lower bound" (of "planned": what stays, and the most
            that is in use at one moment). A net whose shapes depend on values is not planned, and has no other bound
            than what it holds.
        measured: also run one training and one test iteration per scheme, on zeros for images.
        make_device: makes the device whose workspaces count and, if measured, that is measured; one for each scheme.
            None makes simulated ones.
        backward_streams: as for Net.

    Raises NetError for anything wrong in the files, or a shape that neither they nor input_shapes state.
    """
    specs = specs_of(model)
    solver = read_solver(model) if is_solver(model) else None
    shapes = {**stated_shapes(specs), **(input_shapes or {})}
    options = {
        "train_batch": train_batch, "test_batches": test_batches, "input_shapes": shapes, "dtype": dtype,
        "backward_streams": backward_streams,
    }  # fmt: skip
    result = {}
    # the lower bound is that of the plans of the same nets
    for built, names in itertools.groupby(schemes, lambda name: PLANNED if name == BOUND else name):
        device = SimulatedDevice(compute=False) if make_device is None else make_device()
        with uncollected():
            nets, update = _build(specs, solver, built, options, device)
            found = {name: _account(name, nets, update) for name in names}
        if measured and built in found:
            found[built].measured, found[built].cards = _measure(nets, update)
        result.update(found)
        del nets, update  # the next scheme finds the device's memory as this one did
        gc.collect()
        for memory in workspaces(device, device.streams):
            memory.trim()
    return result


def _build(
    specs: Specs, solver: Any, scheme: str, options: dict[str, Any], device: Device
) -> tuple[Nets, Updater | None]:
    nets = build_nets(
        specs,
        share=scheme in ("blobs", PLANNED),
        share_params=scheme != "separate",
        memory="train" if scheme == PLANNED else "keep",
        device=device,
        seed=0,
        **options,
    )
    if solver is None:
        return nets, None
    update = updater_for(solver, nets.train)
    update.place()
    return nets, update


def _account(name: str, nets: Nets, update: Updater | None) -> Scheme:
    held = _Capacities({}, {})
    needs = nets.train.needs(backward=True)
    solver_state = update.state_blobs() if update is not None else []
    if update is not None:
        needs += update.needs()
    scheme = Scheme(name, _add(nets.train, needs, held, solver_state, name == BOUND))
    for net, report in zip(nets.tests, nets.reports, strict=True):
        scheme.tests.append(_add(net, net.needs(), held, [], name == BOUND))
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
        aligned = sum(round_up(nbytes, ALIGNMENT) for nbytes in self.device.values())
        return round_up(aligned, CHUNK) - sum(self.device.values())


def _add(net: Net, needs: Iterable[Need], held: _Capacities, solver_state: Sequence[Blob], bound: bool) -> Held:
    """Add a net's needs to what is held, or the least that these could be; the bytes that this took."""
    purpose = purposes_of(net, solver_state)
    added = dict.fromkeys(PURPOSES, 0)
    rounding, host = held.rounding(), 0
    plan = net.planned()
    for memory, side, nbytes in needs:
        blocks = [_Block(purpose.get(memory, "data"), 0, nbytes, 0, 0)]
        if plan is not None and memory is plan.arena:
            blocks = _blocks(plan, purpose)
            if bound:
                blocks, nbytes = _stacked(blocks)
        elif plan is not None and bound and memory is workspace(net.device):
            memory = plan.arena  # an update's scratch could lie there, too
        more = held.grow(memory, side, nbytes)
        if side is Side.DEVICE:
            for block in _fullest(blocks, nbytes - more):
                added[block.purpose] += block.stop - block.start
                more -= block.stop - block.start
            added["gaps"] += more
        else:
            host += more
    # parameters start on the host, and losses are read there
    parameters = [blob for blobs in net.params.values() for blob in blobs]
    for blob in (*parameters, *net.losses()):
        memory = blob.data_view.memory
        host += held.grow(memory, Side.HOST, max(memory.cpu_capacity, blob.nbytes))
    blob_bytes = sum(blob.nbytes for blob in net.blobs.values())
    return Held(batch_of(net), added, held.rounding() - rounding, host, blob_bytes)


class _Block(NamedTuple):
    """Bytes `start` to `stop` of a memory, which are in use for a purpose from step `first` to step `last`."""

    purpose: str
    start: int
    stop: int
    first: int
    last: int


def _blocks(plan: Plan, purpose: Mapping[SyncedMemory, str]) -> list[_Block]:
    """What takes turns in an arena."""
    return [
        _Block("workspace" if each.memory is None else purpose[each.memory], start, stop, each.first, until)
        for each in plan.tenants
        for (start, stop), until in zip(each.ranges, each.untils, strict=True)
    ]


def _fullest(blocks: Iterable[_Block], floor: int = 0) -> list[_Block]:
    """What is in use from address `floor` on, at the first of the moments when that is most."""
    above = [block._replace(start=max(block.start, floor)) for block in blocks if block.stop > floor]
    changes = Counter[int]()
    for block in above:
        changes[block.first] += block.stop - block.start
        changes[block.last + 1] -= block.stop - block.start
    moments = sorted(changes)
    loads = itertools.accumulate(changes[moment] for moment in moments)
    _, moment = max(zip(loads, moments, strict=True), key=lambda pair: pair[0], default=(0, 0))
    return [block for block in above if block.first <= moment <= block.last]


def _stacked(blocks: Iterable[_Block]) -> tuple[list[_Block], int]:
    """What is in use at the fullest moment, one upon the other without a gap, and the bytes of it."""
    stack, top = [], 0
    for block in _fullest(blocks):
        bottom, top = top, top + block.stop - block.start
        stack.append(block._replace(start=bottom, stop=top))
    return stack, top


def purposes_of(net: Net, solver_state: Sequence[Blob] = ()) -> dict[SyncedMemory, str]:
    """What each memory that a net uses on its device is for, one of PURPOSES."""
    result = dict.fromkeys(workspaces(net.device, net.device.streams), "workspace")
    for layer in (node.layer for node in net.nodes):
        for name, blob in layer.internal.items():
            result[blob.data_view.memory] = "input buffers" if name in layer.input_buffers else "internal"
    for blob in (*net.blobs.values(), *net.pieces):
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
    state = {memory.name: purpose for memory, purpose in result.items() if purpose in PURPOSES[:3]}
    for blob in net.pieces:  # some of which are for what is evicted of these
        result[blob.data_view.memory] = state.get(blob.name, "data")
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
    if update is not None and update.place():
        update.run_in_backward(0, nets.train.start_forward())
    else:
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


def over_bound(schemes: Mapping[str, Scheme], name: str = PLANNED) -> float:
    """What the nets hold under a scheme, over its lower bound; 1 if both are nothing."""
    held, bound = sum(schemes[name].predicted), sum(schemes[BOUND].predicted)
    return held / bound if bound else 1.0


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
