"""A row for every lifetime of a train net and its test nets. Nothing runs, and no data is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from blobmem.devices import Device, SimulatedDevice
from blobmem.devices.pages import round_up
from blobmem.errors import NetError
from blobmem.footprint import batch_of, purposes_of, stated_shapes
from blobmem.memory import SyncedMemory
from blobmem.memory.slot import Slot
from blobmem.memory.views import ALIGNMENT
from blobmem.net.build import uncollected
from blobmem.net.builder import Nets, build_nets, is_solver, specs_of
from blobmem.net.net import Net
from blobmem.net.plan import Plan
from blobmem.net.plan.times import COPIES
from blobmem.net.schedule import Unit
from blobmem.solvers import updater_for

SCRATCH = "workspace"
"""The purpose of rows that are a call's scratch."""


class Row(NamedTuple):
    """An array, or the scratch of a call, while it is in use.

    Attributes:
        name: of the array; one with other blobs over it (in-place tops, splits) has the first one's.
        purpose: one of `footprint.PURPOSES`.
        shape: of the array; () for scratch, which is bytes.
        nbytes: how large it is.
        layer: whose call uses it first.
        first, last: positions of the calls that use it first and last; it is in use during both. Where another array is
            made in its place, the last is the call before, and the bytes are the other's from then on.
        offset: where it lies, in bytes.
    """

    name: str
    purpose: str
    shape: tuple[int, ...]
    nbytes: int
    layer: str
    first: int
    last: int
    offset: int


class Copy(NamedTuple):
    """An array on its way to the host, or back.

    Attributes:
        name: of the array.
        nbytes: how large it is.
        out: it leaves the device.
        begin, end: when it is under way, as is reckoned (`net.plan.times`), on the scale of calls: 3.5 is when half of
            the time of call 3 has passed.
        ms: how long that is.
    """

    name: str
    nbytes: int
    out: bool
    begin: float
    end: float
    ms: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What of a net may take turns, over a whole pass.

    Attributes:
        net: which net this is, with its batch.
        calls: a label for each call of the pass, in order: layer and op. Calls that run as one are one.
        rows: what there is, in the order of first use.
        nbytes: bytes that it takes.
        copies: of what is evicted, in the order in which they are queued.
    """

    net: str
    calls: list[str]
    rows: list[Row]
    nbytes: int
    copies: list[Copy] = field(default_factory=list)

    def loads(self) -> list[int]:
        """Bytes in use during each call."""
        changes = [0] * (len(self.calls) + 1)
        for row in self.rows:
            changes[row.first] += row.nbytes
            changes[row.last + 1] -= row.nbytes
        return list(accumulate(changes))[:-1]

    def label(self, moment: float) -> str:
        """The number and the label of the call at a moment on the scale of calls."""
        at = min(int(moment), len(self.calls) - 1)
        return f"{at} {self.calls[at]}"

    def peak(self) -> int:
        """The first of the calls during which most bytes are in use."""
        loads = self.loads()
        return loads.index(max(loads))

    def live(self, call: int) -> list[Row]:
        """What is in use during a call, the largest first."""
        return sorted((row for row in self.rows if row.first <= call <= row.last), key=lambda row: -row.nbytes)


def timelines(
    model: Any,
    *,
    train_batch: int | None = None,
    test_batches: Sequence[int] = (),
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    dtype: Any = "float32",
    make_device: Callable[[], Device] | None = None,
    backward_streams: int | str = 1,
) -> dict[str, list[Timeline]]:
    """By scheme, the train net's timeline and those of the test nets.

    "planned" is what `blobmem train` does: offsets are those in the arena, which the nets share. "unplanned" is what
    nets do that keep their blobs, on one stream: an array has its own place for the whole pass, and all calls have one
    workspace. On a device that may hold less than the planned nets need, arrays are evicted.

    The arguments are those of `footprint.footprint`. Raises NetError for anything wrong in the files, a shape that
    neither they nor input_shapes state, or a net that cannot be planned: its shapes depend on values, or nothing runs.
    """
    specs = specs_of(model)
    options: dict[str, Any] = {"train_batch": train_batch, "test_batches": test_batches, "seed": 0, "dtype": dtype}
    options["input_shapes"] = {**stated_shapes(specs), **(input_shapes or {})}
    result = {}
    kinds: list[tuple[str, str, int | str]] = [("planned", "train", backward_streams), ("unplanned", "keep", 1)]
    for scheme, memory, streams in kinds:
        device = SimulatedDevice(compute=False) if make_device is None else make_device()
        with uncollected():
            share = scheme == "planned"
            nets = build_nets(specs, share, memory=memory, backward_streams=streams, device=device, **options)
            if is_solver(model):
                updater_for(model, nets.train).place()
            found = _timelines(nets)
        result[scheme] = found if scheme == "planned" else [_apart(each) for each in found]
    return result


def _timelines(nets: Nets) -> list[Timeline]:
    names = [f"test net {index}" if len(nets.tests) > 1 else "test net" for index in range(len(nets.tests))]
    return [_timeline(name, net) for name, net in zip(["train net", *names], [nets.train, *nets.tests], strict=True)]


def _timeline(name: str, net: Net) -> Timeline:
    if any(node.layer.dynamic for node in net.nodes):
        raise NetError(f"{net.identity} has no plan to show: it has layers whose shapes depend on values")
    plan, schedules = net.planned(), net.compiled()
    # the plan that a net would have which keeps its blobs leaves it with an arena that it does not know: it never runs
    plan = plan or Plan(net, schedules, net.read_after(), SyncedMemory(0, net.device))
    units = list(chain.from_iterable(schedule.units() for schedule in schedules))
    if not units:
        raise NetError(f"{net.identity} has no plan to show: none of its layers computes anything")
    layers = [_layers(unit) for unit in units]
    rows = sorted(_rows(net, plan, layers), key=lambda row: (row.first, -row.last))
    calls = [f"{layer}: {_ops(unit)}" for layer, unit in zip(layers, units, strict=True)]
    return Timeline(f"{name}, batch {batch_of(net)}", calls, rows, plan.nbytes, _copies(net, units))


def _copies(net: Net, units: Sequence[Unit]) -> list[Copy]:
    """What is on its way to the host and back, and when."""
    copying = [unit.calls[-1].op in COPIES for unit in units]
    if not any(copying):
        return []
    times = net.reckoned()
    at = np.flatnonzero(~np.array(copying))  # what computes, one after the other
    when = np.column_stack((times.begin[at], times.end[at])).ravel()
    places = np.column_stack((at, at + 1)).ravel()
    result = []
    for index in (index for index, copies in enumerate(copying) if copies):
        call, begin, end = units[index].calls[-1], times.begin[index], times.end[index]
        memory = call.operand(0).memory
        first, last = np.interp((begin, end), when, places).tolist()
        out = call.op == "evict"
        result.append(Copy(memory.name, call.operand(0).view.nbytes, out, first, last, float(end - begin)))
    return result


def _rows(net: Net, plan: Plan, layers: Sequence[str]) -> Iterator[Row]:
    """What lies in the arena; `layers` has the layer of each call."""
    purposes, arrays = purposes_of(net), _arrays(net)
    for tenant in plan.tenants:
        memory, layer = tenant.memory, layers[tenant.first]
        purpose = SCRATCH if memory is None else purposes.get(memory, "data")
        name, shape = (f"{layer} (scratch)", ()) if memory is None else arrays.get(memory, (memory.name, ()))
        untils = tenant.untils if net.takes_turns else [tenant.last] * len(tenant.ranges)
        for form, (start, stop), until in zip(_forms(memory), tenant.ranges, untils, strict=True):
            if until >= tenant.first:  # or its heir has the bytes from the call on that makes it
                yield Row(name + form, purpose, shape, stop - start, layer, tenant.first, until, start)


def _layers(unit: Unit) -> str:
    return " + ".join(dict.fromkeys(call.layer_name for call in unit.calls[: unit.stop - unit.start]))


def _ops(unit: Unit) -> str:
    own = (call.op for call in unit.calls[: unit.stop - unit.start])
    return " + ".join(dict.fromkeys(op if isinstance(op, str) else op.__name__.strip("_") for op in own))


def _forms(memory: SyncedMemory | None) -> Iterator[str]:
    """What to say of each of a tenant's ranges, in their order: an array may be there, and channels last, or both."""
    if memory is None or isinstance(memory, Slot):
        yield ""
    if memory is not None and memory.reordered is not None and isinstance(memory.reordered.array, Slot):
        yield " (channels last)"


def _arrays(net: Net) -> dict[SyncedMemory, tuple[str, tuple[int, ...]]]:
    """The name and shape of the first array over each memory."""
    arrays: dict[SyncedMemory, tuple[str, tuple[int, ...]]] = {}
    params = ((blob.name, blob) for blobs in net.params.values() for blob in blobs)
    for name, blob in (*net.blobs.items(), *net.internals.items(), *params):
        arrays.setdefault(blob.data_view.memory, (name, blob.shape))
        if blob.has_diff:
            arrays.setdefault(blob.diff_view.memory, (f"{name}.diff", blob.shape))
    return arrays


def _apart(timeline: Timeline) -> Timeline:
    """The same with places that nothing shares but the calls' scratch."""
    starts = [0, *accumulate(0 if row.purpose == SCRATCH else round_up(row.nbytes, ALIGNMENT) for row in timeline.rows)]
    workspace = max((row.nbytes for row in timeline.rows if row.purpose == SCRATCH), default=0)
    rows = [
        row._replace(offset=starts[-1] if row.purpose == SCRATCH else start)
        for row, start in zip(timeline.rows, starts[:-1], strict=True)
    ]
    return replace(timeline, rows=rows, nbytes=starts[-1] + workspace)
