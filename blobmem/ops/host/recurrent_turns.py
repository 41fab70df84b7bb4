"""Compiled: threads that take the steps of a recurrence together, each step's work in slices, one per thread.

A step needs all of the step before it, and lasts a few microseconds: far less than it takes to wake a thread. So the
threads stay in one kernel for many steps, and tell each other through an array `turns` of int64: how many slices are
done in all (at 0), and for each slice how many steps have been begun (at PLACE, 2 * PLACE, ...). It starts at zero.

    for step in range(steps):
        for i in range(slices):
            slice = (own + i) % slices
            if begin_slice(turns, slice, step):
                ...
                end_slice(turns)
        if not await_step(turns, slices, step, patience):
            return

Nothing is given to a thread, so none has to come: the others take its slices. A thread that waits in vain, because
another one was taken off its core in the middle of a slice, leaves, and the other takes all slices from there on. It
can always: whoever waits has found every slice of the step begun, so one that is not done has a thread at work on it.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from blobmem.ops.host.compiled import kernel, part
from blobmem.ops.host.tile import array_base

PLACE = 8
"""Elements between counts, so that each has a cache line of its own."""

_PAUSES = llvmlite.binding.get_process_triple().startswith(("x86_64", "i686", "amd64"))


def turns_size(slices: int) -> int:
    """Elements of `turns`."""
    return PLACE * (slices + 1)


@intrinsic
def _advance_from(typing: Any, turns: Any, at: Any, expected: Any) -> Any:
    """Add one to turns[at] if it is `expected`, and say whether it was, as one step for all threads."""
    signature = types.boolean(turns, at, types.int64)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        place = array_base(context, builder, signature.args[0], v[0], v[1])
        following = builder.add(v[2], v[2].type(1))
        return builder.extract_value(builder.cmpxchg(place, v[2], following, "acq_rel", "acquire"), 1)

    return signature, generate


@intrinsic
def _advance(typing: Any, turns: Any, at: Any) -> Any:
    """Add one to turns[at]; whoever sees it sees all that this thread has written before."""
    signature = types.void(turns, at)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        place = array_base(context, builder, signature.args[0], v[0], v[1])
        builder.atomic_rmw("add", place, ir.IntType(64)(1), "acq_rel")
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _look(typing: Any, turns: Any, at: Any) -> Any:
    """turns[at] now, after a moment in which a thread on the same core may go ahead."""
    signature = types.int64(turns, at)

    def generate(context: Any, builder: Any, signature: Any, v: Any) -> Any:
        if _PAUSES:
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), pause), [])
        place = array_base(context, builder, signature.args[0], v[0], v[1])
        return builder.load_atomic(place, "acquire", 8, typ=ir.IntType(64))

    return signature, generate


@part
def begin_slice(turns, which, step):
    """Whether this slice of this step is the caller's to do; nobody else's then, and never again."""
    return _advance_from(turns, PLACE * (which + 1), step)


@part
def end_slice(turns):
    """Say that a slice that was begun is done."""
    _advance(turns, 0)


@part
def await_step(turns, slices, step, patience):
    """Wait until all slices of a step are done, and say so; or, after `patience` looks, that they are not."""
    wanted = slices * (step + 1)
    for _ in range(patience):
        if _look(turns, 0) >= wanted:
            return True
    return _look(turns, 0) >= wanted


@kernel
def _look_often(turns, looks):
    await_step(turns, 1, 0, looks)


@functools.cache
def looks_in_a_microsecond() -> float:
    """How many times a thread that waits looks in a microsecond: from about 15 to several hundred, by processor."""
    turns, looks = np.zeros(turns_size(1), np.int64), 2000
    shortest = np.inf
    for _ in range(5):  # the first may compile, and any may be interrupted
        start = time.perf_counter()
        _look_often(turns, looks)
        shortest = min(shortest, time.perf_counter() - start)
    return looks / (1e6 * shortest)
