"""Compiled: arrays put one after another at the lowest offset that is free while they live, and a search for an order;
what choices of what is made anew, or evicted, ask most often;
and minimum cuts.

Steps and sizes are int64, sizes and offsets in units of the alignment. All is a function of the arguments alone.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel, part

Ints = np.ndarray
Floats = np.ndarray
Bools = np.ndarray
NO_LIMIT = 1 << 62


@part
def _happens_before(last: int, first: int) -> bool:
    """Whether an array's last use is over before another's first: on one stream the order of the calls."""
    return last < first


@part
def _put_all(
    order: Ints, first: Ints, last: Ints, size: Ints, offset: Ints, placed: Ints, limit: int
) -> tuple[int, int]:
    """Give each array, in this order, the lowest offset that is free; (total, steps of work).

    Stops once the total is beyond `limit`. `placed` is int64 scratch of shape (4, arrays).
    """
    starts, stops, firsts, lasts = placed[0], placed[1], placed[2], placed[3]  # of those placed, by offset
    total, work = 0, 0
    for count in range(order.size):
        index = order[count]
        at = 0
        for other in range(count):
            work += 1
            if _happens_before(lasts[other], first[index]) or _happens_before(last[index], firsts[other]):
                continue
            if starts[other] - at >= size[index]:
                break
            at = max(at, stops[other])
        offset[index] = at
        total = max(total, at + size[index])
        if total > limit:
            break
        slot = count
        while slot > 0 and starts[slot - 1] > at:
            starts[slot], stops[slot] = starts[slot - 1], stops[slot - 1]
            firsts[slot], lasts[slot] = firsts[slot - 1], lasts[slot - 1]
            slot -= 1
        starts[slot], stops[slot] = at, at + size[index]
        firsts[slot], lasts[slot] = first[index], last[index]
    return total, work


@part
def _draw(state: Ints, below: int) -> int:
    """The next number from 0 to `below` of a linear congruential generator (Knuth's MMIX)."""
    state[0] = state[0] * 6364136223846793005 + 1442695040888963407
    return ((state[0] >> 33) & 0x7FFFFFFF) % below


@part
def _draw_culprit(state: Ints, order: Ints, size: Ints, offset: Ints, total: int, tops: Ints) -> int:
    """A position other than the first in the order, mostly of an array that reaches up to the total."""
    count = 0
    for at in range(1, order.size):
        if offset[order[at]] + size[order[at]] == total:
            tops[count] = at
            count += 1
    if count and _draw(state, 4):
        return tops[_draw(state, count)]
    return 1 + _draw(state, order.size - 1)


@part
def _shuffle(state: Ints, order: Ints, at: int) -> None:
    """Let the array at position `at` be placed earlier, before another or in exchange with it."""
    to = _draw(state, at)
    moved = order[at]
    if _draw(state, 2):
        for slot in range(at, to, -1):
            order[slot] = order[slot - 1]
    else:
        order[at] = order[to]
    order[to] = moved


@kernel
def put_all(order: Ints, first: Ints, last: Ints, size: Ints, offset: Ints, limit: int) -> tuple[int, int]:
    """Fill `offset` with places in this order; (total, steps of work). A total above `limit` is not the whole one."""
    return _put_all(order, first, last, size, offset, np.empty((4, order.size), np.int64), limit)


@kernel
def improve(order: Ints, first: Ints, last: Ints, size: Ints, offset: Ints, goal: int, work: int) -> int:
    """Look for a better order of two or more arrays, from `order` on, and fill `offset` with its places; the total.

    Orders at random from a fixed seed, kept where the total is no larger, until it is `goal` or `work` steps are done.
    """
    count = order.size
    placed = np.empty((4, count), np.int64)
    tops, trial, here = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    state = np.zeros(1, np.int64)
    total, _ = _put_all(order, first, last, size, offset, placed, NO_LIMIT)
    while total > goal and work > 0:
        for at in range(count):
            trial[at] = order[at]
        _shuffle(state, trial, _draw_culprit(state, order, size, offset, total, tops))
        reached, done = _put_all(trial, first, last, size, here, placed, total)
        work -= done + 4 * count
        if reached <= total:
            total = reached
            for at in range(count):
                order[at], offset[at] = trial[at], here[at]
    return total


@kernel
def beyond_turn(
    away: Ints, copy: Ints, leaving: Ints, ready: Ints, coming: Ints, wanted: Ints, turn: float
) -> tuple[float, float]:
    """Milliseconds by which copies out of what is `away` end after the turn, and by which those back, each as late as
    will do, begin before it; back of what is 1 there, others are waited for.

    `copy` are the milliseconds of each. What is `ready` first leaves first, what is `wanted` first comes first: they
    are numbered so in `leaving` and `coming`.
    """
    end, left = turn, 0.0
    for at in range(leaving.size - 1, -1, -1):
        index = leaving[at]
        if away[index]:
            left += copy[index]
            end = max(end, ready[index] + left)
    begin, come = turn, 0.0
    for index in coming:
        if away[index] == 1:
            come += copy[index]
            begin = min(begin, wanted[index] - come)
    return end - turn, turn - begin


@kernel
def max_flow(tails: Ints, heads: Ints, capacities: Ints, nodes: int) -> tuple[int, Ints]:
    """The largest flow from the last node but one to the last one, by Dinic's algorithm, which is the minimum cut; and
    of each node whether it is on the first one's side of that: from 0 on if so, else -1."""
    source, sink, count = nodes - 2, nodes - 1, len(tails)
    to, left = np.empty(2 * count, np.int64), np.zeros(2 * count, np.int64)
    start = np.zeros(nodes + 1, np.int64)  # of each node its edges, those back among them, in `order`
    for edge in range(count):
        to[2 * edge], to[2 * edge + 1], left[2 * edge] = heads[edge], tails[edge], capacities[edge]
        start[tails[edge] + 1] += 1
        start[heads[edge] + 1] += 1
    for node in range(nodes):
        start[node + 1] += start[node]
    order, place = np.empty(2 * count, np.int64), start[:-1].copy()
    for edge in range(2 * count):
        tail = to[edge ^ 1]
        order[place[tail]] = edge
        place[tail] += 1
    flow, path, queue = 0, np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    while True:
        level = np.full(nodes, -1)
        level[source], queue[0], begin, end = 0, source, 0, 1
        while begin < end:
            node = queue[begin]
            begin += 1
            for at in range(start[node], start[node + 1]):
                edge = order[at]
                if left[edge] > 0 and level[to[edge]] < 0:
                    level[to[edge]] = level[node] + 1
                    queue[end] = to[edge]
                    end += 1
        if level[sink] < 0:
            return flow, level
        place = start[:-1].copy()
        depth, node = 0, source
        while True:  # from the source on, as far as levels lead; back where they do not
            if node == sink:
                least = left[path[0]]
                for at in range(depth):
                    least = min(least, left[path[at]])
                flow += least
                for at in range(depth - 1, -1, -1):
                    left[path[at]] -= least
                    left[path[at] ^ 1] += least
                    if left[path[at]] == 0:
                        depth, node = at, to[path[at] ^ 1]
                continue
            while place[node] < start[node + 1]:
                edge = order[place[node]]
                if left[edge] > 0 and level[to[edge]] == level[node] + 1:
                    break
                place[node] += 1
            if place[node] < start[node + 1]:
                path[depth] = edge
                depth += 1
                node = to[edge]
            elif node == source:
                break
            else:
                depth -= 1
                node = to[path[depth] ^ 1]
                place[node] += 1
