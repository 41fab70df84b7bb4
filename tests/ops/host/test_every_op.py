"""What holds for every op alike: no thread count changes a bit, garbage in outputs is not read, inputs may be read-only."""

import numpy as np
import pytest

from blobmem.ops.host.fillers import Filler
from blobmem.ops.host.random import draws_at
from blobmem.ops.registry import ArraySpec, table

OPS = table("host")
DRAWS = draws_at(3, "test", 5)
WINDOW = {"kernel": (3, 2), "stride": (2, 2), "pad": (1, 0)}
LRN = {"local_size": 3, "alpha": 0.5, "beta": 0.75}
CONV = {"stride": (2, 1), "pad": (1, 2), "dilation": (1, 2), "group": 2}
LOSS = {"ignore_label": 3, "normalization": "VALID"}


class Out:
    """An output: its shape, and its dtype unless the call's."""

    def __init__(self, *shape, dtype=None):
        self.shape, self.dtype = shape, dtype


class InOut(Out):
    """Memory that is read and written."""


def labels(n):
    return lambda rng, dtype: rng.integers(0, 5, n).astype(dtype)


def mask(low, high, *shape, dtype=np.int32):
    return lambda rng, _: rng.integers(low, high, shape, dtype=dtype)


X, Y = (3, 6, 11, 9), (3, 6, 6, 4)  # what WINDOW makes of X
CX, CW, CY = (3, 6, 11, 9), (8, 3, 3, 3), (3, 8, 6, 9)  # and CONV
F = (3, 6, 99)

# Operands in order: a tuple is an input of that shape, a function makes one, None is absent.
CASES = {
    "accuracy_forward": ([(7, 5, 3), labels((7, 3)), Out(), Out(5)], {"top_k": 2, "ignore_label": 3}),
    "argmax_forward": ([(5, 6, 7), Out(5, 2, 7)], {"top_k": 2, "out_max_val": False, "axis": 1}),
    "ave_pool_forward": ([X, Out(*Y)], WINDOW),
    "ave_pool_backward": ([Y, Out(*X)], WINDOW),
    "batch_norm_forward": ([F, Out(*F), Out(*F), Out(6), Out(6), InOut(6), InOut(6), InOut(1)],
                           {"eps": 1e-5, "fraction": 0.9}),
    "batch_norm_inference": ([F, Out(*F), (6,), (6,), (1,)], {"eps": 10.0}),
    "batch_norm_backward": ([F, (6,), F, Out(*F)], {}),
    "batch_norm_backward_global": ([F, Out(*F), (6,), (1,)], {"eps": 10.0}),
    "bias_forward": ([F, (6,), Out(*F)], {}),
    "concat_forward": ([(3, 4, 5), (3, 0, 5), (3, 6, 5), Out(3, 10, 5)], {"axis": 1}),
    "concat_backward": ([(3, 10, 5), Out(3, 6, 5)], {"axis": 1, "offset": 4}),
    "conv_forward": ([CX, CW, (8,), Out(*CY)], CONV),
    "conv_backward_data": ([CY, CW, Out(*CX)], CONV),
    "conv_backward_weights": ([CX, CY, Out(*CW)], CONV | {"accumulate": False}),
    "conv_backward_bias": ([CY, Out(8)], {"accumulate": False}),
    "copy": ([X, Out(*X, dtype=np.int32)], {}),
    "deconv_forward": ([CY, CW, (6,), Out(*CX)], CONV),
    "deconv_backward_data": ([CX, CW, Out(*CY)], CONV),
    "deconv_backward_weights": ([CY, CX, InOut(*CW)], CONV | {"accumulate": True}),
    "dropout_forward": ([X, Out(*X), Out(*X, dtype=np.uint8)], {"ratio": 0.4, "draws": DRAWS}),
    "dropout_backward": ([X, mask(0, 2, *X, dtype=np.uint8), Out(*X)], {"ratio": 0.4}),
    "eltwise_sum": ([X, X, X, Out(*X)], {"coeffs": (1.0, -2.0, 0.5)}),
    "eltwise_sum_backward": ([X, Out(*X)], {"coeff": -2.0}),
    "eltwise_prod": ([X, X, X, Out(*X)], {}),
    "eltwise_prod_backward": ([X, Out(*X), X, X], {}),
    "eltwise_prod_backward_unstable": ([X, Out(*X), X, X], {}),
    "eltwise_max": ([X, X, X, Out(*X), Out(*X, dtype=np.int32)], {}),
    "eltwise_max_backward": ([X, mask(0, 3, *X), Out(*X)], {"index": 1}),
    "euclidean_loss_forward": ([(4, 70), (4, 70), Out(4, 70), Out()], {}),
    "euclidean_loss_backward": ([(4, 70), (), Out(4, 70)], {"sign": -1.0}),
    "fill": ([Out(*X)], {"value": 2.5}),
    "fill_random": ([Out(*X)], {"filler": Filler("gaussian", sparse=2), "draws": DRAWS}),
    "inner_product_forward": ([(5, 130), (40, 130), (40,), Out(5, 40)], {"transpose": False}),
    "inner_product_backward_data": ([(5, 40), (40, 130), Out(5, 130)], {"transpose": False}),
    "inner_product_backward_weights": ([(5, 130), (5, 40), Out(40, 130)], {"transpose": False, "accumulate": False}),
    "inner_product_backward_bias": ([(5, 40), Out(40)], {"accumulate": False}),
    "lrn_forward": ([X, Out(*X), Out(*X)], LRN | {"k": 2.0}),
    "lrn_backward": ([X, X, lambda rng, dtype: 1 + rng.random(X, dtype), X, Out(*X)], LRN | {"k": 2.0}),
    "lrn_within_forward": ([X, Out(*X), Out(*X)], LRN),
    "lrn_within_backward": ([X, X, lambda rng, dtype: 1 + rng.random(X, dtype), X, Out(*X)], LRN),
    "max_pool_forward": ([X, Out(*Y), Out(*Y, dtype=np.int32)], WINDOW),
    "max_pool_backward": ([Y, mask(0, 99, *Y), Out(*X)], WINDOW),
    "power_forward": ([X, Out(*X)], {"power": 3.0, "scale": 0.5, "shift": 9.0}),
    "power_backward": ([X, X, X, Out(*X)], {"power": 3.0, "scale": 0.5, "shift": 9.0}),
    "prelu_forward": ([F, (6,), Out(*F)], {}),
    "prelu_backward_data": ([F, (6,), F, Out(*F)], {}),
    "prelu_backward_slope": ([F, F, Out(6)], {"accumulate": False}),
    "relu_forward": ([X, Out(*X)], {"slope": 0.1}),
    "relu_backward": ([X, X, Out(*X)], {"slope": 0.0}),
    "scale_forward": ([F, (6,), (6,), Out(*F)], {}),
    "scale_backward_data": ([F, (6,), Out(*F)], {}),
    "scale_backward_gamma": ([F, F, Out(6)], {"accumulate": False}),
    "scale_backward_beta": ([F, Out(6)], {"accumulate": False}),
    "sgd_update": ([X, InOut(*X), InOut(*X)], {"rate": 0.1, "momentum": 0.9, "decay": 0.01, "regularization": "L2",
                                               "scale": 0.5}),
    "sigmoid_forward": ([X, Out(*X)], {}),
    "sigmoid_backward": ([X, X, Out(*X)], {}),
    "slice_forward": ([(3, 10, 5), Out(3, 4, 5), Out(3, 6, 5)], {"axis": 1}),
    "slice_backward": ([(3, 4, 5), (3, 6, 5), Out(3, 10, 5)], {"axis": 1}),
    "softmax_forward": ([(7, 5, 300), Out(7, 5, 300)], {}),
    "softmax_backward": ([(7, 5, 300), (7, 5, 300), Out(7, 5, 300)], {}),
    "softmax_loss_forward": ([(7, 5, 3), labels((7, 3)), Out(7, 5, 3), Out()], LOSS),
    "softmax_loss_backward": ([lambda rng, dtype: rng.random((7, 5, 3), dtype), labels((7, 3)), (), Out(7, 5, 3)], LOSS),
    "stochastic_pool_forward": ([lambda rng, dtype: rng.random(X, dtype), Out(*Y), Out(*Y, dtype=np.int32)],
                                WINDOW | {"draws": DRAWS}),
    "sum_arrays": ([X, X, X, Out(*X)], {}),
    "sumsq": ([X, InOut(1)], {}),
    "tanh_forward": ([X, Out(*X)], {}),
    "tanh_backward": ([X, X, Out(*X)], {}),
}  # fmt: skip


def make(name, read_only=False):
    """The case's operands, and those of them that are written."""
    rng = np.random.default_rng(sorted(CASES).index(name))
    operands, written = [], []
    for kind in CASES[name][0]:
        if isinstance(kind, InOut):
            array = rng.standard_normal(kind.shape).astype(np.float32)
        elif isinstance(kind, Out):
            array = np.full(kind.shape, 113 if kind.dtype else np.nan, kind.dtype or np.float32)
        else:
            array = kind(rng, np.float32) if callable(kind) else np.array(rng.standard_normal(kind), np.float32)
            array.flags.writeable = not read_only
        operands.append(array)
        if isinstance(kind, Out):
            written.append(array)
    return operands, written


def run(name, operands):
    """Call an op as a schedule does, with a workspace of just the bytes that it asks for, full of not-a-numbers."""
    attributes = dict(CASES[name][1])
    if OPS[name].workspace is not None:
        nbytes = OPS[name].workspace_bytes(*map(ArraySpec.of, operands), **attributes)
        raw = np.full(nbytes + 128, 0xFF, np.uint8)
        first = -raw.ctypes.data % 64
        attributes["ws"] = raw[first : first + nbytes]
        OPS[name](*operands, **attributes)
        assert (raw[first + nbytes :] == 0xFF).all()
    else:
        OPS[name](*operands, **attributes)


def test_every_op_has_a_case():
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_is_sound(name, threads):
    threads(2)
    operands, written = make(name)
    run(name, operands)
    for array in written:
        assert np.isfinite(array).all()
    for count in (1, 3):
        threads(count)
        operands, again = make(name, read_only=True)
        run(name, operands)
        for one, two in zip(written, again, strict=True):
            assert one.tobytes() == two.tobytes()
