import itertools
import random

import pytest

from blobmem.memory.extents import Extents


def test_all_zero_at_first():
    extents = Extents()
    assert list(extents) == [(0, None, 0)]
    assert extents.at(0, 1 << 60) == 0
    assert list(extents.runs(5, 9)) == [(5, 9, 0)]
    assert list(extents.runs(5, 5)) == []


def test_put_cuts_and_merges():
    extents = Extents()
    assert extents.put(0, 100, 1)
    assert extents.put(0, 50, 3)
    assert list(extents) == [(0, 50, 3), (50, 100, 1), (100, None, 0)]
    assert extents.at(0, 50) == 3 and extents.at(50, 100) == 1 and extents.at(49, 51) is None
    assert extents.at(60, 101) is None
    assert list(extents.runs(40, 120)) == [(40, 50, 3), (50, 100, 1), (100, 120, 0)]
    assert not extents.put(10, 20, 3)
    assert not extents.put(30, 30, 1)
    assert extents.put(0, 50, 1)
    assert list(extents) == [(0, 100, 1), (100, None, 0)]
    assert extents.put(50, None, 0)
    assert list(extents) == [(0, 50, 1), (50, None, 0)]
    assert not extents.put(50, None, 0)
    assert extents.put(0, None, 0)
    assert len(extents) == 1


def test_runs_may_be_changed_while_they_are_walked():
    extents = Extents()
    extents.put(10, 20, 1)
    extents.put(30, 40, 2)
    for start, stop, _ in extents.runs(0, 50):
        extents.put(start, stop, 3)
    assert list(extents) == [(0, 50, 3), (50, None, 0)]


def test_repr_is_for_people():
    extents = Extents()
    extents.put(0, 4, 3)
    extents.put(4, 6, 2)
    assert repr(extents) == "Extents(0-4 both, 4-6 device, 6- zero)"


@pytest.mark.parametrize("seed", range(5))
def test_against_a_plain_list(seed):
    draw = random.Random(seed)
    size = 40
    extents, plain = Extents(), [0] * size
    for _ in range(600):
        start, stop = sorted(draw.choices(range(size + 1), k=2))
        bits = draw.randrange(4)
        to_the_end = draw.random() < 0.05
        before = list(plain)
        plain[start : size if to_the_end else stop] = [bits] * ((size if to_the_end else stop) - start)
        changed = extents.put(start, None if to_the_end else stop, bits)
        assert changed or before == plain
        if not to_the_end:
            assert changed == (before != plain)
        starts = [a for a, _, _ in extents]
        values = [bits for _, _, bits in extents]
        assert starts[0] == 0 and starts == sorted(set(starts))
        assert all(a != b for a, b in itertools.pairwise(values))
        start, stop = sorted(draw.choices(range(size + 1), k=2))
        walked = [bits for a, b, bits in extents.runs(start, stop) for _ in range(b - a)]
        assert walked == plain[start:stop]
        if start < stop:
            expected = plain[start] if len(set(plain[start:stop])) == 1 else None
            assert extents.at(start, stop) == expected
