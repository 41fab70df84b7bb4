"""Lifetimes: who is alive when, who is pinned, and that a pass in an arena computes what it computes without one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobmem import SimulatedDevice
from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net.plan import Lifetime, layout
from blobmem.net.plan import lifetimes as lifetimes_of_steps
from blobmem.ops.call import Operand, accumulate_diff, call, overwrite, overwrite_diff, read, read_diff, write

BLOCK = 512


def lifetimes(calls, scratch=(), keep=()):
    """Of calls that run one by one."""
    return lifetimes_of_steps([[each] for each in calls], scratch, keep)


@pytest.fixture
def blobs():
    device = SimulatedDevice()
    return [Blob((100,), device=device, name=name) for name in "abcd"]


def memory(blob):
    return blob.data_view.memory


def test_an_array_lives_from_its_first_use_to_its_last(blobs):
    a, b, c, d = blobs
    calls = [
        call("fill", overwrite(a)),
        call("copy", read(a), overwrite(b)),
        call("copy", read(b), overwrite(c)),
        call("copy", read(a), overwrite(d)),
    ]
    found = lifetimes(calls)
    assert found.arena == [
        Lifetime(memory(a), 400, 0, 3),
        Lifetime(memory(b), 400, 1, 2),
        Lifetime(memory(c), 400, 2, 2),
        Lifetime(memory(d), 400, 3, 3),
    ]
    assert found.pinned == {}


def test_data_and_gradient_are_two_arrays(blobs):
    a, b, *_ = blobs
    calls = [call("fill", overwrite(a)), call("fill", overwrite_diff(a)), call("copy", read_diff(a), overwrite(b))]
    assert [life[1:] for life in lifetimes(calls).arena] == [(400, 0, 0), (400, 1, 2), (400, 2, 2)]


def test_what_lies_over_one_memory_is_one_array(blobs):
    """In place, and through a blob that shares it, with other shapes."""
    a, b, c, _ = blobs
    c.reshape(50)
    c.share_data(a)
    calls = [
        call("fill", overwrite(a)),
        call("relu_forward", read(a), overwrite(a)),
        call("copy", read(c), overwrite(b)),
        call("axpy", read(b), write(c)),
    ]
    assert lifetimes(calls).arena == [Lifetime(memory(a), 400, 0, 3), Lifetime(memory(b), 400, 2, 3)]


def test_the_largest_view_counts(blobs):
    a, b, *_ = blobs
    b.reshape(2, 100)
    b.share_data(a)
    b.reshape(2, 100)
    assert memory(b) is memory(a)
    (life,) = lifetimes([call("fill", overwrite(a)), call("fill", overwrite(b)), call("fill", overwrite(a))]).arena
    assert life[1:] == (800, 0, 2)


def test_an_array_filled_slice_by_slice_is_not_pinned_and_one_with_a_gap_is():
    whole = SyncedMemory(name="whole")
    both, left, right = Blob((256,)), Blob((128,)), Blob((128,))
    both.bind_data(whole, 0)
    left.bind_data(whole, 0)
    right.bind_data(whole, BLOCK)
    calls = [call("fill", overwrite(left)), call("fill", overwrite(right)), call("copy", read(both))]
    assert lifetimes(calls) == ([Lifetime(whole, 1024, 0, 2)], {})
    assert lifetimes([calls[0], calls[2]]) == ([], {whole: 1024})


@pytest.mark.parametrize(
    "use",
    [
        lambda blob: call("copy", read(blob)),
        lambda blob: call("axpy", write(blob)),
        lambda blob: call("relu_forward", read(blob), overwrite(blob)),
        lambda blob: call("relu_forward", overwrite(blob), read(blob)),
        lambda blob: call("fill", overwrite(blob), once=True),
    ],
    ids=["read", "updated", "in place", "in place, written first", "filled once"],
)
def test_what_matters_beyond_the_pass_is_pinned(blobs, use):
    a, *_ = blobs
    assert lifetimes([use(a), call("fill", overwrite(a))]) == ([], {memory(a): 400})


def test_a_parameters_gradient_is_pinned_as_it_is_added_to(blobs):
    a, *_ = blobs
    calls = [call("conv_backward_weights", accumulate_diff(a)), call("sgd", read_diff(a), write(a))]
    assert lifetimes(calls) == ([], {a.diff_view.memory: 400, memory(a): 400})


def test_what_somebody_keeps_is_pinned(blobs):
    a, b, *_ = blobs
    calls = [call("fill", overwrite(a)), call("copy", read(a), overwrite(b))]
    found = lifetimes(calls, keep={memory(b)})
    assert found == ([Lifetime(memory(a), 400, 0, 1)], {memory(b): 400})


def test_scratch_lives_as_long_as_its_call(blobs):
    a, *_ = blobs
    calls = [call("fill", overwrite(a)), call("copy", read(a)), call("copy", read(a))]
    found = lifetimes(calls, scratch=[0, 700, 30])
    assert found.arena == [Lifetime(memory(a), 400, 0, 2), Lifetime(1, 700, 1, 1), Lifetime(2, 30, 2, 2)]
    with pytest.raises(ValueError, match="scratch of 2 steps is given, for 3"):
        lifetimes(calls, scratch=[1, 2])


def test_what_runs_as_one_is_in_use_at_one_time(blobs):
    a, b, c, d = blobs
    steps = [
        [call("fill", overwrite(a))],
        [call("copy", read(a), overwrite(b)), call("copy", read(b), overwrite(c)), call("copy", read(c), overwrite(d))],
    ]
    assert [life[1:] for life in lifetimes_of_steps(steps).arena] == [(400, 0, 1), *[(400, 1, 1)] * 3]


def test_an_array_channels_last_has_a_place_of_its_own(blobs):
    a, b, *_ = blobs
    a.reshape(1, 4, 5, 5)
    form = (1, 4, 25, a.dtype)
    last = Operand(a, False, Intent.OVERWRITE, (1, 5, 5, 4), form=form)
    calls = [call("conv_forward", last), call("copy", overwrite(b)), call("relu_forward", last)]
    assert lifetimes(calls).arena == [Lifetime(memory(a).reordered.array, 400, 0, 2), Lifetime(memory(b), 400, 1, 1)]
    both = lifetimes([*calls, call("copy", read(a))]).arena
    assert [life[1:] for life in both if life.key is not memory(b)] == [(400, 0, 3)] * 2


# -------------------------------------------------------------------- programs at random


class Pass:
    """Calls on three-block memories, run on a dict of blocks: each write leaves a digest of all that its call read."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.memories = [SyncedMemory(name=str(index)) for index in range(rng.randint(1, 7))]
        self.calls, self.scratch = [], []
        for _ in range(rng.randint(1, 14)):
            operands = [self._operand(rng) for _ in range(rng.randint(1, 4))]
            self.calls.append(call("op", *operands, once=rng.random() < 0.05))
            self.scratch.append(rng.choice((0, 0, BLOCK, 3 * BLOCK)))
        self.keep = {each for each in self.memories if rng.random() < 0.1}

    def _operand(self, rng):
        start, stop = sorted(rng.sample(range(4), 2)) if rng.random() < 0.3 else (0, 3)
        blob = Blob((stop - start) * BLOCK // 4)
        blob.bind_data(rng.choice(self.memories), start * BLOCK)
        return Operand(blob, False, rng.choice((Intent.READ, Intent.WRITE, Intent.OVERWRITE, Intent.OVERWRITE)))

    def run(self, place, scratch_at, blocks, first):
        """All that the calls read, where memory m's bytes are from place[m] on, and call i's scratch at scratch_at[i].

        `first`: it is the first pass, in which `once` calls run.
        """
        trace = []
        for index, each in enumerate(self.calls):
            if each.once and not first:
                continue
            for block in range(scratch_at[index], scratch_at[index] + self.scratch[index], BLOCK):
                blocks[block] = -index
            digest = hash(tuple(blocks.get(block, 0) for view in each.reads for block in self._blocks(view, place)))
            trace.append(digest)
            for operand in each.present():
                if operand.intent is Intent.READ:
                    continue
                for count, block in enumerate(self._blocks(operand.view, place)):
                    # a call that updates may leave a block as it was
                    if operand.intent is Intent.OVERWRITE or (count + digest) % 2:
                        blocks[block] = hash((digest, index, count))
            for block in range(scratch_at[index], scratch_at[index] + self.scratch[index], BLOCK):
                blocks[block] = -index
        kept = [blocks.get(place[each] + at, 0) for each in self.keep for at in (0, BLOCK, 2 * BLOCK)]
        return trace, kept

    @staticmethod
    def _blocks(view, place):
        start = place[view.memory] + view.offset
        return range(start, start + view.nbytes, BLOCK)


@given(st.integers(0, 10**9))
@settings(max_examples=300, deadline=None)
def test_a_pass_in_an_arena_computes_what_it_computes_without(check, seed):
    """Twice, with other bytes in the arena before each pass: what matters from one to the next must be outside."""
    program = Pass(seed)
    found = lifetimes(program.calls, program.scratch, program.keep)
    plan = layout(found.arena)
    check(found.arena, plan)
    apart = {memory: 1 << 40 | index << 20 for index, memory in enumerate(program.memories)}
    beyond = [1 << 41 | index << 20 for index in range(len(program.calls))]
    place, scratch_at = dict(apart), list(beyond)
    for life, offset in zip(found.arena, plan.offsets, strict=True):
        if isinstance(life.key, int):
            scratch_at[life.key] = offset
        else:
            place[life.key] = offset
    blocks, planned = {}, {}
    for turn in range(3):
        planned.update((at, 1000 + turn) for at in range(0, plan.nbytes, BLOCK))
        expected = program.run(apart, beyond, blocks, first=turn == 0)
        assert program.run(place, scratch_at, planned, first=turn == 0) == expected
