"""The plan of a pass: lifetimes from its calls, and from these an arena in which arrays take turns."""

from blobmem.net.plan.arena import Layout, layout
from blobmem.net.plan.early import update_early
from blobmem.net.plan.liveness import Lifetime, Lifetimes, lifetimes
from blobmem.net.plan.masks import read_tops, shut_in_pools
from blobmem.net.plan.parts import Parts, in_parts
from blobmem.net.plan.places import Arena, Plan, unseen
from blobmem.net.plan.recompute import recompute
from blobmem.net.plan.rooms import with_rooms
from blobmem.net.plan.streams import beside
from blobmem.net.plan.uses import Remade

__all__ = [
    "Arena", "Layout", "Lifetime", "Lifetimes", "Parts", "Plan", "Remade", "beside", "in_parts", "layout", "lifetimes",
    "read_tops", "recompute", "shut_in_pools", "unseen", "update_early", "with_rooms",
]  # fmt: skip
