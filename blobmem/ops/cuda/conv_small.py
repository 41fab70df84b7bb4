"""Convolutions of few channels and small planes by kernels of our own, which turn no arrays over and widen none.

They are among the plans that a search times (`conv_search`), in several tilings, each with a name of its own: what a
choice says runs anywhere. float32 only, the same bits on every run; either layout, the weights in the file's order.
Tensor cores compute them in "tf32", and in "fp32" the gradients for weights, of eleven bits of each number and eleven
of the rest, whose errors are float32's; for the other directions cuDNN's "fp32" plans are faster.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError
from blobmem.ops.cuda.algorithms import Key
from blobmem.ops.cuda.launch import Kernels

SMALL = "small:"
"""What the name of such a plan begins with; behind it come the numbers of its tiling."""

_KERNELS = Kernels("conv_small")
_MOST_PRODUCTS = 1 << 28  # beyond, tensor cores are faster, and for float32 cuDNN
_MOST_TAPS = 128  # of a kernel
_ROOM = 5632  # numbers in half of a block's shared memory (HALF in the source)
_PLACES = 480  # in a table (PLACES in the source)
_MOST_WARPS = 16
_TILE = 32  # rows and columns of what a warp finds
_CARD = 132  # blocks that are about one each for the multiprocessors of a card
_TILINGS = 24  # of those that look best, how many are timed
_GAP = 0.5  # how near the best a tiling has to look


class Convolved(NamedTuple):
    """A tiling of an output or of a gradient for the data: channels of the result and rows in a block, slices that the
    sums are in, and the source's channels in shared memory at a time."""

    run: int
    rows: int
    slices: int
    depth: int


class Weighed(NamedTuple):
    """A tiling of a gradient for the weights: outputs and rows in a block, slices that the sums are in, the source's
    channels in a block, and parts that the bands are summed in."""

    run: int
    rows: int
    slices: int
    depth: int
    parts: int


class Gathered(NamedTuple):
    """A tiling of a gradient for the data that is gathered from what each position of dy adds to it: channels of the
    result in a block, slices that the sums are in, and the source's channels in shared memory at a time."""

    run: int
    slices: int
    depth: int


Tiling = Convolved | Weighed | Gathered


class Small:
    """A tiling of a convolution that can be run.

    Attributes:
        name: as choices have it.
        workspace: bytes that it needs, for the sums of parts.
    """

    __slots__ = ("_block", "_grid", "_kernel", "_parts", "_shapes", "name", "workspace")

    def __init__(self, key: Key, tiling: Tiling) -> None:
        self.name = SMALL + "x".join(map(str, tiling))
        shape = _Shape.of(key)
        math_name = "tf32" if key.math == "tf32" else "fp32"
        last = key.layout == "NHWC"
        dims = (shape.source, (shape.outputs, shape.height, shape.width), shape.window)
        runs = -(-shape.outputs // tiling.run)
        self._parts, self.workspace = 1, 0
        self._shapes: tuple[Any, ...]
        tile: tuple[int, ...]
        if isinstance(tiling, Weighed):
            self._parts = tiling.parts
            self.workspace = 4 * tiling.parts * math.prod(key.w) if tiling.parts > 1 else 0
            self._kernel = f"weights_gradient_{math_name}"
            self._grid = runs * -(-key.w[1] // tiling.depth) * tiling.parts
            tile = (*tiling[:4], *shape.seen(tiling.rows), shape.line(tiling), tiling.parts)
            self._shapes = (key.x[0], *dims, tile, last)
        elif isinstance(tiling, Gathered):
            self._kernel, self._grid = "gather_tf32", key.x[0] * runs
            tile = (*tiling, *shape.lines(tiling))
            self._shapes = (*dims, tile, last)
        else:
            self._kernel = "convolve_tf32"
            self._grid = key.x[0] * -(-shape.height // tiling.rows) * runs
            tile = (*tiling, *shape.seen(tiling.rows), shape.line(tiling))
            self._shapes = (*dims, tile, key.direction == "data", last)
        self._block = 32 * shape.tiles(tiling) * tiling.slices

    @classmethod
    def named(cls, key: Key, name: str) -> Small | None:
        """The plan of that name for a key; None if it is none of these."""
        if not name.startswith(SMALL) or not fits(key):
            return None
        numbers = name.removeprefix(SMALL).split("x")
        kind: type[Tiling] = Weighed if key.direction == "weights" else Convolved
        if key.direction == "data" and len(numbers) == len(Gathered._fields):
            kind = Gathered
        try:
            tiling = kind(*map(int, numbers))
        except (TypeError, ValueError):
            return None
        return cls(key, tiling) if _Shape.of(key).takes(tiling) else None

    def forward(self, x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, relu: bool = False) -> None:
        """y = x convolved with w, plus b, and with `relu` max(0, .) of that; or dx from dy (as x), plus b."""
        _KERNELS.run(y, self._kernel, self._grid, self._block, x, w, b, y, *self._shapes, relu)

    def weights(self, x: CudaArray, dy: CudaArray, dw: CudaArray, ws: CudaArray | None, accumulate: bool) -> None:
        """dw (+)= the gradient for the weights. DeviceError if ws is too small."""
        if self.workspace and (ws is None or ws.nbytes < self.workspace):
            held = 0 if ws is None else ws.nbytes
            raise DeviceError(f"a convolution needs {self.workspace} bytes of workspace but was given {held}")
        partial = ws if self.workspace else None
        _KERNELS.run(dw, self._kernel, self._grid, self._block, x, dy, dw, partial, *self._shapes, accumulate)
        if partial is not None:
            add_partial(partial, dw, self._parts, accumulate)


def add_partial(partial: CudaArray, dw: CudaArray, parts: int, accumulate: bool) -> None:
    """dw (+)= the sum of the parts, float32 of dw's size one behind the other."""
    _KERNELS.run(dw, "add_partial", -(-dw.size // 32), 256, partial, dw, dw.size, parts, accumulate)


def fits(key: Key) -> bool:
    """Whether our kernels take a convolution, and it is of a size that they are meant for."""
    return (
        key.direction in ("weights", *(("forward", "forward+bias", "data") if key.math == "tf32" else ()))
        and key.dtype == "float32"
        and len(key.stride) == 2 and key.group == 1 and {*key.dilation} == {1}
        and math.prod(key.w[2:]) <= _MOST_TAPS and max(key.stride) <= 4
        and 0 < math.prod(key.y) * math.prod(key.w[1:]) <= _MOST_PRODUCTS
        and any(True for _ in _Shape.of(key).tilings())
    )  # fmt: skip


@functools.lru_cache(1024)
def plans(key: Key) -> list[Small]:
    """The tilings that are worth timing, the best guesses first."""
    shape = _Shape.of(key)
    looks = sorted((shape.cost(tiling), tiling) for tiling in shape.tilings())
    return [Small(key, tiling) for cost, tiling in looks[:_TILINGS] if cost * _GAP <= looks[0][0]]


class _Shape(NamedTuple):
    """A convolution as the kernels see it: from `source` (channels, height, width) to `outputs` of `height` x `width`;
    for a gradient for the data the source is dy, its numbers `apart`."""

    images: int
    source: tuple[int, ...]
    outputs: int
    height: int
    width: int
    window: tuple[int, ...]
    direction: str
    products: int  # by tensor cores, for each of numbers

    @classmethod
    def of(cls, key: Key) -> _Shape:
        kernel, source, (outputs, height, width) = key.w[2:], key.x[1:], key.y[1:]
        window = (*kernel, *key.stride, *key.pad, 1, 1)
        if key.direction == "data":
            source, (outputs, height, width) = key.y[1:], source
            pad = tuple(k - 1 - p for k, p in zip(kernel, key.pad, strict=True))
            window = (*kernel, 1, 1, *pad, *key.stride)
        products = 1 if key.math == "tf32" else 3
        return cls(key.x[0], source, outputs, height, width, window, key.direction, products)

    @property
    def taps(self) -> int:
        return self.window[0] * self.window[1]

    def seen(self, rows: int) -> tuple[int, int]:
        """Rows and columns of the source in shared memory for so many rows of the result."""
        kernel_rows, kernel_columns, down, right = self.window[:4]
        # the weights behind are to begin with a multiple of 16 bytes
        return (rows - 1) * down + kernel_rows, (self.width - 1) * right + kernel_columns + 3 & ~3

    def line(self, tiling: Tiling) -> int:
        """Numbers from a line of what the source is multiplied by to the next in shared memory; lines read at a
        time begin in other banks."""
        if self.direction == "data":
            return tiling.run * self.taps + 3 & ~3
        if isinstance(tiling, Weighed):
            return (tiling.rows * self.width + 7 & ~7) + 4
        return (tiling.depth * self.taps + 3 & ~7) + 4

    def lines(self, tiling: Gathered) -> tuple[int, int]:
        """Numbers from a line of the source to the next in shared memory, and of weights; lines read at a time begin in
        other banks."""
        positions, across = math.prod(self.source[1:]), tiling.run * self.taps
        return (positions + 23 & ~31) + 8, (across + 23 & ~31) + 8

    def tiles(self, tiling: Tiling) -> int:
        """Warps for a slice."""
        if isinstance(tiling, Gathered):
            return -(-math.prod(self.source[1:]) // _TILE) * -(-tiling.run * self.taps // _TILE)
        if isinstance(tiling, Weighed):
            return -(-tiling.run // _TILE) * -(-tiling.depth * self.taps // _TILE)
        return -(-tiling.rows * self.width // _TILE)

    def takes(self, tiling: Tiling) -> bool:
        """Whether a block has room and threads for it."""
        if min(tiling) < 1 or self.tiles(tiling) * tiling.slices > _MOST_WARPS:
            return False
        if isinstance(tiling, Gathered):
            sums = tiling.slices * tiling.run * self.taps * (-(-math.prod(self.source[1:]) // _TILE) * _TILE + 4)
            room = tiling.depth * sum(self.lines(tiling))
            return tiling.depth % 8 == 0 and tiling.depth <= _PLACES and sums <= 2 * _ROOM and room <= _ROOM
        if tiling.run % 8:
            return False
        lines, planes = tiling.run, tiling.depth
        places, across = tiling.rows * self.width, tiling.depth * self.taps
        if isinstance(tiling, Convolved):
            if tiling.run > _TILE:
                return False
            lines, planes = tiling.depth if self.direction == "data" else tiling.run, planes + 1
            places, across = across, places
        sums = tiling.slices * tiling.run * (-(-across // _TILE) * _TILE + 4)
        room = planes * math.prod(self.seen(tiling.rows)) + lines * self.line(tiling)
        return sums <= 2 * _ROOM and room <= _ROOM and places <= _PLACES

    def tilings(self) -> Iterator[Tiling]:
        """All that leave no block without work."""
        runs, rows = [8 * n for n in _shares(-(-self.outputs // 8))], _shares(self.height)
        numbers = itertools.product(runs, rows, range(1, _MOST_WARPS + 1), _shares(self.source[0]))
        found: Iterator[Tiling]
        if self.direction == "weights":
            found = (Weighed(*each, parts) for each in numbers for parts in self._parts(*each))
        else:
            found = (Convolved(*each) for each in numbers)
        if self.direction == "data":
            depths = {8 * -(-depth // 8) for depth in _shares(self.source[0])}
            gathered = itertools.product(_shares(self.outputs), range(1, _MOST_WARPS + 1), sorted(depths))
            found = itertools.chain(found, (Gathered(*each) for each in gathered))
        return (tiling for tiling in found if self.takes(tiling))

    def _parts(self, run: int, rows: int, _: int, depth: int) -> set[int]:
        """Parts that make one to four blocks for each multiprocessor."""
        units = self.images * -(-self.height // rows)
        blocks = -(-self.outputs // run) * -(-self.source[0] // depth)
        return {max(1, min(units, _CARD * each // blocks)) for each in (1, 2, 4)}

    def cost(self, tiling: Tiling) -> float:
        """About how many cycles a card takes: rough, but of tilings that differ much the better one's is less."""
        runs, warps, behind = -(-self.outputs // tiling.run), self.tiles(tiling) * tiling.slices, 0.0
        lines: tuple[int, int]
        if isinstance(tiling, Gathered):
            blocks, steps, places = self.images * runs, -(-self.source[0] // tiling.depth), tiling.depth
            positions, lines = math.prod(self.source[1:]), (tiling.run * self.taps, tiling.depth)
            loads = tiling.depth * positions * (16 if positions % 4 else 4)
            terms = tiling.slices * self.taps // math.prod(self.window[6:])
            adds = tiling.run * self.height * self.width / (32 * warps) * (30 + 10 * terms)
        else:
            bands, positions = -(-self.height // tiling.rows), tiling.rows * self.width
            if isinstance(tiling, Weighed):
                blocks = runs * -(-self.source[0] // tiling.depth) * tiling.parts
                steps = -(-self.images * bands // tiling.parts)
                places, lines, results = positions, (positions, tiling.run), tiling.depth * self.taps
                if tiling.parts > 1:
                    behind = 3000 + tiling.parts * self.outputs * self.source[0] * self.taps / 1000
            else:
                blocks, steps = self.images * bands * runs, -(-self.source[0] // tiling.depth)
                places, results = tiling.depth * self.taps, positions
                lines = (tiling.run * self.taps, tiling.depth) if self.direction == "data" else (places, tiling.run)
            whole = self.seen(tiling.rows)[1] == self.source[2] and not any(self.window[4:6])
            loads = tiling.depth * math.prod(self.seen(tiling.rows)) * (5 if whole else 25)
            adds = tiling.run * results / (32 * warps) * (30 + 30 * tiling.slices)  # of the slices, at the end
        loads += math.prod(lines) * (16 if lines[0] % 4 else 4)
        resident = min(-(-blocks // _CARD), 16 // warps or 1, 4)
        rounds = -(-blocks // (_CARD * resident))
        # instructions of a multiprocessor's warps at a step, and how long one warp takes for it
        eights = -(-places // 8 // tiling.slices) or 1
        issued = resident * (warps * eights * (55 + 25 * self.products) + loads / 32) / 4
        waits = max(eights * (100 + 50 * self.products), 800 / resident) + 100
        return rounds * (steps * max(issued, waits) + 3500 + adds) + behind


def _shares(n: int) -> list[int]:
    """What each of one, two, three... equal shares of n comes to, each size once."""
    return sorted({-(-n // shares) for shares in range(1, n + 1)})
