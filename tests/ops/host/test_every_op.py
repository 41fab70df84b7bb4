"""What holds for every op alike: no thread count changes a bit, garbage in outputs is not read, inputs may be read-only."""

import zlib

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
COLUMNS = {"kernel": (3, 3), "stride": (2, 1), "pad": (1, 2), "dilation": (1, 2)}
PYRAMID = {"levels": (((11, 9), (0, 0), 1), ((6, 5), (1, 1), 2))}
VALID = {"ignore_label": 3, "normalization": "VALID"}
LOSS = VALID | {"layer": "l"}
UPDATE = {"rate": 0.1, "decay": 0.01, "regularization": "L2", "scale": 0.5}


class Out:
    """An output: its shape, and its dtype unless the call's."""

    def __init__(self, *shape, dtype=None):
        self.shape, self.dtype = shape, dtype


class InOut(Out):
    """Memory that is read and written."""


class Squares(InOut):
    """The same, with no value below 0."""


def labels(n):
    return lambda rng, dtype: rng.integers(0, 5, n).astype(dtype)


def mask(low, high, *shape, dtype=np.int32):
    return lambda rng, _: rng.integers(low, high, shape, dtype=dtype)


def positive(*shape):
    return lambda rng, dtype: 1 + rng.random(shape, dtype)


def boxes(rng, dtype):
    corner = rng.random((2, 1, 50, 2), dtype)
    return np.concatenate([corner, corner + 0.3], -1, dtype=dtype)


def corners(rng, dtype):
    return np.stack([boxes(rng, dtype)[0, 0].ravel(), np.full(200, 0.1, dtype)])


def regions(rng, dtype):
    ends = rng.integers(0, 20, (5, 2))
    return np.hstack([rng.integers(0, 3, (5, 1)), ends, ends + rng.integers(0, 9, (5, 2))]).astype(dtype)


def zeros_and_ones(*shape):
    return lambda rng, dtype: rng.integers(0, 2, shape).astype(dtype)


def small(*shape):
    return lambda rng, dtype: (0.05 * rng.standard_normal(shape)).astype(dtype)


X, Y = (3, 6, 11, 9), (3, 6, 6, 4)  # what WINDOW makes of X
CX, CW, CY = (3, 6, 11, 9), (8, 3, 3, 3), (3, 8, 6, 9)  # and CONV
F = (3, 6, 99)
SEQUENCE = [(60, 9, 7), zeros_and_ones(60, 9), (9, 5)]  # x, cont, x_static of recurrent layers
STATES = [Out(9, 120)] * 2

# Operands in order: a tuple is an input of that shape, a function makes one, None is absent.
CASES = {
    "absval_forward": ([X, Out(*X)], {}),
    "absval_backward": ([X, X, Out(*X)], {}),
    "accuracy_forward": ([(7, 5, 3), labels((7, 3)), Out(), Out(5)], {"top_k": 2, "ignore_label": 3, "layer": "l"}),
    "adadelta_update": ([X, InOut(*X), Squares(*X), Squares(*X)], UPDATE | {"momentum": 0.9, "delta": 1e-6}),
    "adagrad_update": ([X, InOut(*X), Squares(*X)], UPDATE | {"delta": 1e-6}),
    "adam_update": ([X, InOut(*X), InOut(*X), Squares(*X)],
                    UPDATE | {"momentum": 0.9, "momentum2": 0.999, "delta": 1e-6}),
    "argmax_forward": ([(5, 6, 7), Out(5, 2, 7)], {"top_k": 2, "out_max_val": False, "axis": 1}),
    "ave_pool_forward": ([X, Out(*Y)], WINDOW),
    "ave_pool_backward": ([Y, Out(*X)], WINDOW),
    "axpy_forward": ([(18,), (18, 99), (18, 99), Out(18, 99)], {}),
    "batch_norm_forward": ([F, Out(*F), Out(*F), Out(12), Out(6), InOut(6), InOut(6), InOut(1)],
                           {"eps": 1e-5, "fraction": 0.9}),
    "batch_norm_given": ([F, Out(*F), Out(*F), (12,), (6,)], {}),
    "batch_norm_moments": ([F, Squares(12, dtype=np.float64)], {"before": 40}),
    "batch_norm_settle": ([lambda rng, dtype: rng.random(12), Out(12), Out(6), InOut(6), InOut(6), InOut(1)],
                          {"eps": 1e-5, "fraction": 0.9, "count": 40}),
    "batch_norm_sums": ([F, (6,), (6,), F, Out(12, dtype=np.float64)], {"relu": True, "first": True}),
    "batch_norm_gradients": ([lambda rng, dtype: rng.random(12), Out(6), Out(6)], {"accumulate": False}),
    "batch_norm_backward_given": ([F, (6,), (6,), (6,), F, Out(*F), lambda rng, dtype: rng.random(12)],
                                  {"relu": True, "count": 400}),
    "batch_norm_inference": ([F, Out(*F), (6,), positive(6), positive(1)], {"eps": 10.0}),
    "batch_norm_backward": ([F, (6,), F, Out(*F)], {}),
    "batch_norm_backward_global": ([F, Out(*F), positive(6), positive(1)], {"eps": 10.0}),
    "best_boxes": ([(2, 50, 3), mask(0, 50, 2, 3, 9), Out(2, 3, dtype=np.int32)], {"most": 11}),
    "bias_forward": ([F, (6,), Out(*F)], {}),
    "bnll_forward": ([X, Out(*X)], {}),
    "bnll_backward": ([X, X, Out(*X)], {}),
    "clip_forward": ([X, Out(*X)], {"low": -0.5, "high": 0.8}),
    "clip_backward": ([X, X, Out(*X)], {"low": -0.5, "high": 0.8}),
    "concat_forward": ([(3, 4, 5), (3, 0, 5), (3, 6, 5), Out(3, 10, 5)], {"axis": 1}),
    "concat_backward": ([(3, 10, 5), Out(3, 6, 5)], {"axis": 1, "offset": 4}),
    "contrastive_loss_forward": ([(40, 70), (40, 70), labels(40), Out()], {"margin": 9.0, "legacy": False}),
    "contrastive_loss_backward": ([(40, 70), (40, 70), labels(40), (), Out(40, 70)], {"margin": 9.0, "legacy": False}),
    "conv_forward": ([CX, CW, (8,), Out(*CY)], CONV),
    "conv_backward_data": ([CY, CW, Out(*CX)], CONV),
    "conv_backward_weights": ([CX, CY, Out(*CW)], CONV | {"accumulate": False}),
    "conv_backward_bias": ([CY, Out(8)], {"accumulate": False}),
    "copy": ([X, Out(*X, dtype=np.int32)], {}),
    "crop_forward": ([X, Out(2, 6, 4, 9)], {"offsets": (1, 0, 5, 0)}),
    "crop_backward": ([(2, 6, 4, 9), Out(*X)], {"offsets": (1, 0, 5, 0)}),
    "decode_boxes": ([(2, 50, 3, 4), corners, Out(2, 3, 50, 4)], {"code": "CENTER_SIZE", "variances": True}),
    "deconv_forward": ([CY, CW, (6,), Out(*CX)], CONV),
    "deconv_backward_data": ([CX, CW, Out(*CY)], CONV),
    "deconv_backward_weights": ([CY, CX, InOut(*CW)], CONV | {"accumulate": True}),
    "detection_rows": ([(2, 1, 50, 4), (2, 50, 3), mask(0, 50, 2, 3, 4), mask(2, 3, 2, 3), Out(12, 7)], {}),
    "divide_by_labels": ([(), labels((7, 3)), Out()], {"classes": 5, "ignore_label": 1, "layer": "l"}),
    "dropout_forward": ([X, Out(*X), Out(*X, dtype=np.uint8)], {"ratio": 0.4, "draws": DRAWS}),
    "dropout_backward": ([X, mask(0, 2, *X, dtype=np.uint8), Out(*X)], {"ratio": 0.4}),
    "eltwise_sum": ([X, X, X, Out(*X)], {"coeffs": (1.0, -2.0, 0.5)}),
    "eltwise_sum_backward": ([X, Out(*X)], {"coeff": -2.0}),
    "eltwise_prod": ([X, X, X, Out(*X)], {}),
    "eltwise_prod_backward": ([X, Out(*X), X, X], {}),
    "eltwise_prod_backward_unstable": ([X, Out(*X), X, X], {}),
    "eltwise_max": ([X, X, X, Out(*X), Out(*X, dtype=np.int32)], {}),
    "eltwise_max_backward": ([X, mask(0, 3, *X), Out(*X)], {"index": 1}),
    "elu_forward": ([X, Out(*X)], {"alpha": 0.7}),
    "elu_backward": ([X, X, X, Out(*X)], {"alpha": 0.7}),
    "euclidean_loss_forward": ([(4, 70), (4, 70), Out(4, 70), Out()], {}),
    "euclidean_loss_backward": ([(4, 70), (), Out(4, 70)], {"sign": -1.0}),
    "exp_forward": ([X, Out(*X)], {"rate": 0.5, "offset": 1.0}),
    "exp_backward": ([X, X, Out(*X)], {"rate": 0.5, "offset": 1.0}),
    "fill": ([Out(*X)], {"value": 2.5}),
    "fill_scaled": ([Squares(4), Out(*X)], {"value": 0.5}),
    "find_bad": ([X, X, InOut(4)], {}),
    "fill_random": ([Out(*X)], {"filler": Filler("gaussian", sparse=2), "draws": DRAWS}),
    "fold_norm": ([(6, 4, 3, 2), (6,), (6,), positive(6), positive(1), (6,), (6,), Out(6, 4, 3, 2), Out(6)],
                  {"eps": 0.1, "axis": 0, "turned": True}),
    "hinge_loss_forward": ([(70, 5), labels(70), Out()], {"norm": "L2", "layer": "l"}),
    "hinge_loss_backward": ([(70, 5), labels(70), (), Out(70, 5)], {"norm": "L2", "layer": "l"}),
    "infogain_loss_forward": ([(7, 5, 3), labels((7, 3)), (5, 5), Out(7, 5, 3), Out()], LOSS),
    "infogain_loss_backward": ([(7, 5, 3), labels((7, 3)), (5, 5), (), Out(7, 5, 3)], LOSS),
    "gather_forward": ([(5, 130), labels(40), (130,), Out(40, 130)], {"layer": "l"}),
    "gather_backward": ([(40, 130), labels(40), Out(5, 130)], {"accumulate": False, "layer": "l"}),
    "im2col_forward": ([CX, Out(3, 54, 6, 9)], COLUMNS),
    "im2col_backward": ([(3, 54, 6, 9), Out(*CX)], COLUMNS),
    "inner_product_forward": ([(5, 130), (40, 130), (40,), Out(5, 40)], {"transpose": False}),
    "inner_product_backward_data": ([(5, 40), (40, 130), Out(5, 130)], {"transpose": False}),
    "inner_product_backward_weights": ([(5, 130), (5, 40), Out(40, 130)], {"transpose": False, "accumulate": False}),
    "inner_product_backward_bias": ([(5, 40), Out(40)], {"accumulate": False}),
    "interp_forward": ([X, Out(3, 6, 17, 20)], {"crop": (1, 0)}),
    "interp_backward": ([(3, 6, 17, 20), Out(*X)], {"crop": (1, 0)}),
    "l2_normalize_forward": ([F, (6,), Out(*F), Out(3, 99)], {"each": True, "eps": 0.1}),
    "l2_normalize_backward": ([F, (6,), positive(3), F, Out(*F)], {}),
    "l2_normalize_backward_scale": ([F, positive(3, 99), F, Out(6)], {"accumulate": False}),
    "log_forward": ([X, Out(*X)], {"scale": 0.5, "shift": 9.0, "factor": 2.0}),
    "log_backward": ([X, X, Out(*X)], {"scale": 0.5, "shift": 9.0, "factor": 2.0}),
    "lrn_forward": ([X, Out(*X)], LRN | {"k": 2.0}),
    "lrn_backward": ([X, X, Out(*X)], LRN | {"k": 2.0}),
    "lrn_within_forward": ([X, Out(*X)], LRN),
    "lrn_within_backward": ([X, X, X, Out(*X)], LRN),
    "lstm_forward": ([*SEQUENCE, small(480, 7), (480,), small(480, 5), small(480, 120), (9, 120), (9, 120),
                      Out(60, 9, 120), *STATES, Out(60, 9, 480), Out(61, 9, 120), Out(9, 120)], {}),
    "lstm_backward": ([*SEQUENCE, small(480, 7), small(480, 5), small(480, 120),
                       lambda rng, dtype: rng.random((60, 9, 480), dtype), (61, 9, 120), (9, 120), (60, 9, 120),
                       (9, 120), (9, 120), Out(60, 9, 7), Out(9, 5), *STATES, Out(480, 7), Out(480), Out(480, 5),
                       Out(480, 120)], {"accumulate": False}),
    "lstm_unit_forward": ([(9, 700), (9, 2800), zeros_and_ones(9), Out(9, 700), Out(9, 700)], {}),
    "lstm_unit_backward": ([(9, 700), (9, 2800), zeros_and_ones(9), (9, 700), (9, 700), Out(9, 700),
                            Out(9, 2800)], {}),
    "max_pool_forward": ([X, Out(*Y), Out(*Y, dtype=np.int32)], WINDOW),
    "max_pool_backward": ([Y, mask(0, 99, *Y), Out(*X)], WINDOW),
    "nearest_forward": ([X, Out(3, 6, 22, 18)], {"times": (1, 1), "over": (2, 2)}),
    "nearest_backward": ([(3, 6, 22, 18), Out(*X)], {"times": (1, 1), "over": (2, 2)}),
    "nesterov_update": ([X, InOut(*X), InOut(*X)], UPDATE | {"momentum": 0.9}),
    "multinomial_loss_forward": ([(70, 5), labels(70), Out()], {"layer": "l"}),
    "multinomial_loss_backward": ([positive(70, 5), labels(70), (), Out(70, 5)], {"layer": "l"}),
    "multiply": ([X, (1,), Out(*X)], {}),
    "mvn_forward": ([(18, 99), Out(18, 99)], {"normalize_variance": True, "eps": 1e-9}),
    "mvn_backward": ([(18, 99), (18, 99), Out(18, 99)], {"normalize_variance": True, "eps": 1e-9}),
    "next_scale": ([Squares(4)], {}),
    "nonzero_indices": ([labels(40), Out(40, dtype=np.int32)], {}),
    "power_forward": ([X, Out(*X)], {"power": 3.0, "scale": 0.5, "shift": 9.0}),
    "power_backward": ([X, X, X, Out(*X)], {"power": 3.0, "scale": 0.5, "shift": 9.0}),
    "prelu_forward": ([F, (6,), Out(*F)], {}),
    "prelu_backward_data": ([F, (6,), F, Out(*F)], {}),
    "prelu_backward_slope": ([F, F, Out(6)], {"accumulate": False}),
    "prior_boxes": ([Out(2, 6 * 4 * 2 * 4)], {"plane": (6, 4), "sizes": [(5, 5), (7, 3)], "image": (48, 32),
                                              "step": (8, 8), "offset": 0.5, "clip": True, "variance": (0.1,)}),
    "propose_boxes": ([(2, 4, 6, 5), (2, 8, 6, 5), lambda rng, dtype: np.array([[96, 80, 1]] * 2, dtype),
                       Out(2, 1, 60, 4), Out(2, 60, 1)],
                      {"anchors": [(0, 0, 7, 7), (0, 0, 15, 7)], "stride": 16, "min_size": 0}),
    "region_rows": ([(2, 1, 50, 4), (2, 50, 1), mask(0, 50, 2, 1, 4), Out(8, 5), Out(8, 1)], {}),
    "rmsprop_update": ([X, InOut(*X), Squares(*X)], UPDATE | {"rms_decay": 0.9, "delta": 1e-6}),
    "reduction_forward": ([(5, 130), Out(5)], {"operation": "ASUM", "coeff": 0.5}),
    "reduction_backward": ([(5, 130), (5,), Out(5, 130)], {"operation": "SUMSQ", "coeff": 0.5}),
    "relu_forward": ([X, Out(*X)], {"slope": 0.1}),
    "relu_backward": ([X, X, Out(*X)], {"slope": 0.0}),
    "relu6_forward": ([X, Out(*X)], {"slope": 0.1}),
    "relu6_backward": ([X, X, Out(*X)], {"slope": 0.1}),
    "roi_pool_forward": ([X, regions, Out(5, 6, 3, 2), Out(5, 6, 3, 2, dtype=np.int32)], {"scale": 0.5}),
    "roi_pool_backward": ([(5, 6, 3, 2), regions, mask(-1, 99, 5, 6, 3, 2), Out(*X)], {}),
    "rnn_forward": ([*SEQUENCE, small(300, 7), (300,), small(300, 5), small(300, 300), small(300, 300), (300,),
                     (9, 300), Out(60, 9, 300), Out(9, 300), Out(61, 9, 300)], {}),
    "rnn_backward": ([*SEQUENCE, small(300, 7), small(300, 5), small(300, 300), small(300, 300), (300,),
                      lambda rng, dtype: rng.random((61, 9, 300), dtype), (60, 9, 300), (9, 300), Out(60, 9, 7),
                      Out(9, 5), Out(9, 300), Out(300, 7), Out(300), Out(300, 5), Out(300, 300), Out(300, 300),
                      Out(300)], {"accumulate": False}),
    "scale_forward": ([F, (6,), (6,), Out(*F)], {}),
    "scale_backward_data": ([F, (6,), Out(*F)], {}),
    "scale_backward_gamma": ([F, F, Out(6)], {"accumulate": False}),
    "scale_backward_beta": ([F, Out(6)], {"accumulate": False}),
    "sgd_update": ([X, InOut(*X), InOut(*X)], UPDATE | {"momentum": 0.9}),
    "sigmoid_forward": ([X, Out(*X)], {}),
    "sigmoid_backward": ([X, X, Out(*X)], {}),
    "sigmoid_cross_entropy_forward": ([(70, 90), labels((70, 90)), Out()], VALID),
    "sigmoid_cross_entropy_backward": ([(70, 90), labels((70, 90)), (), Out(70, 90)], VALID),
    "slice_forward": ([(3, 10, 5), Out(3, 4, 5), Out(3, 6, 5)], {"axis": 1}),
    "slice_backward": ([(3, 4, 5), (3, 6, 5), Out(3, 10, 5)], {"axis": 1}),
    "softmax_forward": ([(7, 5, 300), Out(7, 5, 300)], {}),
    "softmax_backward": ([(7, 5, 300), (7, 5, 300), Out(7, 5, 300)], {}),
    "softmax_loss_forward": ([(7, 5, 3), labels((7, 3)), Out(7, 2, 3), Out()], LOSS),
    "softmax_loss_backward": ([(7, 5, 3), labels((7, 3)), lambda rng, dtype: 1 + rng.random((7, 2, 3), dtype), (),
                               Out(7, 5, 3)], LOSS),
    "spp_ave_forward": ([X, Out(3, 30)], PYRAMID),
    "spp_ave_backward": ([(3, 30), Out(*X)], PYRAMID),
    "spp_max_forward": ([X, Out(3, 30), Out(3, 30, dtype=np.int32)], PYRAMID),
    "spp_max_backward": ([(3, 30), mask(0, 99, 3, 30), Out(*X)], PYRAMID),
    "spp_stochastic_forward": ([lambda rng, dtype: rng.random(X, dtype), Out(3, 30), Out(3, 30, dtype=np.int32)],
                               PYRAMID | {"draws": DRAWS}),
    "stochastic_pool_forward": ([lambda rng, dtype: rng.random(X, dtype), Out(*Y), Out(*Y, dtype=np.int32)],
                                WINDOW | {"draws": DRAWS}),
    "sum_arrays": ([X, X, X, Out(*X)], {}),
    "sumsq": ([X, InOut(1)], {}),
    "suppress_boxes": ([boxes, (2, 50, 3), Out(2, 3, 9, dtype=np.int32)],
                       {"background": 0, "least": -1.0, "entering": 40, "threshold": 0.4, "eta": 1.0, "pixels": False}),
    "swish_forward": ([X, Out(*X)], {"beta": 1.5}),
    "swish_backward": ([X, X, Out(*X)], {"beta": 1.5}),
    "take_items": ([(7, 5, 3), Out(4, 5, 3)], {"first": 2}),
    "tanh_forward": ([X, Out(*X)], {}),
    "tanh_backward": ([X, X, Out(*X)], {}),
    "tile_forward": ([(6, 99), Out(6, 3, 99)], {}),
    "tile_backward": ([(6, 3, 99), Out(6, 99)], {}),
    "threshold_forward": ([X, Out(*X)], {"threshold": 0.3}),
    "transpose": ([(3, 40, 50, 9), Out(9, 3, 50, 40)], {"order": (3, 0, 2, 1)}),
    "unpool_forward": ([X, mask(-1, 300, *X), Out(3, 6, 15, 20)], {}),
    "unpool_backward": ([(3, 6, 15, 20), mask(-1, 300, *X), Out(*X)], {}),
}  # fmt: skip


def make(name, read_only=False):
    """The case's operands, and those of them that are written."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    operands, written = [], []
    for kind in CASES[name][0]:
        if isinstance(kind, InOut):
            array = rng.standard_normal(kind.shape).astype(kind.dtype or np.float32)
            array = abs(array) if isinstance(kind, Squares) else array
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
