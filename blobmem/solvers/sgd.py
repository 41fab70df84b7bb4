"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

from blobmem.net.build import LearnableParam
from blobmem.solvers.base import Solver, register_solver
from blobmem.solvers.update import Updater


class SGD(Updater):
    """v = momentum * v + rate * (gradient + decay * parameter), parameter -= v; for L1, decay * sign(parameter).

    History: v.
    """

    type = "SGD"
    op = "sgd_update"

    def attributes(self, entry: LearnableParam, rate: float, scale: float, iteration: int) -> dict[str, Any]:
        return {
            "rate": rate * entry.lr_mult,
            "momentum": self.param.momentum,
            "decay": self.param.weight_decay * entry.decay_mult,
            "regularization": self.param.regularization_type,
            "scale": scale,
        }


@register_solver
class SGDSolver(Solver):
    """`type: "SGD"`, the default."""

    updater_type = SGD
