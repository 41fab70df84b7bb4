"""Batch norm, scale and bias by channel: whole packs and odd runs, one part and several, channels without runs."""

import itertools

import numpy as np
import pytest

from blobmem import dtypes
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2000, 64, 1), (0, 3, 4), (0, 8, 1)])
@pytest.mark.parametrize("before", [0, 1000])
def test_moments(cuda, rng, shape, dtype, before):
    x, moments = normal(rng, dtype, *shape, mean=2), rng.random(2 * shape[1]) * 5
    if not before:
        moments[:] = np.nan
    rtol = 1e-6 if dtype == np.float32 else 1e-12
    cuda.compare("batch_norm_moments", x, moments, before=before, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 7, 700])
def test_settled_moments(cuda, rng, channels, dtype):
    state = batch_norm_state(rng, dtype, channels)
    cuda.compare(
        "batch_norm_settle", rng.random(2 * channels) * 5, *state, eps=1e-3, fraction=0.75, count=77, rtol=1e-6
    )


@pytest.mark.parametrize("shape", [(300, 33, 1), (2000, 64, 1), (64, 2, 121), (3, 2, 12100), (6, 5, 49)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_slice_is_the_whole_to_the_same_bits_and_several_nearly(cuda, rng, shape, dtype):
    x, state = normal(rng, dtype, *shape, mean=30), batch_norm_state(rng, dtype, shape[1])
    x[: shape[0] // 3] += 1
    whole = cuda.run("batch_norm_forward", x, np.zeros_like(x), None, *state, eps=1e-3, fraction=0.75)
    for cuts in ([0, shape[0]], [0, 1, shape[0] // 3, shape[0]]):
        moments, count = np.full(2 * shape[1], np.nan), shape[2]
        for begin, end in itertools.pairwise(cuts):
            moments = cuda.run("batch_norm_moments", x[begin:end], moments, before=begin * count)[1]
        kept = cuda.run("batch_norm_settle", moments, *state, eps=1e-3, fraction=0.75, count=shape[0] * count)[1:]
        y = [cuda.run("batch_norm_given", x[begin:end], x[begin:end] * 0, None, *kept[:2])[1]
             for begin, end in itertools.pairwise(cuts)]  # fmt: skip
        for mine, theirs in zip([np.concatenate(y), *kept[1:]], [whole[1], *whole[4:]], strict=True):
            if len(cuts) == 2 and channels.splits(shape) == 1 and shape[2] > 1:
                np.testing.assert_array_equal(mine, theirs)
            else:
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 if dtype == np.float32 else 1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2000, 64, 1), (0, 3, 4), (0, 8, 1)])
@pytest.mark.parametrize("relu, given", [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_from_sums(cuda, rng, shape, dtype, relu, given):
    xhat, dy = normal(rng, dtype, *shape), normal(rng, dtype, *shape, mean=1)
    c, inv_std = shape[1], rng.random(shape[1]).astype(dtype) + 1
    gamma, beta = (normal(rng, dtype, c), normal(rng, dtype, c)) if given else (None, None)
    sums, count = rng.random(2 * c) * 5, max(1, shape[0] * shape[2])
    near = 5e-7 * count + 1e-5 if dtype == np.float32 else 1e-10
    for first in (False, True):
        total = sums * (np.nan if first else 1)
        cuda.compare("batch_norm_sums", xhat, gamma, beta, dy, total, relu=relu, first=first, atol=near)
    near = 1e-4 if dtype == np.float32 else 1e-11
    for dx in (np.zeros_like(dy), dy, xhat):
        operands = xhat, inv_std, gamma, beta, dy, dx, sums
        cuda.compare("batch_norm_backward_given", *operands, relu=relu, count=count, atol=near)
    totals = normal(rng, dtype, c), normal(rng, dtype, c)
    for accumulate, wanted in [(True, totals), (False, totals), (True, (totals[0], None)), (False, (None, totals[1]))]:
        cuda.compare("batch_norm_gradients", sums, *wanted, accumulate=accumulate)


@pytest.mark.parametrize("shape", [(300, 33, 1), (2000, 64, 1), (64, 2, 121), (3, 2, 12100)])
def test_gradient_by_sums_of_slices_is_that_of_the_whole(cuda, rng, shape):
    """Shut where it is, too: to the same bits, or some element would be far off."""
    xhat, dy, c = normal(rng, np.float32, *shape), normal(rng, np.float32, *shape, mean=1), shape[1]
    xhat[:] = np.round(4 * xhat) / 4
    inv_std, gamma = rng.random(c).astype(np.float32) + 1, np.full(c, 0.3, np.float32)
    factors, zero = (xhat, inv_std, gamma, -gamma * xhat[0, :, 0]), np.zeros(c, np.float32)
    whole = cuda.run("batch_norm_scale_backward", *factors, dy, np.zeros_like(dy), zero, zero.copy(), relu=True,
                     accumulate=False)  # fmt: skip
    sums, cut = np.full(2 * c, np.nan), shape[0] // 3
    for part in (slice(cut), slice(cut, None)):
        operands = xhat[part], *factors[2:], dy[part], sums
        sums = cuda.run("batch_norm_sums", *operands, relu=True, first=part.start is None)[4]
    dx = [cuda.run("batch_norm_backward_given", xhat[part], *factors[1:], dy[part], dy[part] * 0, sums, relu=True,
                   count=shape[0] * shape[2])[5] for part in (slice(cut), slice(cut, None))]  # fmt: skip
    np.testing.assert_allclose(np.concatenate(dx), whole[5], rtol=0, atol=1e-5)
    totals = cuda.run("batch_norm_gradients", sums, zero, zero.copy(), accumulate=False)[1:]
    for mine, theirs in zip(totals, whole[6:8], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-3)


def in_four_slices(cuda, x, gamma, beta, dy, room):
    """What is gathered of slices, with so much room for parts behind it, but for these."""
    shape, c = x.shape, x.shape[1]
    moments, sums = np.full((2, 2 * c + room), np.nan)
    for at in range(4):
        part = slice(at * shape[0] // 4, (at + 1) * shape[0] // 4)
        last, before = at == 3, shape[2] * part.start
        moments = cuda.run("batch_norm_moments", x[part], moments, before=before, last=last)[1]
        operands = x[part], gamma, beta, dy[part], sums
        sums = cuda.run("batch_norm_sums", *operands, relu=True, first=at == 0, last=last)[4]
    return [moments[:c], moments[c : 2 * c], sums[: 2 * c]]


@pytest.mark.parametrize("dtype", [*DTYPES, *map(dtypes.of, dtypes.HALVES)])
@pytest.mark.parametrize("shape", [(8000, 64, 1), (9000, 8, 1), (9000, 7, 1), (4, 5, 49), (8, 2, 32000)])
def test_parts_of_slices_are_joined_with_the_last(cuda, rng, shape, dtype):
    """Where there is room for them, to the same numbers but for rounding."""
    x, dy, c = normal(rng, dtype, *shape, mean=9), normal(rng, dtype, *shape, mean=1), shape[1]
    factors = normal(rng, dtype, c), normal(rng, dtype, c)
    found = (np.concatenate(in_four_slices(cuda, x, *factors, dy, room)) for room in (0, 100_000))
    np.testing.assert_allclose(*found, rtol=1e-9 if dtype == np.float64 else 2e-5)


@pytest.mark.parametrize("dtype", dtypes.HALVES)
@pytest.mark.parametrize("shape", [(2000, 64, 1), (300, 7, 1), (3, 5, 49), (3, 2, 12100)])
def test_slices_of_halves(cuda, rng, shape, dtype):
    """Statistics are float32, gamma, beta and their gradients halves."""
    half, c, count = dtypes.of(dtype), shape[1], shape[0] * shape[2]
    x, dy = normal(rng, half, *shape, mean=2), normal(rng, half, *shape, mean=1)
    gamma, beta = normal(rng, half, c), normal(rng, half, c)
    wide, slope, times, plus = (a.astype(np.float64) for a in (x, dy, gamma[:, None], beta[:, None]))
    moments, state = np.full(2 * c, np.nan), batch_norm_state(rng, np.float32, c)
    for part in (slice(1), slice(1, None)):
        moments = cuda.run("batch_norm_moments", x[part], moments, before=shape[2] * (part.start or 0))[1]
    np.testing.assert_allclose(moments[:c], wide.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(moments[c:], wide.var((0, 2)) * count, rtol=1e-5)
    state = cuda.run("batch_norm_settle", moments, *state, eps=1e-3, fraction=0.75, count=count)[1:]
    np.testing.assert_allclose(state[1], (wide.var((0, 2)) + 1e-3) ** -0.5, rtol=1e-5)
    g, sums = np.where(wide * times + plus > 0, slope, 0), np.full(2 * c, np.nan)
    for part in (slice(1), slice(1, None)):
        operands = x[part], gamma, beta, dy[part], sums
        sums = cuda.run("batch_norm_sums", *operands, relu=True, first=part.start is None)[4]
    both = np.stack([g.sum((0, 2)), (g * wide).sum((0, 2))])
    np.testing.assert_allclose(sums.reshape(2, c), both, atol=1e-5 * count)
    totals = cuda.run("batch_norm_gradients", sums, gamma, beta, accumulate=False)[1:]
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(totals, both[::-1].astype(half), rtol=1e-2)
    dx = cuda.run("batch_norm_backward_given", x, state[1], gamma, beta, dy, x, sums, relu=True, count=count)[5]
    expected = (g - both[0][:, None] / count - wide * both[1][:, None] / count) * times * state[1][:, None]
    np.testing.assert_allclose(dx.astype(np.float64), expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("outputs, inputs", [(7, 3), (64, 16), (300, 290)])
@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_from_sources(cuda, rng, outputs, inputs, scaled, dtype):
    """Those of a batch norm, and a scale, behind a product, from sums over its source."""
    count, near = 700, 1e-4 if dtype == np.float32 else 1e-10
    x, g = rng.normal(1, 2, (count, inputs)), rng.normal(0.5, 1, (count, outputs))
    w = rng.normal(size=(outputs, inputs))
    y = x @ w.T
    inv_std = 1 / np.sqrt(y.var(axis=0) + 1e-5)
    gamma = rng.normal(size=outputs) if scaled else None
    xhat, times = (y - y.mean(axis=0)) * inv_std, inv_std * (1 if gamma is None else gamma)
    dy = times * (g - g.mean(axis=0) - xhat * (g * xhat).mean(axis=0))
    sums = g.T @ x, x.T @ x, g.sum(axis=0), x.sum(axis=0)
    given = [None if each is None else each.astype(dtype) for each in (*sums, w, inv_std, gamma)]
    before, wanted = rng.normal(size=(outputs, inputs)).astype(dtype), np.full(outputs, 2, dtype)
    totals = (wanted, wanted.copy()) if scaled else (None, None)
    empty = [np.full(shape, np.nan, dtype) for shape in ((outputs, inputs), (inputs, inputs), (inputs,))]
    for accumulate in (True, False):
        got = cuda.run("conv_batch_norm_gradients", *given, before, *totals, *empty, count=count, accumulate=accumulate)
        dw, dgamma, dbeta, of_g, of_x, shift = got[7:]
        for mine, theirs, old in ((dw, dy.T @ x, before), (dgamma, (g * xhat).sum(axis=0), 2), (dbeta, sums[2], 2)):
            if mine is not None:
                theirs = theirs + accumulate * old
                np.testing.assert_allclose(mine, theirs, rtol=near, atol=near * np.abs(theirs).max())
        dx = dy @ w
        np.testing.assert_allclose(g @ of_g + x @ of_x.T + shift, dx, rtol=near, atol=near * np.abs(dx).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("outputs, inputs", [(7, 3), (64, 16), (2, 1040)])
def test_moments_from_sources(cuda, rng, outputs, inputs, dtype):
    """Those of a product, from sums over its source; of rows that make nothing of it, no less than nothing."""
    count, near = 1500, 1e-4 if dtype == np.float32 else 1e-10
    x, w = rng.normal(1, 2, (count, inputs)), rng.normal(size=(outputs, inputs))
    x[:, 0], w[0] = 3, np.arange(inputs) == 0
    y = x @ w.T
    given = [each.astype(dtype) for each in (x.T @ x, x.sum(axis=0), w)]
    moments = cuda.run("conv_batch_norm_moments", *given, np.full(2 * outputs, np.nan), count=count)[3]
    means, spreads = moments.reshape(2, outputs)
    np.testing.assert_allclose(means, y.mean(axis=0), rtol=near, atol=near)
    np.testing.assert_allclose(spreads[1:], count * y.var(axis=0)[1:], rtol=near)
    assert 0 <= spreads[0] <= near * count * 9


def test_launches(cuda, rng):
    """Two where a block can take a channel, three where it has to be cut."""
    if not hasattr(cuda.device, "launches"):
        pytest.skip("a real device does not count launches")
    for shape, launches in [((2, 3, 4), 2), ((3, 2, 12100), 3)]:
        x, begun = normal(rng, np.float32, *shape), len(cuda.device.launches)
        cuda.run("batch_norm_forward", x, x, None, *batch_norm_state(rng, np.float32, shape[1]), eps=1e-5, fraction=0.9)
        assert len(cuda.device.launches) - begun == launches
    x, factors = normal(rng, np.float32, 8000, 64, 1), normal(rng, np.float32, 2, 64)
    for room, launches in [(0, 16), (100_000, 10)]:  # parts of slices are joined by each, or by the last
        begun = len(cuda.device.launches)
        in_four_slices(cuda, x, *factors, x, room)
        assert len(cuda.device.launches) - begun == launches


def test_same_bits(cuda, rng):
    x, dy = normal(rng, np.float32, 3, 2, 12100), normal(rng, np.float32, 3, 2, 12100)
    state = batch_norm_state(rng, np.float32, 2)
    for name, operands, options in [
        ("batch_norm_forward", (x, np.zeros_like(x), None, *state), {"eps": 1e-5, "fraction": 0.9}),
        ("batch_norm_backward", (x, state[3], dy, np.zeros_like(x)), {}),
        ("batch_norm_moments", (x, np.ones(4)), {"before": 9}),
        ("batch_norm_sums", (x, None, None, dy, np.ones(4)), {"relu": True, "first": False}),
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
