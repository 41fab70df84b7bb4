"""What tests of every op need: arrays, the checks that all ops have to pass."""

import tracemalloc

import numpy as np
import pytest

from blobmem.ops.host.parallel import set_num_threads


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture
def close(dtype):
    """Compare with what was computed in float64, relative to the largest value."""

    def check(got, expected, digits=1.0):
        assert got.dtype == dtype
        assert got.shape == np.shape(expected)
        tolerance = digits * {np.float32: 2e-6, np.float64: 1e-13}[dtype]
        scale = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * scale)

    return check


@pytest.fixture
def garbage(dtype):
    """Fresh output memory: not a number everywhere."""
    return lambda *shape: np.full(shape, np.nan, dtype)


@pytest.fixture
def threads():
    """Sets the number of threads, for this test."""
    yield set_num_threads
    set_num_threads(0)


@pytest.fixture
def same_bits(threads):
    """Run an op with 1, 2 and 5 threads on equal operands: every array must come out the same."""

    def check(op, *operands, **attributes):
        results = []
        for count in (1, 2, 5):
            threads(count)
            copies = [None if a is None else a.copy() for a in operands]
            op(*copies, **attributes)
            results.append(copies)
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                if one is not None:
                    assert one.tobytes() == two.tobytes()
        return results[0]

    return check


@pytest.fixture
def frugal(threads):
    """Run an op (once before, to compile it): it must not allocate more than a small fixed amount of memory."""

    def check(op, *operands, **attributes):
        threads(1)  # others would grow their private scratch at a time that chance decides
        op(*operands, **attributes)
        tracemalloc.start()
        try:
            op(*operands, **attributes)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 100_000 < max(a.nbytes for a in operands if a is not None), peak

    return check
