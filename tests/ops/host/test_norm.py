"""Normalization, scaling and shifting against NumPy in float64."""

import itertools

import numpy as np
import pytest

from blobmem.ops.host import norm

SHAPES = [(4, 3, 20), (8, 5, 1), (1, 3, 7), (2, 300, 6), (600, 70, 1), (3, 2, 9001), (1, 4, 1)]


def values(dtype, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def by_channel(a):
    return np.asarray(a, np.float64)[None, :, None]


def normalized(x, eps):
    x = x.astype(np.float64)
    mean, variance = x.mean((0, 2)), x.var((0, 2))
    return (x - by_channel(mean)) / np.sqrt(by_channel(variance) + eps), mean, variance


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_forward(shape, keep, in_place, dtype, close, garbage):
    channels, m = shape[1], shape[0] * shape[2]
    x = values(dtype, *shape) * 3 + 1
    expected, mean, variance = normalized(x, 1e-3)
    running_mean, running_var = values(dtype, channels, seed=1), values(dtype, channels, seed=2) ** 2
    factor, y = np.array([2.0], dtype), x if in_place else garbage(*shape)
    sums = running_mean * 0.75 + mean, running_var * 0.75 + variance * (m / (m - 1) if m > 1 else 1)
    xhat, got_mean, inv_std = garbage(*shape) if keep else None, garbage(2 * channels), garbage(channels)
    norm.batch_norm_forward(x, y, xhat, got_mean, inv_std, running_mean, running_var, factor, eps=1e-3, fraction=0.75)
    close(y, expected, digits=10)
    if keep:
        np.testing.assert_array_equal(xhat, y)
    close(got_mean[:channels], mean, digits=5)
    np.testing.assert_allclose(
        got_mean[:channels].astype(np.float64) + got_mean[channels:], mean, rtol=1e-12, atol=1e-12
    )
    close(inv_std, 1 / np.sqrt(variance + 1e-3), digits=5)
    close(running_mean, sums[0], digits=5)
    close(running_var, sums[1], digits=5)
    assert factor[0] == 2.5


@pytest.mark.parametrize("shape", [(64, 2, 1), (4, 2, 5000)])
def test_a_large_mean_does_not_spoil_the_variance(shape):
    x = (np.random.default_rng(0).normal(size=shape) + 4096).astype(np.float32)
    expected, mean, variance = normalized(x, 1e-5)
    y = np.empty_like(x)
    got_mean, inv_std, *running = (np.zeros(n, np.float32) for n in (4, 2, 2, 2))
    norm.batch_norm_forward(x, y, None, got_mean, inv_std, *running, np.zeros(1, np.float32), eps=1e-5, fraction=0.9)
    np.testing.assert_allclose(y, expected, atol=1e-3)
    np.testing.assert_allclose(inv_std, 1 / np.sqrt(variance + 1e-5), rtol=1e-5)
    np.testing.assert_allclose(got_mean[:2], mean, rtol=1e-7)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_with_global_statistics(shape, in_place, dtype, close, garbage):
    x, dy = values(dtype, *shape), values(dtype, *shape, seed=3)
    mean, variance = values(dtype, shape[1], seed=1), values(dtype, shape[1], seed=2) ** 2
    inv_std = 1 / np.sqrt(by_channel(variance) / 4 + 1e-2)
    expected, slope = (x - by_channel(mean) / 4) * inv_std, dy * inv_std
    y, dx = (x, dy) if in_place else (garbage(*shape), garbage(*shape))
    norm.batch_norm_inference(x, y, mean, variance, np.array([4], dtype), eps=1e-2)
    close(y, expected, digits=3)
    norm.batch_norm_backward_global(dy, dx, variance, np.array([4], dtype), eps=1e-2)
    close(dx, slope, digits=3)


@pytest.mark.parametrize("axis, turned", [(0, False), (0, True), (1, False)])
@pytest.mark.parametrize("scaled", [True, False])
def test_folded_weights_do_what_batch_norm_and_scale_would_do_to_the_outputs(
    dtype, close, garbage, axis, turned, scaled
):
    outputs, w = 5, values(dtype, *((5, 3, 2) if axis == 0 else (4, 5)))
    mean, gamma, beta, b = (values(dtype, outputs, seed=seed) for seed in range(1, 5))
    variance, factor = values(dtype, outputs, seed=5) ** 2, np.array([4], dtype)
    given = (b, gamma, beta) if scaled else (None, None, None)
    out, shift = garbage(*w.shape), garbage(outputs)
    norm.fold_norm(w, given[0], mean, variance, factor, *given[1:], out, shift, eps=1e-2, axis=axis, turned=turned)
    if turned:
        out = out.reshape(5, 2, 3).swapaxes(1, 2)
    along = w if axis == 0 else w.T
    x = values(dtype, *along.shape[1:], 7, seed=6)  # of which outputs are sums
    y = np.tensordot(along, x, along.ndim - 1)
    y = (y + by_channel(b)[0] if scaled else y)[None]
    norm.batch_norm_inference(y, y, mean, variance, factor, eps=1e-2)
    if scaled:
        norm.scale_forward(y, gamma, beta, y)
    close(np.tensordot(out if axis == 0 else out.T, x, along.ndim - 1) + shift[:, None], y[0], digits=3)


def test_no_statistics_yet(dtype, close, garbage):
    x, y, junk, none = values(dtype, 2, 3, 4), garbage(2, 3, 4), values(dtype, 3), np.zeros(1, dtype)
    norm.batch_norm_inference(x, y, junk, junk, none, eps=0.25)
    close(y, 2.0 * x)
    norm.batch_norm_backward_global(x, y, junk, none, eps=0.25)
    close(y, 2.0 * x)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_backward(shape, in_place, dtype, close, garbage):
    xhat, dy = values(dtype, *shape), values(dtype, *shape, seed=1) + 1
    inv_std = values(dtype, shape[1], seed=2) ** 2 + 1
    wide = dy.astype(np.float64)
    along = (wide * xhat).mean((0, 2), keepdims=True) * xhat
    expected = (wide - wide.mean((0, 2), keepdims=True) - along) * by_channel(inv_std)
    dx = dy if in_place else garbage(*shape)
    norm.batch_norm_backward(xhat, inv_std, dy, dx)
    # not of the largest result, which is near zero for few items
    np.testing.assert_allclose(dx, expected, atol={np.float32: 2e-5, np.float64: 1e-12}[dtype])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_scale_and_bias(shape, in_place, dtype, close, garbage):
    gamma, beta = values(dtype, shape[1], seed=1), values(dtype, shape[1], seed=2)
    a, b = by_channel(gamma), by_channel(beta)
    calls = [
        (lambda x, y: norm.scale_forward(x, gamma, beta, y), lambda x: x * a + b),
        (lambda x, y: norm.scale_forward(x, gamma, None, y), lambda x: x * a),
        (lambda x, y: norm.bias_forward(x, beta, y), lambda x: x + b),
        (lambda x, y: norm.scale_backward_data(x, gamma, y), lambda x: x * a),
    ]
    for run, formula in calls:
        x = values(dtype, *shape)
        expected = formula(x.astype(np.float64))
        y = x if in_place else garbage(*shape)
        run(x, y)
        close(y, expected)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 3, 2)])
def test_gradients_of_scale_and_bias(shape, dtype, close, garbage):
    x, dy = values(dtype, *shape), values(dtype, *shape, seed=1)
    for expected, run in (
        ((x.astype(np.float64) * dy).sum((0, 2)), lambda out, **flag: norm.scale_backward_gamma(x, dy, out, **flag)),
        (dy.astype(np.float64).sum((0, 2)), lambda out, **flag: norm.scale_backward_beta(dy, out, **flag)),
    ):
        out = garbage(shape[1])
        run(out, accumulate=False)
        np.testing.assert_allclose(out, expected, atol={np.float32: 1e-6, np.float64: 1e-14}[dtype] * (10 + x.size))
        run(out, accumulate=True)
        np.testing.assert_allclose(out, 2 * expected, atol={np.float32: 1e-6, np.float64: 1e-14}[dtype] * (20 + x.size))


def test_opposite_gradients_leave_nothing(dtype, garbage):
    """Parameters shared by two branches of opposite gradients: no rounding may be left."""
    x, dy, total = values(dtype, 5, 4, 3), values(dtype, 5, 4, 3, seed=1), garbage(4)
    norm.scale_backward_beta(dy, total, accumulate=False)
    norm.scale_backward_beta(-dy, total, accumulate=True)
    assert (total == 0).all()
    norm.scale_backward_gamma(x, dy, total, accumulate=False)
    norm.scale_backward_gamma(x, -dy, total, accumulate=True)
    assert (total == 0).all()


def slices(shape):
    """Of uneven sizes; the last one is empty."""
    cuts = sorted({0, shape[0] // 5, shape[0] // 2, shape[0]})
    return [slice(*pair) for pair in itertools.pairwise([*cuts, shape[0]])]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_by_statistics_has_the_same_bits(shape, keep, in_place, dtype, garbage):
    x, c = values(dtype, *shape) * 3 + 7, shape[1]
    state = garbage(2 * c), garbage(c), values(dtype, c), values(dtype, c) ** 2, np.ones(1, dtype)
    expected, kept = garbage(*shape), garbage(*shape)
    norm.batch_norm_forward(x, expected, kept, *state, eps=1e-3, fraction=0.75)
    for part in slices(shape):
        given = x[part].copy()
        y, xhat = given if in_place else np.full_like(given, np.nan), np.full_like(given, np.nan) if keep else None
        norm.batch_norm_given(given, y, xhat, *state[:2])
        assert y.tobytes() == expected[part].tobytes()
        assert xhat is None or xhat.tobytes() == kept[part].tobytes()


@pytest.mark.parametrize("mean", [0, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_moments_of_slices(shape, mean, dtype):
    x = values(dtype, *shape) + mean
    x[: shape[0] // 2] += 5  # so that slices have other means
    moments, seen = np.full(2 * shape[1], np.nan), 0
    for part in slices(shape):
        norm.batch_norm_moments(x[part], moments, before=seen)
        seen += x[part].shape[0] * shape[2]
    exact = x.astype(np.float64)
    np.testing.assert_allclose(moments[: shape[1]], exact.mean((0, 2)), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(moments[shape[1] :], exact.var((0, 2)) * seen, rtol=1e-9, atol=1e-13)


def test_moments_of_nothing():
    for shape in ((0, 3, 4), (0, 3, 1), (2, 3, 0)):
        moments = np.arange(6.0)
        norm.batch_norm_moments(np.zeros(shape, np.float32), moments, before=7)
        np.testing.assert_array_equal(moments, np.arange(6.0))
        moments[:] = np.nan
        norm.batch_norm_moments(np.zeros(shape, np.float32), moments, before=0)
        np.testing.assert_array_equal(moments, np.zeros(6))


@pytest.mark.parametrize("shape", SHAPES)
def test_settled_moments_are_the_statistics_of_the_whole(shape, dtype, close, garbage):
    x, c = values(dtype, *shape) * 3 + 1, shape[1]
    running = values(dtype, c, seed=1), values(dtype, c, seed=2) ** 2, np.array([2], dtype)
    expected = garbage(2 * c), garbage(c), *(array.copy() for array in running)
    norm.batch_norm_forward(x, garbage(*shape), None, *expected, eps=1e-3, fraction=0.75)
    moments, count = np.empty(2 * c), shape[0] * shape[2]
    norm.batch_norm_moments(x, moments, before=0)
    state = garbage(2 * c), garbage(c), *running
    norm.batch_norm_settle(moments, *state, eps=1e-3, fraction=0.75, count=count)
    for mine, whole in zip(state[1:], expected[1:], strict=True):
        close(mine, whole)
    means = [array.astype(np.float64).reshape(2, c).sum(0) for array in (state[0], expected[0])]
    np.testing.assert_allclose(*means, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("target", ["dx", "dy", "xhat"])
@pytest.mark.parametrize("scaled, shifted", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_of_slices(shape, relu, scaled, shifted, target, dtype, garbage):
    c, count = shape[1], shape[0] * shape[2]
    xhat, dy = values(dtype, *shape), values(dtype, *shape, seed=1) + 1
    inv_std = values(dtype, c, seed=2) ** 2 + 1
    gamma, beta = values(dtype, c, seed=3) if scaled else None, values(dtype, c, seed=4) if shifted else None
    times, plus = (by_channel(other if array is None else array) for array, other in ((gamma, [1]), (beta, [0])))
    g = np.where(xhat * times + plus > 0, dy, 0).astype(np.float64) if relu else dy.astype(np.float64)
    sums, dx = np.full(2 * c, np.nan), garbage(*shape)
    for at, part in enumerate(slices(shape)):
        norm.batch_norm_sums(xhat[part], gamma, beta, dy[part], sums, relu=relu, first=at == 0)
    expected = np.concatenate([g.sum((0, 2)), (g * xhat).sum((0, 2))])
    atol = {np.float32: 1e-6, np.float64: 1e-14}[dtype] * (10 + count)
    np.testing.assert_allclose(sums, expected, atol=atol)
    expected = expected.reshape(2, 1, c, 1) / count
    expected = (g - expected[0] - xhat * expected[1]) * times * by_channel(inv_std)
    for part in slices(shape):
        given = {"xhat": xhat[part].copy(), "dy": dy[part].copy(), "dx": dx[part]}
        norm.batch_norm_backward_given(given["xhat"], inv_std, gamma, beta, given["dy"], given[target], sums, relu=relu,
                                       count=count)  # fmt: skip
        dx[part] = given[target]
    np.testing.assert_allclose(dx, expected, atol={np.float32: 5e-5, np.float64: 1e-12}[dtype])


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 3, 1), (2, 3, 0)])
def test_sums_of_nothing(shape):
    nothing, sums = np.zeros(shape, np.float32), np.arange(6.0)
    norm.batch_norm_sums(nothing, None, None, nothing, sums, relu=True, first=False)
    np.testing.assert_array_equal(sums, np.arange(6.0))
    norm.batch_norm_sums(nothing, None, None, nothing, sums, relu=True, first=True)
    np.testing.assert_array_equal(sums, np.zeros(6))


def test_gradients_of_sums(dtype, garbage):
    sums, dgamma, dbeta = np.arange(6.0) + 1, garbage(3), garbage(3)
    norm.batch_norm_gradients(sums, dgamma, None, accumulate=False)
    norm.batch_norm_gradients(sums, None, dbeta, accumulate=False)
    np.testing.assert_array_equal([dbeta, dgamma], sums.reshape(2, 3))
    norm.batch_norm_gradients(sums, dgamma, dbeta, accumulate=True)
    np.testing.assert_array_equal([dbeta, dgamma], 2 * sums.reshape(2, 3))
    norm.batch_norm_gradients(sums, None, None, accumulate=True)


def cases(dtype, shape):
    x, y, xhat = (values(dtype, *shape, seed=i) for i in range(3))
    c = [values(dtype, shape[1], seed=i) ** 2 for i in range(4)]
    one, two = np.ones(1, dtype), np.tile(c[3].astype(np.float64), 2)
    return {
        "forward": (
            norm.batch_norm_forward,
            (x, y, xhat, np.tile(c[0], 2), *c[1:], one),
            {"eps": 1e-5, "fraction": 0.9},
        ),
        "given": (norm.batch_norm_given, (x, y, xhat, np.tile(c[0], 2), c[1]), {}),
        "moments": (norm.batch_norm_moments, (x, two), {"before": 3}),
        "sums": (norm.batch_norm_sums, (xhat, c[0], c[1], x, two), {"relu": True, "first": False}),
        "backward given": (
            norm.batch_norm_backward_given,
            (xhat, c[0], c[1], c[2], x, y, two),
            {"relu": True, "count": 99},
        ),
        "inference": (norm.batch_norm_inference, (x, y, c[0], c[1], one), {"eps": 1e-5}),
        "backward": (norm.batch_norm_backward, (xhat, c[0], x, y), {}),
        "global": (norm.batch_norm_backward_global, (x, y, c[0], one), {"eps": 1e-5}),
        "scale": (norm.scale_forward, (x, c[0], c[1], y), {}),
        "data": (norm.scale_backward_data, (x, c[0], y), {}),
        "gamma": (norm.scale_backward_gamma, (x, y, c[0]), {"accumulate": True}),
        "beta": (norm.scale_backward_beta, (x, c[0]), {"accumulate": False}),
        "bias": (norm.bias_forward, (x, c[0], y), {}),
    }


@pytest.mark.parametrize("shape", [(7, 23, 401), (203, 311, 1)])
@pytest.mark.parametrize("name", cases(np.float32, (1, 1, 1)))
def test_threads_and_memory(name, shape, dtype, same_bits, frugal):
    op, operands, attributes = cases(dtype, shape)[name]
    same_bits(op, *operands, **attributes)
    frugal(op, *operands, **attributes)
