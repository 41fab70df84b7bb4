"""PyTorch's side of the GPU benchmark: the twin of one of our nets, run in one of PyTorch's ways."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch

import blobmem
from benchmarks import inputs
from benchmarks.clock import Contestant, Deadline
from benchmarks.torch_nets import twin

MIB = 2**20
CLASSES = 10  # of the labels: as many as any net has
MODES = {"compile": "default", "compile_overhead": "reduce-overhead"}


class Theirs:
    """A warmed-up twin.

    Args:
        variant: "eager" (NCHW), "channels_last"; in the layout `layout`: "compile", "compile_overhead" (torch.compile
            in its modes default and reduce-overhead), "graph" (the whole step captured as a CUDA graph).
        layout: "NCHW" or "channels_last".
        others: as for Ours.
    """

    def __init__(
        self, variant: str, layout: str, model: str, batch: int, phase: str, math: str, word: str, deadline: Deadline
    ) -> None:
        self.name = variant
        self.layout = {"eager": "NCHW", "channels_last": "channels_last"}.get(variant, layout)
        self.place = torch.device(word)
        self.on_gpu = self.place.type == "cuda"
        set_math(math)
        self.dtype = dtype_of(math)
        step = self._step(model, batch, phase)
        if variant == "graph":
            self.graph = captured(step)
            step = self.graph.replay
        self.contestant = Contestant(step, torch.cuda.synchronize if self.on_gpu else int)
        self.step_ms = self.contestant.warm_up(deadline)
        if self.on_gpu and variant != "graph":  # a captured step allocates nothing: its peak was its capture
            torch.cuda.reset_peak_memory_stats()

    def _step(self, model: str, batch: int, phase: str) -> Callable[[], Any]:
        train = phase == "train"
        module, arrays = made(model, batch, train, self.layout, self.place, torch.float32 if train else self.dtype)
        parameters = list(module.parameters())
        compiled = self.name in MODES
        if compiled:
            module = torch.compile(module, mode=MODES[self.name])
        if not train:
            return lambda: _infer(module, *arrays)
        begin = torch.compiler.cudagraph_mark_step_begin if compiled else None
        return training_step(module, arrays, sgd(parameters, self.on_gpu), self.dtype, self.name != "graph", begin)

    def finish(self) -> dict[str, Any]:
        """What was measured, with the host's time and the allocator's peak."""
        result = self.contestant.result() | {"host_ms": self.contestant.host_ms(), "layout": self.layout}
        if self.on_gpu:
            result["peak_mib"] = torch.cuda.max_memory_allocated() / MIB
            result["reserved_mib"] = torch.cuda.memory_reserved() / MIB
            if self.name in ("eager", "channels_last"):
                result["unsearched_mib"] = self._peak_unsearched()
        return result

    def _peak_unsearched(self) -> float:
        """The peak in MiB with the algorithms that cuDNN takes without timing them, which may want less scratch."""
        torch.backends.cudnn.benchmark = False
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.contestant.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / MIB

    def close(self) -> None:
        """Give the memory back."""
        compiled = self.name in MODES
        on_gpu = self.on_gpu
        self.__dict__.clear()
        if compiled:
            torch.compiler.reset()
        release(on_gpu)


def release(on_gpu: bool) -> None:
    """Hand what nobody holds any more back to the card."""
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _infer(module: Any, *arrays: Any) -> None:
    with torch.no_grad():
        module(*arrays)


def made(model: str, batch: int, train: bool, layout: str, place: Any, dtype: Any) -> tuple[Any, list[Any]]:
    """The twin of a model, and its inputs, on that device and in that layout ("NCHW", "channels_last")."""
    param = inputs.with_inputs(model, batch, deploy=not train)
    net = blobmem.Net(param, blobmem.TRAIN if train else blobmem.TEST)
    inputs.fill(net, CLASSES)
    data, *others = (torch.from_numpy(net.blobs[name].data) for name in net.inputs)
    forms = {4: torch.channels_last, 5: torch.channels_last_3d} if layout == "channels_last" else {}
    form = forms.get(data.dim(), torch.contiguous_format)
    module: Any = twin(net).train(train).to(place, dtype, memory_format=form)
    arrays = [data.to(place, dtype, memory_format=form)]
    for other in others:  # labels are numbers of classes; whatever else there is stays what it is
        arrays.append(other.to(place).long() if other is others[-1] else other.to(place))
    return module, arrays


def training_step(
    module: Any, arrays: list[Any], optimizer: Any, dtype: Any, cached: bool = True,
    begin: Callable[[], Any] | None = None, around: Any = None,
) -> Callable[[], None]:  # fmt: skip
    """Forward, backward and update; in halves as autocast has them, whose casts of weights a captured step can't cache.

    Args:
        begin: called between the gradients' clearing and the forward pass.
        around: a context manager for the forward pass.
    """
    halves = dtype != torch.float32

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if begin is not None:
            begin()
        with around or contextlib.nullcontext(), torch.autocast(arrays[0].device.type, dtype, halves, cached):
            loss = module(*arrays)
        loss.backward()
        optimizer.step()

    return step


def captured(step: Callable[[], Any]) -> Any:
    """The CUDA graph of a step, captured after a few that choose algorithms and make the optimizer's state."""
    if not torch.cuda.is_available():
        raise RuntimeError("CUDA graphs need a GPU")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def sgd(parameters: Any, on_gpu: bool) -> Any:
    """The optimizer; of PyTorch's three forms of the update the fused one is the fastest, and takes no memory."""
    return torch.optim.SGD(
        parameters, inputs.RATE, momentum=inputs.MOMENTUM, weight_decay=inputs.DECAY, fused=on_gpu or None
    )


def dtype_of(math: str) -> Any:
    """PyTorch's dtype of that name where it is one of halves, else float32."""
    return getattr(torch, inputs.dtype_of(math))


def set_math(math: str) -> None:
    """fp32: no TF32 anywhere; tf32: wherever PyTorch can. The fastest algorithms, found by timing, in halves, too."""
    allowed = math == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.benchmark = True
