"""exp, sigmoid and tanh on vectors, as LLVM instructions, since a compiler does not turn calls of them into vectors.

exp(x) - 1 = 2^k (exp(r) - 1) + (2^k - 1), where k is x / ln 2, rounded, and r = x - k ln 2 is in [-0.35, 0.35]: there
Taylor's series is within a rounding error after 7 terms in single and 13 in double precision. ln 2 is taken off in two
parts, of which the first has few digits, so that k times it is exact (Cody and Waite 1980). It is exp(x) - 1 rather
than exp(x) because tanh then keeps its digits near 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from llvmlite import ir

from blobmem.ops.host.tile import Emit


class _Format(NamedTuple):
    """What the series depends on: digits and exponent of the format, the range in which 2^k is a normal number."""

    mantissa: int
    bias: int
    least: float
    most: float
    ln2: tuple[float, float]
    terms: int


_FORMATS = {
    32: _Format(23, 127, -87.0, 88.0, (0.693359375, -2.1219444005469057e-4), 7),
    64: _Format(52, 1023, -708.0, 709.0, (0.693145751953125, 1.4286068203094172e-6), 13),
}


class Functions:
    """The functions of recurrent layers on one vector, and constants of its type."""

    def __init__(self, emit: Emit):
        self.emit = emit
        self.builder = emit.builder
        self.one = self.constant(1.0)

    def constant(self, value: float) -> Any:
        return ir.Constant(self.emit.vector, [value] * self.emit.count)

    def expm1(self, x: Any) -> Any:
        """exp(x) - 1, of x cut to the range of the format; not a number stays that."""
        emit, b = self.emit, self.builder
        form = _FORMATS[32 if isinstance(emit.element, ir.FloatType) else 64]
        for bound, order in ((form.least, "<"), (form.most, ">")):
            x = b.select(b.fcmp_ordered(order, x, self.constant(bound)), self.constant(bound), x)
        # so large that its last digit counts ones: adding it rounds, and leaves k in the low bits
        shift = self.constant(1.5 * 2.0**form.mantissa)
        shifted = emit.multiply_add(x, self.constant(1 / math.log(2)), shift)
        k = b.fsub(shifted, shift)
        r = x
        for piece in form.ln2:
            r = emit.multiply_add(k, self.constant(-piece), r)
        series = self.constant(1 / math.factorial(form.terms))
        for n in range(form.terms - 1, 1, -1):
            series = emit.multiply_add(series, r, self.constant(1 / math.factorial(n)))
        series = emit.multiply_add(b.fmul(r, r), series, r)
        integers = ir.VectorType(ir.IntType(32 if form.mantissa == 23 else 64), emit.count)
        filled = [ir.Constant(integers, [value] * emit.count) for value in (form.bias, form.mantissa)]
        power = b.bitcast(b.shl(b.add(b.bitcast(shifted, integers), filled[0]), filled[1]), emit.vector)
        return emit.multiply_add(power, series, b.fsub(power, self.one))

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + exp(-x))."""
        two = self.constant(2.0)
        return self.builder.fdiv(self.one, self.builder.fadd(two, self.expm1(self.builder.fneg(x))))

    def tanh(self, x: Any) -> Any:
        """tanh(x) = (exp(2x) - 1) / (exp(2x) + 1)."""
        e = self.expm1(self.builder.fadd(x, x))
        return self.builder.fdiv(e, self.builder.fadd(e, self.constant(2.0)))

    def product(self, *factors: Any) -> Any:
        """The product of several vectors, from left to right."""
        result = factors[0]
        for factor in factors[1:]:
            result = self.builder.fmul(result, factor)
        return result

    def slope(self, y: Any) -> Any:
        """y (1 - y), the slope of the sigmoid where it is y."""
        return self.builder.fmul(y, self.builder.fsub(self.one, y))

    def rest_of_square(self, y: Any) -> Any:
        """1 - y y, the slope of tanh where it is y."""
        return self.builder.fsub(self.one, self.builder.fmul(y, y))
