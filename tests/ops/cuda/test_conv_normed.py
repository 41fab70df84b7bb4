import numpy as np
import pytest
from cuda_devices import ON_TENSOR_CORES, EmulatedCuda

from blobmem import dtypes
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.ops.cuda import conv_normed
from blobmem.ops.registry import ArraySpec, table

WINDOW = {"stride": (1, 1), "pad": (0, 0), "dilation": (1, 1), "group": 1, "layout": "NHWC"}
DTYPES = ["float32", "bfloat16", "float16"]


def window(w):
    """Of a convolution that keeps the size."""
    return WINDOW | {"pad": (w.shape[2] // 2, w.shape[3] // 2)}


def made(rng, pixels, inputs, outputs, dtype, taps=1):
    """x, w, b, other, mean, inv_std, gamma and beta, with numbers that the dtype has; statistics are in float32."""
    shapes = (
        (2, *pixels, inputs),
        (outputs, inputs, taps, taps),
        (outputs,),
        (2, *pixels, outputs),
        (outputs,),
        (outputs,),
    )
    x, w, b, other, gamma, beta = (rng.normal(size=shape).astype(dtypes.of(dtype)) for shape in shapes)
    upper = rng.normal(size=outputs).astype(np.float32)
    mean = np.concatenate([upper, upper * np.float32(1e-8)])
    return x, w, b, other, mean, rng.uniform(0.5, 2, size=outputs).astype(np.float32), gamma, beta


def convolved(x, w):
    edge, (height, width) = w.shape[2] // 2, x.shape[1:3]
    x = np.pad(x, [(0, 0), (edge, edge), (edge, edge), (0, 0)])
    taps = [(at, to) for at in range(w.shape[2]) for to in range(w.shape[3])]
    return sum(x[:, at : at + height, to : to + width] @ w[:, :, at, to].T for at, to in taps)


def wanted(x, w, b, other, mean, inv_std, gamma, beta, relu):
    """What the kernel should make, of nothing but x and what is given, and xhat."""
    outputs = len(w)
    x, w, b, other, gamma, beta = (None if a is None else a.astype(float) for a in (x, w, b, other, gamma, beta))
    found = convolved(x, w) + (0 if b is None else b)
    xhat = (found - mean[:outputs].astype(float) - mean[outputs:]) * inv_std
    y = xhat * (1 if gamma is None else gamma) + (0 if beta is None else beta) + (0 if other is None else other)
    return (np.maximum(y, 0) if relu else y), xhat


def share(cuda, dtype):
    """Of the largest number, what another may be wrong by."""
    if dtype == "float32":
        return 1e-5 if isinstance(cuda.device, EmulatedCuda) else 2e-3  # on a GPU of ten bits of each factor
    return 2e-3 if dtype == "float16" else 1.6e-2


@pytest.mark.parametrize("cuda", ON_TENSOR_CORES, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "pixels, inputs, outputs, taps",
    [((1, 3), 32, 64, 1), ((9, 16), 64, 128, 1), ((13, 10), 96, 64, 1), ((7, 5), 64, 128, 3), ((1, 92), 64, 64, 3)],
)
@pytest.mark.parametrize(
    "parts", ["", "b gamma beta relu", "gamma other", "gamma beta kept relu", "b gamma other kept"]
)
def test_it_normalises_as_it_convolves(cuda, rng, pixels, inputs, outputs, taps, dtype, parts):
    if taps > 1 and dtype == "float32":
        return
    x, w, b, other, mean, inv_std, gamma, beta = made(rng, pixels, inputs, outputs, dtype, taps)
    b, other, gamma, beta = (
        array if name in parts.split() else None
        for name, array in {"b": b, "other": other, "gamma": gamma, "beta": beta}.items()
    )
    y = np.full((*x.shape[:-1], outputs), np.nan).astype(dtypes.of(dtype))
    kept = y.copy() if "kept" in parts else None
    arrays = x, w, b, other, y, kept, mean, inv_std, gamma, beta
    moved = 1 + (other is not None) + (kept is not None)
    assert conv_normed.fits(x, w, moved, tuple(window(w).values()), cuda.device)
    got = cuda.run("conv_batch_norm_given", *arrays, relu="relu" in parts, **window(w))
    expected, xhat = wanted(x, w, b, other, mean, inv_std, gamma, beta, "relu" in parts)
    results = [(got[4], expected), *([] if kept is None else [(got[5], xhat)])]
    for result, numbers in results:
        close = share(cuda, dtype) * np.abs(numbers).max()
        np.testing.assert_allclose(result.astype(float), numbers, rtol=0, atol=close)


@pytest.mark.parametrize("cuda", ON_TENSOR_CORES, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_so(cuda, rng, dtype):
    """Past the ReLU, in its own pixel; and the sign of an infinity counts."""
    x, w, b, other, mean, inv_std, gamma, beta = made(rng, (5, 7), 64, 64, dtype)
    other[0, 1, 2, 3], other[1, 4, 6, 63], other[1, 0, 0, 0] = np.nan, np.inf, -np.inf
    y = np.zeros_like(other)
    given = x, w, b, other, y, None, mean, inv_std, gamma, beta
    y = cuda.run("conv_batch_norm_given", *given, relu=True, **window(w))[4].astype(float)
    assert np.isnan(y[0, 1, 2, 3]) and y[1, 4, 6, 63] == np.inf and y[1, 0, 0, 0] == 0
    assert np.isfinite(y).sum() == y.size - 2


def batch_norm(rng, pixels, inputs, outputs, dtype, taps):
    """x, w, b, mean, inv_std, gamma, beta and dy; and xhat and y, as floats."""
    x, w, b, dy, mean, inv_std, gamma, beta = made(rng, pixels, inputs, outputs, dtype, taps)
    _, xhat = wanted(x, w, b, None, mean, inv_std, gamma, beta, False)
    return (x, w, b, mean, inv_std, gamma, beta, dy), xhat, xhat * gamma.astype(float) + beta.astype(float)


ROOMS = [(0, 264), (3 * 264, 264), (3 * 264, 2)]
"""How many numbers there are of each channel behind the two sums, and how many blocks run at a time."""

CASES = [
    (*shape, dtype)
    for shape in [((1, 3), 32, 64, 1), ((9, 16), 64, 128, 1), ((20, 31), 96, 64, 1), ((9, 30), 64, 64, 3)]
    for dtype in (DTYPES if shape[-1] == 1 else DTYPES[1:])
]


@pytest.mark.parametrize("cuda", ON_TENSOR_CORES, indirect=True)
@pytest.mark.parametrize("pixels, inputs, outputs, taps, dtype", CASES)
@pytest.mark.parametrize("written", [False, True])
def test_it_takes_moments_as_it_convolves(monkeypatch, cuda, rng, pixels, inputs, outputs, taps, dtype, written):
    """Slice by slice, also where means are far from zero beside the deviations."""
    x, w, b, *_ = made(rng, pixels, inputs, outputs, dtype, taps)
    b = (b * 0 + 50).astype(dtypes.of(dtype))
    y, count = wanted(x, w, b, None, np.zeros(2 * outputs), 1, None, None, False)[0], np.prod(pixels)
    for room, blocks in ROOMS:
        monkeypatch.setattr(conv_normed, "_BLOCKS", blocks)
        moments = np.full((2 + room) * outputs, np.nan)
        for at in range(2):
            top = np.zeros((1, *pixels, outputs)).astype(dtypes.of(dtype)) if written else None
            given = x[at : at + 1], w, b, top, moments
            got = cuda.run("conv_moments", *given, before=int(count * at), last=at == 1, **window(w))
            moments = got[4]
            if written:
                close = share(cuda, dtype) * np.abs(y).max()
                np.testing.assert_allclose(got[3].astype(float), y[at : at + 1], rtol=0, atol=close)
        close = share(cuda, dtype) * np.abs(y - 50).max()
        folded = y.reshape(-1, outputs)
        np.testing.assert_allclose(moments[:outputs], folded.mean(0), rtol=0, atol=close)
        spread = moments[outputs : 2 * outputs] / (2 * count)
        np.testing.assert_allclose(spread, folded.var(0), rtol=0, atol=close * y.std())


@pytest.mark.parametrize("cuda", ON_TENSOR_CORES, indirect=True)
@pytest.mark.parametrize("pixels, inputs, outputs, taps, dtype", CASES)
@pytest.mark.parametrize("relu", [False, True])
def test_it_has_a_batch_norms_gradient_as_it_convolves(
    monkeypatch, cuda, rng, pixels, inputs, outputs, taps, dtype, relu
):
    """The sums, slice by slice, and the gradient by them."""
    given, xhat, y = batch_norm(rng, pixels, inputs, outputs, dtype, taps)
    *factors, dy = given
    x, w, b, mean, inv_std, gamma, beta = factors
    shut = np.abs(y) < 4 * share(cuda, dtype) * np.abs(y).max()  # or open, by rounding
    dy = np.where(shut & relu, 0, dy).astype(dtypes.of(dtype))
    g, count = dy.astype(float) * (y > 0 if relu else 1), int(2 * np.prod(pixels))
    close = 4 * share(cuda, dtype) * np.abs(xhat).max() * np.sqrt(count)
    for room, blocks in ROOMS:
        monkeypatch.setattr(conv_normed, "_BLOCKS", blocks)
        sums = np.full((2 + room) * outputs, np.nan)
        for at in range(2):
            part, kept = slice(at, at + 1), np.zeros((1, *pixels, outputs)).astype(dtypes.of(dtype)) if at else None
            operands = x[part], w, b, mean, inv_std, gamma, beta, dy[part], kept, sums
            got = cuda.run("conv_batch_norm_sums", *operands, relu=relu, first=at == 0, last=at == 1, **window(w))
            sums = got[9]
        near = share(cuda, dtype) * np.abs(xhat).max()
        np.testing.assert_allclose(got[8].astype(float), xhat[1:], rtol=0, atol=near)
        np.testing.assert_allclose(sums[:outputs], g.reshape(-1, outputs).sum(0), rtol=0, atol=close)
        along = (g * xhat).reshape(-1, outputs).sum(0)
        np.testing.assert_allclose(sums[outputs : 2 * outputs], along, rtol=0, atol=close)
    exact = np.concatenate([g.reshape(-1, outputs).sum(0), along])
    operands = [x, w, b, mean, inv_std, gamma, beta, dy, dy * 0, exact]
    dx = cuda.run("conv_batch_norm_backward_given", *operands, relu=relu, count=count, **window(w))[8]
    operands[8] = dy
    in_place = cuda.run("conv_batch_norm_backward_given", *operands, relu=relu, count=count, **window(w))[8]
    np.testing.assert_array_equal(in_place, dx)
    expected = (g - (exact[:outputs] + xhat * exact[outputs:]) / count) * gamma.astype(float) * inv_std
    near = 2 * share(cuda, dtype) * np.abs(expected).max()
    np.testing.assert_allclose(dx.astype(float), expected, rtol=0, atol=near)


SPECS = {"x": (4, 56, 56, 64), "w": (64, 64, 1, 1), "other": False, "kept": False}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, True), ({"w": (128, 64, 3, 3), "pad": (1, 1)}, "halves"), ({"stride": (2, 2)}, False), ({"pad": (1, 1)}, False),
        ({"w": (64, 32, 1, 1), "group": 2}, False), ({"layout": "NCHW"}, False), ({"x": (0, 56, 56, 64)}, False),
        ({"x": (4, 7, 7, 36), "w": (64, 36, 1, 1)}, False), ({"w": (96, 64, 1, 1)}, False),
        ({"x": (4, 7, 7, 96), "w": (128, 96, 1, 1), "kept": True}, True),
        ({"x": (4, 7, 7, 7, 64), "stride": (1, 1, 1), "pad": (0, 0, 0), "w": (64, 64, 1, 1, 1)}, True),
        ({"x": (4, 28, 28, 128), "w": (512, 128, 1, 1), "other": True, "kept": True}, True),
        ({"x": (4, 28, 28, 256), "w": (1024, 256, 1, 1)}, False),  # so many products take longer than what moves
        ({"w": (64, 64, 3, 3)}, False), ({"w": (64, 64, 3, 3), "pad": (2, 2), "dilation": (2, 2)}, False),
        ({"x": (4, 56, 56, 128), "w": (128, 128, 3, 3), "pad": (1, 1)}, False),
        ({"x": (4, 56, 93, 64), "w": (64, 64, 3, 3), "pad": (1, 1)}, False),
        ({"x": (4, 7, 7, 512), "w": (2048, 512, 1, 1), "other": True, "kept": True}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("math, dtype", [("tf32", "float32"), ("fp32", "float32"), ("fp32", "bfloat16")])
def test_what_fits(change, expected, math, dtype):
    given = SPECS | change
    x, w = (ArraySpec(given[name], dtypes.of(dtype)) for name in "xw")
    y = ArraySpec((*given["x"][:-1], given["w"][0]), dtypes.of(dtype))
    other, kept = (y if given[name] else None for name in ("other", "kept"))
    window, device = tuple((WINDOW | change)[name] for name in WINDOW), PredictedCuda(math=math)
    expected = bool(expected and (math, dtype) != ("fp32", "float32") and (dtype != "float32" or expected != "halves"))
    assert conv_normed.fits(x, w, 1 + given["other"] + given["kept"], window, device) == expected
    if expected:
        statistics = [ArraySpec((given["w"][0],), np.dtype(np.float32))] * 2
        operands = x, w, None, other, y, kept, *statistics, None, None
        attributes = {name: (WINDOW | change)[name] for name in WINDOW}
        op, taps = table("cuda")["conv_batch_norm_given"], w.shape[2]  # more than one are turned over
        assert op.workspace_bytes(*operands, device=device, relu=True, **attributes) == (w.nbytes if taps > 1 else 0)
