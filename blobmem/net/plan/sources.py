"""A pass over calls, where a device has no room for all that lives between forward and backward: moments and gradients
of batch norms behind 1x1 convolutions are had from what these convolve.

Such a convolution of few channels to many, y = W x, makes by far the larger array. It is read for its moments before it
is normalised, and forward keeps it normalised for the batch norm's gradients. But sums over it are products of W with
sums over x, and so is all that either takes of it. With g the gradient of the normalised array, n numbers a channel and
sums over all of these::

    G = sum(g x') - sum(g) mean(x)'        S = sum(x x') - n mean(x) mean(x)'
    mean(y) = W mean(x)                    n var(y) = diag(W S W')
    dgamma = inv_std * rowsum(W * G)       dbeta = sum(g)
    dW = a * (G - inv_std * dgamma / n * (W S))                        with a = gamma * inv_std
    dx = (a * W)' g + B x - W' (a * dbeta / n) - B mean(x)             with B = -W' diag(a * inv_std * dgamma / n) W

So y is normalised as it is made, nobody reads it, or what forward has made of it, for gradients, and there are fewer
bytes to go through. Results are the same to rounding, not to the bit. (Derived from Ioffe and Szegedy 2015, where y's
gradient is given.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from blobmem.dtypes import is_half
from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net.plan.abreast import MOMENTS, SETTLES, Gradient, by_moments, gradient_at
from blobmem.net.plan.again import by_one
from blobmem.net.schedule import first_uses
from blobmem.ops.call import Call, Operand, call, like, memories, overwrite, read

_NORM = "batch_norm_forward"

WIDER = 2
"""How many times as many channels as it convolves a convolution makes, or more."""

LONG = 128
"""How many numbers a channel has for each of those that are convolved, or more: products of sums cost little then."""

_NEAR_NORM = frozenset({"scale_forward", "relu_forward", "max_pool_forward", "ave_pool_forward"})
"""What leaves normalised numbers so that means are not large beside deviations: what differs little among large numbers
is lost in sums of their squares."""


class FromSources(NamedTuple):
    """Calls by which moments and gradients are had so.

    Attributes:
        forward, backward: all calls.
        position: of each call of forward as it was, where it is now, or what has its numbers.
        arrays: that they have beside those of layers.
        absent: memories that they do not use any more.
    """

    forward: list[Call]
    backward: list[Call]
    position: list[int]
    arrays: list[Blob]
    absent: set[SyncedMemory]


def from_sources(
    forward: Sequence[Call], backward: Sequence[Call], free: Container[SyncedMemory], ops: Mapping[str, Any]
) -> FromSources:
    """The calls with such moments and gradients from sources.

    Args:
        forward, backward: the calls, one by one.
        free: memories that nobody reads but these calls.
        ops: those of the device.
    """
    norms, result, arrays, at = dict[int, _Calls](), list[Call](), list[Blob](), 0
    makers = {} if SETTLES not in ops else _makers(forward)
    while at < len(backward):
        found = None if not makers else _match(forward, backward, at, free, makers)
        if found is None:
            result.append(backward[at])
            at += 1
            continue
        calls = norms[found.norm] = _Calls(found, forward[found.norm - 1], forward[found.norm])
        result += calls.backward()
        at = found.stop
    ahead, position = list[Call](), list[int]()
    for at, each in enumerate(forward):
        if at + 1 in norms:
            ahead += norms[at + 1].moments()
        ahead.append(norms[at].given if at in norms else each)
        position.append(len(ahead) - 1)
    for calls in norms.values():
        arrays += calls.arrays
    used = {*memories([*ahead, *result])}
    return FromSources(ahead, result, position, arrays, {*memories([*forward, *backward])} - used)


class _Found(NamedTuple):
    """What is replaced.

    Attributes:
        stop: the position in backward behind it.
        norm: that of the batch norm in forward.
        gradient: of the batch norm.
        weights, data: the convolution's.
    """

    stop: int
    norm: int
    gradient: Gradient
    weights: Call
    data: Call


def _makers(forward: Sequence[Call]) -> dict[SyncedMemory, int]:
    """Of what batch norms keep for backward the position of the call, where just before it a convolution makes so much
    of little that this is worth while."""
    return {
        each.operand(2).memory: at
        for at, each in enumerate(forward)
        if at and each.op == _NORM and each.operands[2] is not None and _is_wide(forward[at - 1], each)
        if _is_normalized(forward, at - 1)
    }


def _is_normalized(forward: Sequence[Call], conv: int) -> bool:
    """Whether what a convolution reads is what a batch norm has made, or near it."""
    memory = forward[conv].operand(0).memory
    for each in reversed(forward[:conv]):
        if memory in each.written_memories():
            if each.op not in _NEAR_NORM:
                return each.op == _NORM
            memory = each.operand(0).memory
    return False


def _is_wide(conv: Call, norm: Call) -> bool:
    if (
        conv.op != "conv_forward"
        or conv.operands[2] is not None
        or conv.operand(3).memory is not norm.operand(0).memory
    ):
        return False
    w, (outer, _, inner), window = conv.operand(1), norm.operand(0).op_shape, conv.attributes
    outputs, inputs, *taps = w.op_shape
    if is_half(w.blob.dtype):
        return False  # what such sums lose by rounding is no longer small
    if {*window["stride"]} != {1} or any(window["pad"]) or window["group"] != 1 or math.prod(taps) != 1:
        return False
    return bool(outputs >= WIDER * inputs and outer * inner >= LONG * inputs)


def _match(
    forward: Sequence[Call],
    backward: Sequence[Call],
    at: int,
    free: Container[SyncedMemory],
    makers: Mapping[SyncedMemory, int],
) -> _Found | None:
    gradient = gradient_at(backward, at)
    if gradient is None or gradient.stop + 2 > len(backward) or gradient.call.attributes.get("relu", False):
        return None
    xhat, dx = gradient.call.operand(0), gradient.call.operand(3 if gradient.call.op == "batch_norm_backward" else 5)
    weights, data = backward[gradient.stop : gradient.stop + 2]
    norm, stop = makers.get(xhat.memory), gradient.stop + 2
    if norm is None or (weights.op, data.op) != ("conv_backward_weights", "conv_backward_data"):
        return None
    x, w, *_ = (operand.memory for operand in forward[norm - 1].present())
    is_theirs = (
        (weights.operand(0).memory, data.operand(1).memory) == (x, w)
        and weights.operand(1).memory is dx.memory
        and data.operand(0).memory is dx.memory
        and data.operand(2).intent is Intent.OVERWRITE
    )
    if not is_theirs or dx.memory not in free or xhat.memory not in free:
        return None
    if not first_uses(backward[stop:]).get(dx.memory, True):
        return None  # what is there is read
    if xhat.memory in {*memories([*backward[:at], *backward[stop:]])}:
        return None
    return _Found(stop, norm, gradient, weights, data)


class _Calls:
    """Makes the calls in place of what is found.

    Attributes:
        arrays: that they have beside those of layers.
        given: the batch norm by its statistics, of which nothing is kept.
    """

    def __init__(self, found: _Found, conv: Call, norm: Call) -> None:
        self._found, self._conv, self.arrays = found, conv, list[Blob]()
        w = conv.operand(1).op_shape
        self._squares = self._array("squares", (w[1], *w[1:]))
        self._source = self._array("sums of source", w[1:2])
        self._moments = self._array("moments", (2 * w[0],), np.float64)
        self._settled, given = by_moments(norm, self._moments)
        self.given = by_one(given)
        self._count = self._settled.attributes["count"]

    def moments(self) -> list[Call]:
        """The calls that have the batch norm's statistics, before the convolution."""
        x, w = self._conv.operand(0), self._conv.operand(1)
        sums = call("conv_backward_bias", x, _sum(self._source)), self._found.weights.over((x, x, _sum(self._squares)))
        of_sums = *map(read, (self._squares, self._source)), w, overwrite(self._moments)
        found = like(self._settled, call(MOMENTS, *of_sums, count=self._count))
        return [*(like(self._conv, each) for each in sums), found, self._settled]

    def backward(self) -> list[Call]:
        """The calls of backward: those of the batch norm's layer read statistics that are its own."""
        found, w = self._found, self._conv.operand(1).op_shape
        shapes = {"weights": w, "weights of source": self._squares.shape, "shift": w[1:2]}
        factors = [self._array(what, shape) for what, shape in shapes.items()]
        products, plain = self._array("products", w), self._array("sums", w[:1])
        calls = [*self._summing(products, plain), self._settling(products, plain, factors)]
        return [like(found.gradient.norm, each) for each in calls] + [
            like(found.data, each) for each in self._data(factors)
        ]

    def _array(self, what: str, shape: tuple[int, ...], dtype: Any = None) -> Blob:
        w, name = self._found.data.operand(1).blob, self._found.data.layer_name
        self.arrays.append(Blob(shape, dtype=dtype or w.dtype, device=w.device, name=f"{name}/{what}"))
        return self.arrays[-1]

    @property
    def _g(self) -> Operand:
        """The gradient of what the batch norm, with its scale, makes, as convolutions see it."""
        dy = self._found.gradient.call.operands[4 if self._is_scaled else 2]
        assert dy is not None
        return dataclasses.replace(dy, shape=self._found.weights.operand(1).op_shape, intent=Intent.READ)

    @property
    def _is_scaled(self) -> bool:
        return self._found.gradient.call.op == "batch_norm_scale_backward"

    def _summing(self, products: Blob, plain: Blob) -> list[Call]:
        weights, g = self._found.weights, self._g
        return [
            call("conv_backward_bias", g, _sum(plain)),  # which may run as one with what makes g
            weights.over((weights.operand(0), g, _sum(products))),
        ]

    def _settling(self, products: Blob, plain: Blob, factors: Sequence[Blob]) -> Call:
        found, of_norm = self._found, self._found.gradient.call.operands
        gamma, dgamma, dbeta = (of_norm[2], *of_norm[6:8]) if self._is_scaled else (None, None, None)
        sums = *map(read, (products, self._squares, plain, self._source)), found.data.operand(1)
        given = *sums, of_norm[1], gamma, found.weights.operand(2), dgamma, dbeta
        return call(SETTLES, *given, *map(overwrite, factors), count=self._count)

    def _data(self, factors: Sequence[Blob]) -> list[Call]:
        data, (of_g, of_x, shift) = self._found.data, map(read, factors)
        x, dx = self._found.weights.operand(0), data.operand(2)
        part = self._array("part", dx.blob.shape)
        window = {name: data.attributes[name] for name in ("stride", "pad", "dilation", "group")}
        return [
            data.over((self._g, of_g, overwrite(part, dx.shape))),
            call("conv_sum_forward", x, of_x, shift, read(part, dx.shape), dx, **window, relu=False),
        ]


def _sum(blob: Blob) -> Operand:
    """An array to which slices of the batch add."""
    return Operand(blob, False, Intent.OVERWRITE, accumulate=True)
