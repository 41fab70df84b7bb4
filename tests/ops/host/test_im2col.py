"""Columns of windows against a loop over taps in NumPy."""

import itertools

import numpy as np
import pytest

from blobmem.ops.host import im2col

CASES = {
    "2d": ((5, 6), (3, 2), (1, 1), (0, 0), (1, 1)),
    "padded": ((5, 6), (3, 3), (1, 1), (1, 2), (1, 1)),
    "strided": ((9, 8), (3, 3), (2, 3), (1, 0), (1, 1)),
    "dilated": ((9, 11), (3, 2), (2, 1), (2, 1), (2, 4)),
    "1d": ((17,), (4,), (3,), (2,), (2,)),
    "3d": ((4, 5, 3), (2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
    "4d": ((2, 3, 3, 4), (2, 1, 2, 2), (1, 1, 1, 2), (0, 1, 0, 0), (1, 1, 1, 1)),
    "mostly padding": ((2, 1), (3, 3), (1, 1), (4, 5), (1, 2)),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    """Spatial shape, places, and the op's attributes."""
    spatial, *rest = request.param
    attributes = dict(zip(("kernel", "stride", "pad", "dilation"), rest, strict=True))
    places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(spatial, *rest, strict=True)]
    return spatial, tuple(places), attributes


def taps_of(case):
    """Per tap, the slices of the padded plane that the places see through it."""
    _, places, a = case
    for tap in itertools.product(*map(range, a["kernel"])):
        firsts = [t * d for t, d in zip(tap, a["dilation"], strict=True)]
        yield tuple(
            slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(firsts, places, a["stride"], strict=True)
        )  # fmt: skip


def padded(x, case):
    return np.pad(x, [(0, 0), (0, 0), *[(p, p) for p in case[2]["pad"]]])


def test_forward(case, dtype, garbage):
    spatial, places, attributes = case
    x = np.random.default_rng(0).normal(size=(2, 3, *spatial)).astype(dtype)
    wide = padded(x, case)
    expected = np.stack([wide[(..., *seen)] for seen in taps_of(case)], axis=2)
    y = garbage(2, 3 * expected.shape[2], *places)
    im2col.im2col_forward(x, y, **attributes)
    np.testing.assert_array_equal(y, expected.reshape(y.shape))


def test_backward(case, dtype, garbage, close):
    spatial, places, attributes = case
    taps = list(taps_of(case))
    dy = np.random.default_rng(1).normal(size=(2, 3, len(taps), *places)).astype(dtype)
    wide = padded(np.zeros((2, 3, *spatial)), case)
    for tap, seen in enumerate(taps):
        wide[(..., *seen)] += dy[:, :, tap]
    inside = tuple(slice(p, p + n) for p, n in zip(attributes["pad"], spatial, strict=True))
    dx = garbage(2, 3, *spatial)
    im2col.im2col_backward(dy.reshape(2, 3 * len(taps), *places), dx, **attributes)
    close(dx, wide[(..., *inside)])


def test_threads_and_memory(dtype, same_bits, frugal):
    x = np.random.default_rng(0).normal(size=(3, 7, 33, 35)).astype(dtype)
    y = np.empty((3, 63, 17, 18), dtype)
    attributes = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "dilation": (1, 1)}
    for check in (same_bits, frugal):
        check(im2col.im2col_forward, x, y, **attributes)
        check(im2col.im2col_backward, np.ones_like(y), x, **attributes)
