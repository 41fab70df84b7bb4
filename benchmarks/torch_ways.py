"""PyTorch's training step of a net of ours where memory is short: plain, in a CUDA graph, with what is saved for
gradients on the host, and checkpointed in segments."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from benchmarks.clock import Contestant, Deadline, race, steps_for
from benchmarks.gpu_torch import captured, dtype_of, made, release, set_math, sgd, training_step
from benchmarks.torch_segments import segmentations, segmented

LAYOUTS = ("NCHW", "channels_last")


class Theirs:
    """The twin of one of our nets, in the layout in which a step is faster, in a CUDA graph if it may be in one, as the
    host bounds others. Halves are autocast's.

    Args:
        model, batch: a folder of models/ and the batch size.
        math: "fp32", "tf32", "float16" or "bfloat16".
        word: the device's ("cuda").
        deadline: of all that is measured.
        steps, seconds, group: as `clock.race` has them.
    """

    def __init__(
        self, model: str, batch: int, math: str, word: str, deadline: Deadline, steps: int, seconds: float, group: int
    ) -> None:
        self._place, self._math, self._deadline = torch.device(word), math, deadline
        self._steps, self._seconds, self._group = steps, seconds, group
        self._on_gpu = self._place.type == "cuda"
        set_math(math)
        took = {}
        for layout in LAYOUTS:
            self._make(model, batch, layout)
            took[layout] = self._first_ms()
            if self._arrays[0].dim() < 4:
                break  # words have but one
        self.layout = min(took, key=lambda layout: took[layout])
        self._make(model, batch, self.layout)  # a graph's gradients lie in its own memory
        self.segmentations = [*segmentations(self._module)]

    def plain(self) -> dict[str, Any]:
        """Figures of the step as it is."""
        return self._measured(self._step(self._module)) | {"layout": self.layout}

    def graph(self) -> dict[str, Any]:
        """Of the step captured as a CUDA graph."""
        graph = captured(self._step(self._module, cached=False))
        peak = torch.cuda.max_memory_allocated()  # a replay allocates nothing
        return self._measured(graph.replay) | {"peak_bytes": peak}

    def on_host(self) -> dict[str, Any]:
        """Of the step with all that is saved for gradients in page-locked memory of the host."""
        offload = save_on_cpu(pin_memory=self._on_gpu)
        return self._measured(self._step(self._module, offload))

    def checkpointed(self, limits: Sequence[int]) -> list[dict[str, Any]]:
        """For each limit, figures of the step in the fewest segments with which it takes no more; or else least."""
        peaks = {cuts: self._peak(self._step(segmented(self._module, cuts))) for cuts in self.segmentations}
        if not peaks:
            raise ValueError("no segments hold less than the whole step")
        measured: dict[tuple[int, ...], dict[str, Any]] = {}
        result = []
        for limit in limits:
            cuts = next((cuts for cuts in peaks if peaks[cuts] <= limit), min(peaks, key=lambda cuts: peaks[cuts]))
            if cuts not in measured:
                measured[cuts] = self._measured(self._step(segmented(self._module, cuts)))
                measured[cuts]["segments"] = len(cuts) + 1
            result.append(measured[cuts])
        return result

    def close(self) -> None:
        """Give the memory back."""
        on_gpu = self._on_gpu
        self.__dict__.clear()
        release(on_gpu)

    def _make(self, model: str, batch: int, layout: str) -> None:
        self._module, self._arrays = made(model, batch, True, layout, self._place, torch.float32)
        self._optimizer = sgd(self._module.parameters(), self._on_gpu)

    def _first_ms(self) -> float:
        """What a step takes, roughly."""
        step: Callable[[], Any] = self._step(self._module)
        if self._on_gpu:
            with contextlib.suppress(RuntimeError):  # not every net's step may be captured
                step = captured(self._step(self._module, cached=False)).replay
        return self._contestant(step).warm_up(self._deadline)

    def _step(self, module: Any, around: Any = None, cached: bool = True) -> Callable[[], None]:
        return training_step(module, self._arrays, self._optimizer, dtype_of(self._math), cached, around=around)

    def _contestant(self, step: Callable[[], Any]) -> Contestant:
        return Contestant(step, torch.cuda.synchronize if self._on_gpu else int)

    def _measured(self, step: Callable[[], Any]) -> dict[str, Any]:
        with self._clean():
            contestant = self._contestant(step)
            ms = contestant.warm_up(self._deadline)
            peak = self._peak(step)
            race([(contestant, steps_for(ms, self._steps, self._seconds))], self._group, self._deadline)
            return contestant.result() | {"peak_bytes": peak}

    def _peak(self, step: Callable[[], Any]) -> int:
        with self._clean():
            self._deadline.check()
            if not self._on_gpu:
                step()
                return 0
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()

    @contextlib.contextmanager
    def _clean(self) -> Iterator[None]:
        """Nothing is left of what others did before."""
        gc.collect()
        try:
            yield
        finally:
            self._optimizer.zero_grad(set_to_none=True)
