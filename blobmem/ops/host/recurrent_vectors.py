"""One vector of units of a recurrent layer: what happens to them between the matrix products, in registers.

Arrays are flat, offsets and strides count elements; `count` lanes of the vectors are there, the others are not touched.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from blobmem.ops.host.recurrent_functions import Functions
from blobmem.ops.host.tile import Emit, array_base


class _Places:
    """The vectors that an intrinsic's arguments point to: (array, offset) pairs from the first argument on."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: tuple, pairs: int):
        self.emit = Emit(context, builder, signature.args[0].dtype)
        self.builder = builder
        self.mask = self.emit.first_lanes(values[-1])
        self.base = [
            array_base(context, builder, signature.args[2 * i], values[2 * i], values[2 * i + 1]) for i in range(pairs)
        ]

    def _at(self, which: int, index: int, stride: Any) -> Any:
        if not index:
            return self.base[which]
        return self.emit.at(self.base[which], self.builder.mul(stride, stride.type(index)))

    def load(self, which: int, index: int = 0, stride: Any = None) -> Any:
        """The vector at a pair's place, or `index` strides beyond it."""
        return self.emit.load_some(self._at(which, index, stride), self.mask)

    def store(self, value: Any, which: int, index: int = 0, stride: Any = None) -> None:
        self.emit.store_some(value, self._at(which, index, stride), self.mask)


@intrinsic
def lstm_vector(typing: Any, raw: Any, raw_at: Any, sums: Any, sums_at: Any, gates: Any, gates_at: Any, before: Any,
                before_at: Any, after: Any, after_at: Any, hidden: Any, hidden_at: Any, state: Any, state_at: Any,
                step: Any, sums_step: Any, keep: Any, next_keep: Any, count: Any) -> Any:  # fmt: skip
    """gates = sigmoid (input, forget, output) and tanh (candidate) of raw + sums;
    after = keep * forget * before + input * candidate; hidden = output * tanh(after); state = next_keep * hidden.

    The four gates lie `step` apart in raw and gates, `sums_step` in sums.
    """
    signature = types.void(raw, raw_at, sums, sums_at, gates, gates_at, before, before_at, after, after_at, hidden,
                           hidden_at, state, state_at, step, sums_step, keep, next_keep, count)  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        places = _Places(context, builder, signature, v, 7)
        f = Functions(places.emit)
        stride, sums_stride = v[14], v[15]
        keep, next_keep = places.emit.splat(v[16]), places.emit.splat(v[17])
        act = [f.sigmoid, f.sigmoid, f.sigmoid, f.tanh]
        gates = [act[i](builder.fadd(places.load(0, i, stride), places.load(1, i, sums_stride))) for i in range(4)]
        for i, gate in enumerate(gates):
            places.store(gate, 2, i, stride)
        kept = f.product(keep, gates[1], places.load(3))
        cell = builder.fadd(kept, builder.fmul(gates[0], gates[3]))
        hidden = builder.fmul(gates[2], f.tanh(cell))
        places.store(cell, 4)
        places.store(hidden, 5)
        places.store(builder.fmul(next_keep, hidden), 6)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def lstm_vector_backward(typing: Any, gates: Any, gates_at: Any, before: Any, before_at: Any, after: Any, after_at: Any,
                         dhidden: Any, dhidden_at: Any, sums: Any, sums_at: Any, dafter: Any, dafter_at: Any,
                         dbefore: Any, dbefore_at: Any, dgates: Any, dgates_at: Any, dstate: Any, dstate_at: Any,
                         carried: Any, carried_at: Any, step: Any, keep: Any, next_keep: Any,
                         count: Any) -> Any:  # fmt: skip
    """The gradients of what `lstm_vector` computes, with those of its raw gates in dgates and again in dstate, and
    carried = next_keep * hidden, computed anew. sums is the gradient of state, dhidden that of hidden itself.
    """
    signature = types.void(gates, gates_at, before, before_at, after, after_at, dhidden, dhidden_at, sums, sums_at,
                           dafter, dafter_at, dbefore, dbefore_at, dgates, dgates_at, dstate, dstate_at, carried,
                           carried_at, step, keep, next_keep, count)  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        places = _Places(context, builder, signature, v, 10)
        f = Functions(places.emit)
        stride = v[20]
        keep, next_keep = places.emit.splat(v[21]), places.emit.splat(v[22])
        i, forget, o, g = (places.load(0, index, stride) for index in range(4))
        squashed = f.tanh(places.load(2))
        dh = places.emit.multiply_add(next_keep, places.load(4), places.load(3))
        dc = builder.fadd(places.load(5), f.product(dh, o, f.rest_of_square(squashed)))
        kept = builder.fmul(dc, keep)
        gradients = (
            f.product(dc, g, f.slope(i)),
            f.product(kept, places.load(1), f.slope(forget)),
            f.product(dh, squashed, f.slope(o)),
            f.product(dc, i, f.rest_of_square(g)),
        )
        places.store(builder.fmul(kept, forget), 6)
        for index, gradient in enumerate(gradients):
            places.store(gradient, 7, index, stride)
            places.store(gradient, 8, index, stride)
        places.store(f.product(next_keep, o, squashed), 9)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def rnn_vector(typing: Any, hidden: Any, hidden_at: Any, sums: Any, sums_at: Any, state: Any, state_at: Any,
               next_keep: Any, count: Any) -> Any:  # fmt: skip
    """hidden = tanh(hidden + sums); state = next_keep * hidden."""
    signature = types.void(hidden, hidden_at, sums, sums_at, state, state_at, next_keep, count)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        places = _Places(context, builder, signature, v, 3)
        f = Functions(places.emit)
        hidden = f.tanh(builder.fadd(places.load(0), places.load(1)))
        places.store(hidden, 0)
        places.store(builder.fmul(places.emit.splat(v[6]), hidden), 2)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def rnn_vector_backward(typing: Any, hidden: Any, hidden_at: Any, sums: Any, sums_at: Any, dhidden: Any,
                        dhidden_at: Any, dstate: Any, dstate_at: Any, next_keep: Any, count: Any) -> Any:  # fmt: skip
    """From the gradient of hidden itself in dhidden and that of state in sums, the gradient of what tanh was of, in
    dhidden and again in dstate."""
    signature = types.void(hidden, hidden_at, sums, sums_at, dhidden, dhidden_at, dstate, dstate_at, next_keep, count)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        places = _Places(context, builder, signature, v, 4)
        f = Functions(places.emit)
        dh = places.emit.multiply_add(places.emit.splat(v[8]), places.load(1), places.load(2))
        gradient = builder.fmul(dh, f.rest_of_square(places.load(0)))
        places.store(gradient, 2)
        places.store(gradient, 3)
        return context.get_dummy_value()

    return signature, generate
