"""Vector instructions for max pooling: a value and its place, both kept where the value is larger.

A compiler makes vectors of such loops only for long rows, and pooled rows are short.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from blobmem.ops.host.tile import Emit, array_base

NOWHERE = 2**31 - 1
"""The place of padding, after every real one."""


class _Pair:
    """A vector of values, and one of as many int32 places, at the same offset of two arrays."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any, first: int, offset: Any):
        self.emit = Emit(context, builder, kinds[first].dtype)
        self.places = Emit(context, builder, types.int32, self.emit.count)
        self.value_at = array_base(context, builder, kinds[first], values[first], offset)
        self.place_at = array_base(context, builder, kinds[first + 1], values[first + 1], offset)

    def load(self) -> tuple[Any, Any]:
        return self.emit.load(self.value_at), self.places.load(self.place_at)

    def load_every_other(self) -> tuple[Any, Any]:
        """The even elements of twice as many."""
        count = self.emit.count
        even = ir.Constant(ir.VectorType(ir.IntType(32), count), [2 * lane for lane in range(count)])
        builder = self.emit.builder
        pairs = []
        for emit, pointer in ((self.emit, self.value_at), (self.places, self.place_at)):
            further = emit.at(pointer, ir.IntType(64)(count))
            pairs.append(builder.shuffle_vector(emit.load(pointer), emit.load(further), even))
        return pairs[0], pairs[1]

    def either(self, mask: Any, always: Any) -> Any:
        """A mask, or all lanes."""
        everywhere = ir.Constant(mask.type, [1] * self.emit.count)
        return self.emit.builder.select(always, everywhere, mask)

    def store(self, value: Any, place: Any) -> None:
        self.emit.store(value, self.value_at)
        self.places.store(place, self.place_at)


def _above(builder: Any, new: Any, old: Any) -> Any:
    """Where a value is larger, or not a number: what went wrong in a plane shall not vanish."""
    return builder.or_(builder.fcmp_ordered(">", new, old), builder.fcmp_unordered("uno", new, new))


@intrinsic
def raise_row(typing: Any, best: Any, where: Any, offset: Any, x: Any, x_offset: Any, count: Any, index: Any,
              first: Any) -> Any:  # fmt: skip
    """best = max(best, x) for up to a vector of `count` elements, where = their places, from `index`. `first`: set.

    Beyond `count` nothing is read; there a first row becomes lower than any number, and nowhere.
    """
    signature = types.void(best, where, offset, x, x_offset, count, index, first)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        pair = _Pair(context, builder, signature.args, v, 0, v[2])
        lanes, integers = pair.emit.count, pair.places
        inside = pair.emit.first_lanes(v[5])
        source = array_base(context, builder, signature.args[3], v[3], v[4])
        loaded = pair.emit.load_some(source, inside, float("-inf"))
        counting = ir.Constant(integers.vector, list(range(lanes)))
        here = builder.add(counting, integers.splat(builder.trunc(v[6], integers.element)))
        here = builder.select(inside, here, ir.Constant(integers.vector, [NOWHERE] * lanes))
        value, place = pair.load()
        take = pair.either(_above(builder, loaded, value), v[7])
        pair.store(builder.select(take, loaded, value), builder.select(take, here, place))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def raise_windows(typing: Any, best: Any, where: Any, offset: Any, row: Any, places: Any, row_offset: Any, twice: Any,
                  first: Any) -> Any:  # fmt: skip
    """best = max(best, row) for a vector of windows that begin one element apart (`twice`: two), or set if `first`.

    Of equals the earlier place is kept.
    """
    signature = types.void(best, where, offset, row, places, row_offset, twice, first)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        kept = _Pair(context, builder, signature.args, v, 0, v[2])
        source = _Pair(context, builder, signature.args, v, 3, v[5])
        with builder.if_else(v[6]) as (then, otherwise):
            with then:
                apart = source.load_every_other()
                then_block = builder.block
            with otherwise:
                next_to = source.load()
                else_block = builder.block
        new, there = builder.phi(kept.emit.vector), builder.phi(kept.places.vector)
        for phi, a, b in zip((new, there), apart, next_to, strict=True):
            phi.add_incoming(a, then_block)
            phi.add_incoming(b, else_block)
        value, place = kept.load()
        above = _above(builder, new, value)
        equal = builder.fcmp_ordered("==", new, value)
        earlier = builder.icmp_signed("<", there, place)
        take = kept.either(builder.or_(above, builder.and_(equal, earlier)), v[7])
        kept.store(builder.select(take, new, value), builder.select(take, there, place))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def put_places(typing: Any, mask: Any, mask_offset: Any, values: Any, places: Any, offset: Any, count: Any, first: Any,
               apart: Any) -> Any:  # fmt: skip
    """mask = places - (first, first + apart, ...) for up to a vector of `count` elements; no other is touched.

    A vector is as long as one of `values`, the array that the places are of.
    """
    signature = types.void(mask, mask_offset, values, places, offset, count, first, apart)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        pair = _Pair(context, builder, signature.args, v, 2, v[4])
        integers, lanes = pair.places, pair.emit.count
        step, start = (integers.splat(builder.trunc(each, integers.element)) for each in (v[7], v[6]))
        passed = builder.mul(step, ir.Constant(integers.vector, list(range(lanes))))
        place = builder.sub(builder.sub(integers.load(pair.place_at), start), passed)
        marks = Emit(context, builder, signature.args[0].dtype, lanes)
        if marks.element != integers.element:
            place = builder.trunc(place, marks.vector)
        target = array_base(context, builder, signature.args[0], v[0], v[1])
        marks.store_some(place, target, marks.first_lanes(v[5]))
        return context.get_dummy_value()

    return signature, generate
