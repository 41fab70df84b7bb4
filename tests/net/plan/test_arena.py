"""Layouts: nothing overlaps, the same every time, and as small as an exhaustive search finds."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobmem.net.plan import Lifetime, arena, kernels, layout
from blobmem.net.plan.arena import largest_load as reckoned_load

LIVES = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 12), st.integers(0, 8)).map(
        lambda life: Lifetime(None, life[0], life[1], life[1] + life[2])
    ),
    max_size=24,
)
HARD = [(3, 3, 4), (1, 3, 6), (5, 2, 3), (5, 7, 7), (3, 4, 6), (5, 0, 2), (5, 5, 7)]  # no arena of its load, 10


def lives(*rows):
    return [Lifetime(index, *row) for index, row in enumerate(rows)]


def drawn(seed, count, times, longest, most):
    """Lifetimes at random, of sizes spread over orders of magnitude up to `most`."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        first = rng.randrange(times)
        last = min(times - 1, first + rng.randrange(longest))
        rows.append((round(most ** rng.random()), first, last))
    return lives(*rows)


def fits(arrays, total, placed=()):
    """Whether arrays of small sizes fit in `total` units: every offset is tried for each."""
    if not arrays:
        return True
    (size, first, last), rest = arrays[0], arrays[1:]
    near = [(at, stop) for at, stop, a, b in placed if a <= last and first <= b]
    for at in range(total - size + 1):
        stop = at + size
        if all(stop <= low or high <= at for low, high in near) and fits(
            rest, total, (*placed, (at, stop, first, last))
        ):
            return True
    return False


def optimum(arrays, load):
    """The smallest arena, found by exhaustive search."""
    rows = sorted((life[1:] for life in arrays), reverse=True)
    return next(total for total in range(load, sum(row[0] for row in rows) + 1) if fits(rows, total))


def test_one_after_the_other_they_take_turns_at_one_place():
    plan = layout(lives((1000, 0, 1), (700, 2, 3), (1, 4, 4)))
    assert plan.offsets == [0, 0, 0] and plan.nbytes == 1000


def test_one_call_that_reads_one_and_writes_another_needs_both():
    plan = layout(lives((1000, 0, 2), (700, 2, 3)))
    assert plan.nbytes in (1024 + 700, 1024 + 1000) and sorted(plan.offsets) == [0, 1024]


def test_of_nothing_there_is_none():
    assert layout([]) == ([], 0)
    assert layout(lives((0, 0, 5), (0, 2, 3))) == ([0, 0], 0)
    assert layout(lives((0, 0, 5), (8, 2, 3), (0, 1, 3))) == ([0, 0, 0], 8)


@pytest.mark.parametrize("row", [(-1, 0, 1), (1, 2, 1)])
def test_what_is_no_lifetime_is_refused(row):
    with pytest.raises(ValueError, match="no lifetime has"):
        layout(lives((5, 0, 1), row))


def test_each_gets_the_lowest_gap_that_it_fits_in():
    first, last = np.array([[0, 9], [0, 1], [0, 9], [5, 9]], np.int64).T.copy()
    order, size, offset = np.arange(4), np.array([1, 1, 2, 1]), np.empty(4, np.int64)
    assert kernels.put_all(order, first, last, size, offset) == 4 and offset.tolist() == [0, 1, 2, 1]


@given(LIVES)
@settings(deadline=None)
def test_neighbours_are_those_that_live_at_one_time(arrays):
    first, last = (np.array([life[at] for life in arrays], np.int64) for at in (2, 3))
    starts = arena._neighbours_begin(first, last)
    others = kernels.neighbours(first, last, starts)
    for at, life in enumerate(arrays):
        near = [
            i for i, other in enumerate(arrays) if i != at and life.first <= other.last and other.first <= life.last
        ]
        assert sorted(others[starts[at] : starts[at + 1]]) == near
    assert starts[-1] == len(others)


def test_no_more_orders_and_limits_are_tried_than_it_takes(monkeypatch):
    tried, limits = [], []

    def count(*arguments, put_all=kernels.put_all):
        tried.append(put_all(*arguments))
        return tried[-1]

    def search(limit, *arguments, put_below=kernels.put_below):
        limits.append(limit)
        return put_below(limit, *arguments)

    monkeypatch.setattr(kernels, "put_all", count)
    monkeypatch.setattr(kernels, "put_below", search)
    arena._remembered.cache_clear()
    layout(lives((5, 0, 3), (4, 1, 2), (6, 2, 2)))
    assert len(tried) == 1 and not limits, "it has reached the load"
    layout(lives(*HARD), 1, 9)
    assert len(tried) == 1 + 6 and not limits, "there is no such arena"
    plan = layout(lives(*HARD), 1)
    assert len(tried) == 1 + 6 + 6 and {*limits} == {10}, "an order reaches 11"
    plan.offsets.clear()
    assert len(layout(lives(*HARD), 1).offsets) == len(HARD)
    assert len(tried) == 1 + 6 + 6, "it is remembered"


def test_of_too_many_pairs_the_best_order_is_taken(monkeypatch, check):
    monkeypatch.setattr(arena, "PAIRS", 1)
    monkeypatch.setattr(kernels, "neighbours", None)
    arena._remembered.cache_clear()
    plan = layout(lives(*HARD), 1)
    check(lives(*HARD), plan, 1)
    assert plan.nbytes == 11


@given(LIVES, st.sampled_from([1, 64, 512]))
@settings(deadline=None)
def test_nothing_overlaps_and_the_layout_repeats(check, arrays, alignment):
    plan = layout(arrays, alignment)
    check(arrays, plan, alignment)
    arena._remembered.cache_clear()
    assert layout([life._replace(key=object()) for life in arrays], alignment) == plan


@given(LIVES.filter(lambda arrays: any(life.nbytes for life in arrays)))
def test_the_load_is_that_of_a_plain_computation(largest_load, arrays):
    columns = np.array([life[1:] for life in arrays], np.int64)
    assert reckoned_load(columns[:, 1], columns[:, 2], columns[:, 0]) == largest_load(arrays)


@given(LIVES, st.floats(0.9, 1.1))
@settings(deadline=None)
def test_within_given_bytes_nothing_overlaps_and_the_layout_repeats(check, largest_load, arrays, part):
    enough = 1 + int(part * largest_load(arrays))
    plan = layout(arrays, 1, enough)
    check(arrays, plan, 1)
    arena._remembered.cache_clear()
    assert layout([life._replace(key=object()) for life in arrays], 1, enough) == plan


def test_an_arena_that_is_small_enough_is_not_made_smaller():
    arrays = drawn(3, 60, 60, 20, 500)
    least, most = layout(arrays, 1).nbytes, sum(life.nbytes for life in arrays)
    assert least < layout(arrays, 1, most).nbytes <= most


def test_another_process_finds_the_same():
    """After a search, whose random numbers are its own."""
    code = "import test_arena as t; print(t.layout(t.drawn(3, 60, 60, 20, 500), 1))"
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(layout(drawn(3, 60, 60, 20, 500), 1))


@pytest.mark.parametrize("seed", range(40))
def test_small_ones_are_the_smallest_there_are(check, largest_load, seed):
    arrays = drawn(seed, 5 + seed % 4, 8, 5, 6)
    plan = layout(arrays, 1)
    check(arrays, plan, 1)
    assert plan.nbytes <= 1.02 * optimum(arrays, largest_load(arrays))


def test_where_the_load_cannot_be_reached_the_optimum_is(check, largest_load):
    arrays = lives(*HARD)
    plan = layout(arrays, 1)
    check(arrays, plan, 1)
    assert largest_load(arrays) == 10 and plan.nbytes == optimum(arrays, 10) == 11


@pytest.mark.parametrize("longest, most", [(12, 100), (4, 100), (6, 1000)])
def test_where_no_fixed_order_is_good_the_search_is(monkeypatch, check, largest_load, longest, most):
    family = [drawn(seed, 20, 20, longest, most) for seed in range(30)]
    loads = [largest_load(arrays) for arrays in family]
    plans = [layout(arrays, 1) for arrays in family]
    for arrays, plan, load in zip(family, plans, loads, strict=True):
        check(arrays, plan, 1)
        assert plan.nbytes <= 1.01 * load
    monkeypatch.setattr(kernels, "put_below", lambda *arguments: False)
    arena._remembered.cache_clear()
    fixed = [layout(arrays, 1).nbytes for arrays in family]
    assert max(nbytes / load for nbytes, load in zip(fixed, loads, strict=True)) > 1.02, "they would be no test"


@pytest.mark.parametrize("seed", range(6))
def test_below_a_limit_near_the_load_places_are_found(monkeypatch, check, largest_load, seed):
    """Behind hundreds of others, where orders need up to a twelfth more."""
    arrays = drawn(seed, 300, 100, 40, 1000)
    enough = int(1.01 * largest_load(arrays))
    plan = layout(arrays, 1, enough)
    check(arrays, plan, 1)
    assert plan.nbytes <= enough


@pytest.mark.parametrize("count, longest", [(300, 30), (300, 300), (3000, 40), (3000, 1000)])
def test_large_ones_at_random_are_near_their_load(check, largest_load, count, longest):
    arrays = drawn(count + longest, count, count, longest, 10**6)
    plan = layout(arrays)
    check(arrays, plan)
    assert plan.nbytes <= 1.05 * largest_load(arrays)


def test_a_pass_forward_and_back_is_packed_without_loss(check, largest_load):
    """Nested lifetimes, with short ones between, as training has: 15,000 arrays."""
    rng, calls = random.Random(1), 10_000
    arrays = lives(
        *((rng.randrange(1, 64) * 4096, at, calls - at) for at in range(calls // 2)),
        *((rng.randrange(1, 32) * 4096, at, at + 1) for at in range(calls)),
    )
    plan = layout(arrays)
    check(arrays, plan)
    assert plan.nbytes <= 1.02 * largest_load(arrays)
