"""Inner products on the CUDA device against the host's."""

import numpy as np
import pytest

from blobmem.ops.cuda import linear

SHAPES = [(3, 5, 4), (1, 1, 1), (64, 33, 10), (7, 700, 301), (1, 92, 70), (400, 1, 3), (600, 8, 40)]  # M, K, N


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inner_product(cuda, rng, shape, transpose, dtype):
    m, k, n = shape
    x, dy, b = (rng.normal(size=size).astype(dtype) for size in ((m, k), (m, n), n))
    w, dw = rng.normal(size=(2, *((k, n) if transpose else (n, k)))).astype(dtype)
    for bias in (None, b):
        cuda.compare("inner_product_forward", x, w, bias, np.full_like(dy, np.nan), transpose=transpose)
    cuda.compare("inner_product_backward_data", dy, w, np.full_like(x, np.nan), transpose=transpose)
    if not transpose:
        cuda.compare("inner_product_backward_data", dy, w, x, transpose=transpose, add=True)
    for accumulate in (False, True):
        filled, total = (dw, b) if accumulate else (np.full_like(dw, np.nan), np.full_like(b, np.nan))
        cuda.compare("inner_product_backward_weights", x, dy, filled, transpose=transpose, accumulate=accumulate)
        cuda.compare("inner_product_backward_bias", dy, total, accumulate=accumulate)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inner_product_and_relu(cuda, rng, shape, bias, dtype):
    m, k, n = shape
    x, w, y = rng.normal(size=(m, k)).astype(dtype), rng.normal(size=(n, k)).astype(dtype), np.zeros((m, n), dtype)
    b = np.full(n, -0.0, dtype) if bias else None
    w[0], x[-1, 0] = 0, np.nan if m > 1 else 1
    plain = cuda.run("inner_product_forward", x, w, b, y, transpose=False)[3]
    begun = len(getattr(cuda.device, "launches", ()))
    got = cuda.run("inner_product_relu_forward", x, w, b, y, transpose=False)[3]
    np.testing.assert_array_equal(got, np.maximum(plain, 0))
    assert np.isnan(got).any() == (m > 1) and (got == 0).any() and not np.signbit(got[got == 0]).any()
    if hasattr(cuda.device, "launches"):
        few = m * n <= 2048 and k >= 32
        assert cuda.device.launches[begun:] == ["few_products" if few else "add_bias" if bias else "relu"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_large_result_has_its_bias_first(monkeypatch, cuda, rng, shape, dtype):
    monkeypatch.setattr(linear, "LARGE", 0)
    m, k, n = shape
    x, w, b = (rng.normal(size=size).astype(dtype) for size in ((m, k), (n, k), n))
    begun = len(getattr(cuda.device, "launches", ()))
    cuda.compare("inner_product_forward", x, w, b, np.full((m, n), np.nan, dtype), transpose=False)
    if hasattr(cuda.device, "launches"):
        assert cuda.device.launches[begun:] == ["few_products" if m * n <= 2048 and k >= 32 else "spread"]


def test_the_bias_of_one_row_is_a_copy(cuda, rng, dtype):
    dy = rng.normal(size=(1, 1003)).astype(dtype)
    _, db = cuda.run("inner_product_backward_bias", dy, np.full(1003, np.nan, dtype), accumulate=False)
    np.testing.assert_array_equal(db, dy[0])


def test_opposite_gradients_of_shared_parameters_leave_nothing(cuda, rng, dtype):
    x, dy = rng.normal(size=(5, 33)).astype(dtype), rng.normal(size=(5, 17)).astype(dtype)
    dw, db = np.full((17, 33), np.nan, dtype), np.full(17, np.nan, dtype)
    for sign in (1, -1):
        attributes = {"accumulate": sign < 0}
        dw = cuda.run("inner_product_backward_weights", x, sign * dy, dw, transpose=False, **attributes)[2]
        db = cuda.run("inner_product_backward_bias", sign * dy, db, **attributes)[1]
    # a library may take other sums for the second product than for the first
    assert np.abs(dw).max() <= 8 * np.finfo(dtype).eps * np.abs(dy.T @ x).max()
    assert not db.any()


@pytest.mark.parametrize("accumulate", [False, True])
def test_an_empty_batch(cuda, dtype, accumulate):
    x, w, dy, b = np.ones((0, 4), dtype), np.ones((3, 4), dtype), np.ones((0, 3), dtype), np.ones(3, dtype)
    cuda.compare("inner_product_forward", x, w, b, dy, transpose=False)
    cuda.compare("inner_product_backward_data", dy, w, x, transpose=False)
    cuda.compare("inner_product_backward_weights", x, dy, w, transpose=False, accumulate=accumulate)
    cuda.compare("inner_product_backward_bias", dy, b, accumulate=accumulate)


def test_the_result_is_the_same_every_time(cuda, rng):
    x, w, b, y = (rng.normal(size=size).astype(np.float32) for size in ((50, 300), (70, 300), 70, (50, 70)))
    results = [
        [
            cuda.run("inner_product_forward", x, w, b, y, transpose=False)[3].tobytes(),
            cuda.run("inner_product_backward_weights", x, y, w, transpose=False, accumulate=True)[2].tobytes(),
            cuda.run("inner_product_backward_bias", y, b, accumulate=True)[1].tobytes(),
        ]
        for _ in range(2)
    ]
    assert results[0] == results[1]
