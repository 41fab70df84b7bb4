"""Division by L2 norms against plain NumPy in float64."""

import numpy as np
import pytest

from blobmem.ops.host import normalize

SHAPES = [(2, 3, 4), (3, 5, 1), (1, 7, 600), (2, 1, 9)]
EPS = 0.3


@pytest.fixture(params=[(each, shared) for each in (False, True) for shared in (False, True)],
                ids=["image-channels", "image-shared", "position-channels", "position-shared"])  # fmt: skip
def kind(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def case(request, kind, dtype):
    """Arrays x, scale and dy, and their expected results in double precision: norms, y, dx, dscale."""
    shape, (each, shared) = request.param, kind
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    scale = rng.uniform(0.5, 2, 1 if shared else shape[1]).astype(dtype)
    wide_x, wide_dy, factors = x.astype(np.float64), dy.astype(np.float64), scale[None, :, None].astype(np.float64)
    over = 1 if each else (1, 2)
    norms = np.sqrt((wide_x**2).sum(over, keepdims=True) + EPS)
    along = (wide_x * factors * wide_dy).sum(over, keepdims=True)
    dx = (factors * wide_dy - wide_x * along / norms**2) / norms
    dscale = (wide_x * wide_dy / norms).sum((0, 2))
    expected = norms[:, 0] if each else norms[:, 0, 0], factors * wide_x / norms, dx
    return (x, scale, dy), (*expected, dscale.sum(keepdims=True) if shared else dscale)


def test_both_directions(case, kind, close, garbage):
    (x, scale, dy), (norms_expected, y_expected, dx_expected, dscale_expected) = case
    y, norms = garbage(*x.shape), garbage(*norms_expected.shape)
    normalize.l2_normalize_forward(x, scale, y, norms, each=kind[0], eps=EPS)
    close(norms, norms_expected)
    close(y, y_expected, 2)
    y.fill(np.nan)
    normalize.l2_normalize_forward(x, scale, y, None, each=kind[0], eps=EPS)
    close(y, y_expected, 2)
    dx, dscale = garbage(*x.shape), garbage(*scale.shape)
    normalize.l2_normalize_backward(x, scale, norms, dy, dx)
    close(dx, dx_expected, 4)
    ws = np.full(8 * x.shape[1], 0xFF, np.uint8)
    normalize.l2_normalize_backward_scale(x, norms, dy, dscale, accumulate=False, ws=ws)
    close(dscale, dscale_expected, 4)
    normalize.l2_normalize_backward_scale(x, norms, dy, dscale, accumulate=True, ws=ws)
    close(dscale, 2 * dscale_expected, 4)


def test_in_place(case, kind, close):
    (x, scale, dy), (norms, y_expected, dx_expected, _) = case
    y, dx = x.copy(), dy.copy()
    normalize.l2_normalize_forward(y, scale, y, None, each=kind[0], eps=EPS)
    close(y, y_expected, 2)
    normalize.l2_normalize_backward(x, scale, norms.astype(x.dtype), dx, dx)
    close(dx, dx_expected, 4)


@pytest.mark.parametrize("each", [False, True], ids=["image", "position"])
def test_threads_and_memory(each, dtype, same_bits, frugal):
    x = np.random.default_rng(0).normal(size=(4, 40, 700)).astype(dtype)
    scale, y, norms = np.ones(40, dtype), np.zeros_like(x), np.ones((4, 700) if each else 4, dtype)
    attributes = {"each": each, "eps": EPS}
    cases = [
        (normalize.l2_normalize_forward, (x, scale, y, norms), attributes),
        (normalize.l2_normalize_backward, (x, scale, norms, x + 1, y), {}),
        (normalize.l2_normalize_backward_scale, (x, norms, x + 1, scale),
         {"accumulate": False, "ws": np.zeros(320, np.uint8)}),
    ]  # fmt: skip
    for op, operands, attributes in cases:
        same_bits(op, *operands, **attributes)
        frugal(op, *operands, **attributes)
