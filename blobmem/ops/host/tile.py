"""The innermost loop of every matrix product here: a tile of C in registers, and what is needed around it.

    C[r, j] = (C[r, j] or nothing) + (a value per row + sum over k of A[r, k] * B[k, j])

for ROWS rows and 1 to 3 vectors of columns.

It is written as LLVM instructions on vectors because a compiler cannot be relied on to find this form in plain loops. A
is read element by element at any two strides, B a vector at a time, so that either may be a packed panel or the array
itself. On AVX-512 the 24 sums, 3 vectors of B and one element of A fill the register file; where a machine has 16
vector registers the tile has half the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _vector_bytes_and_registers() -> tuple[int, int]:
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 64, 32
    if features.get("avx") and features.get("fma"):
        return 32, 16
    return 16, 32 if features.get("neon") else 16


VECTOR_BYTES, _REGISTERS = _vector_bytes_and_registers()

_POINTER = ir.PointerType()

PANEL_VECTORS = 3
"""Vectors of columns in a full tile, and in a packed panel of B."""

ROWS = 8 if _REGISTERS >= 32 else 4
"""Rows of a tile, and in a packed panel of A."""

SET, ADD, SET_WITH_ROWS = 0, 1, 2
"""What becomes of C: replaced by the sums, added to, or replaced by sums that start from one value per row (a bias).

Adding happens once at the end: sums over long runs are taken in blocks and so lose fewer digits than one long chain.
"""


def lanes_of(itemsize: int) -> int:
    """Elements of one vector."""
    return VECTOR_BYTES // itemsize


def panel_of(itemsize: int) -> int:
    """Columns of a packed panel of B."""
    return PANEL_VECTORS * VECTOR_BYTES // itemsize


def array_base(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Pointer to an element of a flat array."""
    data = context.make_array(array_type)(context, builder, array).data
    return cgutils.gep_inbounds(builder, data, offset)


class Emit:
    """Vector instructions for one element type, of one vector register unless a count is given."""

    def __init__(self, context: Any, builder: Any, dtype: Any, count: int = 0):
        self.builder = builder
        self.count = count or VECTOR_BYTES // (dtype.bitwidth // 8)
        self.align = dtype.bitwidth // 8
        self.name = f"v{self.count}{'f' if isinstance(dtype, types.Float) else 'i'}{dtype.bitwidth}"
        element = context.get_value_type(dtype)
        self.element = element
        self.vector = ir.VectorType(element, self.count)

    def at(self, pointer: Any, index: Any) -> Any:
        return self.builder.gep(pointer, [index], source_etype=self.element)

    def load_one(self, pointer: Any) -> Any:
        return self.builder.load(pointer, typ=self.element)

    def load(self, pointer: Any) -> Any:
        value = self.builder.load(self.builder.bitcast(pointer, self.vector.as_pointer()), typ=self.vector)
        value.align = self.align
        return value

    def store(self, value: Any, pointer: Any) -> None:
        stored = self.builder.store(value, self.builder.bitcast(pointer, self.vector.as_pointer()))
        stored.align = self.align

    def load_some(self, pointer: Any, mask: Any, otherwise: float | None = None) -> Any:
        """The lanes of a mask; the others become a constant (None: zero) and are not read."""
        other = ir.Constant(self.vector, None if otherwise is None else [otherwise] * self.count)
        arguments = [self.builder.bitcast(pointer, _POINTER), ir.IntType(32)(self.align), mask, other]
        return self._call(f"masked.load.{self.name}.p0", self.vector, arguments)

    def store_some(self, value: Any, pointer: Any, mask: Any) -> None:
        arguments = [value, self.builder.bitcast(pointer, _POINTER), ir.IntType(32)(self.align), mask]
        self._call(f"masked.store.{self.name}.p0", ir.VoidType(), arguments)

    def splat(self, value: Any) -> Any:
        """One value in all lanes."""
        none = ir.Constant(self.vector, ir.Undefined)
        index = ir.IntType(32)
        one = self.builder.insert_element(none, value, index(0))
        return self.builder.shuffle_vector(one, none, ir.Constant(ir.VectorType(index, self.count), [0] * self.count))

    def first_lanes(self, count: Any) -> Any:
        """The mask of the first `count` lanes."""
        integer = ir.IntType(64)
        counting = ir.Constant(ir.VectorType(integer, self.count), list(range(self.count)))
        one = self.builder.insert_element(ir.Constant(counting.type, ir.Undefined), count, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.count), [0] * self.count)
        limit = self.builder.shuffle_vector(one, ir.Constant(counting.type, ir.Undefined), zeros)
        return self.builder.icmp_signed("<", counting, limit)

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        return self._call(f"fmuladd.{self.name}", self.vector, [x, y, z])

    def _call(self, name: str, result: Any, arguments: list) -> Any:
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, signature, f"llvm.{name}")
        return self.builder.call(function, arguments)


def _tile(vectors: int) -> Callable[..., Any]:
    """The tile of that many vectors of columns.

    (a, its offset, row stride, step; b, offset, step; c, offset, row stride; steps; mode; the rows' values, offset).
    Arrays are flat, offsets and strides count elements; `steps` is at least 1.
    """

    @intrinsic
    def tile(typing: Any, a: Any, ao: Any, ar: Any, ak: Any, b: Any, bo: Any, bk: Any, c: Any, co: Any, cr: Any,
             steps: Any, mode: Any, s: Any, so: Any) -> Any:  # fmt: skip
        signature = types.void(a, ao, ar, ak, b, bo, bk, c, co, cr, steps, mode, s, so)

        def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
            kinds = signature.args
            emit = Emit(context, builder, kinds[7].dtype)
            base = [array_base(context, builder, kinds[i], v[i], v[i + 1]) for i in (0, 4, 7, 12)]
            _generate_tile(builder, emit, vectors, base, (v[2], v[3], v[6], v[9]), v[10], v[11])
            return context.get_dummy_value()

        return signature, generate

    return tile


def _generate_tile(builder: Any, emit: Emit, vectors: int, base: list, strides: tuple, steps: Any, mode: Any) -> None:
    a, b, c, row_values = base
    a_row, a_step, b_step, c_row = strides
    index = steps.type
    spots = [(r, j) for r in range(ROWS) for j in range(vectors)]
    block = {name: builder.function.append_basic_block(f"tile.{name}")
             for name in ("rows", "start", "loop", "done", "add", "set", "end")}  # fmt: skip
    entry = builder.block

    builder.cbranch(_is_mode(builder, mode, SET_WITH_ROWS), block["rows"], block["start"])
    builder.position_at_end(block["rows"])
    by_row = [emit.splat(emit.load_one(emit.at(row_values, index(r)))) for r in range(ROWS)]
    builder.branch(block["start"])

    builder.position_at_end(block["start"])
    zero = ir.Constant(emit.vector, [0.0] * emit.count)
    first = [builder.phi(emit.vector) for _ in range(ROWS)]
    for phi, value in zip(first, by_row, strict=True):
        phi.add_incoming(zero, entry)
        phi.add_incoming(value, block["rows"])
    row_offsets = [builder.mul(a_row, index(r)) for r in range(ROWS)]
    builder.branch(block["loop"])

    builder.position_at_end(block["loop"])
    step, a_now, b_now = builder.phi(index), builder.phi(a.type), builder.phi(b.type)
    sums = [builder.phi(emit.vector) for _ in spots]
    columns = [emit.load(emit.at(b_now, index(j * emit.count))) for j in range(vectors)]
    rows = [emit.splat(emit.load_one(emit.at(a_now, row_offsets[r]))) for r in range(ROWS)]
    new = [emit.multiply_add(rows[r], columns[j], old) for (r, j), old in zip(spots, sums, strict=True)]
    following = builder.add(step, index(1))
    starts = [index(0), a, b, *(first[r] for r, _ in spots)]
    nexts = [following, emit.at(a_now, a_step), emit.at(b_now, b_step), *new]
    for phi, start, value in zip([step, a_now, b_now, *sums], starts, nexts, strict=True):
        phi.add_incoming(start, block["start"])
        phi.add_incoming(value, block["loop"])
    builder.cbranch(builder.icmp_signed("<", following, steps), block["loop"], block["done"])

    builder.position_at_end(block["done"])
    places = [emit.at(c, builder.add(builder.mul(c_row, index(r)), index(j * emit.count))) for r, j in spots]
    builder.cbranch(_is_mode(builder, mode, ADD), block["add"], block["set"])
    builder.position_at_end(block["add"])
    for place, value in zip(places, new, strict=True):
        emit.store(builder.fadd(emit.load(place), value), place)
    builder.branch(block["end"])
    builder.position_at_end(block["set"])
    for place, value in zip(places, new, strict=True):
        emit.store(value, place)
    builder.branch(block["end"])
    builder.position_at_end(block["end"])


def _is_mode(builder: Any, mode: Any, which: int) -> Any:
    return builder.icmp_signed("==", mode, mode.type(which))


tile_1 = _tile(1)
tile_2 = _tile(2)
tile_3 = _tile(3)


@intrinsic
def lanes(typing: Any, array: Any) -> Any:
    """Elements of the array's dtype in one vector, a constant."""
    count = VECTOR_BYTES // (array.dtype.bitwidth // 8)
    signature = types.intp(array)
    return signature, lambda context, builder, signature, values: context.get_constant(types.intp, count)


@intrinsic
def copy_vector(typing: Any, to: Any, to_offset: Any, source: Any, source_offset: Any) -> Any:
    """One vector from a flat array to another, whatever the alignment."""
    signature = types.void(to, to_offset, source, source_offset)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        emit = Emit(context, builder, signature.args[0].dtype)
        value = emit.load(array_base(context, builder, signature.args[2], v[2], v[3]))
        emit.store(value, array_base(context, builder, signature.args[0], v[0], v[1]))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_part(typing: Any, to: Any, to_offset: Any, source: Any, source_offset: Any, count: Any) -> Any:
    """The first `count` elements of a vector from a flat array to another; no other element is touched."""
    signature = types.void(to, to_offset, source, source_offset, count)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        emit = Emit(context, builder, signature.args[0].dtype)
        mask = emit.first_lanes(v[4])
        value = emit.load_some(array_base(context, builder, signature.args[2], v[2], v[3]), mask)
        emit.store_some(value, array_base(context, builder, signature.args[0], v[0], v[1]), mask)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_part(typing: Any, to: Any, to_offset: Any, source: Any, source_offset: Any, count: Any) -> Any:
    """The first `count` elements of a vector of one flat array, added to those of another."""
    signature = types.void(to, to_offset, source, source_offset, count)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        emit = Emit(context, builder, signature.args[0].dtype)
        mask = emit.first_lanes(v[4])
        target = array_base(context, builder, signature.args[0], v[0], v[1])
        value = emit.load_some(array_base(context, builder, signature.args[2], v[2], v[3]), mask)
        emit.store_some(builder.fadd(emit.load_some(target, mask), value), target, mask)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def transpose_vectors(typing: Any, to: Any, to_offset: Any, to_row: Any, source: Any, source_offset: Any,
                      source_row: Any) -> Any:  # fmt: skip
    """A square of one vector's length each way, transposed: to[i, j] = source[j, i], rows that many elements apart."""
    signature = types.void(to, to_offset, to_row, source, source_offset, source_row)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        emit = Emit(context, builder, signature.args[0].dtype)
        target = array_base(context, builder, signature.args[0], v[0], v[1])
        origin = array_base(context, builder, signature.args[3], v[3], v[4])
        index = v[2].type
        rows = [emit.load(emit.at(origin, builder.mul(v[5], index(i)))) for i in range(emit.count)]
        half = emit.count // 2
        while half:
            rows = _exchange(builder, rows, half)
            half //= 2
        for i, row in enumerate(rows):
            emit.store(row, emit.at(target, builder.mul(v[2], index(i))))
        return context.get_dummy_value()

    return signature, generate


def _exchange(builder: Any, rows: list, half: int) -> list:
    """Swap the off-diagonal quarters of every square of 2 * half: one stage of a transposition."""
    count = len(rows)
    lanes32 = ir.VectorType(ir.IntType(32), count)
    upper = ir.Constant(lanes32, [lane if not lane & half else lane - half + count for lane in range(count)])
    lower = ir.Constant(lanes32, [lane + half if not lane & half else lane + count for lane in range(count)])
    result = list(rows)
    for i in range(count):
        if not i & half:
            result[i] = builder.shuffle_vector(rows[i], rows[i + half], upper)
            result[i + half] = builder.shuffle_vector(rows[i], rows[i + half], lower)
    return result
