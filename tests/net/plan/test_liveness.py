"""Lifetimes: who is alive when, who is pinned, and that a pass in an arena computes what it computes without one."""

import dataclasses
import random
from itertools import pairwise

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
        call("pool", read(a), overwrite(b)),
        call("pool", read(b), overwrite(c)),
        call("pool", read(a), overwrite(d)),
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
    calls = [call("fill", overwrite(a)), call("fill", overwrite_diff(a)), call("pool", read_diff(a), overwrite(b))]
    assert [life[1:] for life in lifetimes(calls).arena] == [(400, 0, 0), (400, 1, 2), (400, 2, 2)]


def test_what_lies_over_one_memory_is_one_array(blobs):
    """In place, and through a blob that shares it, with other shapes."""
    a, b, c, _ = blobs
    c.reshape(50)
    c.share_data(a)
    calls = [
        call("fill", overwrite(a)),
        call("relu_forward", read(a), overwrite(a)),
        call("pool", read(c), overwrite(b)),
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
    calls = [call("fill", overwrite(left)), call("fill", overwrite(right)), call("pool", read(both))]
    assert lifetimes(calls)[:3] == ([Lifetime(whole, 1024, 0, 2)], {}, {})
    assert lifetimes([calls[0], calls[2]])[:3] == ([], {whole: 1024}, {})


@pytest.mark.parametrize(
    "use",
    [
        lambda blob: call("pool", read(blob)),
        lambda blob: call("axpy", write(blob)),
        lambda blob: call("relu_forward", read(blob), overwrite(blob)),
        lambda blob: call("relu_forward", overwrite(blob), read(blob)),
        lambda blob: call("fill", overwrite(blob), once=True),
    ],
    ids=["read", "updated", "in place", "in place, written first", "filled once"],
)
def test_what_matters_beyond_the_pass_is_pinned(blobs, use):
    a, *_ = blobs
    assert lifetimes([use(a), call("fill", overwrite(a))])[:3] == ([], {memory(a): 400}, {})


def test_a_parameters_gradient_is_pinned_as_it_is_added_to(blobs):
    a, *_ = blobs
    calls = [call("conv_backward_weights", accumulate_diff(a)), call("sgd", read_diff(a), write(a))]
    assert lifetimes(calls)[:3] == ([], {a.diff_view.memory: 400, memory(a): 400}, {})


def test_what_somebody_keeps_is_pinned(blobs):
    a, b, *_ = blobs
    calls = [call("fill", overwrite(a)), call("pool", read(a), overwrite(b))]
    found = lifetimes(calls, keep={memory(b)})
    assert found[:3] == ([Lifetime(memory(a), 400, 0, 1)], {memory(b): 400}, {})


def test_scratch_lives_as_long_as_its_call(blobs):
    a, *_ = blobs
    calls = [call("fill", overwrite(a)), call("pool", read(a)), call("pool", read(a))]
    found = lifetimes(calls, scratch=[0, 700, 30])
    assert found.arena == [Lifetime(memory(a), 400, 0, 2), Lifetime(1, 700, 1, 1), Lifetime(2, 30, 2, 2)]
    with pytest.raises(ValueError, match="scratch of 2 steps is given, for 3"):
        lifetimes(calls, scratch=[1, 2])


def test_what_runs_as_one_is_in_use_at_one_time(blobs):
    a, b, c, d = blobs
    steps = [
        [call("fill", overwrite(a))],
        [
            *(call("pool", read(one), overwrite(other)) for one, other in pairwise(blobs)),
            call("pools", read(a), *map(overwrite, (b, c, d))),
        ],
    ]
    assert [life[1:] for life in lifetimes_of_steps(steps).arena] == [(400, 0, 1), *[(400, 1, 1)] * 3]


def test_an_array_channels_last_has_a_place_of_its_own(blobs):
    a, b, *_ = blobs
    a.reshape(1, 4, 5, 5)
    form = (1, 4, 25, a.dtype)
    last = Operand(a, False, Intent.OVERWRITE, (1, 5, 5, 4), form=form)
    calls = [call("conv_forward", last), call("pool", overwrite(b)), call("relu_forward", last)]
    assert lifetimes(calls).arena == [Lifetime(memory(a).reordered.array, 400, 0, 2), Lifetime(memory(b), 400, 1, 1)]
    both = lifetimes([*calls, call("pool", read(a))]).arena
    assert [life[1:] for life in both if life.key is not memory(b)] == [(400, 0, 3)] * 2


# -------------------------------------------------------------------- outputs in place of inputs


def turns(*steps, keep=()):
    """Names of arrays that take over each other's bytes, in order."""
    found = lifetimes_of_steps(steps, keep=keep)
    for key, turn in found.turns.items():
        (whole,) = [life for life in found.arena if life.key is key]
        assert (whole.first, whole.last) == (turn[0].first, turn[-1].last)
        assert all(one.last == other.first and one.nbytes == other.nbytes for one, other in pairwise(turn))
    return [[life.key.name for life in turn] for turn in found.turns.values()]


def test_an_output_takes_over_an_input_that_nobody_reads_again(blobs):
    a, b, c, d = blobs
    fills = [[call("fill", overwrite(a))], [call("fill", overwrite(b))]]
    total = call("eltwise_sum", read(a), read(b), overwrite(c), coeffs=(1, 1))
    assert turns(*fills, [total], [call("pool", read(c))]) == [["a", "c"]]
    assert turns(*fills, [total], [call("pool", read(a))]) == [["b", "c"]]
    assert turns(*fills, [total], [call("pool", read(a), read(b))]) == []
    assert turns(*fills, [total], keep={memory(a)}) == [["b", "c"]]
    assert turns(*fills, [total], keep={memory(c)}) == []
    relu = call("relu_forward", read(c), overwrite(d), slope=0.0)
    assert turns(*fills, [total], [relu]) == [["a", "c", "d"]]
    assert turns(*fills, [total], [relu], [call("eltwise_sum", read(d), overwrite(b))]) == [["a", "c", "d"]], (
        "b is not born"
    )


@pytest.mark.parametrize("op", ["pool", "softmax_forward", "conv_forward", test_what_somebody_keeps_is_pinned])
def test_other_ops_have_arrays_of_their_own(blobs, op):
    a, b, *_ = blobs
    assert turns([call("fill", overwrite(a))], [call(op, read(a), overwrite(b))]) == []


def test_what_differs_in_size_type_or_order_is_not_taken_over(blobs):
    a, b, c, d = blobs
    half, whole = Blob((50,), name="half"), Blob((100,), dtype="int32", name="whole")
    for other in (half, whole):
        assert turns([call("fill", overwrite(a))], [call("copy", read(a), overwrite(other))]) == []
    a.reshape(1, 4, 5, 5)
    form = (1, 4, 25, a.dtype)
    last = Operand(a, False, Intent.READ, (1, 5, 5, 4), form=form)
    made = dataclasses.replace(last, intent=Intent.OVERWRITE)
    begun = [call("conv_forward", made)]
    assert turns(begun, [call("relu_forward", last, overwrite(b))]) == []
    other = dataclasses.replace(made, blob=b)
    b.reshape(1, 4, 5, 5)
    assert turns(begun, [call("relu_forward", last, other)]) == [["a (channels last)", "b (channels last)"]]
    c.reshape(200)
    part = Blob((100,), device=c.device)
    part.share_data(c)
    assert turns([call("fill", overwrite(c))], [call("copy", read(part), overwrite(d))]) == []


def test_an_input_that_is_read_twice_or_as_a_factor_is_not_taken_over(blobs):
    a, b, c, _ = blobs
    fills = [[call("fill", overwrite(a))], [call("fill", overwrite(b))]]
    assert turns(*fills, [call("eltwise_sum", read(a), read(a), overwrite(c))]) == []
    assert turns(*fills, [call("scale_forward", read(a), read(a), None, overwrite(c))]) == []
    assert turns(*fills, [call("scale_forward", read(a), read(b), None, overwrite(c))]) == [["a", "c"]]
    assert turns(*fills, [call("sum_arrays", read(a), read(a), read(b), overwrite(c))]) == [], "b is added last"


def test_calls_that_may_run_as_one_have_to_be_able_to_both_ways(blobs):
    """As the gradient of a sum and a ReLU behind it: what one call reads for the last time another may write."""
    y, dy, da, db = blobs
    begun = [[call("pool", overwrite(y))], [call("pool", overwrite(dy))]]
    one_by_one = [
        call("relu_backward", read(y), read(dy), overwrite(dy), slope=0.0),
        call("eltwise_sum_backward", read(dy), overwrite(da), coeff=1),
        call("eltwise_sum_backward", read(dy), overwrite(db), coeff=1),
    ]
    as_one = call("sum_relu_backward", read(y), write(dy), overwrite(da), overwrite(db), slope=0.0)
    # da may have y's bytes, which is read before; it cannot have dy's, which is read after
    assert turns(*begun, [*one_by_one, as_one]) == [["a", "c"], ["b", "d"]]
    assert turns(*begun, [*one_by_one, dataclasses.replace(as_one, op="pool")]) == []
    assert turns(*begun, *([each] for each in one_by_one)) == [["b", "d"]]


def test_an_array_of_one_step_takes_over_and_is_taken_over(blobs):
    one, two, total, da = blobs
    y, db = Blob((100,), name="y"), Blob((100,), name="db")
    begun = [[call("pool", overwrite(blob))] for blob in (one, two, y)]
    one_by_one = [
        call("sum_arrays", read(one), read(two), overwrite(total)),
        call("relu_backward", read(y), read(total), overwrite(total), slope=0.0),
        call("eltwise_sum_backward", read(total), overwrite(da), coeff=1),
        call("eltwise_sum_backward", read(total), overwrite(db), coeff=1),
    ]
    as_one = call(
        "sums_relu_backward", read(y), read(one), read(two), overwrite(total), overwrite(da), overwrite(db), slope=0.0
    )
    steps = [*begun, [*one_by_one, as_one], [call("pool", read(y))]]
    assert turns(*steps) == [["a", "c", "db"], ["b", "d"]]


def test_what_takes_over_an_array_that_one_call_skips_takes_that_calls_input(blobs):
    x, top, b, y = blobs
    gamma = Blob((4,), name="gamma")
    begun = [[call("pool", overwrite(x), overwrite(b))], [call("pool", overwrite(gamma))]]
    one_by_one = [
        call("scale_forward", read(x), read(gamma), None, overwrite(top)),
        call("eltwise_sum", read(top), read(b), overwrite(y), coeffs=(1, 1)),
    ]
    as_one = call("scale_sum_relu_forward", read(x), read(gamma), None, read(b), None, None, overwrite(y), slope=0.0)
    later = [call("pool", read(b))]
    assert turns(*begun, [*one_by_one, as_one], later) == [["a", "b", "d"]]
    as_one = dataclasses.replace(as_one, op="pool")  # which may read x when it has written y
    assert turns(*begun, [*one_by_one, as_one], later) == [["a", "b"]]


# -------------------------------------------------------------------- programs at random


class Pass:
    """Calls on three-block memories, run on a dict of blocks: each write leaves a digest of all that its call read."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.memories = [SyncedMemory(name=str(index)) for index in range(rng.randint(1, 7))]
        self.calls, self.scratch = [], []
        for _ in range(rng.randint(1, 14)):
            if rng.random() < 0.5:
                operands = [self._operand(rng) for _ in range(rng.randint(1, 4))]
                self.calls.append(call("op", *operands, once=rng.random() < 0.05))
            else:  # block by block
                whole = [self._operand(rng, 0, intent) for intent in (Intent.READ, Intent.READ, Intent.OVERWRITE)]
                self.calls.append(call("eltwise_sum", *whole))
            self.scratch.append(rng.choice((0, 0, BLOCK, 3 * BLOCK)))
        self.keep = {each for each in self.memories if rng.random() < 0.1}

    def _operand(self, rng, parts=0.3, intent=None):
        start, stop = sorted(rng.sample(range(4), 2)) if rng.random() < parts else (0, 3)
        blob = Blob((stop - start) * BLOCK // 4)
        blob.bind_data(rng.choice(self.memories), start * BLOCK)
        intent = intent or rng.choice((Intent.READ, Intent.WRITE, Intent.OVERWRITE, Intent.OVERWRITE))
        return Operand(blob, False, intent)

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
            if each.op == "eltwise_sum":
                for one, other, total in zip(
                    *(self._blocks(operand.view, place) for operand in each.present()), strict=True
                ):
                    blocks[total] = hash((blocks.get(one, 0), blocks.get(other, 0), index))
                continue
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
            place.update((own.key, offset) for own in found.turns.get(life.key, [life]))
    blocks, planned = {}, {}
    for turn in range(3):
        planned.update((at, 1000 + turn) for at in range(0, plan.nbytes, BLOCK))
        expected = program.run(apart, beyond, blocks, first=turn == 0)
        assert program.run(place, scratch_at, planned, first=turn == 0) == expected
