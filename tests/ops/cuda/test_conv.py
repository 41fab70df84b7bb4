import numpy as np
import pytest

from blobmem.ops.cuda import algorithms
from blobmem.ops.registry import ArraySpec, table

# images, channels, outputs, spatial, kernel, stride, pad, dilation, group
CASES = {
    "1d": (2, 3, 4, (11,), (3,), (2,), (1,), (2,), 1),
    "1x1": (3, 5, 7, (4, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "2d": (2, 3, 4, (7, 9), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided": (2, 3, 5, (9, 8), (3, 2), (2, 3), (1, 0), (1, 1), 1),
    "dilated": (1, 2, 3, (9, 10), (3, 3), (1, 2), (2, 1), (2, 3), 1),
    "groups": (2, 6, 4, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 2),
    "depthwise": (2, 4, 8, (7, 7), (3, 3), (2, 2), (1, 1), (1, 1), 4),
    "padding beyond the kernel": (1, 1, 2, (4, 3), (2, 2), (1, 1), (3, 2), (1, 1), 1),
    "3d": (1, 2, 3, (4, 5, 6), (2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2), 1),
    "4d": (1, 2, 2, (3, 4, 3, 5), (2, 2, 1, 3), (1, 2, 1, 1), (1, 0, 0, 1), (1, 1, 1, 1), 2),
    "6d": (1, 1, 2, (2, 3, 2, 3, 2, 3), (1, 2, 2, 2, 1, 2), (1,) * 6, (0, 1, 0, 0, 0, 1), (1,) * 6, 1),
}
NO_IMAGES = (0, 3, 4, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1)

dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])
cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True, scope="module")
def choices_of_their_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("algorithms")
        patch.setattr(algorithms, "folder", lambda: folder)
        yield


@pytest.fixture
def compare(cuda):
    """The runner's, with room for Winograd's sums where cuDNN computes in single precision."""

    def compare(name, *operands, **attributes):
        single = operands[0].dtype == np.float32 and cuda.device.name.startswith("cuda")
        cuda.compare(name, *operands, rtol=1e-4 if single else 1e-5, **attributes)

    return compare


@pytest.fixture
def make(rng):
    """x, w, b, dy of a case's convolution, and its attributes."""

    def make(case, dtype):
        images, channels, outputs, spatial, kernel, stride, pad, dilation, group = (
            NO_IMAGES if case is None else CASES[case]
        )
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(spatial, kernel, stride, pad, dilation, strict=True)
        ]
        shapes = (
            (images, channels, *spatial),
            (outputs, channels // group, *kernel),
            (outputs,),
            (images, outputs, *sizes),
        )
        window = {"stride": stride, "pad": pad, "dilation": dilation, "group": group}
        return [rng.normal(size=shape).astype(dtype) for shape in shapes], window

    return make


def full(like):
    """What an op has to overwrite."""
    return np.full_like(like, np.nan)


@dtypes
@cases
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_forward(compare, make, case, dtype, bias):
    (x, w, b, y), window = make(case, dtype)
    compare("conv_forward", x, w, b if bias else None, full(y), **window)


@dtypes
@cases
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_and_relu(cuda, make, case, dtype, bias):
    """ReLU of what the convolution alone makes: what is no number stays, and no zero is negative."""
    (x, w, b, y), window = make(case, dtype)
    w[-1], b[0] = np.nan, -0.0
    b = b if bias else None
    close = 1e-6 if cuda.device.name.startswith("cuda") else 0  # cuDNN may sum in another order every time
    layouts = {"NCHW": (x, w, b, full(y))}
    if case in ORDERED:
        layouts["NHWC"] = last(x), w, b, last(full(y))
    for layout, operands in layouts.items():
        plain = cuda.run("conv_forward", *operands, layout=layout, **window)[3]
        got = cuda.run("conv_relu_forward", *operands, layout=layout, **window)[3]
        np.testing.assert_allclose(got, np.maximum(plain, 0), rtol=0, atol=close * np.abs(np.nan_to_num(plain)).max())
        assert np.isnan(got).any() and not np.signbit(got[got == 0]).any()


@dtypes
@cases
@pytest.mark.parametrize("bias, relu", [(True, True), (False, False)])
def test_convolution_and_sum(cuda, make, rng, case, dtype, bias, relu):
    """The same and another array; with the channels last, weights in either order."""
    (x, w, b, y), window = make(case, dtype)
    b, other = b if bias else None, rng.normal(size=y.shape).astype(dtype)
    expected = cuda.run("conv_forward", x, w, b, full(y), **window)[3] + other
    expected = np.maximum(expected, 0) if relu else expected
    runs = [(x, w, other, full(y), {})]
    if case in ORDERED:
        turned = last(w).reshape(w.shape)
        runs += [(last(x), w, last(other), last(full(y)), {"layout": "NHWC"})]
        if w.shape[1] > 1:
            runs += [(last(x), turned, last(other), last(full(y)), {"layout": "NHWC", "turned": True})]
    for mine, weights, added, out, options in runs:
        got = cuda.run("conv_sum_forward", mine, weights, b, added, out, relu=relu, **window, **options)[4]
        close = 1e-5 if dtype == np.float32 else 1e-12
        if cuda.device.name.startswith("cuda"):
            close *= 10
        wanted = last(expected) if options else expected
        np.testing.assert_allclose(got, wanted, rtol=0, atol=close * np.abs(expected).max())


@pytest.mark.parametrize("channels", [8, 24])
@pytest.mark.parametrize("outputs", [1, 2, 3, 4])
@pytest.mark.parametrize("op, bias", [("conv_forward", True), ("conv_forward", False), ("conv_relu_forward", True)])
def test_few_outputs_of_halves_take_no_workspace(cuda, rng, channels, outputs, op, bias):
    x = rng.normal(size=(2, 3, 5, channels)).astype(np.float16)
    w, b = (rng.normal(size=shape).astype(np.float16) for shape in ((outputs, channels, 1, 1), (outputs,)))
    operands = x, w, b if bias else None, full(x[..., :outputs].copy())
    window = {"stride": (1, 1), "pad": (0, 0), "dilation": (1, 1), "group": 1, "layout": "NHWC"}
    specs = [None if each is None else ArraySpec.of(each) for each in operands]
    assert not table("cuda")[op].workspace_bytes(*specs, device=cuda.device, **window)
    got = cuda.run(op, *operands, **window)[3]
    expected = x.astype(np.float32) @ w.reshape(outputs, channels).T.astype(np.float32) + (b if bias else 0)
    expected = np.maximum(expected, 0) if "relu" in op else expected
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@dtypes
@pytest.mark.parametrize("case", ["1x1", "2d", "groups", "depthwise", "3d"])
@pytest.mark.parametrize("bias, relu", [(True, True), (False, False)])
@pytest.mark.parametrize("single", [True, False])
def test_convolution_and_sum_of_tiles(cuda, make, rng, case, dtype, bias, relu, single):
    """Another array, of a single channel or of more, along the channels again and again."""
    (x, w, b, y), window = make(case, dtype)
    b, outputs = b if bias else None, len(b)
    tiles = outputs if single else next(n for n in range(2, outputs + 1) if outputs % n == 0)
    once = rng.normal(size=(len(y), outputs // tiles, *y.shape[2:])).astype(dtype)
    expected = cuda.run("conv_forward", x, w, b, full(y), **window)[3] + np.concatenate([once] * tiles, axis=1)
    expected = np.maximum(expected, 0) if relu else expected
    runs = [(x, once.reshape(len(once), -1), full(y), "NCHW")]
    if case in ORDERED:
        runs += [(last(x), last(once).reshape(-1, once.shape[1]), last(full(y)), "NHWC")]
    for mine, added, out, layout in runs:
        got = cuda.run("conv_sum_forward", mine, w, b, added, out, relu=relu, layout=layout, **window)[4]
        wanted = last(expected) if layout == "NHWC" else expected
        close = 1e-4 if dtype == np.float32 else 1e-11
        np.testing.assert_allclose(got, wanted, rtol=0, atol=close * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("case", ["1d", "1x1", "2d", "groups", "3d"])
@pytest.mark.parametrize(
    "parts", ["", "scale", "scale relu", "sum relu", "kept scale", "kept scale relu", "kept sum relu"]
)
def test_convolution_and_norm(cuda, make, rng, case, parts, dtype):
    """What a batch norm by given statistics and all that may follow it make of a convolution."""
    (x, w, b, y), window = make(case, dtype)
    outputs = len(b)
    mean = rng.normal(size=outputs).astype(np.float32)
    gamma, beta = rng.normal(size=(2, outputs)).astype(dtype)
    inv_std = rng.uniform(0.5, 2, size=outputs).astype(np.float32)
    mean = np.concatenate([mean, np.full_like(mean, 1e-9)])
    b, beta = (b, beta) if "relu" in parts else (None, None)
    gamma = gamma if parts else None
    other = rng.normal(size=y.shape).astype(dtype) if "sum" in parts else None
    by_channel = (slice(None), *[None] * len(y.shape[2:]))
    made = cuda.run("conv_forward", x, w, b, full(y), **window)[3]
    xhat = (made - mean[:outputs][by_channel]) * inv_std[by_channel]
    wanted = xhat if gamma is None else xhat * gamma[by_channel]
    wanted = wanted + (0 if beta is None else beta[by_channel]) + (0 if other is None else other)
    wanted = np.maximum(wanted, 0) if "relu" in parts else wanted
    rounded = 1e-4 if dtype == np.float32 else 1e-2
    layouts = {"NCHW": lambda array: array, "NHWC": last} if case in ORDERED else {"NCHW": lambda array: array}
    for layout, turn in layouts.items():
        added, kept = (None if other is None else turn(other)), (full(turn(y)) if "kept" in parts else None)
        arrays = turn(x), w, b, added, full(turn(y)), kept, mean, inv_std, gamma, beta
        got = cuda.run("conv_batch_norm_given", *arrays, relu="relu" in parts, layout=layout, **window)
        close = rounded * np.abs(wanted).max()
        np.testing.assert_allclose(got[4], turn(wanted), rtol=0, atol=close)
        if kept is not None:
            np.testing.assert_allclose(got[5], turn(xhat), rtol=0, atol=rounded * np.abs(xhat).max())


@dtypes
@cases
def test_convolution_backward(compare, make, case, dtype):
    (x, w, _, dy), window = make(case, dtype)
    compare("conv_backward_data", dy, w, full(x), **window)
    compare("conv_backward_weights", x, dy, full(w), accumulate=False, **window)
    compare("conv_backward_weights", x, dy, np.ones_like(w), accumulate=True, **window)


@dtypes
@cases
@pytest.mark.parametrize("bias", [True, False])
def test_deconvolution_forward(compare, make, rng, case, dtype, bias):
    (y, w, _, x), window = make(case, dtype)
    b = rng.normal(size=y.shape[1]).astype(dtype) if bias else None
    compare("deconv_forward", x, w, b, full(y), **window)


@dtypes
@cases
def test_deconvolution_backward(compare, make, case, dtype):
    (dy, w, _, x), window = make(case, dtype)
    compare("deconv_backward_data", dy, w, full(x), **window)
    compare("deconv_backward_weights", x, dy, full(w), accumulate=False, **window)
    compare("deconv_backward_weights", x, dy, np.ones_like(w), accumulate=True, **window)


# the operands with spatial axes
SPATIAL = {"forward": (0, 3), "backward_data": (0, 2), "backward_weights": (0, 1)}
ORDERED = [case for case in CASES if len(CASES[case][3]) in (2, 3)]


def last(x):
    """The same with the channels last."""
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


@pytest.fixture
def compare_last(cuda):
    """Run a convolution's op with the channels last against the host's."""

    def compare(name, *operands, **attributes):
        host, spatial = table("host")[name], SPATIAL[name.split("_", 1)[1]]
        theirs = [None if a is None else a.copy() for a in operands]
        extra = {}
        if host.workspace is not None:
            specs = [None if a is None else ArraySpec.of(a) for a in operands]
            extra["ws"] = np.empty(host.workspace_bytes(*specs, **attributes) + 64, np.uint8)
        host(*theirs, **attributes, **extra)
        mine = [last(a) if i in spatial else a for i, a in enumerate(operands)]
        for i, got in enumerate(cuda.run(name, *mine, layout="NHWC", **attributes)):
            if got is None:
                continue
            expected = last(theirs[i]) if i in spatial else theirs[i]
            close = {"cuda": 1e-4}.get(cuda.device.name[:4], 1e-5) if got.dtype == np.float32 else 1e-12
            np.testing.assert_allclose(got, expected, rtol=0, atol=close * np.abs(expected).max())

    return compare


@dtypes
@pytest.mark.parametrize("case", ORDERED)
def test_channels_last(compare_last, make, rng, case, dtype):
    (x, w, b, y), window = make(case, dtype)
    compare_last("conv_forward", x, w, b, full(y), **window)
    compare_last("conv_forward", x, w, None, full(y), **window)
    compare_last("conv_backward_data", y, w, full(x), **window)
    compare_last("deconv_backward_data", x, w, full(y), **window)
    c = rng.normal(size=x.shape[1]).astype(dtype)
    compare_last("deconv_forward", y, w, c, full(x), **window)
    compare_last("deconv_forward", y, w, None, full(x), **window)
    for accumulate, dw in ((False, full(w)), (True, np.ones_like(w))):
        compare_last("conv_backward_weights", x, y, dw, accumulate=accumulate, **window)
        compare_last("deconv_backward_weights", y, x, dw, accumulate=accumulate, **window)


@pytest.mark.parametrize("case", ["1d", "4d"])
def test_channels_last_is_for_planes_and_volumes(cuda, make, case):
    (x, w, _, y), window = make(case, np.float32)
    with pytest.raises(ValueError, match="NHWC of four or five axes"):
        cuda.run("conv_forward", x, w, None, y, layout="NHWC", **window)


def test_no_images(cuda, make):
    (x, w, b, y), window = make(None, np.float32)
    assert cuda.run("conv_forward", x, w, b, y, **window)[3].size == 0
    assert cuda.run("conv_backward_data", y, w, x, **window)[2].size == 0
    for accumulate, expected in ((False, 0.0), (True, 3.0)):
        before = np.full_like(w, 3.0)
        np.testing.assert_array_equal(
            cuda.run("conv_backward_weights", x, y, before, accumulate=accumulate, **window)[2], expected
        )


@dtypes
@pytest.mark.parametrize("shape", [(3, 5, 4, 7), (2, 3, 1, 1), (1, 2, 300), (0, 4, 2, 2), (600, 36, 1)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_bias_gradient(compare, rng, shape, dtype, accumulate):
    dy = rng.normal(size=shape).astype(dtype)
    db = np.full(shape[1], 2.0 if accumulate else np.nan, dtype)
    compare("conv_backward_bias", dy, db, accumulate=accumulate)


def test_more_axes_than_kernels_take_is_an_error(cuda):
    x = np.zeros((1, 1, *[1] * 7), np.float32)
    window = {"stride": (1,) * 7, "pad": (0,) * 7, "dilation": (1,) * 7, "group": 1}
    with pytest.raises(ValueError, match="7 spatial axes"):
        cuda.run("conv_forward", x, x, None, x.copy(), **window)


def test_our_own_kernels_take_no_workspace(cuda):
    if cuda.device.library("cudnn", lambda _: None) is not None:
        pytest.skip("cuDNN's plans may take one")
    spec = ArraySpec((2, 3, 8, 8), np.dtype(np.float32))
    weights = ArraySpec((3, 3, 1, 1), np.dtype(np.float32))
    window = {"stride": (1, 1), "pad": (0, 0), "dilation": (1, 1), "group": 1}
    op = table("cuda")["conv_backward_weights"]
    assert op.workspace_bytes(spec, spec, weights, device=cuda.device, accumulate=True, **window) == 0
