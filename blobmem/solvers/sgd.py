"""Stochastic gradient descent with momentum, and with Nesterov's.

In the formulas g is the gradient, clipped and averaged, with the decay added.
"""

from __future__ import annotations

from typing import Any

from blobmem.solvers.base import Solver, register_solver
from blobmem.solvers.update import Updater


class SGD(Updater):
    """v = momentum * v + rate * g, parameter -= v. History: v."""

    type = "SGD"
    op = "sgd_update"

    def attributes(self, rate: float, scale: float, iteration: int) -> dict[str, Any]:
        return super().attributes(rate, scale, iteration) | {"momentum": self.param.momentum}


class Nesterov(SGD):
    """v as in SGD, parameter -= (1 + momentum) * v - momentum * old v. History: v."""

    type = "Nesterov"
    op = "nesterov_update"


@register_solver
class SGDSolver(Solver):
    """`type: "SGD"`, the default."""

    updater_type = SGD


@register_solver
class NesterovSolver(Solver):
    """`type: "Nesterov"`."""

    updater_type = Nesterov
