"""Products of matrices on the CUDA device against NumPy in double precision."""

import numpy as np
import pytest

from blobmem import dtypes
from blobmem.ops.cuda import products
from blobmem.ops.cuda.cublas import Cublas
from blobmem.ops.cuda.products import WORKSPACE, batched_product, prepare, product

SIZES = [(3, 4, 5), (1, 1, 1), (1, 70, 33), (70, 1, 33), (70, 33, 1), (65, 130, 17)]  # m, k, n


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture
def place(cuda):
    """Arrays on the device: `place(array)` gives a CudaArray, `place.back(it)` what it holds now."""

    class Place:
        def __init__(self):
            self.held = []

        def __call__(self, array):
            address = cuda.device.allocate(max(array.nbytes, 1), "test")
            self.held.append(address)
            if array.nbytes:
                cuda.device.memcpy_htod(address, np.ascontiguousarray(array))
            placed = cuda.device.as_array(address, array.shape, array.dtype)
            self.at = {**getattr(self, "at", {}), placed.address: address}
            return placed

        def back(self, placed):
            array = np.empty(placed.shape, placed.dtype)
            cuda.device.synchronize()
            if array.nbytes:
                cuda.device.memcpy_dtoh(array, self.at[placed.address])
            return array

        def workspace(self):
            return self(np.zeros(WORKSPACE, np.uint8))

    places = Place()
    yield places
    for address in places.held:
        cuda.device.free(address)


def close(got, expected, dtype):
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max()))


def operands(rng, dtype, m, k, n, transpose_a, transpose_b, *counts):
    a, b, c = (rng.normal(size=(*counts, *size)).astype(dtype) for size in ((m, k), (k, n), (m, n)))
    stored = [np.swapaxes(a, -1, -2) if transpose_a else a, np.swapaxes(b, -1, -2) if transpose_b else b, c]
    return a.astype(np.float64) @ b.astype(np.float64), stored


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_product(place, rng, size, transpose_a, transpose_b, dtype):
    expected, (a, b, c) = operands(rng, dtype, *size, transpose_a, transpose_b)
    ws = place.workspace()
    for alpha, beta in ((1.0, 0.0), (1.0, 1.0), (-2.5, 0.0), (0.5, 2.0)):
        start = np.full_like(c, np.nan) if beta == 0 else c
        result = place(start)
        product(
            place(a), place(b), result, ws, transpose_a=transpose_a, transpose_b=transpose_b, alpha=alpha, beta=beta
        )
        close(place.back(result), alpha * expected + (beta * c if beta else 0), dtype)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_batched_product(place, rng, transpose_a, transpose_b, dtype):
    expected, (a, b, c) = operands(rng, dtype, 7, 9, 4, transpose_a, transpose_b, 3)
    ws, transposes = place.workspace(), {"transpose_a": transpose_a, "transpose_b": transpose_b}
    result = place(c)
    batched_product(place(a), place(b), result, ws, **transposes, beta=1.0)
    close(place.back(result), expected + c, dtype)
    batched_product(place(a[0]), place(b), result, ws, **transposes)  # one a for all
    one = a[0].T if transpose_a else a[0]
    close(place.back(result), one @ (np.swapaxes(b, 1, 2) if transpose_b else b), dtype)


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_a_product_of_no_terms_is_what_is_left(place, rng, beta, dtype):
    c = rng.normal(size=(3, 4)).astype(dtype)
    a, b, ws = place(np.zeros((3, 0), dtype)), place(np.zeros((0, 4), dtype)), place.workspace()
    start = np.full_like(c, np.nan) if beta == 0 else c
    result, results = place(start), place(np.stack([start, start]))
    product(a, b, result, ws, beta=beta)
    batched_product(a, b, results, ws, beta=beta)
    expected = beta * c
    np.testing.assert_array_equal(place.back(result), expected)
    np.testing.assert_array_equal(place.back(results), np.stack([expected, expected]))


def test_an_empty_result(place, dtype):
    ws, b = place.workspace(), place(np.ones((4, 5), dtype))
    product(place(np.zeros((0, 4), dtype)), b, place(np.zeros((0, 5), dtype)), ws, beta=0.5)
    batched_product(place(np.zeros((0, 3, 4), dtype)), b, place(np.zeros((0, 3, 5), dtype)), ws, beta=0.5)


def test_a_prepared_product_goes_from_place_to_place(place, rng, dtype):
    a, b, c = (rng.normal(size=size).astype(dtype) for size in ((4, 3, 5), (7, 5), (4, 3, 7)))
    left, result = place(a), place(c)
    run = prepare(left.part(0, (3, 5)), place(b), result.part(0, (3, 7)), place.workspace(), transpose_b=True, beta=1.0)
    for i in (2, 0, 3):
        run(left.address + i * 15 * c.itemsize, result.address + i * 21 * c.itemsize)
        c[i] += (a[i].astype(np.float64) @ b.T.astype(np.float64)).astype(dtype)
    close(place.back(result), c, dtype)


def test_shapes_that_do_not_fit(place, dtype):
    ws = place.workspace()
    a, b, c = (place(np.zeros(shape, dtype)) for shape in ((3, 4), (4, 5), (3, 5)))
    for wrong in ((a, b, b), (b, a, c), (a, c, b)):
        with pytest.raises(ValueError, match="no product of shape"):
            product(*wrong, ws)
        with pytest.raises(ValueError, match="no product of shape"):
            batched_product(*(array.reshape(1, *array.shape) for array in wrong), ws)
    with pytest.raises(ValueError, match="no product of shape"):
        batched_product(a.reshape(1, 3, 4), b, place(np.zeros((2, 3, 5), dtype)), ws)


@pytest.mark.parametrize("columns, products_of_most", [(256, 1), (257, 4), (258, 2), (259, 4)], ids=str)
@pytest.mark.parametrize("transpose_a, transpose_b", [(False, True), (False, False), (True, False)])
def test_a_large_matrix_is_taken_by_rows_that_begin_alike(
    monkeypatch, cuda, place, rng, transpose_a, transpose_b, columns, products_of_most
):
    """As a result (scores), as a factor (their gradient), and as one whose rows are summed over."""
    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(cuda.device, "math", "tf32")
    m, k, n = (9, 8, columns) if transpose_b else (columns, 9, 8) if transpose_a else (9, columns, 8)
    expected, (a, b, c) = operands(rng, np.float32, m, k, n, transpose_a, transpose_b)
    calls, cublas = [], cuda.device.library("cublas", Cublas)
    monkeypatch.setattr(cuda.device, "library", lambda *_: cublas)
    monkeypatch.setattr(cublas, "gemm", lambda *each, gemm=cublas.gemm: (calls.append(each), gemm(*each)))
    for beta in (0.0, 0.5):
        result = place(np.full_like(c, np.nan) if beta == 0 else c)
        calls.clear()
        product(
            place(a), place(b), result, place.workspace(), transpose_a=transpose_a, transpose_b=transpose_b, beta=beta
        )
        np.testing.assert_allclose(place.back(result), expected + beta * c, rtol=0, atol=2e-3 * np.abs(expected).max())
        most = [each for each in calls if max(each[3:6]) >= columns - 6]
        assert len(most) == products_of_most
        for *_, b_at, ldb, a_at, lda, _, c_at, ldc in most:
            assert not any(at % 16 for at in (a_at, b_at, c_at)) and not any(ld % 4 for ld in (lda, ldb, ldc))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "transpose_a, transpose_b, products_of_all", [(False, True, 10), (False, False, 1), (True, False, 1)]
)
def test_of_halves_only_a_large_result_is_made_in_parts(
    monkeypatch, cuda, place, rng, transpose_a, transpose_b, products_of_all, name
):
    """Of every fourth row each; parts of one sum would be rounded each."""
    monkeypatch.setattr(products, "LARGE", 0)
    m, k, n = (9, 8, 514) if transpose_b else (514, 9, 8) if transpose_a else (9, 514, 8)
    calls, cublas = [], cuda.device.library("cublas", Cublas)
    monkeypatch.setattr(cuda.device, "library", lambda *_: cublas)
    monkeypatch.setattr(cublas, "gemm", lambda *each, gemm=cublas.gemm: (calls.append(each), gemm(*each)))
    whole = [rng.integers(-1, 2, size) for size in ((m, k), (k, n), (m, n))]  # sums that halves have exactly
    a, b, c = (array.astype(dtypes.of(name)) for array in whole)
    result = place(c)
    product(place(a.T if transpose_a else a), place(b.T if transpose_b else b), result, place.workspace(),
            transpose_a=transpose_a, transpose_b=transpose_b, beta=1.0)  # fmt: skip
    np.testing.assert_array_equal(place.back(result).astype(np.float64), whole[0] @ whole[1] + whole[2])
    assert len(calls) == products_of_all
