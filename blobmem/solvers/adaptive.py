"""Updates with a rate for each element, from the squares of its gradients: AdaGrad, RMSProp, AdaDelta, Adam.

In the formulas g is the gradient, clipped and averaged, with the decay added.
"""

from __future__ import annotations

import math
from typing import Any

from blobmem.solvers.base import Solver, register_solver
from blobmem.solvers.update import Updater


class _Adaptive(Updater):
    """What they have in common: `delta`, which keeps divisors from zero."""

    def check(self) -> None:
        if not self.param.delta >= 0:
            raise self.error("delta", "0 or more")

    def attributes(self, rate: float, scale: float, iteration: int) -> dict[str, Any]:
        return super().attributes(rate, scale, iteration) | {"delta": self.param.delta}

    def _check_fraction(self, field: str) -> None:
        """Raise NetError unless what is kept of a mean in each iteration is from 0 to below 1."""
        if not 0 <= getattr(self.param, field) < 1:
            raise self.error(field, "0 or more and below 1")

    def _refuse_momentum(self) -> None:
        if self.param.momentum != 0:
            raise self.error("momentum", f"none, as {self.type} has no use for it")


class AdaGrad(_Adaptive):
    """h += g^2, parameter -= rate * g / (sqrt(h) + delta). History: h."""

    type = "AdaGrad"
    op = "adagrad_update"

    def check(self) -> None:
        super().check()
        self._refuse_momentum()


class RMSProp(_Adaptive):
    """h = rms_decay * h + (1 - rms_decay) * g^2, parameter -= rate * g / (sqrt(h) + delta). History: h."""

    type = "RMSProp"
    op = "rmsprop_update"

    def check(self) -> None:
        super().check()
        self._refuse_momentum()
        self._check_fraction("rms_decay")

    def attributes(self, rate: float, scale: float, iteration: int) -> dict[str, Any]:
        return super().attributes(rate, scale, iteration) | {"rms_decay": self.param.rms_decay}


class AdaDelta(_Adaptive):
    """u = g * sqrt((mean of u^2 + delta) / (mean of g^2 + delta)), parameter -= rate * u.

    The means are running ones of which `momentum` is kept. History: the mean of g^2, that of u^2.
    """

    type = "AdaDelta"
    op = "adadelta_update"
    histories = 2

    def check(self) -> None:
        super().check()
        self._check_fraction("momentum")

    def attributes(self, rate: float, scale: float, iteration: int) -> dict[str, Any]:
        return super().attributes(rate, scale, iteration) | {"momentum": self.param.momentum}


class Adam(_Adaptive):
    """m, v: running means of g and g^2, of which momentum and momentum2 are kept; parameter -= corrected rate * m /
    (sqrt(v) + delta). History: m, v.

    The correction, for means that began at 0, is sqrt(1 - momentum2^t) / (1 - momentum^t) in iteration t, from 1 on
    (Kingma and Ba 2015, the end of section 2).
    """

    type = "Adam"
    op = "adam_update"
    histories = 2

    def check(self) -> None:
        super().check()
        self._check_fraction("momentum")
        self._check_fraction("momentum2")

    def attributes(self, rate: float, scale: float, iteration: int) -> dict[str, Any]:
        first, second, t = self.param.momentum, self.param.momentum2, iteration + 1
        corrected = rate * math.sqrt(1 - second**t) / (1 - first**t)
        means = {"momentum": first, "momentum2": second}
        return super().attributes(corrected, scale, iteration) | means


@register_solver
class AdaGradSolver(Solver):
    """`type: "AdaGrad"`."""

    updater_type = AdaGrad


@register_solver
class RMSPropSolver(Solver):
    """`type: "RMSProp"`."""

    updater_type = RMSProp


@register_solver
class AdaDeltaSolver(Solver):
    """`type: "AdaDelta"`."""

    updater_type = AdaDelta


@register_solver
class AdamSolver(Solver):
    """`type: "Adam"`."""

    updater_type = Adam
