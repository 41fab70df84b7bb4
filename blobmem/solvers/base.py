"""The solver: iterations of forward, backward and update, with tests, reports and snapshots in between."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from blobmem import devices
from blobmem.errors import NetError, OutOfDeviceMemory
from blobmem.net import Net, SharingReport, build_nets, weights
from blobmem.net.begun import Begun
from blobmem.net.builder import solver_specs
from blobmem.net.needs import Need, secure
from blobmem.net.settled import Settled
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_solver
from blobmem.solvers import carried, snapshot
from blobmem.solvers.events import Callbacks, Display, TestResult, outputs_of
from blobmem.solvers.state import State
from blobmem.solvers.timing import Timing
from blobmem.solvers.trial import Trial
from blobmem.solvers.update import Updater

log = logging.getLogger("blobmem")

_AHEAD = 16
"""Iterations whose losses nobody waits for yet. So long may the host be held up, by a thread that makes batches on its
core, for one, which takes a millisecond for a unit of small ones."""


class Solver:
    """Trains the net of a solver file, as pycaffe's solvers do. Made by `get_solver`, or by the class of its type.

    Args:
        model: path of a solver prototxt, or a SolverParameter message.
        share: train and test nets share blobs by name; otherwise parameters only, which scripts that hold on to blobs
            of both nets rely on.
        device: a Device or its word ("cpu", "simulated:8GiB"); the default device when None.
        seed: what fillers and random draws are a function of; the solver's random_seed when None.
        level, stages: added to the train net's state, which include and exclude rules see.
        memory: "keep", or "train" for as little memory as will do (`build_nets`): blobs are then readable only while
            no other array has their bytes, but for outputs, parameters and those named in `keep`. Parameters are
            updated during backward, as soon as their gradients are complete, and gradients readable after it only
            where something may look at them (`Updater.place`, a callback on_gradients_ready).
        net_options: as for `build_nets` (dtype, input_shapes, train_batch, test_batches, skip_damaged, keep,
            backward_streams; with "auto", and where nothing is known of such a net yet, the first 18 steps find out).

    Attributes:
        param: the SolverParameter.
        net: the train net.
        test_nets: the test nets.
        reports: what each test net shares with the nets before it.
        updater: the update, with the history blobs and the learning rate.
        stopped: whether `stop` ended the last `step` or `solve`.

    Raises NetError naming the file and field for anything wrong in the files.
    """

    updater_type: ClassVar[type[Updater]]

    def __init__(
        self,
        model: Any,
        share: bool = False,
        device: devices.Device | str | None = None,
        seed: int | None = None,
        level: int | None = None,
        stages: Sequence[str] = (),
        memory: str = "keep",
        **net_options: Any,
    ) -> None:
        if memory == "inference":
            raise ValueError("a solver trains: its memory is 'keep' or 'train', not 'inference'")
        if not hasattr(type(self), "updater_type"):
            raise TypeError("Solver is the base of SGDSolver and the like: use blobmem.get_solver(file)")
        self.source = file_of(model)
        self.param: Any = read_solver(model)
        if seed is None and self.param.random_seed >= 0:
            seed = self.param.random_seed
        # as in Caffe, a script may run an unshared test net backward
        net_options.setdefault("forward_only_tests", share)
        if level is not None:
            self.param.train_state.level = level
        self.param.train_state.stage.extend(stages)
        specs = solver_specs(self.param, self.source)
        nets = build_nets(specs, share, device=device, seed=seed, memory=memory, **net_options)
        self.net: Net = nets.train
        self.test_nets: list[Net] = nets.tests
        self.reports: list[SharingReport] = nets.reports
        for net in self.test_nets:
            net.debug_info |= self.param.debug_info
        self._check_fields()
        self.updater = self.updater_type(self.param, self.net, self.source)
        self.net.beside = weakref.WeakMethod(self._present_needs)
        self._trial, self._timing = Trial(self.net), Timing(self.net)
        self.stopped = False
        self._snapshot_asked = False
        self._iter = 0
        self._losses: deque[float] = deque(maxlen=max(1, self.param.average_loss))
        self._callbacks = Callbacks()
        self._settled = Settled()
        self._late: list[tuple[int, int, Begun]] = []  # of iterations whose losses are open: number, step of the rate
        self._load_weights()

    def _check_fields(self) -> None:
        where, param = f"{self.source}: " if self.source else "", self.param
        if self.test_nets and param.test_interval < 1:
            raise NetError(f"{where}test_interval: expected 1 or more, as test_iter asks for tests")
        if param.max_iter < 0:
            raise NetError(f"{where}max_iter: expected 0 or more, got {param.max_iter}")
        if param.HasField("solver_mode") and param.solver_mode == caffe_pb2.SolverParameter.GPU:
            log.info("%ssolver_mode GPU is not looked at: this runs on %s", where, self.net.device.name)

    def _load_weights(self) -> None:
        """Start from the files of the solver's `weights`, which may each be several with commas between."""
        for name in (part.strip() for given in self.param.weights for part in given.split(",")):
            path = Path(name)
            beside = Path(self.source).parent / name
            if not path.exists() and self.source and beside.exists():
                path = beside
            self.updater.load_weights(path)
            for net in self.test_nets:
                if set(net.params) - set(self.net.params):
                    net.copy_trained_layers_from(path)

    # ---------------------------------------------------------------- pycaffe's face

    @property
    def iter(self) -> int:
        """Iterations that are behind."""
        return self._iter

    @property
    def type(self) -> str:
        """The solver's type, as in prototxt."""
        return self.updater_type.type

    @property
    def smoothed_loss(self) -> float:
        """The mean loss of the last `average_loss` iterations; 0 before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else 0.0

    def add_callback(
        self,
        on_start: Callable[[], Any] | None = None,
        on_gradients_ready: Callable[[], Any] | None = None,
        *,
        on_iteration: Callable[[int, float], Any] | None = None,
        on_test: Callable[[TestResult], Any] | None = None,
        on_display: Callable[[Display], Any] | None = None,
        on_snapshot: Callable[[str], Any] | None = None,
    ) -> None:
        """Have callables called during training.

        Args:
            on_start: before the forward pass of each iteration.
            on_gradients_ready: between backward and update; it may change the gradients. With one no parameter is
                updated before (memory="train").
            on_iteration: at the end of each, with the iterations behind and the iteration's loss.
            on_test: with each test net's TestResult.
            on_display: with a Display, every `display` iterations.
            on_snapshot: with the path of each solverstate written.
        """
        self._callbacks.add(
            on_start=on_start,
            on_gradients_ready=on_gradients_ready,
            on_iteration=on_iteration,
            on_test=on_test,
            on_display=on_display,
            on_snapshot=on_snapshot,
        )

    def step(self, iterations: int = 1) -> None:
        """Carry out so many iterations, with the tests, reports and snapshots that fall due in them.

        Raises OutOfDeviceMemory before an iteration has changed anything or taken a record: once there is room,
        another call goes on as if nothing had happened. An iteration that ends amid its updates (memory="train") does
        not count, and says in a warning that some parameters have been updated. Raises NetError before the first
        iteration if snapshots are due and cannot be written.
        """
        self.stopped = False
        if self.param.snapshot:
            self._check_snapshots()
        self._run(iterations)

    def solve(self, resume_file: str | os.PathLike[str] | None = None) -> None:
        """Train up to `max_iter`, from a snapshot if given, then snapshot, report and test as the solver says."""
        self.stopped = False
        param = self.param
        if not param.HasField("max_iter"):
            raise NetError(f"{self.source or 'the solver'}: max_iter is missing; solve() trains up to it")
        if param.snapshot or param.snapshot_after_train:
            self._check_snapshots()
        if resume_file is not None:
            self.restore(resume_file)
        log.info("training net '%s' with %s, policy %s", self.net.name, self.type, param.lr_policy)
        self._run(param.max_iter - self._iter)
        if param.snapshot_after_train and not (param.snapshot and self._due(param.snapshot)):
            self.snapshot()
        if self.stopped:
            return
        if self._due(param.display):
            self._losses.append(self.net.run_forward())
            self._display()
        if self._due(param.test_interval):
            self.test_all()

    def stop(self) -> None:
        """End `step` or `solve` after the iteration in progress; `solve` still snapshots. For signal handlers."""
        self.stopped = True

    def snapshot_soon(self) -> None:
        """Have a snapshot written after the iteration in progress. For signal handlers."""
        self._snapshot_asked = True

    def share_weights(self, net: Net) -> None:
        """Have another net use the train net's parameters, by layer name."""
        net.share_with(self.net)

    def apply_update(self) -> None:
        """Update the parameters from their present gradients, as at the end of an iteration.

        Raises SharedBlobError if `step` has used these up (memory="train").
        """
        self.updater.run(self._iter)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of net '{self.net.name}' at iteration {self._iter}>"

    # ---------------------------------------------------------------- an iteration

    def _due(self, interval: int) -> bool:
        return interval > 0 and self._iter % interval == 0

    def _run(self, iterations: int) -> None:
        stop = self._iter + iterations
        try:
            while self._iter < stop and not self.stopped:
                with self.net.group.lock:
                    self._iterate()
        finally:
            with self.net.group.lock:
                try:
                    self._catch_up()
                finally:  # should that be interrupted
                    self._catch_up()

    def _iterate(self) -> None:
        test = self._due(self.param.test_interval) and (self._iter > 0 or self.param.test_initialization)
        if self._is_settled(test):
            late = self.updater.may_wait
            coming = self._iter, self.updater.rate.current_step
            whole = self._settled.whole(self.net.as_one) if late else None
            self._late.append((*coming, self.updater.repeat(self._iter, late, whole)))
            self._iter += 1
            self._catch_up(_AHEAD)
        else:
            self._catch_up()
            self._timing.run(lambda: self._iterate_anew(test))
            self._settled.end()
        if self._due(self.param.snapshot) or self._snapshot_asked:
            self._snapshot_asked = False
            self.snapshot()
        for report in self._callbacks.on_iteration:
            self._catch_up()
            report(self._iter, self._losses[-1])

    def _catch_up(self, most: int = 0) -> None:
        """Wait for losses until no more are open than that many.

        Where a bad value was found, neither that iteration nor any after it has updated anything: they are taken back.
        """
        while len(self._late) > most:
            loss = self._late[0][-1].wait()
            left_out = self.updater.left_out()
            if left_out:
                self._take_back(left_out)
            self._late.pop(0)
            self._losses.append(loss)

    def _take_back(self, count: int) -> NoReturn:
        """Take back so many of the last iterations, and raise what was found in the first of them."""
        late, self._late = self._late, []
        self._losses.extend(begun.wait() for *_, begun in late[:-count])
        for self._iter, self.updater.rate.current_step, begun in reversed(late[-count:]):
            begun.take_back()
        self.net.device.synchronize()  # which raises what was found, unless another thread has been told
        raise NetError(
            f"{self.net.identity}: iteration {self._iter} was left out, as another thread was told of a bad value that "
            "was found on this device meanwhile: run it again"
        )

    def _is_settled(self, test: bool) -> bool:
        """Whether the coming iteration may be queued as the last one was, with nobody looking at it half-way."""
        callbacks = self._callbacks
        looked_at = self._due(self.param.display) or callbacks.on_start or callbacks.on_gradients_ready
        if test or looked_at or self._trial.is_open or self._timing.is_open:
            self._settled.forget()
            return False
        self._place_updates()
        return self._settled.holds(self.updater.whole_runs())

    def _iterate_anew(self, test: bool) -> None:
        self._trial.begin_step()
        try:
            self._secure(self.test_nets if test else [])
        except OutOfDeviceMemory:
            if not self._trial.give_up():
                raise
            self._secure(self.test_nets if test else [])
        if test:
            self.test_all()
        for callback in self._callbacks.on_start:
            callback()
        early = self._place_updates()  # anew, as a callback may have run the net by itself
        loss = self._update_backward() if early else self._forward_backward()
        self._losses.append(loss)
        try:
            if self._due(self.param.display):
                self._display()
        finally:
            if early:  # the update is behind, and counts whatever a callback raises
                self.updater.rate.advance(self._iter)
                self._iter += 1
        if not early:
            for callback in self._callbacks.on_gradients_ready:
                callback()
            self.updater.run(self._iter)
            self._iter += 1

    def _secure(self, tests: list[Net]) -> None:
        """Allocate all that the iteration will use, or nothing: it must not run out of memory half-way."""
        self._place_updates()
        missing = self.net.missing(backward=True) + self.updater.missing()
        for net in tests:
            missing += net.missing()
        secure(missing)

    def _present_needs(self) -> list[Need]:
        """What is used beside the train net, for a plan of that which is being made: by updates, and by test nets."""
        schedules = [schedule for net in self.test_nets for schedule in net.compiled()]
        return [*self.updater.present_needs(), *(need for schedule in schedules for need in schedule.needs())]

    def _place_updates(self) -> bool:
        """Have parameters updated during backward if nobody is to see their gradients; whether they are."""
        return self.updater.place(not self._callbacks.on_gradients_ready)

    def _update_backward(self) -> float:
        """A pass forward, and one backward with the updates in it; the loss."""
        self.net.debug_info = False
        forward = self.net.start_forward()
        return self._trial.run(lambda: self.updater.run_in_backward(self._iter, forward))

    def _forward_backward(self) -> float:
        """Sum the gradients of iter_size batches; their mean loss."""
        net, count = self.net, self.param.iter_size
        wanted = self.param.debug_info and self._due(self.param.display)
        net.debug_info = wanted or net.param.debug_info
        net.clear_param_diffs()
        loss = 0.0
        for _ in range(count):
            forward = net.start_forward()
            self._trial.run(net.run_backward)
            # only now, so that a GPU has work meanwhile; before the update, as it raises what went wrong on the way
            loss += forward()
        return loss / count

    def _display(self) -> None:
        values = {name: np.array(self.net.blobs[name].cpu_data(), np.float64) for name in self.net.outputs}
        rate = self.updater.rate.at(self._iter)
        event = Display(self._iter, self.smoothed_loss, rate, outputs_of(self.net, values))
        log.info("iteration %d: loss %.6g, learning rate %.6g", event.iteration, event.loss, event.rate)
        if self.updater.scaling is not None:
            scale, left_out = self.updater.loss_scale, self.updater.steps_left_out
            log.info("    loss scale %g; %d updates left out so far, for gradients beyond float16", scale, left_out)
        for line in event.outputs.lines():
            log.info("    train net: %s", line)
        for callback in self._callbacks.on_display:
            callback(event)

    # ---------------------------------------------------------------- tests

    def test_all(self) -> list[TestResult]:
        """Test every test net now."""
        return [self.test(index) for index in range(len(self.test_nets))]

    def test(self, index: int = 0) -> TestResult:
        """Run a test net `test_iter` times and average its outputs, except those whose shapes change meanwhile."""
        net, counts = self.test_nets[index], self.param.test_iter
        passes = counts[min(index, len(counts) - 1)]
        sums: dict[str, np.ndarray] = {}
        varied: dict[str, None] = {}
        loss = 0.0
        with net.group.lock:
            if self.net.device.most_bytes is not None:
                self._place_updates()
                self.net.compiled()  # whose plan says what room there is for tests, and what they bring
            for _ in range(passes):
                loss += net.run_forward()
                for name in net.outputs:
                    values = net.blobs[name].cpu_data()
                    total = sums.setdefault(name, np.zeros(values.shape))
                    if total.shape == values.shape:
                        sums[name] = total + values
                    else:
                        varied[name] = None
        for name in varied:
            del sums[name]
        if varied:
            log.warning(
                "test net %d: no averages of %s, whose shapes change from pass to pass", index, ", ".join(varied)
            )
        averages = {name: total / max(passes, 1) for name, total in sums.items()}
        mean_loss = loss / max(passes, 1) if self.param.test_compute_loss else None
        result = TestResult(index, net.name, self._iter, passes, outputs_of(net, averages), mean_loss)
        log.info("iteration %d: test net %d (%d passes)", self._iter, index, passes)
        for line in [] if mean_loss is None else [f"loss {mean_loss:.6g}"]:
            log.info("    %s", line)
        for line in result.outputs.lines():
            log.info("    test net %d: %s", index, line)
        for callback in self._callbacks.on_test:
            callback(result)
        return result

    # ---------------------------------------------------------------- snapshots

    @property
    def snapshot_prefix(self) -> str:
        """Where snapshots go: the solver's snapshot_prefix, or the solver file's name without its extension; in a
        folder given as prefix, that name."""
        given = self.param.snapshot_prefix
        name = Path(self.source).stem if self.source else self.net.name or "solver"
        if not given:
            return os.fspath(Path(self.source).with_suffix("")) if self.source else name
        return os.path.join(given, name) if given.endswith("/") or os.path.isdir(given) else given

    def _check_snapshots(self) -> None:
        snapshot.check_folder(self.snapshot_prefix)

    def snapshot(self) -> str:
        """Write PREFIX_iter_N.caffemodel, .solverstate and .blobmem.json (with snapshot_format: HDF5 .caffemodel.h5,
        .solverstate.h5 and .h5.blobmem.json); the path of the solverstate.

        A process killed meanwhile leaves the old files of these names or the new ones. Raises NetError.
        """
        self._check_snapshots()
        with self.net.group.lock:
            self._catch_up()
            kind, base = snapshot.kind_of(self.param), f"{self.snapshot_prefix}_iter_{self._iter}"
            rate, diffs = self.updater.rate, self.param.snapshot_diff
            state = State(self._iter, rate.current_step, base + kind.model, self.updater.arrays())
            hdf5 = kind is snapshot.HDF5
            model = (weights.to_hdf5 if hdf5 else weights.to_proto)(self.net, diffs, self.updater.unrounded())
            content = state.to_hdf5() if hdf5 else state.to_proto()
            extra = {
                "type": self.type,
                "iter": self._iter,
                "seed": self.net.state.seed,
                "losses": list(self._losses),
                "nets": carried.collect([self.net, *self.test_nets]),
                "loss_scale": self.updater.scaling_state(),
            }
            path = snapshot.write(base, kind, model, content, extra)
        log.info("snapshot written: %s", path)
        for callback in self._callbacks.on_snapshot:
            callback(path)
        return path

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Continue from a snapshot, given by its solverstate, binary or HDF5: bit for bit if it has our sidecar, else
        as Caffe does.

        Raises NetError, with nothing changed, for files that are missing, damaged, not written together, or of
        another net.
        """
        found = snapshot.read(path, self.updater.slots())
        nets = [self.net, *self.test_nets]
        with self.net.group.lock, contextlib.ExitStack() as undo:
            self._catch_up()
            if found.carried is not None:
                carried.check(found.carried, found.path)
                carried.load_layers(nets, found.carried, found.path, undo)
            if found.model is not None:
                self.updater.load_weights(found.model)
            undo.pop_all()
            self.updater.load(found.state.current_step, found.state.history)
            self.updater.load_scaling((found.carried or {}).get("loss_scale", []))
            self._iter = found.state.iter
            self._losses.clear()
            if found.carried is not None:
                self._losses.extend(found.carried["losses"])
                carried.load_counters(nets, found.carried, found.path)
        if found.carried is None:
            log.warning(
                "%s has no %s beside it: parameters, history and iteration restored as Caffe does; data starts from "
                "its beginning and random draws from the seed", found.path, os.path.basename(found.sidecar),
            )  # fmt: skip
        elif found.carried.get("type", self.type) != self.type:
            log.warning(
                "%s was written by %s, whose history %s takes for its own", found.path, found.carried["type"], self.type
            )
        log.info("restored iteration %d from %s", self._iter, found.path)


def file_of(model: Any) -> str:
    """The path that `model` is, for messages and for what lies beside it; "" for a message or the text of one."""
    return os.fspath(model) if isinstance(model, str | os.PathLike) and os.path.exists(model) else ""


# -------------------------------------------------------------------- by type

_types: dict[str, type[Solver]] = {}
_S = TypeVar("_S", bound=type[Solver])


def register_solver(cls: _S) -> _S:
    """Class decorator: the class for solver files of its updater's type. Raises ValueError if that is taken."""
    name = cls.updater_type.type
    taken = _types.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"solver type {name} is already registered by {taken.__module__}.{taken.__qualname__}")
    _types[name] = cls
    return cls


def solver_types() -> dict[str, type[Solver]]:
    """All registered solver classes by type."""
    return dict(sorted(_types.items()))


def solver_type(param: Any, source: str = "") -> type[Solver]:
    """The class for a SolverParameter. Raises NetError listing the known types."""
    cls = _types.get(param.type)
    if cls is None:
        where = f"{source}: " if source else ""
        raise NetError(f"{where}type: expected one of {', '.join(sorted(_types))}; got '{param.type}'")
    return cls


def get_solver(model: Any, **options: Any) -> Solver:
    """The solver of a file or SolverParameter, of the class that its `type` names; options as for `Solver`.

    Raises NetError for an unknown type, with the known ones, and what `Solver` raises.
    """
    return solver_type(read_solver(model), file_of(model))(model, **options)


def updater_for(model: Any, net: Net) -> Updater:
    """The update that a solver file or SolverParameter asks for, for a train net. Raises NetError."""
    param, source = read_solver(model), file_of(model)
    return solver_type(param, source).updater_type(param, net, source)
