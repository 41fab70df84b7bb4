"""Solvers: training a net, with tests, snapshots and learning-rate policies."""

from blobmem.solvers.base import Solver, get_solver, register_solver, updater_for
from blobmem.solvers.events import Display, Outputs, TestResult
from blobmem.solvers.policy import POLICIES
from blobmem.solvers.sgd import SGD, SGDSolver
from blobmem.solvers.update import Updater

__all__ = [
    "POLICIES",
    "SGD",
    "Display",
    "Outputs",
    "SGDSolver",
    "Solver",
    "TestResult",
    "Updater",
    "get_solver",
    "register_solver",
    "updater_for",
]
