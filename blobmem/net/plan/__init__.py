"""The plan of a pass: lifetimes from its calls, and from these an arena in which arrays take turns."""

from blobmem.net.plan.arena import Layout, layout
from blobmem.net.plan.early import update_early
from blobmem.net.plan.liveness import Lifetime, Lifetimes, lifetimes
from blobmem.net.plan.places import Arena, Plan, unseen
from blobmem.net.plan.recompute import Remade, recompute

__all__ = [
    "Arena", "Layout", "Lifetime", "Lifetimes", "Plan", "Remade", "layout", "lifetimes", "recompute", "unseen",
    "update_early",
]  # fmt: skip
