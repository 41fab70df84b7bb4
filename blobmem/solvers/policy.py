"""Learning-rate policies: Caffe's formulas, by the name in `lr_policy`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobmem.errors import NetError


def _power(base: float, exponent: float) -> float:
    """As pow() of C: infinity or NaN where Python would raise."""
    with np.errstate(all="ignore"):
        return float(np.power(np.float64(base), np.float64(exponent)))


def _fixed(param: Any, iteration: int, step: int) -> float:
    """base_lr"""
    return 1.0


def _step(param: Any, iteration: int, step: int) -> float:
    """base_lr * gamma ^ floor(iter / stepsize)"""
    return _power(param.gamma, step)


def _exp(param: Any, iteration: int, step: int) -> float:
    """base_lr * gamma ^ iter"""
    return _power(param.gamma, iteration)


def _inv(param: Any, iteration: int, step: int) -> float:
    """base_lr * (1 + gamma * iter) ^ -power"""
    return _power(1 + param.gamma * iteration, -param.power)


def _multistep(param: Any, iteration: int, step: int) -> float:
    """base_lr * gamma ^ (number of stepvalues that iter has reached)"""
    return _power(param.gamma, step)


def _poly(param: Any, iteration: int, step: int) -> float:
    """base_lr * (1 - iter / max_iter) ^ power, and 0 from max_iter on (where Caffe's formula has no meaning)"""
    return _power(max(0.0, 1 - iteration / param.max_iter), param.power)


def _sigmoid(param: Any, iteration: int, step: int) -> float:
    """base_lr / (1 + exp(-gamma * (iter - stepsize)))"""
    with np.errstate(all="ignore"):
        return float(1 / (1 + np.exp(np.float64(-param.gamma * (iteration - param.stepsize)))))


@dataclass(frozen=True, slots=True)
class Policy:
    """A formula (of parameter, iteration and current step, times base_lr) and the fields it cannot do without."""

    factor: Callable[[Any, int, int], float]
    fields: tuple[str, ...] = ()

    @property
    def formula(self) -> str:
        """The formula, for people."""
        return self.factor.__doc__ or ""


POLICIES = {
    "fixed": Policy(_fixed),
    "step": Policy(_step, ("gamma", "stepsize")),
    "exp": Policy(_exp, ("gamma",)),
    "inv": Policy(_inv, ("gamma", "power")),
    "multistep": Policy(_multistep, ("gamma", "stepvalue")),
    "poly": Policy(_poly, ("power", "max_iter")),
    "sigmoid": Policy(_sigmoid, ("gamma", "stepsize")),
}
"""By the name in `lr_policy`. The formula of each is its docstring."""


class LearningRate:
    """The learning rate of each iteration, as a solver's lr_policy, base_lr and the fields of that policy say.

    Args:
        param: a SolverParameter; its values are looked up whenever a rate is asked for.
        source: the file it came from, for messages.

    Attributes:
        current_step: how many steps of `step` or `multistep` are behind; a solverstate keeps it.

    Raises NetError for a policy that does not exist, or one that lacks a field.
    """

    def __init__(self, param: Any, source: str = "") -> None:
        self.param = param
        self.current_step = 0
        where = f"{source}: " if source else ""
        policy = POLICIES.get(param.lr_policy)
        if policy is None:
            given = f"'{param.lr_policy}'" if param.HasField("lr_policy") else "none"
            raise NetError(f"{where}lr_policy: expected one of {', '.join(POLICIES)}; got {given}")
        self._factor = policy.factor
        if not math.isfinite(param.base_lr):
            raise NetError(f"{where}base_lr: expected a number, got {param.base_lr}")
        for name in ("base_lr", *policy.fields):
            if name == "stepvalue" and not param.stepvalue:
                raise NetError(f"{where}lr_policy '{param.lr_policy}' needs stepvalue, once or more; give it")
            if name != "stepvalue" and not param.HasField(name):
                raise NetError(f"{where}lr_policy '{param.lr_policy}' needs {name}; give it ({policy.formula})")
            if name in ("stepsize", "max_iter") and getattr(param, name) < 1:
                raise NetError(f"{where}{name}: expected 1 or more, got {getattr(param, name)}")

    def at(self, iteration: int) -> float:
        """The rate of an iteration; changes nothing."""
        return float(self.param.base_lr) * self._factor(self.param, iteration, self._step_at(iteration))

    def advance(self, iteration: int) -> float:
        """The rate of an iteration that is being carried out: `current_step` follows."""
        rate = self.at(iteration)
        self.current_step = self._step_at(iteration)
        return rate

    def _step_at(self, iteration: int) -> int:
        if self.param.lr_policy == "step":
            return iteration // self.param.stepsize
        if self.param.lr_policy == "multistep":
            # as in Caffe at most one step per iteration, so that a restored count keeps its meaning
            values, count = self.param.stepvalue, self.current_step
            return count + (count < len(values) and iteration >= values[count])
        return self.current_step
