"""Fused ops against the ops of the host that they stand for: channels with runs and without, one part and several."""

import numpy as np
import pytest

from blobmem.ops.cuda import batch_norm, launch
from blobmem.ops.registry import table

SHAPES = [
    (1, 1, 1),
    (2, 3, 4),
    (3, 5, 49),  # packs that reach into the next channel
    (2, 9, 5),
    (6, 3, 3),  # runs shorter than a pack
    (5, 7, 1),  # no runs, odd channels
    (37, 12, 1),
    (300, 64, 1),
    (2000, 64, 1),  # several parts, half a warp's lots
    (700, 200, 1),  # lots that do not fill their blocks
    (3, 2, 12100),  # two parts, whole packs
    (5, 2, 6727),  # two parts, odd
    (40000, 1, 1),
]
MANY = [(3, 5, 49), (5, 7, 1), (2000, 64, 1), (3, 2, 12100)]  # for what does not depend on the shape so much
DTYPES = [np.float32, np.float64]
HOST = table("host")


def normal(rng, dtype, *shape, mean=0.0):
    return (rng.normal(size=shape) + mean).astype(dtype)


def state(rng, dtype, channels):
    running = normal(rng, dtype, channels), rng.random(channels).astype(dtype), np.full(1, 3.5, dtype)
    return np.zeros(2 * channels, dtype), np.zeros(channels, dtype), *running


def factors(rng, dtype, channels, bias):
    return normal(rng, dtype, channels), normal(rng, dtype, channels) if bias else None


def close(mine, theirs, dtype, rtol=1e-5):
    rtol = rtol if dtype == np.float32 else 1e-11
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=rtol * max(1e-30, np.abs(theirs).max(initial=0)))


def forward(x, given, gamma, beta, relu, eps=1e-3, fraction=0.75):
    """(y, xhat, the state afterwards) by the host's ops."""
    xhat, y, kept = np.zeros_like(x), np.zeros_like(x), [a.copy() for a in given]
    HOST["batch_norm_forward"](x, np.zeros_like(x), xhat, *kept, eps=eps, fraction=fraction)
    HOST["scale_forward"](xhat, gamma, beta, y)
    if relu:
        HOST["relu_forward"](y, y, slope=0.0)
    return y, xhat, kept


def backward(xhat, inv_std, gamma, beta, dy, relu):
    """(dx, dgamma, dbeta) by the host's ops, in double precision; xhat is as it was kept, so that no mask differs."""
    gamma, inv_std, xhat, dy = (a.astype(np.float64) for a in (gamma, inv_std, xhat, dy))
    y = xhat * gamma[:, None] + (0 if beta is None else beta.astype(np.float64)[:, None])
    g, scaled, dx = np.where(y > 0, dy, 0) if relu else dy, np.zeros_like(dy), np.zeros_like(dy)
    dgamma, dbeta = np.zeros_like(gamma), np.zeros_like(gamma)
    HOST["scale_backward_gamma"](xhat, g, dgamma, accumulate=False)
    HOST["scale_backward_beta"](g, dbeta, accumulate=False)
    HOST["scale_backward_data"](g, gamma, scaled)
    HOST["batch_norm_backward"](xhat, inv_std, scaled, dx)
    return dx, dgamma, dbeta


def test_shapes_cover_parts():
    plans = {batch_norm._plan(shape, np.dtype(dtype)) for shape in SHAPES for dtype in DTYPES}
    assert {(plan.parts > 1, plan.width > 0) for plan in plans} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert {plan.width for plan in plans} >= {0, 4, 8}
    assert batch_norm._plan((3211264, 64, 1), np.dtype(np.float32)) == (528, 528, 16, 0)
    assert batch_norm._plan((12544, 2048, 1), np.dtype(np.float32)) == (33, 528, 32, 0)
    assert batch_norm._plan((6272, 1024, 1), np.dtype(np.float32)) == (16, 512, 8, 0)
    assert batch_norm._plan((1568, 512, 1), np.dtype(np.float32)) == (6, 96, 8, 12)
    assert batch_norm._plan((256, 64, 12544), np.dtype(np.float32)) == (32, 2048, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm_scale_forward(cuda, rng, shape, dtype, relu):
    x = normal(rng, dtype, *shape, mean=2)
    given, (gamma, beta) = state(rng, dtype, shape[1]), factors(rng, dtype, shape[1], True)
    got = cuda.run("batch_norm_scale_forward", x, np.zeros_like(x), np.zeros_like(x), *given, gamma, beta, eps=1e-3,
                   fraction=0.75, relu=relu)  # fmt: skip
    y, xhat, kept = forward(x, given, gamma, beta, relu)
    if shape[0] * shape[2] == 1:
        kept[1], got[4] = kept[1] * 0, got[4] * 0  # nothing but rounding is divided by
    for mine, theirs in zip(got[1:8], (y, xhat, *kept), strict=True):
        close(mine, theirs, dtype)
    assert not relu or (got[1] >= 0).all()


@pytest.mark.parametrize("shape", MANY)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_batch_norm_scale_forward_in_place(cuda, rng, shape, bias, keep):
    x = normal(rng, np.float32, *shape)
    given, (gamma, beta) = state(rng, np.float32, shape[1]), factors(rng, np.float32, shape[1], bias)
    kept = np.zeros_like(x) if keep else None
    got = cuda.run("batch_norm_scale_forward", x, x, kept, *given, gamma, beta, eps=1e-3, fraction=0.75, relu=True)
    y, xhat, _ = forward(x, given, gamma, beta, True)
    close(got[0], y, np.float32)
    if keep:
        close(got[2], xhat, np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MANY)
@pytest.mark.parametrize("bias", [False, True])
def test_a_top_made_anew_has_the_same_bits(cuda, rng, shape, dtype, bias):
    """Of the normalised array, by whichever ops made it or did not."""
    x = normal(rng, dtype, *shape, mean=2)
    given, (gamma, beta) = state(rng, dtype, shape[1]), factors(rng, dtype, shape[1], bias)
    for relu in (False, True):
        got = cuda.run("batch_norm_scale_forward", x, np.zeros_like(x), np.zeros_like(x), *given, gamma, beta,
                       eps=1e-3, fraction=0.75, relu=relu)  # fmt: skip
        y, xhat = got[1:3]
        again = cuda.run("scale_relu_forward" if relu else "scale_forward", xhat, gamma, beta, np.zeros_like(x))[-1]
        np.testing.assert_array_equal(again.view(np.uint8), y.view(np.uint8))
        scaled = cuda.run("scale_forward", xhat, gamma, beta, np.zeros_like(x))[-1]
        apart = cuda.run("relu_forward", scaled, scaled, slope=0.0)[-1] if relu else scaled
        np.testing.assert_array_equal(apart.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", [False, True])
def test_the_same_bits_by_the_statistics_that_were_left(cuda, rng, shape, dtype, keep):
    x, b = normal(rng, dtype, *shape, mean=2), normal(rng, dtype, *shape)
    kept, scale = np.zeros_like(x) if keep else None, factors(rng, dtype, shape[1], True)
    for name, others, wanted, options in (
        ("batch_norm", (), (), {}),
        ("batch_norm_scale", (), scale, {"relu": True}),
        ("batch_norm_scale_sum_relu", (b,), scale, {"slope": 0.1}),
    ):
        large = x, *others, np.zeros_like(x), kept
        made = cuda.run(
            f"{name}_forward", *large, *state(rng, dtype, shape[1]), *wanted, eps=1e-3, fraction=0.75, **options
        )
        statistics = made[len(large) : len(large) + 2]
        again = cuda.run(f"{name}_given", *large, *statistics, *wanted, **options)
        for one, other in zip(again[1 : len(large)], made[1 : len(large)], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(300, 5, 1), (2000, 64, 1), (3, 5, 49), (3, 2, 12100)])
def test_variance_of_values_far_from_zero(cuda, rng, shape):
    x = normal(rng, np.float32, *shape, mean=30000)
    x[0, :, 0] = 0
    given = state(rng, np.float32, shape[1])
    got = cuda.run("batch_norm_scale_forward", x, np.zeros_like(x), None, *given, None, None, eps=0.0, fraction=0.0,
                   relu=False)  # fmt: skip
    exact, count = x.astype(np.float64), shape[0] * shape[2]
    mean, var = exact.mean(axis=(0, 2)), exact.var(axis=(0, 2))
    np.testing.assert_allclose(got[3][: shape[1]], mean, rtol=1e-6)
    np.testing.assert_allclose(got[6], var * count / (count - 1), rtol=1e-4)
    close(got[1], (exact - mean[:, None]) / np.sqrt(var)[:, None], np.float32, rtol=1e-4)


@pytest.mark.parametrize("shape", [(4, 3, 20), (2000, 64, 1), (3, 2, 12100)])
def test_constant_channels_far_from_zero(cuda, rng, shape):
    x = np.full(shape, 1e5 + 1 / 128, np.float32)
    given = state(rng, np.float32, shape[1])
    got = cuda.run("batch_norm_scale_forward", x, np.zeros_like(x), None, *given, None, None, eps=1e-5, fraction=0.0,
                   relu=False)  # fmt: skip
    assert (got[6] == 0).all()
    assert (got[1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm_scale_backward(cuda, rng, shape, dtype, relu):
    xhat, dy = normal(rng, dtype, *shape), normal(rng, dtype, *shape, mean=1)
    inv_std, (gamma, beta) = rng.random(shape[1]).astype(dtype) + 1, factors(rng, dtype, shape[1], True)
    totals = normal(rng, dtype, shape[1]), normal(rng, dtype, shape[1])
    dx, dgamma, dbeta = backward(xhat, inv_std, gamma, beta, dy, relu)
    for accumulate in (False, True):
        got = cuda.run("batch_norm_scale_backward", xhat, inv_std, gamma, beta, dy, np.zeros_like(dy), *totals,
                       relu=relu, accumulate=accumulate)  # fmt: skip
        scale = np.abs(dy).max() * np.abs(gamma * inv_std).max()
        np.testing.assert_allclose(got[5], dx, rtol=0, atol=(1e-5 if dtype == np.float32 else 1e-12) * scale)
        for mine, before, more in zip(got[6:], totals, (dgamma, dbeta), strict=True):
            close(mine, more + before * accumulate, dtype)


@pytest.mark.parametrize("shape", MANY)
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm_scale_backward_in_place_without_bias(cuda, rng, shape, relu):
    xhat, dy = normal(rng, np.float32, *shape), normal(rng, np.float32, *shape, mean=1)
    inv_std, (gamma, _) = rng.random(shape[1]).astype(np.float32) + 1, factors(rng, np.float32, shape[1], False)
    dx, dgamma, _ = backward(xhat, inv_std, gamma, None, dy, relu)
    got = cuda.run("batch_norm_scale_backward", xhat, inv_std, gamma, None, dy, dy, np.zeros_like(gamma), None,
                   relu=relu, accumulate=False)  # fmt: skip
    close(got[4], dx, np.float32)
    close(got[6], dgamma, np.float32)


@pytest.mark.parametrize("shape", MANY)
def test_backward_shuts_what_forward_shut(cuda, rng, shape):
    """Gradients pass exactly where y is positive, also where rounding decides."""
    x, one = normal(rng, np.float32, *shape), np.ones(shape[1], np.float32)
    x[:] = np.round(x)  # few values, and beta such that one of them comes out next to zero
    given, gamma = state(rng, np.float32, shape[1]), np.full(shape[1], 0.3, np.float32)
    _, xhat, kept = forward(x, given, gamma, None, False)
    beta = -gamma * xhat[0, :, 0]
    got = cuda.run("batch_norm_scale_forward", x, np.zeros_like(x), np.zeros_like(x), *given, gamma, beta, eps=1e-3,
                   fraction=0.75, relu=True)  # fmt: skip
    dbeta = cuda.run("batch_norm_scale_backward", got[2], kept[1], gamma, beta, np.ones_like(x), np.zeros_like(x), one,
                     one.copy(), relu=True, accumulate=False)[7]  # fmt: skip
    np.testing.assert_array_equal(dbeta, (got[1] > 0).sum(axis=(0, 2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm_scale_inference(cuda, rng, shape, dtype, relu):
    x, mean, var = normal(rng, dtype, *shape), normal(rng, dtype, shape[1]), rng.random(shape[1]).astype(dtype)
    for weight, bias in ((0.0, True), (3.5, False)):
        factor, (gamma, beta) = np.full(1, weight, dtype), factors(rng, dtype, shape[1], bias)
        y = np.zeros_like(x)
        HOST["batch_norm_inference"](x, y, mean, var, factor, eps=1e-3)
        HOST["scale_forward"](y, gamma, beta, y)
        y = np.maximum(y, 0) if relu else y
        for target in (np.zeros_like(x), x):
            got = cuda.run("batch_norm_scale_inference", x, target, mean, var, factor, gamma, beta, eps=1e-3, relu=relu)
            close(got[1], y, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu, kept", [(True, True), (False, False)])
def test_sum_batch_norm_scale_inference(cuda, rng, shape, dtype, relu, kept):
    a, b = normal(rng, dtype, *shape), normal(rng, dtype, *shape)
    mean, var, factor = normal(rng, dtype, shape[1]), rng.random(shape[1]).astype(dtype), np.full(1, 3.5, dtype)
    given = mean, var, factor, *factors(rng, dtype, shape[1], True)
    whole = np.zeros_like(a) if kept else None
    got = cuda.run("sum_batch_norm_scale_inference", a.reshape(-1), b, whole, np.zeros_like(a), *given, eps=1e-3,
                   relu=relu)  # fmt: skip
    y = cuda.run("batch_norm_scale_inference", a + b, np.zeros_like(a), *given, eps=1e-3, relu=relu)[1]
    np.testing.assert_array_equal(got[3], y)
    if kept:
        np.testing.assert_array_equal(got[2], a + b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 4, 1030, 5003])
@pytest.mark.parametrize("slope", [0.0, 0.25])
def test_sum_relu(cuda, rng, size, dtype, slope):
    a, b, dy = (normal(rng, dtype, size) for _ in range(3))
    y = np.where(a + b > 0, a + b, slope * (a + b)).astype(dtype)
    for operands in [(a, b, np.zeros_like(a)), (a, b, a), (a, b, b)]:
        np.testing.assert_array_equal(cuda.run("sum_relu_forward", *operands, slope=slope)[2], y)
    g = np.where(y > 0, dy, slope * dy).astype(dtype)
    da, db = np.ones_like(a), np.ones_like(a)
    for targets in [(da, db), (da, None), (None, db), (None, None), (dy, db)]:
        got = cuda.run("sum_relu_backward", y, dy, *targets, slope=slope)
        for result in filter(lambda array: array is not None, got[1:]):
            np.testing.assert_array_equal(result, g)


def same_bits(mine, theirs):
    np.testing.assert_array_equal(mine.view(np.uint8), theirs.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3, 4)])
@pytest.mark.parametrize("slope", [0.0, 0.25])
def test_scale_sum_relu_has_the_bits_of_its_parts(cuda, rng, shape, dtype, slope):
    """Of one that is scaled and one that is not, or two; zeros of either sign too, which a slope lets through."""
    a, b = normal(rng, dtype, *shape), normal(rng, dtype, *shape)
    a.ravel()[::3] = b.ravel()[::3] = -0.0
    (of_a, of_b), (gamma, beta) = (
        (factors(rng, dtype, shape[1], False) for _ in "ab"),
        factors(rng, dtype, shape[1], True),
    )
    for factors_a, factors_b in [((gamma, beta), (None, None)), (of_a, (None, None)), (of_a, (gamma, beta)),
                                 ((gamma, beta), of_b)]:  # fmt: skip
        one = cuda.run("scale_forward", a, *factors_a, np.zeros_like(a))[3]
        other = b if factors_b[0] is None else cuda.run("scale_forward", b, *factors_b, np.zeros_like(b))[3]
        y = cuda.run("sum_relu_forward", one, other, np.zeros_like(a), slope=slope)[2]
        for target in (np.ones_like(a), a, b):
            got = cuda.run("scale_sum_relu_forward", a, *factors_a, b, *factors_b, target, slope=slope)
            same_bits(got[6], y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3, 4)])
@pytest.mark.parametrize("slope", [0.0, 0.25])
def test_batch_norm_scale_sum_relu_has_the_bits_of_its_parts(cuda, rng, shape, dtype, slope):
    x, b = normal(rng, dtype, *shape, mean=2), normal(rng, dtype, *shape)
    given = state(rng, dtype, shape[1])
    options = {"eps": 1e-3, "fraction": 0.75}
    for bias, kept in [(True, np.zeros_like(x)), (False, np.zeros_like(x)), (True, None)]:
        scale = factors(rng, dtype, shape[1], bias)
        parts = cuda.run("batch_norm_scale_forward", x, np.zeros_like(x), kept, *given, *scale, **options, relu=False)
        y = cuda.run("sum_relu_forward", b, parts[1], np.zeros_like(x), slope=slope)[2]
        for target in (np.ones_like(x), x, b):
            got = cuda.run(
                "batch_norm_scale_sum_relu_forward", x, b, target, kept, *given, *scale, **options, slope=slope
            )
            same_bits(got[2], y)
            for mine, theirs in zip(got[3:9], parts[2:8], strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    same_bits(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 4, 1030, 5003])
@pytest.mark.parametrize("slope", [0.0, 0.25])
def test_sums_relu_backward(cuda, rng, size, dtype, slope):
    y, one, two = (normal(rng, dtype, size) for _ in range(3))
    g = np.where(y > 0, one + two, slope * (one + two)).astype(dtype)
    for a, b in [(True, True), (True, False), (False, True), (False, False)]:
        targets = [np.ones_like(y), np.ones_like(y) if a else None, np.ones_like(y) if b else None]
        got = cuda.run("sums_relu_backward", y, one, two, *targets, slope=slope)
        for result in filter(lambda array: array is not None, got[3:]):
            np.testing.assert_array_equal(result, g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3, 4)])
@pytest.mark.parametrize("slope", [0.0, 0.25])
def test_sums_relu_batch_norm_scale_backward_has_the_bits_of_its_parts(cuda, rng, shape, dtype, slope):
    y, one, two, xhat = (normal(rng, dtype, *shape) for _ in range(4))
    inv_std, gamma = rng.random(shape[1]).astype(dtype) + 1, normal(rng, dtype, shape[1])
    for bias, accumulate in [(True, False), (False, True)]:
        totals = normal(rng, dtype, shape[1]), normal(rng, dtype, shape[1]) if bias else None
        g = cuda.run("sums_relu_backward", y, one, two, np.zeros_like(y), None, None, slope=slope)[3]
        parts = cuda.run("batch_norm_scale_backward", xhat, inv_std, gamma, None, g, np.zeros_like(y), *totals,
                         relu=False, accumulate=accumulate)  # fmt: skip
        for dy, da, dx in [(np.ones_like(y), np.ones_like(y), np.ones_like(y)), (None, one, two), (two, y, xhat)]:
            got = cuda.run("sums_relu_batch_norm_scale_backward", y, one, two, dy, da, xhat, inv_std, gamma, dx,
                           *totals, slope=slope, accumulate=accumulate)  # fmt: skip
            for mine, theirs in zip((*got[3:5], *got[8:]), (dy if dy is None else g, g, *parts[5:]), strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    same_bits(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 2), (17, 5), (600, 36), (2000, 64), (5, 4, 3, 70)])
@pytest.mark.parametrize("slope", [0.0, 0.25])
@pytest.mark.parametrize("accumulate", [False, True])
def test_relu_bias_backward_has_the_bits_of_both(cuda, rng, shape, dtype, slope, accumulate):
    y, dy, db = normal(rng, dtype, *shape), normal(rng, dtype, *shape), normal(rng, dtype, shape[-1])
    folded = (int(np.prod(shape[:-1])), shape[-1], 1)
    for dx in (dy, np.ones_like(dy)):
        g = cuda.run("relu_backward", y, dy, dx, slope=slope)[2]
        total = cuda.run("conv_backward_bias", g.reshape(folded), db, accumulate=accumulate)[1]
        got = cuda.run("relu_bias_backward", y, dy, dx, db, slope=slope, accumulate=accumulate)
        np.testing.assert_array_equal(got[2], g)
        np.testing.assert_array_equal(got[3], total)
        other = normal(rng, dtype, *shape)
        g = cuda.run("sums_relu_backward", y, dy, other, dx, None, None, slope=slope)[3]
        total = cuda.run("conv_backward_bias", g.reshape(folded), db, accumulate=accumulate)[1]
        got = cuda.run("sums_relu_bias_backward", y, dy, other, dx, db, slope=slope, accumulate=accumulate)
        np.testing.assert_array_equal(got[3], g)
        np.testing.assert_array_equal(got[4], total)


def test_sum_relu_of_what_is_no_number(cuda):
    a, b = np.array([np.inf, -np.inf, np.inf], np.float32), np.array([1, 1, -np.inf], np.float32)
    np.testing.assert_array_equal(cuda.run("sum_relu_forward", a, b, a, slope=0.0)[2], np.array([np.inf, 0, np.nan]))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 8, 1)])
def test_nothing(cuda, rng, shape):
    """No statistics from no items; sums of nothing are zero."""
    x, given, gamma = np.zeros(shape, np.float32), state(rng, np.float32, shape[1]), normal(rng, np.float32, shape[1])
    got = cuda.run("batch_norm_scale_forward", x, x, None, *given, gamma, gamma, eps=1e-3, fraction=0.5, relu=True)
    for before, after in zip(given, got[3:8], strict=True):
        np.testing.assert_array_equal(before, after)
    for accumulate in (False, True):
        total = normal(rng, np.float32, shape[1])
        got = cuda.run("batch_norm_scale_backward", x, given[1], gamma, None, x, x, total, None, relu=True,
                       accumulate=accumulate)  # fmt: skip
        np.testing.assert_array_equal(got[6], total * accumulate)
    cuda.run("batch_norm_scale_inference", x, x, *given[2:], gamma, None, eps=1e-3, relu=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(9, 5, 49), (64, 3, 32), (700, 64, 1), (200, 48, 1), (40, 1100, 1), (400, 7, 1), (70, 9, 3)]
)
@pytest.mark.parametrize("blocks", [1, 3])
def test_many_elements_of_a_thread(cuda, rng, shape, dtype, blocks, monkeypatch):
    """Threads that go on from channel to channel, as they do in arrays larger than tests can have."""
    monkeypatch.setattr(launch, "_MOST_BLOCKS", blocks)
    x, dy = normal(rng, dtype, *shape), normal(rng, dtype, *shape)
    given, (gamma, beta) = state(rng, dtype, shape[1]), factors(rng, dtype, shape[1], True)
    y, xhat, kept = forward(x, given, gamma, beta, True)
    got = cuda.run("batch_norm_scale_forward", x, np.zeros_like(x), np.zeros_like(x), *given, gamma, beta, eps=1e-3,
                   fraction=0.75, relu=True)  # fmt: skip
    close(got[1], y, dtype)
    close(got[2], xhat, dtype)
    dx, _, _ = backward(xhat, kept[1], gamma, beta, dy, True)
    got = cuda.run("batch_norm_scale_backward", xhat, kept[1], gamma, beta, dy, dy, gamma.copy(), None, relu=True,
                   accumulate=False)  # fmt: skip
    close(got[4], dx, dtype)
    g = cuda.run("sums_relu_backward", y, x, dy, np.zeros_like(x), None, None, slope=0.0)[3]
    dx, _, _ = backward(xhat, kept[1], gamma, None, g, False)
    got = cuda.run("sums_relu_batch_norm_scale_backward", y, x, dy, None, np.zeros_like(x), xhat, kept[1], gamma,
                   np.zeros_like(x), gamma.copy(), None, slope=0.0, accumulate=False)  # fmt: skip
    same_bits(got[4], g)
    close(got[8], dx, dtype)
    summed = cuda.run("sum_relu_forward", cuda.run("scale_forward", xhat, gamma, beta, y)[3], dy, y, slope=0.0)[2]
    got = cuda.run("scale_sum_relu_forward", xhat, gamma, beta, dy, None, None, np.zeros_like(x), slope=0.0)
    same_bits(got[6], summed)
    got = cuda.run("batch_norm_scale_sum_relu_forward", x, dy, np.zeros_like(x), np.zeros_like(x), *given, gamma, beta,
                   eps=1e-3, fraction=0.75, slope=0.0)  # fmt: skip
    close(got[2], summed, dtype)
    cuda.compare("batch_norm_inference", x, y, *given[2:], eps=1e-3)
    cuda.compare("scale_forward", x, gamma, beta, x)
    cuda.compare("prelu_forward", x, gamma, y)
    cuda.compare("prelu_backward_data", x, gamma, dy, dy)


def test_launches(cuda, rng):
    """Sums and map, and where channels that have runs come in parts one more between."""
    if not hasattr(cuda.device, "launches"):
        pytest.skip("a real device does not count launches")
    for shape, launches in [((2, 3, 4), 2), ((37, 12, 1), 2), ((3, 2, 12100), 3), ((2000, 64, 1), 2)]:
        x, begun = normal(rng, np.float32, *shape), len(cuda.device.launches)
        given, (gamma, beta) = state(rng, np.float32, shape[1]), factors(rng, np.float32, shape[1], True)
        cuda.run("batch_norm_scale_forward", x, x, None, *given, gamma, beta, eps=1e-3, fraction=0.5, relu=True)
        assert len(cuda.device.launches) - begun == launches


@pytest.mark.parametrize("shape", [(2000, 64, 1), (3, 2, 12100)])
def test_same_bits(cuda, rng, shape):
    x, dy = normal(rng, np.float32, *shape), normal(rng, np.float32, *shape)
    given, (gamma, beta) = state(rng, np.float32, shape[1]), factors(rng, np.float32, shape[1], True)
    for name, operands, options in [
        ("batch_norm_scale_forward", (x, np.zeros_like(x), np.zeros_like(x), *given, gamma, beta),
         {"eps": 1e-3, "fraction": 0.5, "relu": True}),
        ("batch_norm_scale_backward", (x, gamma, gamma, beta, dy, np.zeros_like(x), gamma.copy(), gamma.copy()),
         {"relu": True, "accumulate": True}),
    ]:  # fmt: skip
        first, second = (cuda.run(name, *operands, **options) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1500, 64, 1), (600, 200, 1), (601, 36, 1), (500, 45, 1)])
def test_large_arrays_have_their_parts_joined_by_a_launch(cuda, rng, shape, dtype, monkeypatch):
    """To what the blocks of the map make of them in small ones."""
    monkeypatch.setattr(batch_norm, "_LEAST_ROWS", 1)
    monkeypatch.setattr(batch_norm, "_MOST_JOINED", 1 << 20)
    monkeypatch.setattr(batch_norm, "_plan", batch_norm._plan.__wrapped__)
    x, dy, one = (normal(rng, dtype, *shape) for _ in range(3))
    given, (gamma, beta) = state(rng, dtype, shape[1]), factors(rng, dtype, shape[1], True)
    results = []
    for small in (1 << 30, 0):
        monkeypatch.setattr(batch_norm, "_SMALL", small)
        assert batch_norm._plan(shape, np.dtype(dtype))[0] > 1
        forward = cuda.run("batch_norm_scale_forward", x, np.zeros_like(x), np.zeros_like(x), *given, gamma, beta,
                           eps=1e-3, fraction=0.75, relu=True)  # fmt: skip
        back = cuda.run("batch_norm_scale_backward", forward[2], forward[4], gamma, beta, dy, np.zeros_like(x),
                        gamma.copy(), beta.copy(), relu=True, accumulate=True)  # fmt: skip
        summed = cuda.run("sums_relu_batch_norm_scale_backward", x, dy, one, None, np.zeros_like(x), forward[2],
                          forward[4], gamma, np.zeros_like(x), gamma.copy(), None, slope=0.0,
                          accumulate=False)  # fmt: skip
        results.append([*forward[1:8], *back[5:], summed[4], *summed[8:10]])
    for joined, apart in zip(*results, strict=True):
        close(joined, apart, dtype)
