"""Net: a prototxt compiled to schedules, with pycaffe's face."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from blobmem import devices, dtypes
from blobmem.errors import NetError, SharedBlobError
from blobmem.layers.base import TEST, TRAIN, Context, Layer, PassState, default_seed
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob, moves
from blobmem.memory.slot import Slot
from blobmem.net import weights as weight_files
from blobmem.net.access import Access
from blobmem.net.begun import Begun
from blobmem.net.build import Node, check_device, resize, uncollected, wire
from blobmem.net.compilation import Compilation, shapes_of
from blobmem.net.emitted import of_layer
from blobmem.net.graph import PHASES, filter_net, insert_splits, net_state, set_batch
from blobmem.net.inplace import stale_reads
from blobmem.net.losses import LossReader
from blobmem.net.needs import Need, secure
from blobmem.net.placement import Placement
from blobmem.net.plan import Arena
from blobmem.net.precision import insert_conversions
from blobmem.net.schedule import Schedule, Span, first_uses
from blobmem.net.settled import Run
from blobmem.net.sharing import Identity, SharingGroup, SharingReport, share_blobs
from blobmem.proto.text import is_text, read_net

if TYPE_CHECKING:
    from blobmem.net.whole import Whole

log = logging.getLogger("blobmem")

MEMORY = ("keep", "train", "inference")
"""What becomes of a net's arrays after a pass: see `Net`."""

PASSES = ("parts", "fold", "slices")
"""Passes over a net's calls that change results, by rounding: see `Net`."""

_WITHOUT = {
    "parts": "takes its batch as a whole from now on, which needs more memory",
    "fold": "computes batch norm by itself from now on, which takes longer",
}
"""What a net does where such a pass ends."""


class Net(Access, Placement, Compilation):
    """A net in one phase, as `Net(model, phase, ...)` or, in pycaffe's older way, `Net(model, weights, phase)`.

    Args:
        model: path of a prototxt, or a NetParameter message.
        phase: TRAIN or TEST; pycaffe's further positions, level, stages and weights, may follow.
        weights: path of a caffemodel to take parameters from, by layer name.
        level, stages: the rest of the net state that include and exclude rules look at; stages add to the model's own.
        device: where it computes, a Device or its word ("cpu", "cuda:1"); None is the default device, which the net
            then follows (`set_mode_gpu`).
        seed: what random draws and fillers are a function of; the default seed when None.
        dtype: float32, float64, or on a GPU float16 or bfloat16, by name or as NumPy has it (bfloat16 of ml_dtypes). In
            halves statistics, labels, indices, boxes and losses are of float32.
        batch: batch size given to all data and input layers, if not None.
        input_shapes: top name -> shape of one item, for data layers whose source is absent.
        params_from: a net whose parameters this one shares, by layer name.
        forward_only: never runs backward, so that forward keeps nothing for it (masks, scales).
        skip_damaged: data layers warn of a damaged record and take the next one, instead of stopping.
        memory: "keep" lets every blob be read at any time. With "train" the arrays that a pass forward and backward
            fills take turns at the bytes of one arena; with "inference" those of a pass forward, which is then all that
            runs. The net's outputs, losses, inputs and parameters are outside. To read, write or clear another blob
            while others have its bytes raises SharedBlobError. A net with layers whose shapes depend on values keeps
            all.
        keep: names of blobs whose data and gradient stay readable nevertheless.
        passes: names of passes over the calls that may change the rounding of results. "parts": the first layers
            take a large batch in parts, one after another, where that saves much; blobs that live only within them are
            then never whole (with memory="keep" they are). "fold": on a GPU a BatchNorm and a Scale behind a
            convolution or an inner product are folded into weights of the net's own, which follow the parameters; in
            an arena a top that only they read is then never made. Both are for nets that only run forward, and a device
            that computes deterministically has none. "slices": where a device has no room for all that one call uses
            of a net with memory="train", it and calls next to it take the batch in slices, and the first layers of one
            with memory="inference" take it in parts, as many as it takes. Defaults are "parts" and "slices" where
            memory is "inference", "fold" where a net that only runs forward is in halves or built for a device whose
            math is "tf32", and "slices" where memory is "train"; () is none.
        backward_streams: 2 lets a GPU compute gradients of parameters beside those of data, and branches beside each
            other, on a second stream with a workspace of its own. The bits are the same. Devices without streams, the
            CPU say, do as with 1. "auto" is what was measured to be faster, by a solver with "auto", for such a net
            and such a GPU; 1 where nothing was.
        source: the file that a message came from, for error messages.

    Attributes:
        blobs: all blobs by name, in the order in which layers make them.
        params: the parameters of each layer that has some, by the layer's name.
        inputs, outputs: names of the blobs that you fill, and of those that no layer takes.
        layers: the layers in order; of a Python layer the user's own object.
        layer_names: their names.
        top_names, bottom_names: names of each layer's tops and bottoms, by its name.
        internals: the layers' internal arrays (masks, scales), named LAYER/purpose.
        phase: TRAIN or TEST.
        device: where it computes now.
        memory: as given.
        kept: names of the blobs that stay readable whatever `memory` is.
        backward_streams: as given.
        passes: those that are applied where they can be. To run only some of the layers that take parts, or that
            run as one, to have callbacks about layers, or `debug_info`, ends "parts", or "fold", for good.
        param: the NetParameter that it was built from, splits inserted.
        debug_info: log the mean absolute value of what each layer writes.

    Raises NetError naming file, layer and field for a wrong model, FileNotFoundError's message in it for absent files.
    Building allocates no activation.
    """

    @uncollected()
    def __init__(
        self,
        model: Any,
        *args: Any,
        phase: int | None = None,
        weights: str | os.PathLike[str] | None = None,
        level: int = 0,
        stages: Sequence[str] | None = None,
        device: devices.Device | str | None = None,
        seed: int | None = None,
        dtype: Any = np.float32,
        batch: int | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        params_from: Net | None = None,
        forward_only: bool = False,
        skip_damaged: bool = False,
        memory: str = "keep",
        keep: Iterable[str] = (),
        passes: Iterable[str] | None = None,
        backward_streams: int | str = 1,
        source: str = "",
    ) -> None:
        Access.__init__(self)
        Placement.__init__(self, device)
        phase, weights, level, stages = _arguments(args, phase, weights, level, stages)
        self.phase = phase
        named = isinstance(model, str | os.PathLike) and not is_text(model)
        self.source = os.fspath(model) if named else source
        message = read_net(model)
        state = net_state(phase, level, dict.fromkeys([*message.state.stage, *(stages or ())]))
        param = filter_net(message, state, self.source)
        if batch is not None:
            set_batch(param, batch)
        self.param = insert_splits(param, self.source)
        self.name: str = self.param.name
        self.state = PassState(default_seed() if seed is None else seed)
        shapes = {name: tuple(shape) for name, shape in (input_shapes or {}).items()}
        dtype = dtypes.of(dtype)
        check_device(dtype, self.device)
        exact: frozenset[str] = frozenset()
        if dtypes.is_half(dtype):
            self.param, exact = insert_conversions(self.param, self.source)
        self._context = Context(self.device, phase, self.state, self.source, dtype, shapes, skip_damaged)
        if memory not in MEMORY:
            raise ValueError(f"memory is one of {', '.join(MEMORY)}, not {memory!r}")
        if backward_streams not in (1, 2, "auto"):
            raise ValueError(f"backward_streams is 1, 2 or 'auto', not {backward_streams!r}")
        self.memory, self.backward_streams = memory, backward_streams
        self.forward_only = forward_only or memory == "inference"
        self.passes = self._checked_passes(passes, dtypes.is_half(dtype))
        graph = wire(self.param, self._context, self.forward_only, exact)
        self.nodes = graph.nodes
        self.blobs: dict[str, Blob] = graph.blobs
        self.learnable = graph.learnable
        self.inputs: list[str] = graph.inputs
        self.outputs: list[str] = graph.outputs
        # of a Python layer, the user's own object
        self.layers: list[Layer] = [getattr(node.layer, "face", node.layer) for node in self.nodes]
        self._rewound = [(index, node.layer) for index, node in enumerate(self.nodes) if node.layer.rewinds]
        self._with_losses = [(index, node) for index, node in enumerate(self.nodes) if node.losses]
        self._prepared = [node for node in self.nodes if type(node.layer).prepare is not Layer.prepare]
        self._dynamic = [index for index, node in enumerate(self.nodes) if node.layer.dynamic]
        self.layer_names: list[str] = [node.layer.name for node in self.nodes]
        self.top_names: dict[str, list[str]] = {node.layer.name: node.top_names for node in self.nodes}
        self.bottom_names: dict[str, list[str]] = {node.layer.name: node.bottom_names for node in self.nodes}
        self.params: dict[str, list[Blob]] = {n.layer.name: n.layer.blobs for n in self.nodes if n.layer.blobs}
        self.internals: dict[str, Blob] = {}
        self.debug_info: bool = self.param.debug_info
        self.identity = Identity(f"net '{self.name}' ({PHASES[phase]})")
        self.group = SharingGroup()
        self._moves = 0
        self._loss_reader = LossReader()
        self._chains_checked = False
        Compilation.__init__(self)
        self._name_blobs()
        self._arena = self._new_arena()
        self.kept = self._checked_names(keep)
        self._fill(params_from)
        if any(layer.blobs for layer in self.param.layer):  # a model with its values, as a caffemodel is
            self.copy_trained_layers_from(self.param)
            for layer in self.param.layer:
                del layer.blobs[:]
        if weights is not None:
            self.copy_trained_layers_from(weights)

    @property
    def dtype(self) -> np.dtype:
        """What the net's numbers are."""
        return np.dtype(self._context.dtype)

    # ---------------------------------------------------------------- building

    def _name_blobs(self) -> None:
        """Collect the internal arrays and make this net the owner of all it writes."""
        self.internals = {blob.name: blob for node in self.nodes for blob in node.layer.internal.values()}
        for blob in (*self.blobs.values(), *self.internals.values()):
            blob.owner = self.identity

    def _fill(self, params_from: Net | None) -> None:
        """Give the parameters their first values, except those taken from another net or another layer."""
        taken = set()
        if params_from is not None:
            taken = self._share_params(params_from)
        calls = [
            layer.initial_call(index)
            for layer in (node.layer for node in self.nodes)
            for index in layer.fillers
            if layer.name not in taken and index not in layer.shared_params
        ]
        # on the host, as files are: the device takes them with its first pass
        schedule = Schedule(calls, self.device, on_host=True)
        secure(schedule.needs())
        try:
            schedule.run()
        except NetError as error:
            raise NetError(f"{self.source}: {error}" if self.source else str(error)) from None

    def _new_arena(self) -> Arena | None:
        """Where arrays take turns; None if they do not."""
        if self.memory == "keep":
            return None
        if self._dynamic:
            log.warning(
                "%s keeps all its blobs in spite of memory='%s': the shapes after layer '%s' depend on values",
                self.identity, self.memory, self.layer_names[self._dynamic[0]],
            )  # fmt: skip
            return None
        self.group.join(self.group, [self])  # so that a pass looks whether what it reads is there
        return Arena()

    def _checked_names(self, names: Iterable[str]) -> frozenset[str]:
        kept = frozenset(names)
        for name in sorted(kept - {*self.blobs, *self.internals}):
            raise NetError(f"keep: no blob '{name}' in {self.identity}; blobs: {', '.join(self.blobs)}")
        return kept

    def _checked_passes(self, names: Iterable[str] | None, half: bool) -> frozenset[str]:
        may_slice = self.memory == "inference" or (self.memory == "train" and not self.forward_only)
        if names is None:
            rounds = half or getattr(self.device, "math", "") == "tf32"
            defaults = {
                "parts": self.memory == "inference",
                "fold": rounds and self.forward_only,
                "slices": may_slice,
            }
            return frozenset(name for name, wanted in defaults.items() if wanted)
        passes = frozenset(names)
        for name in sorted(passes.difference(PASSES)):
            raise ValueError(f"passes are {', '.join(PASSES)}; there is none called {name!r}")
        for name in sorted(passes - {"slices"} if not self.forward_only else ()):
            raise ValueError(f"'{name}' is for a net that only runs forward: build it with forward_only=True too")
        if "slices" in passes and not may_slice:
            raise ValueError(
                "'slices' is for a net that trains: build it with memory='train', not forward_only; or with "
                "memory='inference'"
            )
        return passes

    # ---------------------------------------------------------------- running

    def _span(self, backward: bool, first: int, last: int) -> Span:
        """The calls of layers first to last, with what they need and rely on."""
        schedule = self.compiled(first, last)[backward]
        for name, done in (("parts", self._parts), ("fold", self._folded)):
            if done is not None and not backward and (self._is_watched() or done.divides(first, last)):
                self._end_pass(name)
                schedule = self.compiled(first, last)[backward]
        if self._sliced is not None and (self._is_watched(backward) or self._sliced.divides(first, last, backward)):
            raise SharedBlobError(
                f"{self.identity} takes {self._sliced.told(self.layer_names)} of the batch, as the device has no room "
                "for more: run all of them at once, without callbacks about layers or debug_info, or grant the device "
                "more memory"
            )
        if self._moves != moves():  # some blob, perhaps of this net, is elsewhere now
            self._moves, self._spans = moves(), {}
        span = self._spans.get((backward, first, last))
        if span is None:
            span = Span(schedule, *schedule.span(range(first, last + 1)))
            self._check_written(span)
            if self._plan is not None:
                self._plan.follow(span, backward)
            self._spans[backward, first, last] = span
        return span

    def _is_watched(self, backward: bool = False) -> bool:
        """Whether somebody looks at the net between its layers."""
        way = "backward" if backward else "forward"
        return bool(self.debug_info or self._callbacks[f"before_{way}"] or self._callbacks[f"after_{way}"])

    def _end_pass(self, name: str) -> None:
        """Do without a pass over the calls from now on."""
        log.warning(
            "%s %s: its layers are run, or looked at, one by one. Build it with passes=() to have that from the start",
            self.identity, _WITHOUT[name],
        )  # fmt: skip
        self.passes -= {name, "slices"} if name == "parts" else {name}
        self._part_room = None
        self._end_plan()

    def _check_written(self, span: Span) -> None:
        """Raise SharedBlobError for a slot of another net's arena: any array of that net may have the bytes."""
        for memory in span.written:
            if isinstance(memory, Slot) and (self._plan is None or memory not in self._plan.memories):
                raise SharedBlobError(
                    f"{self.identity} would write '{memory.name}', which takes turns with other arrays of its net: "
                    f"build that net with keep=['{memory.name}'], or with memory='keep'"
                )

    def prepare(self) -> None:
        """Ask data sources what the next pass will bring, so that all shapes are known before anything runs."""
        for node in self._prepared:
            node.layer.prepare(node.top)

    def needs(self, backward: bool = False) -> list[Need]:
        """The capacity that a whole pass uses: forward, and backward if asked. Runs nothing."""
        return [need for span in self._whole(backward) for need in span.needs]

    def missing(self, backward: bool = False) -> list[Need]:
        """Those of `needs` that may not be met."""
        return [need for span in self._whole(backward) for need in span.missing()]

    def whole_runs(self) -> list[Run]:
        """What the coming pass forward and backward will run, if it may be as the last one was (`repeat`).

        Nothing where somebody looks at the net in between, or another net's arrays are in the arena.
        """
        if self._dynamic or self._is_watched() or self.watches_backward:
            return []
        forward, backward = self._whole(True)
        self._upload_inputs()
        if self._arena is not None and not self._arena.is_of(self._plan):
            return []
        runs = [Run(forward.schedule, forward.start, forward.stop)]
        if self._updates is None:
            return [*runs, Run(backward.schedule, backward.start, backward.stop)]
        return [*runs, Run(backward.schedule, 0, self._loss_at), Run(backward.schedule, self._loss_at)]

    def _whole(self, backward: bool) -> list[Span]:
        """The spans of a whole pass, once its shapes are known."""
        self._follow()
        self.prepare()
        last = len(self.nodes) - 1
        forward = self._span(False, 0, last)
        return [forward, self._span(True, 0, last)] if backward else [forward]

    def run_forward(self, first: int = 0, last: int | None = None) -> float:
        """Run layers first to last forward (positions, inclusive) and return their loss.

        Everything is secured first: raises OutOfDeviceMemory before a byte is written, SharedBlobError if a layer
        would read what another net has overwritten. Where shapes depend on values (dynamic layers), what is secured
        first is what the last pass used, and the rest once it is known.
        """
        return self.start_forward(first, last)()

    def why_eager(self, backward: bool = False) -> dict[str, str]:
        """Of each layer that computes in a whole pass forward (or backward), why a CUDA graph has not all its calls.

        "" where it has, from the third pass or so on. For the present shapes and the device where the net is.
        """
        span = self._whole(backward)[backward]
        runs: list[tuple[int, int | None]] = [(span.start, span.stop)]
        if backward and self._updates is not None:
            runs = [(0, self._loss_at), (self._loss_at, None)]
        reasons: dict[str, str] = {}
        for start, stop in runs:
            for layer, reason in span.schedule.why_eager(start, stop).items():
                reasons[layer] = reasons.get(layer) or reason
        return reasons

    def write_graphs(self, prefix: str) -> list[str]:
        """Write each CUDA graph that runs now for parts of the net as a DOT file; the files' names.

        They are PREFIX-NET-PHASE-DIRECTION-NUMBER.dot. DeviceError if the driver cannot write one.
        """
        name = re.sub(r"[^\w.-]+", "_", self.name)
        stem = f"{prefix}-{name}-{PHASES[self.phase]}"
        schedules = zip(("forward", "backward"), self._schedules or (), strict=False)
        return [file for way, schedule in schedules for file in schedule.write_graphs(f"{stem}-{way}")]

    def start_forward(self, first: int = 0, last: int | None = None) -> Callable[[], float]:
        """`run_forward`, but give what waits for the loss, to be called once and before the next pass forward.

        A GPU goes on meanwhile with what is queued after it. What its kernels find wrong is raised by that call, which
        then takes the pass back.
        """
        last = len(self.nodes) - 1 if last is None else last
        with self.group.lock:
            self._follow()
            if first == 0:
                self.prepare()
            span = self._span(False, first, last)
            secure(span.missing())
            self.group.check(self.identity, span.first_uses)
            if self._follower is not None:
                self._follower.follow()
            return self._start(span, first, last, lambda: self._run_forward(span, first, last))

    def _run_forward(self, span: Span, first: int, last: int) -> Callable[[], float]:
        self._upload_inputs()
        self.group.claim(self.identity, span.left)
        dynamic = [index for index in self._dynamic if first <= index <= last] if self.device.compute else []
        if dynamic:
            self._run_in_parts(first, last, dynamic)
        else:
            self._run(span, False, range(first, last + 1))
        self._upload_inputs(queued=True)
        return self._loss_reader.read(self.device, self._losses(first, last))

    def _losses(self, first: int, last: int) -> list[tuple[Blob, float]]:
        return [loss for index, node in self._with_losses if first <= index <= last for loss in node.losses]

    def _start(self, span: Span, first: int, last: int, run: Callable[[], Callable[[], float]]) -> Begun:
        """What `run` does of a pass, as a new one, whose loss what it returns waits for; see `start_forward`."""
        self.state.iteration += 1
        # another try takes the same records and makes the same random draws
        carried = [(layer, layer.state_dict()) for index, layer in self._rewound if first <= index <= last]
        begun = Begun(self, carried, span)
        try:
            begun.read = run()
        except BaseException:
            begun.take_back()
            raise
        return begun

    def _run_in_parts(self, first: int, last: int, dynamic: Sequence[int]) -> None:
        """Run forward, giving what follows a dynamic layer its shapes once these are known."""
        for index in dynamic:
            self._run_part(first, index - 1)
            node = self.nodes[index]
            before = shapes_of(node)
            self._find(index)
            resize(node)
            self._fit_after(index, before)
            before = shapes_of(node)
            self._run_part(index, index)
            self._fit_after(index, before)
            first = index + 1
        self._run_part(first, last)

    def _find(self, index: int) -> None:
        """Run what a dynamic layer needs to know its tops' shapes."""
        node = self.nodes[index]
        calls = of_layer(node.layer.find(node.bottom, node.top), index, node.layer)
        if calls:
            schedule = Schedule(calls, self.device)
            secure(schedule.needs())
            self.group.claim(self.identity, (memory for each in calls for memory in each.written_memories()))
            schedule.run()

    def _run_part(self, first: int, last: int) -> None:
        if first > last:
            return
        span = self._span(False, first, last)
        secure(span.missing())
        self.group.claim(self.identity, span.written)
        self._run(span, False, range(first, last + 1))

    def _fit_after(self, index: int, before: list[tuple[int, ...]]) -> None:
        """If layer `index` has given its arrays other shapes, let the layers after it follow."""
        if shapes_of(self.nodes[index]) != before:
            self._outdate(index + 1)
            self._shapes = self._present_shapes()
            self._schedules, self._spans = None, {}

    def run_backward(self, first: int | None = None, last: int = 0) -> None:
        """Run layers first down to last backward (positions, inclusive). Parameter gradients are added to.

        Raises what `run_forward` raises.
        """
        if self.forward_only:
            raise NetError(f"{self.identity} was built with forward_only: it has no backward pass")
        if self._updates is not None:
            raise SharedBlobError(
                f"{self.identity} has no gradients of parameters to add to: with memory='{self.memory}' its solver has "
                "updated each parameter as soon as its gradient was complete. Call net.clear_param_diffs(), then run "
                "it forward again, and backward"
            )
        first = len(self.nodes) - 1 if first is None else first
        with self.group.lock, self._going_backward(last, first) as span:
            self._run(span, True, range(first, last - 1, -1))

    def backward_and_update(self, before: Callable[[], float]) -> float:
        """Run the whole of backward with the updates that `update_in_backward` was given.

        `before`, what waits for the loss, is called before the first update (a GPU has work meanwhile): if it raises,
        no parameter has changed. If anything is raised later some have, which is logged. Returns what it returned.
        """
        assert self._updates is not None
        with self.group.lock, self._going_backward(0, len(self.nodes) - 1) as span:
            assert self._plan is not None and self._arena is not None
            self._plan.begin(span, self._arena, self.state.iteration)
            loss = self._run_updating(span.schedule, before)
            self._plan.leave(span)
        return loss

    def _run_updating(self, schedule: Schedule, before: Callable[[], float], again: bool = False) -> float:
        begun = False
        try:
            schedule.run(0, self._loss_at, again)
            loss, begun = before(), True
            schedule.run(self._loss_at, None, again)
        except BaseException:
            if begun:
                self.warn_of_updates()
            raise
        return loss

    def warn_of_updates(self) -> None:
        """Say that something was raised amid a solver's updates."""
        log.warning(
            "%s: an iteration has ended amid its updates: some parameters may have been updated and others "
            "not. It does not count; restore a snapshot to go on from a whole one", self.identity,
        )  # fmt: skip

    def as_one(self, pieces: Sequence[Sequence[Any]]) -> Whole:
        """An iteration as one graph, which ran these pieces last, of schedules of which the first one is forward."""
        from blobmem.net.whole import Whole  # and with it ops of CUDA

        return Whole(pieces, self.device, self._losses(0, len(self.nodes) - 1), self._loss_reader)

    def repeat_as_one(self, whole: Whole) -> Begun:
        """`repeat`, `late`, and an update behind it, of what `as_one` has made."""
        with self.group.lock:
            forward, backward = (self._span(way, 0, len(self.nodes) - 1) for way in (False, True))
            launches = whole.launches
            try:
                return self._start(forward, 0, len(self.nodes) - 1, whole.launch)
            except BaseException:
                self.group.claim(self.identity.unfinished, backward.written)
                if whole.launches != launches:
                    self.warn_of_updates()
                raise

    def repeat(self, late: bool) -> Begun:
        """Run the whole net forward and backward, with the updates that it was given, as it ran last; the pass.

        Only where `settled` finds that it may. Raises what is raised on the way, as `run_forward` and
        `backward_and_update` do. With `late` nobody has waited for the loss when updates are queued.
        """
        with self.group.lock:
            forward, backward = (self._span(way, 0, len(self.nodes) - 1) for way in (False, True))

            def run() -> Callable[[], float]:
                forward.schedule.run(forward.start, forward.stop, again=True)
                return self._loss_reader.read(self.device, self._losses(0, len(self.nodes) - 1))

            begun = self._start(forward, 0, len(self.nodes) - 1, run)
            before = (lambda: 0.0) if late else begun
            with self._unfinished(backward):
                if self._updates is not None:
                    self._run_updating(backward.schedule, before, again=True)
                else:
                    backward.schedule.run(backward.start, backward.stop, again=True)
                    before()
            self._upload_inputs(queued=True)
            return begun

    @contextlib.contextmanager
    def _going_backward(self, last: int, first: int) -> Iterator[Span]:
        """The span of layers first down to last, secured and claimed; if its pass fails nobody has what it writes."""
        self._follow()
        span = self._span(True, last, first)
        self._warn_of_stale_reads(*self.compiled(last, first))
        secure(span.missing())
        self.group.check(self.identity, span.first_uses)
        if self._plan is not None:
            self._plan.check(span, self.identity)
        self.group.claim(self.identity, span.left)
        with self._unfinished(span):
            yield span
        self._upload_inputs(queued=True)

    @contextlib.contextmanager
    def _unfinished(self, span: Span) -> Iterator[None]:
        """If anything is raised nobody has what the span writes."""
        try:
            yield
        except BaseException:
            self.group.claim(self.identity.unfinished, span.written)
            raise

    def _warn_of_stale_reads(self, forward: Schedule, backward: Schedule) -> None:
        """Once, before the first backward pass: chains of in-place layers whose gradients are wrong, in Caffe too."""
        if self._chains_checked:
            return
        self._chains_checked = True
        updates = {id(each.attributes) for each in self._updates or ()}
        number = {name: at for at, name in enumerate(self.layer_names)}
        calls = [  # a gradient that is made in pieces stands among the calls of other layers
            dataclasses.replace(each, layer=number.get(each.layer_name, each.layer))
            for each in backward.calls
            if id(each.attributes) not in updates
        ]
        found = {(r.layer, w.layer): (r, name, w) for r, name, w in stale_reads(forward.calls, calls)}
        for reader, name, writer in found.values():
            log.warning(
                "%s: the gradient of layer '%s' reads '%s', which layer '%s' has overwritten in place by then: it is "
                "wrong, as in Caffe. Give layer '%s' a top of its own",
                self.identity, reader.layer_name, name, writer.layer_name, writer.layer_name,
            )  # fmt: skip

    def _run(self, span: Span, backward: bool, layers: range) -> None:
        direction = "backward" if backward else "forward"
        before, after = self._callbacks[f"before_{direction}"], self._callbacks[f"after_{direction}"]
        logs = self.debug_info and self.device.compute
        if not (logs or before or after):
            self._run_span(span)
            return
        parts = [self._span(backward, index, index) for index in layers]
        if self._plan is not None:  # whoever looks in between finds what was written so far
            self._plan.spend(span.written)
        for index, part in zip(layers, parts, strict=True):
            for callback in before:
                callback(index)
            self.group.claim(self.identity, part.left)
            self._run_span(part)
            if logs:
                self._log_layer(self.nodes[index], backward)
            for callback in after:
                callback(index)

    def _run_span(self, span: Span) -> None:
        if self._plan is None or self._arena is None:
            span.schedule.run(span.start, span.stop)
        else:
            self._plan.begin(span, self._arena, self.state.iteration)
            span.schedule.run(span.start, span.stop)
            self._plan.leave(span)

    def _log_layer(self, node: Node, backward: bool) -> None:
        """Log the mean absolute value of what the layer wrote, and of its parameters."""
        direction, part, asum = (
            ("backward", "diff", Blob.asum_diff) if backward else ("forward", "data", Blob.asum_data)
        )
        blobs = itertools.compress(node.bottom, node.bottom_need) if backward else node.top
        shown = [("bottom" if backward else "top", blob) for blob in blobs]
        shown += [("param", blob) for blob in node.layer.blobs]
        for kind, blob in shown:
            mean = asum(blob) / max(blob.count, 1)
            log.info("[%s] layer %s, %s %s %s: %.6g", direction, node.layer.name, kind, blob.name, part, mean)

    def _upload_inputs(self, queued: bool = False) -> None:
        """A net input whose array the user still holds may have been written since: count it as a host write. Or, with
        `queued`, it may be from now on, and if it is evicted what is queued copies it from there: wait for that."""
        if self.device.is_host:
            return
        for blob in (self.blobs[name] for name in self.inputs):
            if not queued or blob.data_view.memory.evicted:
                blob.touch_if_held()

    def losses(self) -> list[Blob]:
        """The blobs that are losses."""
        return [blob for _, node in self._with_losses for blob, _ in node.losses]

    def reseed(self, seed: int) -> None:
        """Make random draws a function of another seed from now on; parameters stay as they are."""
        if seed != self.state.seed:
            self.state.seed = seed
            self._schedules, self._spans = None, {}  # draws are bound to the seed when a net is compiled

    def clear_param_diffs(self) -> None:
        """Set all parameter gradients to zero, without touching bytes that nobody holds an array over.

        Those that a solver's updates left without bytes have some again, and the net is planned anew.
        """
        self.update_in_backward(None)
        self.group.claim(self.identity, (entry.blob.diff_view.memory for entry in self.learnable))
        for entry in self.learnable:
            entry.blob.clear_diff()

    # ---------------------------------------------------------------- parameters and files

    def copy_trained_layers_from(self, weights: Any) -> None:
        """Take parameters from a caffemodel (path of a binary or HDF5 one, or NetParameter), by layer name; other
        layers keep theirs.

        Raises NetError if a layer's parameters differ in number or shape.
        """
        weight_files.load(self, weights)

    copy_from = copy_trained_layers_from

    def to_proto(self, write_diff: bool = False) -> Any:
        """The NetParameter with the parameters' values (and gradients if asked)."""
        return weight_files.to_proto(self, write_diff)

    def save(self, path: str | os.PathLike[str], write_diff: bool = False) -> None:
        """Write the caffemodel, atomically: a reader sees the old file or the whole new one."""
        weight_files.save(self, path, write_diff)

    def load_hdf5(self, path: str | os.PathLike[str]) -> None:
        """Take parameters from an HDF5 file, as `copy_trained_layers_from` does; gradients in it are left."""
        weight_files.load_hdf5(self, path)

    def save_hdf5(self, path: str | os.PathLike[str], write_diff: bool = False) -> None:
        """Write the parameters (and gradients if asked) as an HDF5 file of Caffe's layout, atomically."""
        weight_files.save_hdf5(self, path, write_diff)

    # ---------------------------------------------------------------- sharing

    def share_with(self, other: Net) -> None:
        """Use the other net's parameters, by layer name.

        Raises NetError if numbers, shapes or dtypes differ, SharedBlobError if the nets are on different devices.
        """
        self._share_params(other)

    def share_blobs_with(self, other: Net) -> SharingReport:
        """Put every eligible blob into the memory of the other net's blob of that name; parameters too.

        The two nets then run one at a time, and reading a blob that the other one has overwritten raises
        SharedBlobError. Returns what was shared and, for the rest, why not. Nets whose arrays take turns (`memory`) do
        so in one arena instead.
        """
        self.share_with(other)
        if self._arena is not None or other._arena is not None:
            return self._share_arena(other)
        other.compiled()
        self._images_last, self._schedules = other._images_last, None  # one memory has one order
        report = share_blobs(self, other)
        self.group.join(other.group, [self, other])
        return report

    def _share_arena(self, other: Net) -> SharingReport:
        if self._arena is None or other._arena is None:
            keeps, plans = (self, other) if self._arena is None else (other, self)
            reason = f"{keeps.identity} keeps its blobs, those of {plans.identity} take turns (memory='{plans.memory}')"
            return SharingReport(unshared=dict.fromkeys(self.blobs, reason))
        self._end_plan()
        self._schedules, self._arena = None, other._arena
        self.group.join(other.group, [self, other])
        return SharingReport()

    def first_uses(self) -> dict[SyncedMemory, bool]:
        """For each memory of a whole pass: whether the pass replaces it before reading it."""
        forward, backward = self.compiled()
        return first_uses([*forward.calls, *backward.calls])

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.identity} cannot be copied or pickled: net.save(file) keeps its parameters, and another net built "
            "from the same prototxt takes them from there, or shares them (share_with)"
        )

    def __repr__(self) -> str:
        return f"<{self.identity}, {len(self.layers)} layers>"


def _arguments(
    args: Sequence[Any], phase: int | None, weights: Any, level: int, stages: Sequence[str] | None
) -> tuple[int, Any, int, Sequence[str] | None]:
    """Tell `Net(model, phase, ...)`, `Net(model, phase, weights)` and `Net(model, weights, phase)` apart."""
    for position, arg in enumerate(args):
        if isinstance(arg, str | os.PathLike):
            if weights is not None:
                raise TypeError("Net got two files of weights")
            weights = arg
        elif isinstance(arg, int | np.integer) and phase is None:
            phase = int(arg)
        elif isinstance(arg, int | np.integer) and position == 1:
            level = int(arg)
        elif isinstance(arg, list | tuple) and position == 2:
            stages = arg
        elif arg is not None:
            raise TypeError(f"Net(model, phase, ...) or Net(model, weights, phase): {arg!r} does not fit")
    if phase not in (TRAIN, TEST):
        raise TypeError(f"Net needs a phase, blobmem.TRAIN or blobmem.TEST, got {phase!r}")
    return phase, weights, level, stages
