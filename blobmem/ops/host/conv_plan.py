"""How a convolution is cut into matrix products: shapes and offsets only, worked out once per shape.

A *pass* is one product

    out[m, j] = sum over k of A[m, k] * column[k, j]     k = (channel, tap), j = (image, position in a lattice)

where column[k, j] is the source element that tap k sees from position j, zero outside the source. A forward
convolution is one pass. Its gradient for the data is one pass per phase of the stride: the inputs at positions q,
q + s, q + 2s, ... see the output gradient through every (s / gcd(s, dilation))-th tap, from last to first, at stride 1.

A lattice has three axes; fewer are filled up as (1, 1, W) and (H, 1, W), so that the outermost is the one to cut.
Positions are cut into *blocks*; what a block's taps see is first copied to a *band*, a window of the source with the
zeros around it and, at strides above 1, one plane per phase, so that every tap then sees contiguous rows. A source
without padding and strides is its own band.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from blobmem.ops.host.tile import ROWS, lanes_of, panel_of

Shape = tuple[int, ...]
Axes = tuple[int, int, int]

# The fields of Pass.geometry, which compiled kernels read.
GROUPS, IMAGES, CHANNELS, OUT_CHANNELS, TAPS, STEPS, STEPS_AT_ONCE, DIRECT = range(8)
BLOCK_IMAGES, BLOCKS_PER_IMAGE, COLUMNS, BAND_SIZE, BAND_ROW, ROW_STRIDE = range(8, 14)
SOURCE_IMAGE, SOURCE_CHANNEL, WINDOW_CHANNEL, OUT_IMAGE, OUT_CHANNEL = range(14, 19)

# The columns of Pass.blocks.
WINDOW_AT, POSITIONS, OUT_AT = range(3)

MOST_STEPS = 384
"""Steps k at once, in float32: what keeps a block of columns in a second-level cache."""

MOST_COLUMNS = 512
"""Columns at once of the weights' gradient, in float32."""

_BLOCK_BYTES = MOST_STEPS * 384 * 4


@dataclass(frozen=True)
class Problem:
    """A convolution of images (images, groups * channels, *source) to (images, groups * out_channels, *out)."""

    images: int
    groups: int
    channels: int
    out_channels: int
    source: Axes
    out: Axes
    kernel: Axes
    stride: Axes
    pad: Axes
    dilation: Axes
    itemsize: int


@dataclass(frozen=True)
class Pass:
    """One product; arrays are of int64 and not to be written."""

    geometry: np.ndarray
    blocks: np.ndarray
    """(blocks per image, 3): where the window begins in a channel (of a source that is its own band), how many
    positions, and where they begin in out."""
    out_at: np.ndarray
    """Per column of a full block, where it lies from the block's first; a smaller block has the first of them."""
    step_at: np.ndarray
    """Per step, where its element lies in the window from a position's."""
    pieces: np.ndarray
    """(3, n): stretches of up to a vector that make up panels of columns: place in the window, column, length."""
    first_piece: np.ndarray
    """Per panel, its first piece; and an end."""
    band_rows: np.ndarray
    """(blocks per image, rows of one image's band, 3): zeros in front, elements from the source, the first's place."""
    tap_index: np.ndarray
    """Per tap, its index in the kernel."""

    @property
    def count(self) -> int:
        """Blocks, of all images."""
        g = self.geometry
        return int(-(-g[IMAGES] // g[BLOCK_IMAGES]) * g[BLOCKS_PER_IMAGE])

    @property
    def steps(self) -> int:
        """K: channels of a group times taps; 0 where no tap reaches, and the outputs are the bias alone."""
        return int(self.geometry[STEPS])


def fold(shape: Shape, fill: int) -> Axes:
    """One to three spatial axes as three."""
    if len(shape) == 1:
        return fill, fill, shape[0]
    if len(shape) == 2:
        return shape[0], fill, shape[1]
    return shape[0], shape[1], shape[2]


@lru_cache(maxsize=512)
def forward_pass(p: Problem) -> Pass:
    """The pass that computes the outputs."""
    return _Cut(p, p.channels, p.out_channels, p.source, p.out, p.stride, p.dilation, p.pad,
                [range(n) for n in p.kernel], p.out, (0, 0, 0), (1, 1, 1)).cut()  # fmt: skip


@lru_cache(maxsize=512)
def weights_pass(p: Problem, steps_at_once: int) -> Pass:
    """The forward pass cut for the weights' gradient, where a whole block is one panel.

    The columns do not depend on `steps_at_once`, so neither does any sum.
    """
    return _Cut(p, p.channels, p.out_channels, p.source, p.out, p.stride, p.dilation, p.pad,
                [range(n) for n in p.kernel], p.out, (0, 0, 0), (1, 1, 1)).cut(steps_at_once)  # fmt: skip


@lru_cache(maxsize=512)
def data_passes(p: Problem) -> tuple[Pass, ...]:
    """The passes that compute the gradient for the source from that for the outputs; together they write all of it."""
    phases = itertools.product(*(range(min(s, n)) for s, n in zip(p.stride, p.source, strict=True)))
    return tuple(_data_pass(p, phase) for phase in phases)


def _data_pass(p: Problem, phase: Shape) -> Pass:
    lattice, taps, dilation, pad = [], [], [], []
    for q, n, k, s, d, before in zip(phase, p.source, p.kernel, p.stride, p.dilation, p.pad, strict=True):
        seen = [t for t in range(k) if (q + before - t * d) % s == 0][::-1]
        lattice.append(-(-(n - q) // s))
        taps.append(seen)
        dilation.append(d // math.gcd(s, d))
        pad.append(-((q + before - seen[0] * d) // s) if seen else 0)
    return _Cut(p, p.out_channels, p.channels, p.out, tuple(lattice), (1, 1, 1), tuple(dilation), tuple(pad), taps,
                p.source, phase, p.stride).cut()  # fmt: skip


@dataclass(frozen=True)
class _Cut:
    """What makes up a pass, before it is cut into blocks.

    `taps` lists per axis the kernel's indices in the order in which positions see them, `dilation` apart in the source;
    outputs lie in an array of `out` at `out_first` and every `out_step`.
    """

    p: Problem
    channels: int
    out_channels: int
    source: Axes
    lattice: Shape
    stride: Axes
    dilation: Shape
    pad: Shape
    taps: list
    out: Axes
    out_first: Shape
    out_step: Axes

    def cut(self, at_once: int = 0) -> Pass:
        """Cut into blocks; `at_once` steps for the weights' gradient, else as many as go well with the caches."""
        p, item = self.p, self.p.itemsize
        counts = [len(t) for t in self.taps]
        n_taps = math.prod(counts)
        steps = self.channels * n_taps
        columns = MOST_COLUMNS * 4 // item
        panel = columns
        if not at_once:
            at_once, panel = _steps_at_once(steps, n_taps, item), panel_of(item)
            columns = min(2304, max(384, _BLOCK_BYTES // (item * at_once)))
        block = _block(p.images, self.lattice, columns)
        planes = [sorted({t * d % s for t in range(n)}) or [0]
                  for n, d, s in zip(counts, self.dilation, self.stride, strict=True)]  # fmt: skip
        direct = self._is_own_band(counts)
        rows = self.source if direct else tuple(
            b + max(0, n - 1) * d // s for b, n, d, s in zip(block[1:], counts, self.dilation, self.stride, strict=True)
        )  # fmt: skip
        slots = math.prod(len(x) for x in planes)
        plane = math.prod(rows)
        size, image, channel = math.prod(self.source), slots * plane, block[0] * slots * plane
        if direct:
            image, channel = p.groups * self.channels * size, size
        channels_seen = min(self.channels, -(-at_once // max(1, n_taps)) + 1)
        blocks = self._blocks(block)
        pieces, first_piece = self._pieces(block, rows, image, panel)
        return Pass(
            geometry=_ints([
                p.groups, p.images, self.channels, self.out_channels, n_taps, steps, at_once, direct, block[0],
                len(blocks), math.prod(block), 0 if direct else channels_seen * channel, rows[2], self.stride[2],
                p.groups * self.channels * size, size, channel,
                p.groups * self.out_channels * math.prod(self.out), math.prod(self.out),
            ]),
            blocks=_ints(blocks),
            out_at=self._out_at(block),
            step_at=_ints(np.add.outer(np.arange(self.channels) * channel, self._tap_at(planes, rows)).reshape(-1)),
            pieces=pieces,
            first_piece=first_piece,
            band_rows=self._band_rows(block, planes, rows),
            tap_index=_sums([[t * s for t in taps] for taps, s in zip(self.taps, _strides(p.kernel), strict=True)]),
        )  # fmt: skip

    def _is_own_band(self, counts: list[int]) -> bool:
        reach = (n + (t - 1) * d for n, t, d in zip(self.lattice, counts, self.dilation, strict=True))
        inside = all(end <= size for end, size in zip(reach, self.source, strict=True))
        return self.stride == (1, 1, 1) and not any(self.pad) and inside

    def _origins(self, block: Shape) -> Iterator[tuple[Shape, list[int]]]:
        """Per block of an image, its first position, and where its window begins."""
        for at in itertools.product(*(range(0, n, b) for n, b in zip(self.lattice, block[1:], strict=True))):
            yield at, [q * s - before for q, s, before in zip(at, self.stride, self.pad, strict=True)]

    def _blocks(self, block: Shape) -> list[list[int]]:
        rows = []
        axis = [a * f for a, f in zip(_strides(self.out), self.out_step, strict=True)]
        first = _dot(_strides(self.out), self.out_first)
        for at, window in self._origins(block):
            sizes = (min(b, n - q) for q, n, b in zip(at, self.lattice, block[1:], strict=True))
            rows.append([_dot(_strides(self.source), window), math.prod(sizes), first + _dot(axis, at)])
        return rows

    def _out_at(self, block: Shape) -> np.ndarray:
        axis = [a * f for a, f in zip(_strides(self.out), self.out_step, strict=True)]
        image = self.p.groups * self.out_channels * math.prod(self.out)
        return _sums([[i * a for i in range(n)] for n, a in zip(block, (image, *axis), strict=True)])

    def _tap_at(self, planes: list, rows: Shape) -> np.ndarray:
        offsets = []
        for a, (d, s) in enumerate(zip(self.dilation, self.stride, strict=True)):
            behind = math.prod(len(x) for x in planes[a + 1 :]) * math.prod(rows)
            offsets.append([planes[a].index(t * d % s) * behind + t * d // s * _strides(rows)[a]
                            for t in range(len(self.taps[a]))])  # fmt: skip
        return _sums(offsets)

    def _pieces(self, block: Shape, rows: Shape, image: int, panel: int) -> tuple[np.ndarray, np.ndarray]:
        row, inner, _ = _strides(rows)
        begins = _sums([[i * a for i in range(n)] for n, a in zip(block[:3], (image, row, inner), strict=True)])
        runs: list[list[int]] = []
        for begin in begins.tolist():
            if runs and sum(runs[-1]) == begin:
                runs[-1][1] += block[3]
            else:
                runs.append([begin, block[3]])
        pieces: list[list[int]] = []
        first, column, width = [0], 0, lanes_of(self.p.itemsize)
        for begin, length in runs:
            done = 0
            while done < length:
                if column == panel:
                    first.append(len(pieces))
                    column = 0
                n = min(length - done, panel - column, width)
                pieces.append([begin + done, column, n])
                done += n
                column += n
        return _ints(np.array(pieces).reshape(-1, 3).T), _ints([*first, len(pieces)])

    def _band_rows(self, block: Shape, planes: list, rows: Shape) -> np.ndarray:
        table = []
        (x0, x1, x2), (s0, s1, s2) = self.source, self.stride
        for _, (w0, w1, w2) in self._origins(block):
            for f0, f1, f2 in itertools.product(*planes):
                first = w2 + f2
                low = min(rows[2], max(0, -(first // s2)))
                count = max(0, min(rows[2], -((first - x2) // s2)) - low)
                for r0, r1 in itertools.product(range(rows[0]), range(rows[1])):
                    p0, p1 = w0 + f0 + r0 * s0, w1 + f1 + r1 * s1
                    inside = count and 0 <= p0 < x0 and 0 <= p1 < x1
                    table.append([low, count, (p0 * x1 + p1) * x2 + first + low * s2] if inside else [0, 0, 0])
        return _ints(table).reshape(-1, math.prod(len(x) for x in planes) * rows[0] * rows[1], 3)


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _ints(values: object) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)


def _strides(shape: Shape) -> Axes:
    return shape[1] * shape[2], shape[2], 1


def _sums(values: list) -> np.ndarray:
    """All sums of one entry of each list, the last list's varying fastest."""
    total = np.zeros(1, np.int64)
    for entries in values:
        total = np.add.outer(total, np.array(entries, np.int64)).reshape(-1)
    return _ints(total)


def _steps_at_once(steps: int, taps: int, itemsize: int) -> int:
    """Whole channels where they fit, and about equal parts."""
    most = MOST_STEPS * 4 // itemsize
    if steps <= most:
        return max(1, steps)
    if taps > most:
        return most
    parts = -(-steps // (most // taps * taps))
    return -(-(steps // taps) // parts) * taps


def _block(images: int, lattice: Shape, most: int) -> tuple[int, int, int, int]:
    """Images and positions per axis of one block, at most `most` columns, blocks about equal."""
    positions, inner = math.prod(lattice), lattice[1] * lattice[2]
    if not positions or not images:
        return (1, 1, 1, 1)
    if positions <= most:
        return (_even(images, most // positions), lattice[0], lattice[1], lattice[2])
    if inner <= most:
        return (1, _even(lattice[0], most // inner), lattice[1], lattice[2])
    if lattice[2] <= most:
        return (1, 1, _even(lattice[1], most // lattice[2]), lattice[2])
    return (1, 1, 1, _even(lattice[2], most))


def _even(total: int, most: int) -> int:
    parts = -(-total // most)
    return -(-total // parts)


def product_scratch(cut: Pass, itemsize: int) -> int:
    """Elements of scratch in `columns_product`: packed columns, a tile of A, its bias, a tile of C, the band."""
    panel, width = panel_of(itemsize), lanes_of(itemsize)
    columns, steps = int(cut.geometry[COLUMNS]), int(cut.geometry[STEPS_AT_ONCE])
    return -(-columns // panel) * panel * steps + ROWS * (steps + panel + 1) + int(cut.geometry[BAND_SIZE]) + 2 * width


def weights_scratch(cut: Pass, rows_at_once: int, itemsize: int) -> int:
    """Elements of scratch in `weights_product`: turned gradients, columns, sums, the band."""
    g, width, panel = cut.geometry, lanes_of(itemsize), panel_of(itemsize)
    columns, steps = int(g[COLUMNS]), -(-int(g[STEPS_AT_ONCE]) // ROWS) * ROWS
    pitch, wide = (-(-columns // width) + 1) * width, -(-rows_at_once // width) * width
    return columns * panel + steps * (pitch + wide) + width + int(g[BAND_SIZE]) + width
