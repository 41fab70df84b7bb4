"""Solvers: training a net, with tests, snapshots and learning-rate policies."""

from blobmem.solvers.adaptive import (
    AdaDelta,
    AdaDeltaSolver,
    AdaGrad,
    AdaGradSolver,
    Adam,
    AdamSolver,
    RMSProp,
    RMSPropSolver,
)
from blobmem.solvers.base import Solver, get_solver, register_solver, solver_types, updater_for
from blobmem.solvers.events import Display, Outputs, TestResult
from blobmem.solvers.policy import POLICIES
from blobmem.solvers.sgd import SGD, Nesterov, NesterovSolver, SGDSolver
from blobmem.solvers.update import Updater

__all__ = [
    "POLICIES",
    "SGD",
    "AdaDelta",
    "AdaDeltaSolver",
    "AdaGrad",
    "AdaGradSolver",
    "Adam",
    "AdamSolver",
    "Display",
    "Nesterov",
    "NesterovSolver",
    "Outputs",
    "RMSProp",
    "RMSPropSolver",
    "SGDSolver",
    "Solver",
    "TestResult",
    "Updater",
    "get_solver",
    "register_solver",
    "solver_types",
    "updater_for",
]
