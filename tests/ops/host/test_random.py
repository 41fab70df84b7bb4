"""Random streams: the generator's published test vectors, and what numbers depend on."""

import numpy as np
import pytest

from blobmem.ops.host import philox
from blobmem.ops.host.fillers import Filler, fill_random
from blobmem.ops.host.random import Draws, draws_at

# From the test vectors of Random123, kat_vectors: philox4x32 with 10 rounds (counter, key, result).
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_published_vectors(counter, key, expected):
    c, k, result = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    words = philox.philox.py_func(np.array([*k, c[2], c[3]], np.uint32), c[1] << 32 | c[0])
    assert [int(word) for word in words] == result


def numbers(draws, count=1000):
    y = np.empty(count)
    fill_random(y, filler=Filler("uniform"), draws=draws)
    return y


def test_compiled_generator_is_the_same():
    draws = draws_at(5, "a stream", 3)
    expected = [philox.uniform_of.py_func(word) for block in range(3) for word in
                philox.philox.py_func(draws.key(), block)]  # fmt: skip
    assert numbers(draws, 11).tolist() == expected[:11]


def test_numbers_are_a_function_of_seed_stream_iteration_and_element(threads):
    first = numbers(draws_at(1, "conv1/0", 7))
    threads(3)
    np.testing.assert_array_equal(first, numbers(draws_at(1, "conv1/0", 7)))
    np.testing.assert_array_equal(first[:100], numbers(draws_at(1, "conv1/0", 7), 100))
    for other in (draws_at(2, "conv1/0", 7), draws_at(1, "conv1/1", 7), draws_at(1, "conv1/0", 8),
                  draws_at(1, "conv1/0", 7 + 2**32)):  # fmt: skip
        assert abs(np.corrcoef(first, numbers(other))[0, 1]) < 0.1


def test_streams_follow_their_state():
    class State:
        iteration = 4

    draws = Draws(1, "drop6/", State())
    first = numbers(draws)
    draws.state.iteration = 5
    assert (numbers(draws) != first).all()
    draws.state.iteration = 4
    np.testing.assert_array_equal(numbers(draws), first)
    assert repr(draws) == "Draws(seed=1, stream='drop6/', iteration=4)"


def test_purposes_are_streams_of_their_own():
    draws = draws_at(1, "x", 2**40 + 3)
    assert draws.key(0).tolist()[:3] == draws.key(1).tolist()[:3]
    assert draws.key(0)[3] != draws.key(1)[3]


def test_seeds_may_be_any_integer():
    assert draws_at(-1, "", 0).key().dtype == np.uint32
    assert draws_at(2**70, "", 0).key().tolist() != draws_at(2**70 + 1, "", 0).key().tolist()
