"""Local response normalisation against its formula."""

import numpy as np
import pytest

from blobmem.ops.host import lrn

SHAPES = [(2, 7, 5, 6), (1, 1, 1, 1), (3, 3, 1, 70), (1, 40, 23, 29)]
ACROSS = {"local_size": 5, "alpha": 0.7, "beta": 0.75, "k": 1.5}
WITHIN = {"local_size": 3, "alpha": 0.7, "beta": 0.75}


def scale_across(x, local_size, alpha, k, **_):
    half = local_size // 2
    padded = np.pad(x**2, [(0, 0), (half, half), (0, 0), (0, 0)])
    return k + alpha / local_size * sum(padded[:, i : i + x.shape[1]] for i in range(local_size))


def scale_within(x, local_size, alpha, **_):
    half = local_size // 2
    padded = np.pad(x**2, [(0, 0), (0, 0), (half, half), (half, half)])
    height, width = x.shape[2:]
    total = sum(padded[:, :, i : i + height, j : j + width] for i, j in np.ndindex(local_size, local_size))
    # of windows that reach over the padding, only what is inside counts for the mean
    tall = [min(i + half + 1, height + half) - (i - half) for i in range(height)]
    wide = [min(j + half + 1, width + half) - (j - half) for j in range(width)]
    return 1 + alpha * total / np.outer(tall, wide)


REGIONS = {
    "across": (lrn.lrn_forward, lrn.lrn_backward, scale_across, ACROSS),
    "within": (lrn.lrn_within_forward, lrn.lrn_within_backward, scale_within, WITHIN),
}


def gradient(region, x, dy, dx, **attributes):
    """dx by the op; within channels that reads the output, too."""
    forward, backward, _, _ = REGIONS[region]
    y = np.empty_like(x)
    forward(x, y, **attributes)
    backward(x, *([y] if region == "within" else []), dy, dx, **attributes)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("beta", [0.75, 0.5, 1.3])
def test_forward(region, shape, beta, dtype, garbage, close):
    forward, _, formula, attributes = REGIONS[region]
    attributes = attributes | {"beta": beta}
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    y = garbage(*shape)
    forward(x, y, **attributes)
    close(y, x * formula(x.astype(float), **attributes) ** -beta)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 1, 1, 1), (1, 7, 1, 5)])
@pytest.mark.parametrize("size, beta", [(3, 0.75), (5, 0.9)])
def test_backward(region, shape, size, beta):
    forward, _, _, attributes = REGIONS[region]
    attributes = attributes | {"beta": beta, "local_size": size}
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal(shape), rng.standard_normal(shape)
    x.reshape(-1)[0] = 0
    dx = np.full(shape, np.nan)
    gradient(region, x, dy, dx, **attributes)
    numeric, other = np.empty(shape), np.empty(shape)
    for index in np.ndindex(*shape):
        value, sums = x[index], []
        for step in (1e-5, -1e-5):
            x[index] = value + step
            forward(x, other, **attributes)
            sums.append((other * dy).sum())
        x[index] = value
        numeric[index] = (sums[0] - sums[1]) / 2e-5
    np.testing.assert_allclose(dx, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("beta", [0.75, 0.5])
def test_gradient_in_place_of_the_tops(region, beta, dtype):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, 9, 5, 6)).astype(dtype) for _ in range(2))
    dx, attributes = np.empty_like(dy), REGIONS[region][-1] | {"beta": beta}
    gradient(region, x, dy, dx, **attributes)
    gradient(region, x, dy, dy, **attributes)
    assert dx.tobytes() == dy.tobytes()


@pytest.mark.parametrize("region", REGIONS)
def test_threads_and_memory(region, same_bits, frugal):
    forward, backward, _, attributes = REGIONS[region]
    rng = np.random.default_rng(0)
    x, y, dy = (rng.standard_normal((3, 40, 17, 19)).astype(np.float32) for _ in range(3))
    for check in (same_bits, frugal):
        check(forward, x, y, **attributes)
        check(backward, x, *([y] if region == "within" else []), dy, np.empty_like(x), **attributes)
