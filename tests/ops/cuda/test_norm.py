"""Batch norm, scale and bias by channel: whole packs and odd runs, one part and several, channels without runs."""

import numpy as np
import pytest

from blobmem.ops.cuda import channels

SHAPES = [
    (2, 3, 4),
    (1, 1, 1),
    (5, 7, 1),
    (300, 33, 1),
    (3, 5, 49),
    (7, 3, 9),
    (64, 2, 121),  # one part, a block of 1024 threads
    (3, 2, 12100),  # two parts, whole packs
    (5, 2, 6727),  # two parts, odd
    (8200, 5, 1),  # too many rows for one block
    (40000, 1, 1),
]
DTYPES = [np.float32, np.float64]


def normal(rng, dtype, *shape, mean=0.0):
    return (rng.normal(size=shape) + mean).astype(dtype)


def batch_norm_state(rng, dtype, channels):
    mean, inv_std = np.zeros(2 * channels, dtype), np.zeros(channels, dtype)
    running = normal(rng, dtype, channels), rng.random(channels).astype(dtype), np.full(1, 3.5, dtype)
    return mean, inv_std, *running


def test_shapes_cover_parts():
    assert {channels.splits(shape) for shape in SHAPES} >= {1, 2}
    assert channels.splits((256, 64, 12544)) == 32
    assert channels.splits((256, 2048, 49)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_forward(cuda, rng, shape, dtype):
    x, y = normal(rng, dtype, *shape, mean=2), np.zeros(shape, dtype)
    state = batch_norm_state(rng, dtype, shape[1])
    if shape[0] * shape[2] == 1:
        x[:] = 0  # a variance of nothing but rounding would be divided by
    cuda.compare("batch_norm_forward", x, y, np.zeros(shape, dtype), *state, eps=1e-5, fraction=0.75)


@pytest.mark.parametrize("shape", [(5, 7, 1), (3, 5, 49), (3, 2, 12100)])
def test_batch_norm_forward_in_place_without_xhat(cuda, rng, shape):
    x = normal(rng, np.float32, *shape)
    cuda.compare("batch_norm_forward", x, x, None, *batch_norm_state(rng, np.float32, shape[1]), eps=1e-3, fraction=0.9)


@pytest.mark.parametrize("shape", [(300, 5, 1), (3, 5, 49), (3, 2, 12100)])
def test_variance_of_values_far_from_zero(cuda, rng, shape):
    x = normal(rng, np.float32, *shape, mean=30000)
    x[0, :, 0] = 0
    count = shape[0] * shape[2]
    results = cuda.run("batch_norm_forward", x, np.zeros_like(x), None,
                       *batch_norm_state(rng, np.float32, shape[1]), eps=0.0, fraction=0.0)  # fmt: skip
    exact = x.astype(np.float64)
    np.testing.assert_allclose(results[3][: shape[1]], exact.mean(axis=(0, 2)), rtol=1e-6)
    np.testing.assert_allclose(results[6], exact.var(axis=(0, 2)) * count / (count - 1), rtol=1e-4)


def test_constant_channels_far_from_zero(cuda, rng):
    x = np.full((4, 3, 20), 1e5 + 1 / 128, np.float32)
    results = cuda.run("batch_norm_forward", x, np.zeros_like(x), None, *batch_norm_state(rng, np.float32, 3),
                       eps=1e-5, fraction=0.0)  # fmt: skip
    assert (results[6] == 0).all()
    assert (results[1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_backward(cuda, rng, shape, dtype):
    xhat, dy = normal(rng, dtype, *shape), normal(rng, dtype, *shape, mean=1)
    inv_std = rng.random(shape[1]).astype(dtype) + 1
    cuda.compare(
        "batch_norm_backward", xhat, inv_std, dy, np.zeros(shape, dtype), atol=2e-5 if dtype == np.float32 else 1e-12
    )
    cuda.compare("batch_norm_backward", xhat, inv_std, dy, dy, atol=2e-5 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 7, 1), (3, 5, 49), (2, 2, 4100)])
@pytest.mark.parametrize("weight", [0.0, 3.5])
def test_batch_norm_with_running_statistics(cuda, rng, shape, dtype, weight):
    mean, var = normal(rng, dtype, shape[1]), rng.random(shape[1]).astype(dtype)
    x, factor = normal(rng, dtype, *shape), np.full(1, weight, dtype)
    rtol = 1e-5 if dtype == np.float32 else 1e-12
    cuda.compare("batch_norm_inference", x, np.zeros_like(x), mean, var, factor, eps=1e-4, rtol=rtol)
    cuda.compare("batch_norm_inference", x, x, mean, var, factor, eps=1e-4, rtol=rtol)
    cuda.compare("batch_norm_backward_global", x, np.zeros_like(x), var, factor, eps=1e-4, rtol=rtol)
    cuda.compare("batch_norm_backward_global", x, x, var, factor, eps=1e-4, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3, 4), (2, 3, 0), (2, 0, 3)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_by_channel(cuda, rng, shape, dtype, accumulate):
    x, dy, total = normal(rng, dtype, *shape), normal(rng, dtype, *shape, mean=0.5), normal(rng, dtype, shape[1])
    atol = None if not x.size else 3e-7 * shape[0] * shape[2] ** 0.5 + 1e-5 if dtype == np.float32 else 1e-10
    cuda.compare("scale_backward_gamma", x, dy, total, accumulate=accumulate, atol=atol)
    cuda.compare("scale_backward_beta", dy, total, accumulate=accumulate, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 7, 1), (3, 5, 49), (2, 2, 4100), (0, 3, 4), (2, 3, 0)])
def test_scale_and_bias(cuda, rng, shape, dtype):
    x, gamma, beta = normal(rng, dtype, *shape), normal(rng, dtype, shape[1]), normal(rng, dtype, shape[1])
    y = np.zeros_like(x)
    cuda.compare("scale_forward", x, gamma, beta, y)
    cuda.compare("scale_forward", x, gamma, None, y)
    cuda.compare("scale_forward", x, gamma, beta, x)
    cuda.compare("scale_backward_data", x, gamma, y)
    cuda.compare("scale_backward_data", x, gamma, x)
    cuda.compare("bias_forward", x, beta, y)
    cuda.compare("bias_forward", x, beta, x)


def test_launches(cuda, rng):
    """Two where a block can take a channel, three where it has to be cut."""
    if not hasattr(cuda.device, "launches"):
        pytest.skip("a real device does not count launches")
    for shape, launches in [((2, 3, 4), 2), ((3, 2, 12100), 3)]:
        x, begun = normal(rng, np.float32, *shape), len(cuda.device.launches)
        cuda.run("batch_norm_forward", x, x, None, *batch_norm_state(rng, np.float32, shape[1]), eps=1e-5, fraction=0.9)
        assert len(cuda.device.launches) - begun == launches


def test_same_bits(cuda, rng):
    x, dy = normal(rng, np.float32, 3, 2, 12100), normal(rng, np.float32, 3, 2, 12100)
    state = batch_norm_state(rng, np.float32, 2)
    for name, operands, options in [
        ("batch_norm_forward", (x, np.zeros_like(x), None, *state), {"eps": 1e-5, "fraction": 0.9}),
        ("batch_norm_backward", (x, state[3], dy, np.zeros_like(x)), {}),
        ("scale_backward_gamma", (x, dy, np.zeros(2, np.float32)), {"accumulate": False}),
    ]:
        first, second = (cuda.run(name, *operands, **options) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            if one is not None:
                np.testing.assert_array_equal(one, other)


def test_opposite_gradients_leave_nothing(cuda, rng):
    """Parameters shared by two branches of opposite gradients: no rounding may be left."""
    x, dy, total = normal(rng, np.float32, 5, 4, 3), normal(rng, np.float32, 5, 4, 3), np.zeros(4, np.float32)
    for name, given, opposite in [("scale_backward_beta", (dy,), (-dy,)), ("scale_backward_gamma", (x, dy), (x, -dy))]:
        half = cuda.run(name, *given, total, accumulate=False)[-1]
        assert (half != 0).all()
        assert (cuda.run(name, *opposite, half, accumulate=True)[-1] == 0).all()
