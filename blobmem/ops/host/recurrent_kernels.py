"""Compiled: the steps of recurrent layers, each a product of the state with the weights, and what becomes of the sums.

Units are cut into `blocks` of 1 to PANEL_VECTORS vectors, and these into one slice for each of `slices` threads. The
weights are packed by block, once for all steps. The state lies in rows of `row` elements, ROWS times some of them, the
rows beyond the streams zero; there are two, for the steps in turn. Sums do not depend on the cuts.
"""

from __future__ import annotations

from blobmem.ops.host.compiled import kernel, part
from blobmem.ops.host.products import copy_run, run_tile, transpose_rows
from blobmem.ops.host.recurrent_turns import await_step, begin_slice, end_slice
from blobmem.ops.host.recurrent_vectors import lstm_vector, lstm_vector_backward, rnn_vector, rnn_vector_backward
from blobmem.ops.host.tile import ADD, PANEL_VECTORS, ROWS, SET, lanes

_DEPTH = 512  # elements of the state that are multiplied at a time: ROWS times these stay in a first-level cache


@part
def block_of(which, blocks, units, width):
    """(first unit, units, vectors) of a block."""
    vectors = (units + width - 1) // width
    first, last = vectors * which // blocks, vectors * (which + 1) // blocks
    return first * width, min(units, last * width) - first * width, last - first


@kernel
def pack_transposed(start, stop, w, packed, gates, units, blocks):
    """packed[block][gate][k, j] = w[gate, unit j of the block, k] for blocks [start, stop); w (gates, units, units)."""
    width = lanes(w)
    for which in range(start, stop):
        first, count, vectors = block_of(which, blocks, units, width)
        wide = vectors * width
        for g in range(gates):
            transpose_rows(w, (g * units + first) * units, units, count, units, packed,
                           (first * gates + g * wide) * units, wide, wide)  # fmt: skip


@kernel
def pack_rows_of(start, stop, w, packed, depth, units, blocks):
    """packed[block][k, j] = w[k, unit j of the block] for blocks [start, stop); w (depth, units)."""
    width = lanes(w)
    for which in range(start, stop):
        first, count, vectors = block_of(which, blocks, units, width)
        wide = vectors * width
        for k in range(depth):
            to = first * depth + k * wide
            copy_run(packed, to, w, k * units + first, count)
            for j in range(to + count, to + wide):
                packed[j] = 0


@part
def add_up(state, at, row, packed, packed_at, gates, depth, vectors, sums):
    """sums[gate, r, j] = sum over k of state[r, k] * packed[gate, k, j] for ROWS rows from `at` on."""
    wide = vectors * lanes(packed)
    panel = PANEL_VECTORS * lanes(packed)
    one = row * 0 + 1
    for k0 in range(0, depth, _DEPTH):
        n = min(_DEPTH, depth - k0)
        mode = ADD if k0 else SET
        for g in range(gates):
            run_tile(vectors, state, at + k0, row, one, packed, packed_at + (g * depth + k0) * wide, wide, sums,
                     g * ROWS * panel, panel, n, mode, sums, one)  # fmt: skip


@kernel
def lstm_steps(start, stop, scratch, turns, slices, patience, packed, blocks, state, row, gates, cells, cells_step,
               hidden, cont, first, steps, total, streams, units):  # fmt: skip
    """Steps [first, first + steps) of `total`, forward.

    gates (steps, streams, 4, units) come as what x and the biases give, and become the gates; cells begin with the
    cell before, and the next one is `cells_step` elements on; hidden (steps, streams, units).
    """
    width = lanes(state)
    panel = PANEL_VECTORS * width
    tile = ROWS * row
    half = (streams + ROWS - 1) // ROWS * tile
    for step in range(steps):
        now, then = (first + step) % 2 * half, (first + step + 1) % 2 * half
        conts = (first + step) * streams
        is_last = first + step + 1 == total
        for i in range(slices):
            which = (start + i) % slices
            if not begin_slice(turns, which, step):
                continue
            for block in range(blocks * which // slices, blocks * (which + 1) // slices):
                unit, count, vectors = block_of(block, blocks, units, width)
                for n in range(streams):
                    r = n % ROWS
                    if r == 0:
                        add_up(state, now + n * row, row, packed, unit * 4 * units, start * 0 + 4, units, vectors,
                               scratch)  # fmt: skip
                    keep = cont[conts + n]
                    next_keep = cont.dtype.type(1) if is_last else cont[conts + streams + n]
                    stream = step * streams + n
                    for v in range(0, count, width):
                        u = unit + v
                        gate, cell = stream * 4 * units + u, step * cells_step + n * units + u
                        lstm_vector(gates, gate, scratch, r * panel + v, gates, gate, cells, cell, cells,
                                    cell + cells_step, hidden, stream * units + u, state, then + n * row + u, units,
                                    ROWS * panel, keep, next_keep, count - v)  # fmt: skip
            end_slice(turns)
        if not await_step(turns, slices, step, patience):
            return


@kernel
def lstm_steps_backward(start, stop, scratch, turns, slices, patience, packed, blocks, dstate, row, gates, cells,
                        dhidden, dlast, dcell, dgates, carried, cont, first, steps, total, streams, units):  # fmt: skip
    """Steps [first, first + steps) of `total`, backward.

    gates and cells are those of `lstm_steps`, cells with the one before; dhidden (steps, streams, units) is the
    gradient of the hidden states as outputs, dlast that of the last of all as a state. dcell (streams, units) is the
    cell's gradient and moves on to that of the cell before. dgates, as gates, is what comes out, and carried (steps,
    streams, units), what each step handed to the next one's product.
    """
    width = lanes(dstate)
    panel = PANEL_VECTORS * width
    tile = ROWS * row
    half = (streams + ROWS - 1) // ROWS * tile
    for step in range(steps):
        here = steps - 1 - step
        age = total - 1 - first - here
        now, before = age % 2 * half, (age + 1) % 2 * half
        conts = (first + here) * streams
        for i in range(slices):
            which = (start + i) % slices
            if not begin_slice(turns, which, step):
                continue
            for block in range(blocks * which // slices, blocks * (which + 1) // slices):
                unit, count, vectors = block_of(block, blocks, units, width)
                for n in range(streams):
                    r = n % ROWS
                    if age == 0:
                        copy_run(scratch, r * panel, dlast, n * units + unit, count)
                    elif r == 0:
                        add_up(dstate, before + n * row, row, packed, unit * 4 * units, start * 0 + 1, 4 * units,
                               vectors, scratch)  # fmt: skip
                    keep = cont[conts + n]
                    next_keep = cont.dtype.type(1) if age == 0 else cont[conts + streams + n]
                    stream = here * streams + n
                    for v in range(0, count, width):
                        u = unit + v
                        gate, cell, flat = stream * 4 * units + u, stream * units + u, n * units + u
                        lstm_vector_backward(gates, gate, cells, cell, cells, cell + streams * units, dhidden, cell,
                                             scratch, r * panel + v, dcell, flat, dcell, flat, dgates, gate, dstate,
                                             now + n * row + u, carried, cell, units, keep, next_keep,
                                             count - v)  # fmt: skip
            end_slice(turns)
        if not await_step(turns, slices, step, patience):
            return


@kernel
def rnn_steps(start, stop, scratch, turns, slices, patience, packed, blocks, state, row, hidden, cont, first, steps,
              total, streams, units):  # fmt: skip
    """Steps [first, first + steps) of `total`, forward: hidden (steps, streams, units) comes as what x and the biases
    give, and becomes the hidden states."""
    width = lanes(state)
    panel = PANEL_VECTORS * width
    tile = ROWS * row
    half = (streams + ROWS - 1) // ROWS * tile
    for step in range(steps):
        now, then = (first + step) % 2 * half, (first + step + 1) % 2 * half
        conts = (first + step + 1) * streams
        is_last = first + step + 1 == total
        for i in range(slices):
            which = (start + i) % slices
            if not begin_slice(turns, which, step):
                continue
            for block in range(blocks * which // slices, blocks * (which + 1) // slices):
                unit, count, vectors = block_of(block, blocks, units, width)
                for n in range(streams):
                    r = n % ROWS
                    if r == 0:
                        add_up(state, now + n * row, row, packed, unit * units, start * 0 + 1, units, vectors, scratch)
                    next_keep = cont.dtype.type(1) if is_last else cont[conts + n]
                    for v in range(0, count, width):
                        u = unit + v
                        rnn_vector(hidden, (step * streams + n) * units + u, scratch, r * panel + v, state,
                                   then + n * row + u, next_keep, count - v)  # fmt: skip
            end_slice(turns)
        if not await_step(turns, slices, step, patience):
            return


@kernel
def rnn_steps_backward(start, stop, scratch, turns, slices, patience, packed, blocks, dstate, row, hidden, dlast,
                       dhidden, cont, first, steps, total, streams, units):  # fmt: skip
    """Steps [first, first + steps) of `total`, backward: dhidden (steps, streams, units) comes as the gradient of the
    hidden states as outputs, dlast as that of the last of all as a state, and becomes that of what tanh was of."""
    width = lanes(dstate)
    panel = PANEL_VECTORS * width
    tile = ROWS * row
    half = (streams + ROWS - 1) // ROWS * tile
    for step in range(steps):
        here = steps - 1 - step
        age = total - 1 - first - here
        now, before = age % 2 * half, (age + 1) % 2 * half
        conts = (first + here + 1) * streams
        for i in range(slices):
            which = (start + i) % slices
            if not begin_slice(turns, which, step):
                continue
            for block in range(blocks * which // slices, blocks * (which + 1) // slices):
                unit, count, vectors = block_of(block, blocks, units, width)
                for n in range(streams):
                    r = n % ROWS
                    if age == 0:
                        copy_run(scratch, r * panel, dlast, n * units + unit, count)
                    elif r == 0:
                        add_up(dstate, before + n * row, row, packed, unit * units, start * 0 + 1, units, vectors,
                               scratch)  # fmt: skip
                    next_keep = cont.dtype.type(1) if age == 0 else cont[conts + n]
                    for v in range(0, count, width):
                        at = (here * streams + n) * units + unit + v
                        rnn_vector_backward(hidden, at, scratch, r * panel + v, dhidden, at, dstate,
                                            now + n * row + unit + v, next_keep, count - v)  # fmt: skip
            end_slice(turns)
        if not await_step(turns, slices, step, patience):
            return
