"""Convolution and deconvolution against sums over taps in double precision; plans, workspace, which way is taken."""

import ctypes
import mmap
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from blobmem.ops.host import conv, conv_plan
from blobmem.ops.registry import ArraySpec, table


@dataclass
class Case:
    images: int
    channels: int
    size: tuple
    outs: int
    kernel: tuple
    stride: tuple
    pad: tuple
    dilation: tuple
    group: int = 1

    @property
    def attributes(self):
        return {"stride": self.stride, "pad": self.pad, "dilation": self.dilation, "group": self.group}

    @property
    def out(self):
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1
                     for n, k, s, p, d in zip(self.size, self.kernel, self.stride, self.pad, self.dilation, strict=True))  # fmt: skip

    def arrays(self, dtype=np.float64):
        rng = np.random.default_rng(0)
        shapes = {"x": (self.images, self.channels, *self.size), "y": (self.images, self.outs, *self.out),
                  "w": (self.outs, self.channels // self.group, *self.kernel), "b": (self.outs,), "c": (self.channels,)}  # fmt: skip
        return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}

    def windows(self, padded, tap):
        """What a tap sees, a view."""
        steps = (slice(t * d, t * d + (n - 1) * s + 1, s)
                 for t, d, n, s in zip(tap, self.dilation, self.out, self.stride, strict=True))  # fmt: skip
        return padded[(slice(None), slice(None), *steps)]

    def expected(self, x, w, dy):
        """y without bias, dx, dw."""
        padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in self.pad)])
        y, dpadded, dw = np.zeros_like(dy), np.zeros_like(padded), np.zeros_like(w)
        per_in, per_out = self.channels // self.group, self.outs // self.group
        for tap in np.ndindex(*self.kernel):
            seen, back = self.windows(padded, tap), self.windows(dpadded, tap)
            for g in range(self.group):
                i, o = slice(g * per_in, (g + 1) * per_in), slice(g * per_out, (g + 1) * per_out)
                weights = w[(o, slice(None), *tap)]
                y[:, o] += np.einsum("nc...,oc->no...", seen[:, i], weights)
                back[:, i] += np.einsum("no...,oc->nc...", dy[:, o], weights)
                dw[(o, slice(None), *tap)] = np.einsum("nop,ncp->oc", dy[:, o].reshape(*dy[:, o].shape[:2], -1),
                                                       seen[:, i].reshape(*seen[:, i].shape[:2], -1))  # fmt: skip
        inner = tuple(slice(p, p + n) for p, n in zip(self.pad, self.size, strict=True))
        return y, dpadded[(slice(None), slice(None), *inner)], dw


CASES = {
    "1-D": Case(2, 3, (11,), 4, (3,), (2,), (2,), (2,)),
    "3-D": Case(2, 3, (5, 6, 7), 4, (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 2, 1)),
    "4-D": Case(1, 2, (4, 5, 3, 4), 3, (2, 2, 2, 2), (1, 2, 1, 1), (1, 0, 1, 0), (1, 1, 1, 2)),
    "one element": Case(1, 1, (1, 1), 1, (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1": Case(5, 16, (7, 7), 20, (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1 strided": Case(2, 16, (8, 9), 24, (1, 1), (2, 3), (0, 0), (1, 1)),
    "1x1, more steps than at once": Case(1, 600, (5, 5), 9, (1, 1), (1, 1), (0, 0), (1, 1)),
    "padded beyond the kernel": Case(2, 4, (9, 7), 6, (3, 2), (2, 3), (3, 0), (1, 1), 2),
    "stride above the kernel": Case(2, 5, (20, 20), 7, (2, 2), (3, 3), (0, 0), (1, 1)),
    "dilated and strided": Case(2, 5, (21, 19), 7, (3, 3), (4, 6), (2, 1), (2, 4)),
    "kernel of the image": Case(2, 3, (5, 5), 10, (5, 5), (1, 1), (0, 0), (1, 1)),
    "kernel larger than steps at once": Case(1, 3, (30, 30), 5, (25, 25), (1, 1), (3, 3), (1, 1)),
    "AlexNet's first": Case(2, 3, (67, 67), 10, (11, 11), (4, 4), (0, 0), (1, 1)),
    "groups": Case(3, 48, (13, 13), 72, (3, 3), (1, 1), (1, 1), (1, 1), 2),
    "depthwise": Case(2, 6, (12, 12), 6, (3, 3), (2, 2), (1, 1), (1, 1), 6),
    "depthwise, two outputs each": Case(2, 6, (12, 12), 12, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    "long rows": Case(1, 3, (3, 5000), 9, (1, 7), (1, 2), (0, 3), (1, 1)),
    "many outputs": Case(1, 20, (12, 12), 513, (3, 3), (1, 1), (0, 0), (1, 1)),
}  # fmt: skip


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


@pytest.fixture
def workspace():
    """Just the bytes that an op asks for, aligned, full of not-a-numbers."""

    def make(name, *operands, **attributes):
        specs = [None if a is None else ArraySpec.of(a) for a in operands]
        nbytes = table("host")[name].workspace_bytes(*specs, **attributes)
        raw = np.full(nbytes + 64, 0xFF, np.uint8)
        first = -raw.ctypes.data % 64
        return raw[first : first + nbytes]

    return make


def spread(values, axes):
    return values.reshape(-1, *[1] * axes)


def test_convolution(case, dtype, close, garbage, workspace):
    a = {name: array.astype(dtype) for name, array in case.arrays().items()}
    y, dx, dw = case.expected(*(a[name].astype(float) for name in "xwy"))
    for b in (a["b"], None):
        got = garbage(*y.shape)
        conv.conv_forward(a["x"], a["w"], b, got, **case.attributes)
        close(got, y if b is None else y + spread(b.astype(float), len(case.size)))
    got = garbage(*dx.shape)
    ws = workspace("conv_backward_data", a["y"], a["w"], got, **case.attributes)
    conv.conv_backward_data(a["y"], a["w"], got, ws=ws, **case.attributes)
    close(got, dx)
    got = garbage(*dw.shape)
    conv.conv_backward_weights(a["x"], a["y"], got, accumulate=False, **case.attributes)
    close(got, dw)
    conv.conv_backward_weights(a["x"], a["y"], got, accumulate=True, **case.attributes)
    close(got, 2 * dw)


def test_deconvolution(case, dtype, close, garbage, workspace):
    a = {name: array.astype(dtype) for name, array in case.arrays().items()}
    y, dx, dw = case.expected(*(a[name].astype(float) for name in "xwy"))
    # the roles of x and y change places
    for b in (a["c"], None):
        got = garbage(*dx.shape)
        ws = workspace("deconv_forward", a["y"], a["w"], b, got, **case.attributes)
        conv.deconv_forward(a["y"], a["w"], b, got, ws=ws, **case.attributes)
        close(got, dx if b is None else dx + spread(b.astype(float), len(case.size)))
    got = garbage(*y.shape)
    conv.deconv_backward_data(a["x"], a["w"], got, **case.attributes)
    close(got, y)
    got = garbage(*dw.shape)
    conv.deconv_backward_weights(a["y"], a["x"], got, accumulate=False, **case.attributes)
    close(got, dw)


@pytest.mark.parametrize("scatter", [True, False], ids=["scatter", "passes"])
def test_both_ways_to_the_gradient_for_the_data(case, scatter, monkeypatch, workspace):
    if len(case.size) > 3 or case.channels == case.group:
        pytest.skip("always direct")
    monkeypatch.setattr(conv, "cheaper", lambda *shape: scatter)
    a = case.arrays()
    _, dx, _ = case.expected(a["x"], a["w"], a["y"])
    got = np.full(dx.shape, np.nan)
    ws = workspace("deconv_forward", a["y"], a["w"], a["c"], got, **case.attributes)
    conv.deconv_forward(a["y"], a["w"], a["c"], got, ws=ws, **case.attributes)
    np.testing.assert_allclose(got, dx + spread(a["c"], len(case.size)), rtol=1e-10, atol=1e-10)


def test_bias(case, dtype, close, garbage):
    dy = case.arrays(dtype)["y"]
    expected = dy.astype(float).sum(axis=(0, *range(2, dy.ndim)))
    got = garbage(case.outs)
    conv.conv_backward_bias(dy, got, accumulate=False)
    close(got, expected)
    conv.conv_backward_bias(dy, got, accumulate=True)
    close(got, 2 * expected)


def test_threads(case, same_bits, workspace):
    a = case.arrays(np.float32)
    attributes = case.attributes
    same_bits(conv.conv_forward, a["x"], a["w"], a["b"], np.empty_like(a["y"]), **attributes)
    same_bits(conv.conv_backward_weights, a["x"], a["y"], a["w"], accumulate=True, **attributes)
    ws = workspace("conv_backward_data", a["y"], a["w"], a["x"], **attributes)
    same_bits(conv.conv_backward_data, a["y"], a["w"], np.empty_like(a["x"]), ws=ws, **attributes)


def test_memory(frugal, workspace):
    case = Case(8, 16, (40, 40), 24, (3, 3), (1, 1), (1, 1), (1, 1))
    a = case.arrays(np.float32)
    frugal(conv.conv_forward, a["x"], a["w"], a["b"], np.empty_like(a["y"]), **case.attributes)
    frugal(conv.conv_backward_weights, a["x"], a["y"], np.empty_like(a["w"]), accumulate=False, **case.attributes)
    ws = workspace("conv_backward_data", a["y"], a["w"], a["x"], **case.attributes)
    frugal(conv.conv_backward_data, a["y"], a["w"], np.empty_like(a["x"]), ws=ws, **case.attributes)


def test_workspace_is_the_weights_whatever_the_batch():
    ops = table("host")
    attributes = {"stride": (1, 1), "pad": (1, 1), "dilation": (1, 1), "group": 2}
    w = ArraySpec((256, 24, 3, 3), np.dtype("float32"))
    sizes = set()
    for batch in (1, 50, 256):
        x, y = (ArraySpec((batch, c, 13, 13), w.dtype) for c in (48, 256))
        assert ops["conv_forward"].workspace is ops["conv_backward_weights"].workspace is None
        sizes.add(ops["conv_backward_data"].workspace_bytes(y, w, x, **attributes))
    assert len(sizes) == 1 and w.nbytes <= sizes.pop() < 1.1 * w.nbytes


@pytest.mark.skipif(sys.platform == "win32", reason="pages are protected by other means there")
def test_an_image_at_the_end_of_its_memory_is_not_read_beyond():
    # a page that may not be read begins where the image ends
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, 3 * page)
    base = np.frombuffer(pages, np.uint8)
    libc = ctypes.CDLL(None)
    fence = ctypes.c_void_p(base.ctypes.data + 2 * page)
    assert libc.mprotect(fence, page, 0) == 0
    for size, kernel in (((5, 5), (1, 1)), ((5, 5), (3, 3)), ((13, 3), (2, 2))):
        count = 3 * 5 * size[0] * size[1]
        x = base[: 2 * page].view(np.float32)[-count:].reshape(3, 5, *size)
        case = Case(3, 5, size, 7, kernel, (1, 1), (0, 0), (1, 1))
        a = case.arrays(np.float32)
        x[...] = a["x"]
        y, dy = np.empty_like(a["y"]), a["y"]
        conv.conv_forward(x, a["w"], None, y, **case.attributes)
        conv.conv_backward_weights(x, dy, a["w"], accumulate=False, **case.attributes)
    libc.mprotect(fence, page, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("itemsize", [4, 8])
def test_plans_cover_every_output_once(case, itemsize):
    if len(case.size) > 3:
        pytest.skip("no plan for more than three axes")
    p = conv_plan.Problem(
        case.images, case.group, case.channels // case.group, case.outs // case.group, conv_plan.fold(case.size, 1),
        conv_plan.fold(case.out, 1), conv_plan.fold(case.kernel, 1), conv_plan.fold(case.stride, 1),
        conv_plan.fold(case.pad, 0), conv_plan.fold(case.dilation, 1), itemsize,
    )  # fmt: skip
    for cuts, plane in (((conv_plan.forward_pass(p),), case.out), (conv_plan.data_passes(p), case.size)):
        seen = np.zeros(int(np.prod(plane)), int)
        for cut in cuts:
            for _, positions, at in cut.blocks:
                seen[at + cut.out_at[:positions]] += 1
        assert (seen == 1).all()
    assert conv_plan.forward_pass(p).steps == p.channels * np.prod(case.kernel)
