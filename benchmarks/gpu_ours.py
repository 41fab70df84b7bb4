"""blobmem's side of the GPU benchmark: one net in one phase on a device of its own, with constant data."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import blobmem
from benchmarks import inputs
from benchmarks.clock import Contestant, Deadline
from blobmem import devices, dtypes

MIB = 2**20
CLASSES = 10  # of the labels: as many as any net has
SOLVER_STEPS = 5


class Ours:
    """A warmed-up net. `contestant` takes its steps one by one without reading a loss, which is what makes nobody wait.

    Args:
        model, batch: a folder of models/ and the batch size.
        phase: "train" (forward, backward, update) or "infer" (the deploy net's forward).
        math: "fp32", "tf32", or a dtype of halves, in which the net then is.
        word: the device's ("cuda").
        memory: the net's.
        captured: run it in CUDA graphs where the device can.
    """

    def __init__(
        self, model: str, batch: int, phase: str, math: str, word: str, deadline: Deadline,
        memory: str = "keep", captured: bool = True,
    ) -> None:  # fmt: skip
        begin = time.perf_counter()
        self.device = device_of(word, math, captured)
        given = {"device": self.device, "dtype": inputs.dtype_of(math), "memory": memory}
        self._synchronize = waiting(self.device)
        self.solver: Any = None
        with search_clock() as self.searched:
            if phase == "train":
                self.solver = inputs.solver_of(inputs.with_inputs(model, batch), **given)
                self.net = self.solver.net
                inputs.fill(self.net, CLASSES)
                self.solver.step(1)
                # what a plan gives up and makes anew is the business of whoever runs a whole step
                step = self._train_step() if memory == "keep" else lambda: self.solver.step(1)
            else:
                net = inputs.with_inputs(model, batch, deploy=True)
                self.net = blobmem.Net(net, blobmem.TEST, seed=1, forward_only=True, **given)
                inputs.fill(self.net, CLASSES)
                inputs.fill_weights(self.net)
                step = self.net.run_forward  # a deploy net has no loss to read
            several = None if self.solver is None else self.solver.step
            self.contestant = Contestant(step, self._synchronize, several=several)
            self.contestant.take(1)
        self.prepared = time.perf_counter() - begin
        self.step_ms = self.contestant.warm_up(deadline)
        self.device.statistics.reset_peak()

    def _train_step(self) -> Callable[[], None]:
        """`Solver.step` without what it reads each time, and without looking at the needs again."""
        net, updater, iteration = self.net, self.solver.updater, self.solver.iter
        forward, backward = net.compiled()

        def step() -> None:
            net.clear_param_diffs()
            net.state.iteration += 1
            forward.run()
            backward.run()
            updater.run(iteration)

        return step

    def finish(self) -> dict[str, Any]:
        """What was measured, with the host's time, `Solver.step`'s, and the bytes held."""
        result = self.contestant.result()
        result["host_ms"] = self.contestant.host_ms()
        if self.solver is not None:
            whole = Contestant(lambda: self.solver.step(1), self._synchronize)
            result["solver_ms"] = whole.take(SOLVER_STEPS)
        statistics = self.device.statistics
        if not self.device.is_host:
            result["peak_mib"] = statistics.peak_bytes / MIB
            result["physical_mib"] = getattr(self.device, "physical_bytes", 0) / MIB
        return result | {"search_s": self.searched[0], "searches": self.searched[1], "prepare_s": self.prepared}

    def close(self) -> None:
        """Give the memory back."""
        self.__dict__.clear()
        gc.collect()


def device_of(word: str, math: str, captured: bool = True) -> devices.Device:
    """A device of its own, so that its statistics are; where the math is a dtype of halves one of fp32. Unless
    `captured` it has no CUDA graphs."""
    math = "fp32" if math in dtypes.HALVES else math
    device = devices.get(word, math=math) if word.startswith("cuda") else devices.get(word)
    device.graphs = device.graphs and captured
    return device


def waiting(device: devices.Device) -> Callable[[], Any]:
    """What waits for all that a device was given to do."""
    return int if device.is_host else device.synchronize  # int: nothing to wait for


@contextlib.contextmanager
def search_clock() -> Iterator[list[float]]:
    """[seconds, searches] for algorithms that are not known yet, while this lasts; building plans is a part of it."""
    from blobmem.ops.cuda import conv_plans

    spent = [0.0, 0]
    patched: Any = conv_plans
    original = patched._search

    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*args, **options)
        finally:
            spent[0] += time.perf_counter() - begin
            spent[1] += 1

    patched._search = timed
    try:
        yield spent
    finally:
        patched._search = original
