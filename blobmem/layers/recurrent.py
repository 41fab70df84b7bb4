"""Recurrent layers: RNN, LSTM, and LSTMUnit, which is one step of an LSTM.

Each is one layer, and one call in either direction, whatever the number of steps: nothing is unrolled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobmem.layers.base import Layer, register_layer
from blobmem.layers.recurrent_base import Recurrent
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, Operand, call, overwrite, overwrite_diff, read, read_diff


@register_layer
class RNN(Recurrent):
    """The plain recurrent layer, with an output layer of its own:

        h_t = tanh(W_xh x_t + b_h + W_xh_static x_static + W_hh (cont_t h_{t-1}))
        o_t = tanh(W_ho h_t + b_o)

    Source: Elman 1990, in the form of Donahue et al. 2014, section 3. Top: o (T, N, num_output).
    Parameters: W_xh, b_h, W_xh_static if there is an x_static, W_hh, W_ho, b_o.
    """

    type = "RNN"
    tops = (1, 2)
    bottoms = (2, 4)
    state_names = ("hidden",)

    def add_params(self) -> None:
        super().add_params()
        self.add_named("w_o", (self.units, self.units))
        self.add_named("b_o", (self.units,))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        self.internal_blob("hiddens", (self.steps + 1, self.streams, self.units))

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "rnn_forward", *self.inputs_of(bottom), *self.parameters("w_x", "b", "w_static", "w_h", "w_o", "b_o"),
            *self.states_before(bottom), overwrite(top[0]), *self.states_after(top), *self.kept("hiddens"),
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        yield from self.unwritten(top)
        yield call(
            "rnn_backward", *self.inputs_of(bottom), *self.parameters("w_x", "w_static", "w_h", "w_o", "b_o"),
            read(self.internal["hiddens"]), read_diff(top[0]), *self.state_gradients(top),
            *self.bottom_gradients(bottom, propagate_down),
            *self.parameter_gradients("w_x", "b", "w_static", "w_h", "w_o", "b_o"),
        )  # fmt: skip


@register_layer
class LSTM(Recurrent):
    """Long short-term memory:

        (i'_t, f'_t, o'_t, g'_t) = W_xc x_t + b_c + W_xc_static x_static + W_hc (cont_t h_{t-1})
        i_t, f_t, o_t = sigmoid(i'_t), sigmoid(f'_t), sigmoid(o'_t);  g_t = tanh(g'_t)
        c_t = cont_t f_t c_{t-1} + i_t g_t
        h_t = o_t tanh(c_t)

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000, in the form of Donahue et al.
    2014, section 3. Backward, with dh_t and dc_t what reaches h_t and c_t:

        dc_t = cont_{t+1} f_{t+1} dc_{t+1} + dh_t o_t (1 - tanh(c_t)^2)
        do'_t = dh_t tanh(c_t) o_t (1 - o_t);  di'_t = dc_t g_t i_t (1 - i_t)
        df'_t = dc_t cont_t c_{t-1} f_t (1 - f_t);  dg'_t = dc_t i_t (1 - g_t^2)
        dh_{t-1} = its gradient as an output + cont_t W_hc^T (di'_t, df'_t, do'_t, dg'_t)

    Top: h (T, N, num_output). Parameters: W_xc, b_c, W_xc_static if there is an x_static, W_hc.
    """

    type = "LSTM"
    state_names = ("hidden", "cell")
    gates = 4

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        self.internal_blob("gates", (self.steps, self.streams, 4 * self.units))
        self.internal_blob("cells", (self.steps + 1, self.streams, self.units))
        self.internal_blob("start", (self.streams, self.units))

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "lstm_forward", *self.inputs_of(bottom), *self.parameters("w_x", "b", "w_static", "w_h"),
            *self.states_before(bottom), overwrite(top[0]), *self.states_after(top),
            *self.kept("gates", "cells", "start"),
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        yield from self.unwritten(top)
        yield call(
            "lstm_backward", *self.inputs_of(bottom), *self.parameters("w_x", "w_static", "w_h"),
            *(read(self.internal[purpose]) for purpose in ("gates", "cells", "start")), read_diff(top[0]),
            *self.state_gradients(top), *self.bottom_gradients(bottom, propagate_down),
            *self.parameter_gradients("w_x", "b", "w_static", "w_h"),
        )  # fmt: skip


@register_layer
class LSTMUnit(Layer):
    """What an LSTM does in a step once its gates are added up: bottoms c_{t-1} (1, N, D), gates' sums (1, N, 4 D), by
    input, forget, output and candidate, and cont_t (1, N); tops c_t and h_t (1, N, D). See `LSTM`.
    """

    type = "LSTMUnit"
    bottoms = (3, 3)
    tops = (2, 2)
    propagates = (True, True, False)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if any(one is other for one in top for other in bottom):
            raise self.error("top", "other blobs than the bottoms, which gradients need")

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        cell, gates, cont = bottom
        if cell.num_axes != 3 or cell.shape[0] != 1 or cell.shape[2] < 1:
            raise self.error("bottom", "a cell of shape (1, N, D)", cell.describe())
        self.streams, self.units = cell.shape[1:]
        if gates.shape != (1, self.streams, 4 * self.units):
            raise self.error("bottom", f"gates of shape {(1, self.streams, 4 * self.units)}", gates.describe())
        if cont.shape != (1, self.streams):
            raise self.error("bottom", f"cont of shape {(1, self.streams)}", cont.describe())
        for blob in top:
            blob.reshape_like(cell)

    def _inputs(self, bottom: Sequence[Blob]) -> tuple[Operand, Operand, Operand]:
        cell, gates, cont = bottom
        return (
            read(cell, (self.streams, self.units)),
            read(gates, (self.streams, 4 * self.units)),
            read(cont, (self.streams,)),
        )

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        shape = (self.streams, self.units)
        yield call("lstm_unit_forward", *self._inputs(bottom), *(overwrite(blob, shape) for blob in top))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        for blob, given in zip(top, self.top_grads, strict=True):
            if not given:
                yield call("fill", overwrite_diff(blob), value=0.0)
        shapes = ((self.streams, self.units), (self.streams, 4 * self.units))
        wanted = [
            overwrite_diff(blob, shape) if need else None
            for blob, shape, need in zip(bottom[:2], shapes, propagate_down[:2], strict=True)
        ]
        if any(wanted):
            grads = (read_diff(blob, shapes[0]) for blob in top)
            yield call("lstm_unit_backward", *self._inputs(bottom), *grads, *wanted)
