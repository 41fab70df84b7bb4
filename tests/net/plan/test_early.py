"""Where updates are put among the calls of backward."""

import pytest

from blobmem.memory import Intent
from blobmem.memory.blob import Blob
from blobmem.net.plan import early, update_early
from blobmem.ops.call import accumulate_diff, call, read, read_diff, write, write_diff


@pytest.fixture
def params():
    """Four of one size, named a to d."""
    return [Blob(8, name=name) for name in "abcd"]


def backward(*used):
    """Calls, of a layer each, from what they use, in the words of `blobmem.ops.call`."""
    calls = [call(f"op{at}", *operands) for at, operands in enumerate(used)]
    for at, each in enumerate(calls):
        each.layer = len(calls) - at
    return calls


def updates(*params):
    return [call("update", read_diff(blob), write(blob), write(Blob(8, name="history"))) for blob in params]


def put(calls, params, joints=None, evicted=()):
    """Ops in order, updates and zeros with the parameter's name."""
    found = update_early(calls, updates(*params), joints or range(len(calls) + 1), evicted)
    return found, [each.op if each.op[:2] == "op" else f"{each.op} {each.operands[0].blob.name}" for each in found]


def test_after_the_last_that_writes_the_gradient_or_reads_the_parameter(monkeypatch, params):
    monkeypatch.setattr(early, "SHARE", 1 << 40)
    a, b, c, _ = params
    calls = backward([accumulate_diff(a)], [read(a), accumulate_diff(b)], [accumulate_diff(c)], [accumulate_diff(b)])
    found, names = put(calls, [a, b, c])
    assert names == ["op0", "op1", "update a", "op2", "update c", "op3", "update b"]
    begins = {each.op: each.operands[-1].intent is Intent.OVERWRITE for each in found if each.op[:2] == "op"}
    assert begins == {"op0": True, "op1": True, "op2": True, "op3": False}
    assert all(operand.accumulate for each in found if each.op[:2] == "op" for operand in each.operands if operand.diff)
    assert [each.layer for each in found] == [4, 3, 3, 2, 2, 1, 1], "each in the layer before it"
    assert [each.operands[-1].intent for each in calls] == [Intent.WRITE] * 4, "what was given is as it was"


def test_each_plan_has_updates_of_its_own(params):
    """Of which each has its layer, whichever plan was made last; what they share is what a solver sets."""
    given, calls = updates(*params), backward(*([accumulate_diff(blob)] for blob in params))
    first = update_early(calls, given, range(len(calls) + 1))
    layers = [each.layer for each in first]
    second = update_early(calls, given, [0, len(calls)])
    assert [each.layer for each in first] == layers != [each.layer for each in second]
    shared = {id(each.attributes) for each in given}
    assert all(shared == {id(each.attributes) for each in found if each.op == "update"} for found in (first, second))


@pytest.mark.parametrize("share, expected", [(1, "....abcd"), (2, "..ab..cd"), (3, "..ab..cd"), (4, ".a.b.c.d")])
def test_updates_wait_for_a_part_of_all_bytes(monkeypatch, params, share, expected):
    monkeypatch.setattr(early, "SHARE", share)
    _, names = put(backward(*([accumulate_diff(blob)] for blob in params)), params)
    assert "".join("." if name[:2] == "op" else name[-1] for name in names) == expected


@pytest.mark.parametrize("which, expected", [("", "........abcd"), ("a", ".a.......bcd"), ("c", "...abc.....d")])
def test_those_with_what_is_evicted_wait_for_little(monkeypatch, params, which, expected):
    """Nor for the first calls to be queued before the loss is known."""
    monkeypatch.setattr(early, "SHARE", 2)
    monkeypatch.setattr(early, "FIRST", 1)
    evicted = {blob.data_view.memory for blob in params if blob.name in which}
    calls = backward(*([accumulate_diff(blob)] for blob in params), *[[write_diff(Blob(8))]] * 4)
    _, names = put(calls, params, evicted=evicted)
    assert "".join("." if name[:2] == "op" else name[-1] for name in names) == expected


def test_at_one_place_they_keep_their_order(params):
    calls = backward(*([accumulate_diff(blob)] for blob in params))
    assert put(calls, params[::-1], [0, 4])[1][4:] == [f"update {name}" for name in "dcba"]


def test_what_runs_as_one_is_not_parted(monkeypatch, params):
    monkeypatch.setattr(early, "SHARE", 1 << 40)
    a, b, *_ = params
    calls = backward([accumulate_diff(a)], [accumulate_diff(b)], [write_diff(Blob(8))])
    assert put(calls, [a, b], [0, 2, 3])[1] == ["op0", "op1", "update a", "update b", "op2"]


def test_zeros_where_no_call_can_begin_a_gradient(monkeypatch, params):
    monkeypatch.setattr(early, "SHARE", 1 << 40)
    a, b, c, d = params
    calls = backward([accumulate_diff(a)], [accumulate_diff(a)], [accumulate_diff(b)], [write_diff(c)], [read(d)])
    found, names = put(calls, params, [0, 1, 3, 4, 5])  # one begins b as another adds to a
    assert names == [
        "op0", "fill b", "op1", "op2", "fill c", "update a", "update b", "op3", "update c", "op4", "fill d", "update d"
    ]  # fmt: skip
    intents = {each.op: each.operands[0].intent for each in found}
    assert intents["op0"] is Intent.OVERWRITE and intents["op2"] is Intent.WRITE


def test_parameters_in_one_place_are_updated_at_the_end_in_their_order(monkeypatch, params):
    monkeypatch.setattr(early, "SHARE", 1 << 40)
    a, b, c, _ = params
    b.share_data(a)
    calls = backward([accumulate_diff(a)], [accumulate_diff(c)], [accumulate_diff(b)], [read(c)])
    names = put(calls, [b, a, c])[1]
    assert names == ["fill a", "op0", "op1", "fill b", "op2", "op3", "update b", "update a", "update c"]


def test_nothing_runs_backward(params):
    assert put([], params[:1])[1] == ["fill a", "update a"]
