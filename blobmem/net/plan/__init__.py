"""The plan of a pass: lifetimes from its calls, and from these an arena in which arrays take turns."""

from blobmem.net.plan.again import Again, Anew, run_again
from blobmem.net.plan.arena import Layout, layout
from blobmem.net.plan.early import update_early
from blobmem.net.plan.liveness import Lifetime, Lifetimes, lifetimes
from blobmem.net.plan.masks import read_tops, shut_in_pools
from blobmem.net.plan.parts import Parts, in_parts
from blobmem.net.plan.places import Arena, Plan, unseen
from blobmem.net.plan.recompute import usual
from blobmem.net.plan.rooms import with_rooms
from blobmem.net.plan.streams import beside
from blobmem.net.plan.through import through
from blobmem.net.plan.uses import Remade, Uses

__all__ = [
    "Again", "Anew", "Arena", "Layout", "Lifetime", "Lifetimes", "Parts", "Plan", "Remade", "Uses", "beside",
    "in_parts", "layout", "lifetimes", "read_tops", "run_again", "shut_in_pools", "through", "unseen", "update_early",
    "usual", "with_rooms",
]  # fmt: skip
