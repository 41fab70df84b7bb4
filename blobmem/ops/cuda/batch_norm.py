"""Batch normalisation, with the scale and the ReLU that may follow it, in two passes over memory.

All large arrays are (outer, channels, inner), statistics and factors (channels,), but means (2 * channels,): they are
followed by what they have lost by rounding. x and y (dy and dx) may be the same memory. Statistics join means and
squared distances of parts, in double precision, in an order that the shape decides.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import exact, is_half
from blobmem.ops.cuda import channels
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.registry import ArraySpec

_UP, _DOWN = Kernels("batch_norm"), Kernels("batch_norm_gradient")
_SLICES, _SETTLE = Kernels("batch_norm_slices"), Kernels("batch_norm_settle")
# where channels have no runs:
_COLUMN_BLOCKS = 528  # what an H200 takes at a time
_LEAST_ROWS, _MAP_ROWS = 8, 4  # of a thread, at least: of those that sum, and those of a map that joins parts
_SMALL = 64 << 20  # bytes of an array up to which a launch more is felt
_MOST_JOINED = 256  # parts of channels that blocks of the map join, each for itself, sooner than a launch does
_FINISH_THREADS, _ABREAST = 512, 8  # of the kernels that join parts: threads, and channels of a block


class _Plan(NamedTuple):
    """Parts of a channel, and blocks; lots of channels that a block takes, 0 where channels have runs; and parts of the
    rows for blocks of the map that join the parts, 0 where that is not up to them."""

    parts: int
    blocks: int
    width: int
    chunks: int


@functools.lru_cache(4096)
def _plan(shape: channels.Folded, dtype: np.dtype) -> _Plan:
    outer, count, inner = shape
    if inner > 1 or count == 1:
        parts = channels.splits(shape)
        return _Plan(parts, parts * count, 0, 0)
    pack = min(4, 16 // dtype.itemsize)  # a LOT of the kernels
    small = outer * count * dtype.itemsize <= _SMALL
    lots, widest = (count // pack, 3 + is_half(dtype) if small else 5) if count % pack == 0 else (count, 5)
    width = 1 << min(widest, (lots - 1).bit_length())
    groups = -(-lots // width)
    each = outer * width // THREADS  # rows of a thread if one block takes all
    parts = max(1, min(_COLUMN_BLOCKS // groups, each // _LEAST_ROWS))
    joins = small and count % pack == 0 and 1 < parts <= _MOST_JOINED // (width * pack)
    chunks = max(1, min(_COLUMN_BLOCKS // groups, each // _MAP_ROWS)) if joins else 0
    return _Plan(parts, parts * groups, width, chunks)


def _plan_of(x: Any) -> _Plan:
    return _plan(x.shape, x.dtype) if x.size else _Plan(1, 0, 0, 0)


def workspace(x: Any, *_: Any, **attributes: Any) -> int:
    """Four numbers for each channel, and up to three doubles for each of its parts."""
    parts, count = _plan_of(x).parts, x.shape[1]
    return 4 * exact(x.dtype).itemsize * count + (24 * parts * count if parts > 1 else 0)


class _Reduced(NamedTuple):
    """What a map of channels takes: the address of four numbers a channel, or where its blocks join parts, `grid` of
    them, what they do that with."""

    factors: int
    grid: int
    given: tuple[Any, ...]


def _reduce(kernels: Kernels, like: CudaArray, name: str, finish: str, large: tuple[Any, ...], small: tuple[Any, ...],
            ws: CudaArray, *numbers: Any, maps: bool = True, kept: int = 0,
            joins: bool = True) -> _Reduced:  # fmt: skip
    """Sums by channel of `large` arrays, and what is made of them; `maps`: a map comes next, which may join parts.
    Parts are `kept` at that address, if one is given; and nothing `joins` them now if it is not to."""
    outer, count, inner = like.shape
    parts, blocks, width, chunks = _plan_of(like)
    chunks = chunks if maps else 0
    factors, sums = ws.address, kept or ws.address + 4 * exact(like.dtype).itemsize * count
    given = *small, sums, factors, outer, count, inner, parts, *numbers
    if width:
        kernels.run(like, f"{name}_columns", blocks, THREADS, *large, *given, width)
    else:
        kernels.run(like, name, blocks, THREADS, *large, *given)
    if parts > 1 and not chunks and joins:
        kernels.run(like, finish, -(-count // _ABREAST), _FINISH_THREADS, *given)
    return _Reduced(factors, blocks // parts * chunks, (chunks, width, *given))


def forward(x: CudaArray, y: CudaArray, xhat: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
            running_mean: CudaArray, running_var: CudaArray, factor: CudaArray, gamma: CudaArray | None,
            beta: CudaArray | None, *, eps: float, fraction: float, relu: bool, ws: CudaArray) -> None:  # fmt: skip
    """y = gamma * xhat + beta, and with `relu` 0 where that is negative; xhat = (x - mean) / sqrt(variance + eps).

    xhat, gamma and beta may be left out. The running sums become fraction * old + new, the new variance being the
    unbiased one and the new factor (1,) being 1.
    """
    if x.size == 0:
        return
    state = mean, inv_std, running_mean, running_var, factor
    factors, grid, given = _statistics(x, state, eps, fraction, ws)
    if grid:
        _UP.run(x, "forward_map_joined", grid, THREADS, x, y, xhat, gamma, beta, relu, *given)
    else:
        _UP.chunks(x, "forward_map", x.size, x, y, xhat, factors, gamma, beta, x.size, x.shape[1], x.shape[2], relu)


def forward_sum(x: CudaArray, b: CudaArray, y: CudaArray, xhat: CudaArray | None, state: tuple[CudaArray, ...],
                gamma: CudaArray, beta: CudaArray | None, *, eps: float, fraction: float, slope: float,
                ws: CudaArray) -> None:  # fmt: skip
    """y = gamma * xhat + beta + b where that is positive, slope times as much elsewhere; all else as of `forward`.

    b and y have the size of x, and any shape; y may be b.
    """
    if x.size == 0:
        return
    factors, grid, given = _statistics(x, state, eps, fraction, ws)
    shape = x.size, x.shape[1], x.shape[2]
    if grid:
        _UP.run(x, "forward_sum_map_joined", grid, THREADS, x, b, y, xhat, gamma, beta, slope, *given)
    else:
        _UP.chunks(x, "forward_sum_map", x.size, x, b, y, xhat, factors, gamma, beta, *shape, slope)


def given(x: CudaArray, y: CudaArray, xhat: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
          gamma: CudaArray | None, beta: CudaArray | None, *, relu: bool) -> None:  # fmt: skip
    """y and xhat of `forward` of the same x, to the same bits, by the statistics that it has left."""
    shape = x.size, x.shape[1], x.shape[2]
    _UP.chunks(x, "given_map", x.size, x, y, xhat, mean, inv_std, gamma, beta, *shape, relu)


def given_sum(x: CudaArray, b: CudaArray, y: CudaArray, xhat: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
              gamma: CudaArray, beta: CudaArray | None, *, slope: float) -> None:  # fmt: skip
    """y and xhat of `forward_sum` of the same x and b, to the same bits, by the statistics that it has left."""
    shape = x.size, x.shape[1], x.shape[2]
    _UP.chunks(x, "given_sum_map", x.size, x, b, y, xhat, mean, inv_std, gamma, beta, *shape, slope)


def _statistics(x: CudaArray, state: tuple[CudaArray, ...], eps: float, fraction: float,
                ws: CudaArray) -> _Reduced:  # fmt: skip
    return _reduce(_UP, x, "forward_moments", "forward_finish", (x,), state, ws, eps, fraction)


def _gather(name: str, like: CudaArray, large: tuple[Any, ...], small: tuple[Any, ...], ws: CudaArray, *numbers: Any,
            last: bool) -> None:  # fmt: skip
    """`_reduce` for slices of a batch, to the last of the `small` arrays, which may have room for parts."""
    kept = _parts_behind(like, small[-1])
    joins = last or not kept
    given = (*numbers, bool(kept))
    _reduce(_SLICES, like, name, f"{name}_finish", large, small, ws, *given, maps=False, kept=kept, joins=joins)


def _parts_behind(like: Any, gathered: CudaArray) -> int:
    """The address behind two numbers of each channel, if there are three for each part of each; 0 if not."""
    parts, count = _plan_of(like).parts, like.shape[1]
    return gathered.address + 16 * count if parts > 1 and gathered.size >= (2 + 3 * parts) * count else 0


class Parts(NamedTuple):
    """Where sums of parts of channels are, how many of each, and whether those of slices before are there, too."""

    address: int
    number: int
    kept: bool


def parts_of(like: ArraySpec, gathered: CudaArray, number: int, ws: CudaArray) -> Parts:
    """Where other kernels than these sum such an array to: behind what is `gathered`, if there is room, in as many
    parts as here; else in ws, in as many as they like."""
    kept = _parts_behind(like, gathered)
    return Parts(kept, _plan_of(like).parts, True) if kept else Parts(ws.address, number, False)


def join_moments(run: CudaArray, like: ArraySpec, moments: CudaArray, parts: Parts, *, before: int,
                 last: bool) -> None:  # fmt: skip
    """`moments` of an array, from those of its parts; it is not there itself, but another one with its dtype is."""
    _join(run, "gathered_moments_finish", like, (moments,), parts, before, last=last)


def join_sums(run: CudaArray, like: ArraySpec, gamma: CudaArray | None, beta: CudaArray | None, sums: CudaArray,
              parts: Parts, *, relu: bool, first: bool, last: bool) -> None:  # fmt: skip
    """`sums`, likewise."""
    _join(run, "gathered_sums_finish", like, (gamma, beta, sums), parts, relu, first, last=last)


def _join(run: CudaArray, finish: str, like: ArraySpec, small: tuple[Any, ...], parts: Parts, *numbers: Any,
          last: bool) -> None:  # fmt: skip
    outer, count, inner = like.shape
    given = *small, parts.address, 0, outer, count, inner, parts.number, *numbers, parts.kept
    if parts.number > 1 and (last or not parts.kept):
        _SLICES.run(run, finish, -(-count // _ABREAST), _FINISH_THREADS, *given)


def moments(x: CudaArray, moments: CudaArray, *, before: int, last: bool, ws: CudaArray) -> None:
    """moments (2 * channels,), doubles: by channel means of x and of `before` numbers whose moments are there, and the
    sums of squared distances from them. Behind them there may be room for parts, which the `last` slice joins."""
    if x.size:
        _gather("gathered_moments", x, (x,), (moments,), ws, before, last=last)
    elif not before:
        moments.zero()


def settle(moments: CudaArray, state: tuple[CudaArray, ...], *, eps: float, fraction: float, count: int) -> None:
    """What `forward` leaves of channels of `count` numbers, from their moments."""
    channels = state[1].size
    _SETTLE.over(state[0], "settle", channels, moments, *state, channels, count, eps, fraction, each=1)


def backward(xhat: CudaArray, inv_std: CudaArray, gamma: CudaArray | None, beta: CudaArray | None, dy: CudaArray,
             dx: CudaArray, dgamma: CudaArray | None, dbeta: CudaArray | None, *, relu: bool, accumulate: bool,
             ws: CudaArray) -> None:  # fmt: skip
    """dx = gamma * inv_std * (g - mean(g) - xhat * mean(g * xhat)), means over channels.

    g is dy, with `relu` 0 where y was not positive; dbeta[c] (+)= the sum of g, dgamma[c] (+)= the sum of g * xhat.
    gamma, beta, dgamma and dbeta may be left out.
    """
    _backward("backward_sums", (xhat, dy), xhat, inv_std, gamma, beta, dy, dx, dgamma, dbeta, relu, accumulate, ws)


def sums(xhat: CudaArray, gamma: CudaArray | None, beta: CudaArray | None, dy: CudaArray, sums: CudaArray, *,
         relu: bool, first: bool, last: bool, ws: CudaArray) -> None:  # fmt: skip
    """sums (2 * channels,), doubles, get by channel those of g and those of g * xhat, g as of `backward`. Behind them
    there may be room for parts, as in `moments`."""
    if xhat.size:
        _gather("gathered_sums", xhat, (xhat, dy), (gamma, beta, sums), ws, relu, first, last=last)
    elif first:
        sums.zero()


def gradients(sums: CudaArray, dgamma: CudaArray | None, dbeta: CudaArray | None, *, accumulate: bool) -> None:
    """dgamma and dbeta of `backward`, from the sums."""
    like = dbeta if dgamma is None else dgamma
    if like is not None:
        _SLICES.over(like, "gradients", like.size, sums, dgamma, dbeta, like.size, accumulate, each=1)


def backward_given(xhat: CudaArray, inv_std: CudaArray, gamma: CudaArray | None, beta: CudaArray | None, dy: CudaArray,
                   dx: CudaArray, sums: CudaArray, *, relu: bool, count: int) -> None:  # fmt: skip
    """dx of `backward`, from the sums of `count` numbers a channel."""
    given, shape = (xhat, dy, dx, inv_std, gamma, beta, sums), (xhat.size, xhat.shape[1], xhat.shape[2])
    _SLICES.chunks(xhat, "backward_given_map", xhat.size, *given, 1 / count, *shape, relu)


def summed_backward(top: CudaArray, one: CudaArray, two: CudaArray, total: CudaArray | None, g: CudaArray,
                    xhat: CudaArray, inv_std: CudaArray, gamma: CudaArray, dx: CudaArray, dgamma: CudaArray | None,
                    dbeta: CudaArray | None, *, slope: float, accumulate: bool, ws: CudaArray) -> None:  # fmt: skip
    """`backward` of the gradient g of a sum whose ReLU made top, all of which it writes: one + two where top is
    positive, slope times as much elsewhere. So is total, if given.

    top, one, two, total and g have the size of xhat, and any shape.
    """
    large = xhat, top, one, two, total, g, slope
    _backward("summed_backward_sums", large, xhat, inv_std, gamma, None, g, dx, dgamma, dbeta, False, accumulate, ws)


def _backward(sums: str, large: tuple[Any, ...], xhat: CudaArray, inv_std: CudaArray, gamma: CudaArray | None,
              beta: CudaArray | None, dy: CudaArray, dx: CudaArray, dgamma: CudaArray | None,
              dbeta: CudaArray | None, relu: bool, accumulate: bool, ws: CudaArray) -> None:  # fmt: skip
    """`backward` with the kernel `sums`, of `large` arrays, which leaves g in dy."""
    if xhat.size == 0:
        for total in (dgamma, dbeta):
            if total is not None and not accumulate:
                total.zero()
        return
    small = inv_std, gamma, beta, dgamma, dbeta
    factors, grid, given = _reduce(_DOWN, xhat, sums, "backward_finish", large, small, ws, relu, accumulate)
    shape = xhat.size, xhat.shape[1], xhat.shape[2]
    if grid:
        _DOWN.run(xhat, "backward_map_joined", grid, THREADS, xhat, dy, dx, *given)
    else:
        _DOWN.chunks(xhat, "backward_map", xhat.size, xhat, dy, dx, factors, gamma, beta, *shape, relu)


def inference(x: CudaArray, y: CudaArray, running_mean: CudaArray | None, running_var: CudaArray, factor: CudaArray,
              gamma: CudaArray | None = None, beta: CudaArray | None = None, *, eps: float,
              relu: bool = False) -> None:  # fmt: skip
    """`forward` with the running sums over their factor (0 where that is 0) for statistics; no mean means 0."""
    given = x, y, running_mean, running_var, factor, gamma, beta
    _UP.chunks(x, "batch_norm_inference", x.size, *given, x.size, x.shape[1], x.shape[2], eps, relu)


def sum_inference(a: CudaArray, b: CudaArray, total: CudaArray | None, y: CudaArray, running_mean: CudaArray,
                  running_var: CudaArray, factor: CudaArray, gamma: CudaArray, beta: CudaArray | None, *, eps: float,
                  relu: bool) -> None:  # fmt: skip
    """total = a + b, and y = `inference` of that before it is rounded. a, b and total have y's size, and any shape."""
    given = a, b, total, y, running_mean, running_var, factor, gamma, beta
    _UP.chunks(y, "sum_inference", y.size, *given, y.size, y.shape[1], y.shape[2], eps, relu)
