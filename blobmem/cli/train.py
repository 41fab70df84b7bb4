"""`blobmem train`: a solver file from its first iteration, or from a snapshot, to its last."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Bar, Output
    from blobmem.solvers import Display, Solver, TestResult

DESCRIPTION = """\
Trains the net of a solver file up to its max_iter, with the tests and snapshots that the file asks for. The arrays of a
pass take turns at as few bytes as will do, and those of the test nets at the same ones, so that testing takes next to
no memory of its own.
"""

EXAMPLE = """\
example, from the top folder of a clone:
  blobmem convert mnist models/lenet/mnist models/lenet
  blobmem train --solver models/lenet/solver.prototxt

Ctrl-C ends training after the iteration in progress, with a snapshot if the solver writes one at its end; a second one
ends it at once. SIGHUP has a snapshot written, and training goes on. Paths in net and solver files start at the working
folder. Exit code 130 says interrupted.
"""


EFFECTS = ("stop", "snapshot", "none")


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(
        commands, "train", run, "train a net, with test nets that cost no memory", DESCRIPTION, EXAMPLE
    )
    parser.add_argument("--solver", type=Path, required=True, metavar="FILE", help="the solver file (prototxt)")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--weights",
        type=options.paths,
        default=[],
        metavar="FILE[,FILE]",
        help="begin with these parameters (caffemodel), by the names of layers",
    )
    start.add_argument(
        "--snapshot", type=Path, metavar="FILE", help="go on from this snapshot (solverstate), as if never interrupted"
    )
    options.add_state(parser)
    options.add_device(parser)
    options.add_dtype(parser)
    options.add_graphs(parser)
    options.add_streams(parser)
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="add a line for each event to this file, which parse-log reads; standard output has them too, unless it "
        "is a terminal",
    )
    for name, default in (("sigint", "stop"), ("sighup", "snapshot")):
        parser.add_argument(
            f"--{name}-effect",
            choices=EFFECTS,
            default=default,
            help=f"what {name.upper()} does after the iteration in progress: stop, snapshot (and go on), or none; "
            f"{default} by default",
        )
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="warn of a damaged record and take the next one, instead of stopping",
    )
    parser.add_argument(
        "--no-share",
        action="store_true",
        help="let test nets share parameters only, as Caffe does, and have blobs of their own",
    )
    options.add_memory(parser, ("keep", "train"), "train")


def run(args: argparse.Namespace, output: Output) -> int:
    """Build the nets, train, and sum up."""
    from blobmem.cli.nets import load_weights, show_graphs
    from blobmem.solvers import get_solver

    with contextlib.ExitStack() as files:
        if args.log is not None:
            output.log = files.enter_context(open(args.log, "a", encoding="utf-8"))
            files.callback(setattr, output, "log", None)
        solver = get_solver(
            args.solver,
            share=not args.no_share,
            device=args.device,
            dtype=args.dtype,
            level=args.level,
            stages=args.stage,
            skip_damaged=args.skip_damaged,
            memory=args.memory,
            backward_streams=args.backward_streams,
        )
        if args.weights:
            load_weights([solver.net, *solver.test_nets], args.weights, output)
        if args.snapshot is not None:
            solver.restore(args.snapshot)
        session = Session(args, solver, output)
        session.introduce()
        finished = session.train()
        show_graphs([solver.net, *solver.test_nets], args.graph_dot, output)
        if not finished:
            session.say_how_to_resume()
            return 130
        session.sum_up()
        session.show_footprint()
        return 0


class Session:
    """One training run and what is said about it."""

    def __init__(self, args: argparse.Namespace, solver: Solver, output: Output) -> None:
        self.args = args
        self.solver = solver
        self.output = output
        self.first = solver.iter
        self.begin = time.perf_counter()
        self.seconds = 0.0
        self.results: dict[int, TestResult] = {}
        self.snapshot = ""

    # ---------------------------------------------------------------- before

    def introduce(self) -> None:
        """Say what is about to be trained, and what its nets share."""
        from blobmem.footprint import batch_of

        solver, net = self.solver, self.solver.net
        parameters = sum(entry.blob.count for entry in net.learnable)
        origin = f" from iteration {solver.iter}" if solver.iter else ""
        self.output.event(
            "start",
            f"Training {net.name} ({parameters:,} parameters, batch {batch_of(net)}) on {net.device.name}"
            f"{origin} to iteration {solver.param.max_iter}",
            solver=self.args.solver,
            net=net.name,
            parameters=parameters,
            batch=batch_of(net),
            device=net.device.name,
            iteration=solver.iter,
            max_iter=solver.param.max_iter,
        )
        for index in range(len(solver.test_nets)):
            self._say_what_is_shared(index)

    def _say_what_is_shared(self, index: int) -> None:
        from blobmem.cli.nets import by_reason

        report = self.solver.reports[index]
        others = "the train net" if index == 0 else "the nets before it"
        if self.args.no_share:
            human = f"Test net {index} shares parameters with the train net, and no blobs (--no-share)"
        else:
            by_name = self.args.memory == "keep" or report.shared or report.unshared
            arrays = f"{len(report.shared)} arrays" if by_name else "the bytes of its arrays"
            human = f"Test net {index} shares its parameters and {arrays} with {others}"
            for reason, names in by_reason(report.unshared).items():
                human += f"\n  not shared: {', '.join(names)} ({reason})"
        self.output.event(
            "share",
            human,
            test_net=index,
            memory=self.args.memory,
            shared=len(report.shared),
            not_shared=",".join(report.unshared) or "-",
        )

    # ---------------------------------------------------------------- during

    def train(self) -> bool:
        """Train to the end; False if it was interrupted."""
        solver = self.solver
        self.begin = time.perf_counter()
        with self.output.progress(solver.param.max_iter, "iteration", self.first) as bar, self._signals(bar):
            bar.update(self.first, remark="compiling kernels")
            solver.add_callback(
                on_iteration=lambda done, _: self._on_iteration(bar, done),
                on_display=self._on_display,
                on_test=self._on_test,
                on_snapshot=self._on_snapshot,
            )
            try:
                solver.solve()
            except KeyboardInterrupt:
                return False
            finally:
                self.seconds = time.perf_counter() - self.begin
        return not solver.stopped

    @contextlib.contextmanager
    def _signals(self, bar: Bar) -> Iterator[None]:
        """Let signals have their effects after the iteration in progress; a second Ctrl-C to stop stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _: Any) -> None:
            signal.signal(number, signal.default_int_handler)
            self.solver.stop()
            bar.update(self.solver.iter, remark="stopping; Ctrl-C again: at once")

        handlers: dict[str, Any] = {
            "stop": stop, "snapshot": lambda *_: self.solver.snapshot_soon(), "none": signal.SIG_IGN,
        }  # fmt: skip
        with contextlib.ExitStack() as undo:
            for name in ("SIGINT", "SIGHUP"):
                if hasattr(signal, name):  # Windows has no SIGHUP
                    number = getattr(signal, name)
                    effect = getattr(self.args, f"{name.lower()}_effect")
                    undo.callback(signal.signal, number, signal.signal(number, handlers[effect]))
            yield

    def _on_iteration(self, bar: Bar, done: int) -> None:
        if self.output.terminal:
            rate = self.solver.updater.rate.at(max(done - 1, 0))
            bar.update(done, remark=f"loss {self.solver.smoothed_loss:.4g}, rate {rate:.3g}")

    def _on_display(self, display: Display) -> None:
        from blobmem.cli.nets import scalars

        # on a terminal the bar says it
        self.output.event(
            "train",
            "",
            iteration=display.iteration,
            loss=display.loss,
            lr=display.rate,
            seconds=time.perf_counter() - self.begin,
            waited=self._waited(),
            **{f"output_{name}": value for name, value in scalars(display.outputs.values).items()},
        )

    def _waited(self) -> float:
        """Seconds that passes have waited for their data since the nets were built."""
        from blobmem.data.source import waiting_time

        return sum(map(waiting_time, (self.solver.net, *self.solver.test_nets)))

    def _on_test(self, result: TestResult) -> None:
        from blobmem.cli.nets import scalars
        from blobmem.cli.output import described

        self.results[result.index] = result
        values = scalars(result.outputs.values)
        self.output.event(
            "test",
            f"iteration {result.iteration}, test net {result.index}: {described(values)}",
            **{"iteration": result.iteration, "test_net": result.index, **values},
        )

    def _on_snapshot(self, path: str) -> None:
        from blobmem.solvers.snapshot import model_path

        self.snapshot = path
        model = model_path(path)
        iteration = self.solver.iter
        self.output.event("snapshot", f"iteration {iteration}, snapshot: {model}", iteration=iteration,
                          caffemodel=model, solverstate=path)  # fmt: skip

    # ---------------------------------------------------------------- after

    def sum_up(self) -> None:
        """Say how training went: iterations, speed, last test, last snapshot."""
        from blobmem.cli.nets import scalars
        from blobmem.cli.output import described, per_second

        count = self.solver.iter - self.first
        speed = count / self.seconds if self.seconds else 0.0
        lines = [
            f"Trained {count} iterations in {self.seconds:.1f} s ({per_second(speed, 'iteration')}), "
            f"loss {self.solver.smoothed_loss:.4g}",
            f"Waited {self._waited():.1f} s of these for data",
        ]
        values: dict[str, Any] = {"iteration": self.solver.iter, "iterations": count, "seconds": self.seconds,
                                  "loss": self.solver.smoothed_loss, "waited": self._waited()}  # fmt: skip
        for index, result in self.results.items():
            means = scalars(result.outputs.values)
            when = "" if result.iteration == self.solver.iter else f" (at iteration {result.iteration})"
            lines.append(f"Test net {index}{when}: {described(means)}")
            values.update((f"test{index}_{name}", value) for name, value in means.items())
        if self.snapshot:
            lines.append(f"Snapshot: {self.snapshot}")
            values["snapshot"] = self.snapshot
        self.output.event("done", "\n".join(lines), **values)

    def show_footprint(self) -> None:
        """Print what the nets of this solver file hold, with weights shared and as they were run here."""
        from blobmem.cli import footprint as command
        from blobmem.cli.output import mib
        from blobmem.errors import NetError
        from blobmem.footprint import footprint

        keeps = self.args.memory == "keep"
        try:
            schemes = footprint(self.args.solver, schemes=("weights", "blobs" if keeps else "planned"))
        except NetError as error:
            # training went well: a shape that only the data can tell is no reason to fail
            self.output.note(f"no footprint: {error}")
            return
        self.output.say()
        command.table(f"Footprint of {self.args.solver} in MiB", schemes, self.output)
        if keeps:
            who, how = "Test nets add", "blobs are too"
            before, after = (sum(held.total for held in scheme.tests) for scheme in schemes.values())
        else:
            who, how = "The nets hold", "arrays take turns as well"
            before, after = (sum(scheme.predicted) for scheme in schemes.values())
        if before:
            self.output.say(
                f"{who} {mib(before)} MiB where parameters are shared, {mib(after)} MiB where {how}: "
                f"{1 - after / before:.1%} less"
            )

    def say_how_to_resume(self) -> None:
        """After an interruption: the command that goes on from the last snapshot."""
        done = self.solver.iter
        if self.snapshot or self.args.snapshot is not None:
            last = self.snapshot or self.args.snapshot
            command = ["blobmem", "train", "--solver", str(self.args.solver), "--snapshot", str(last)]
            command += ["--no-share"] * self.args.no_share + ["--memory", "keep"] * (self.args.memory == "keep")
            hint = "go on with: " + shlex.join(command)
        else:
            hint = "no snapshot was written (snapshot: N in the solver file writes one every N iterations)"
        self.output.error(f"interrupted after iteration {done}; {hint}")
