"""Backward on two streams: which calls, what they keep for how long, and that no two that conflict are unordered."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import blobmem
from blobmem import TRAIN
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.footprint import stated_shapes
from blobmem.memory.blob import Blob
from blobmem.net.builder import specs_of
from blobmem.net.lanes import waits
from blobmem.net.needs import secure
from blobmem.net.plan import arena, places, streams
from blobmem.net.plan.liveness import lifetimes
from blobmem.ops.call import accumulate_diff, call, overwrite_diff, read, read_diff, write
from blobmem.solvers import updater_for

ROOT = Path(__file__).parents[3]
MODELS = sorted(
    {path.parent.name for path in (ROOT / "models").glob("*/train_val.prototxt")} - {"resnet1001", "densenet264"}
)
"""All but those that take half a minute."""


def planned(name, streams, **options):
    """A model's train net on what counts as a GPU, its updates in backward."""
    model = f"models/{name}/train_val.prototxt"
    shapes = stated_shapes(specs_of(model))
    device = PredictedCuda(math="tf32")
    net = blobmem.Net(model, TRAIN, device=device, seed=0, memory="train", input_shapes=shapes,
                      backward_streams=streams, **options)  # fmt: skip
    assert updater_for('base_lr: 1 lr_policy: "fixed" momentum: 0.9', net).place()
    net.planned()
    return net


def unordered(lanes, places, after):
    """Pairs of steps of two streams that conflict in bytes, and of which neither comes after the other: all pairs are
    looked at, one against all others."""
    known, seen = [-1, -1], np.zeros((2, len(lanes)), np.int64)
    for at, (lane, each) in enumerate(zip(lanes, after, strict=True)):
        known[lane] = max(known[lane], each)
        seen[:, at] = known  # of each stream, up to which step of the other one it has come by then
    flat = np.array([(at, start, stop, writes) for at, used in enumerate(places) for start, stop, writes in used])
    step, start, stop, writes = flat.T
    lane = np.array(lanes)[step]
    found = []
    for at, first, last, changes in flat[lane == 1]:
        meets = (lane == 0) & (start < last) & (first < stop) & (start < stop) & (first < last)
        for other in np.unique(step[meets & ((writes == 1) | bool(changes))]):
            one, two = sorted((int(at), int(other)))
            if seen[lanes[two], two] < one:
                found.append((one, two))
    return found


def run(net):
    """The steps of backward, and what each uses, after a pass that does no arithmetic."""
    secure(net.needs(backward=True))
    forward, backward = net.compiled()
    forward.run()
    backward.run()
    steps = backward._program()
    return [step.lane for step in steps], [step.places() for step in steps]


def test_parameters_gradients_and_one_of_two_branches_go_to_the_second_stream():
    a, a2, b, b2, w, top, bottom = (Blob(8, name=name) for name in ("a", "a2", "b", "b2", "w", "top", "bottom"))
    calls = [
        call("slice_forward", read_diff(top), overwrite_diff(a), overwrite_diff(b)),
        call("conv_backward_weights", read_diff(a), accumulate_diff(w)),
        call("relu_backward", read(a), read_diff(a), overwrite_diff(a2)),
        call("sigmoid_backward", read(a2), read_diff(a2), overwrite_diff(a2)),
        call("relu_backward", read(b), read_diff(b), overwrite_diff(b2)),  # begins while the other branch runs
        call("sigmoid_backward", read(b2), read_diff(b2), overwrite_diff(b2)),
        call("sum_arrays", read_diff(a2), read_diff(b2), overwrite_diff(bottom)),
        call("sgd_update", read_diff(w), write(w)),
        call(print, read_diff(bottom)),
    ]
    streams.beside(calls)
    assert [each.stream for each in calls] == [0, 1, 0, 0, 1, 1, 0, 1, 0]
    streams.beside(calls[4:])
    assert [each.stream for each in calls[4:]] == [0, 0, 0, 1, 0], "a chain stays on the first"


@pytest.fixture
def any_layout(monkeypatch):
    """Take the first that is found, which others are not to be given."""
    orders = arena._orders
    monkeypatch.setattr(arena, "_orders", lambda *lives: islice(orders(*lives), 1))
    monkeypatch.setattr(arena, "PAIRS", -1)
    monkeypatch.setattr(arena, "_remembered", arena._remembered.__wrapped__)


@pytest.mark.parametrize("name", MODELS)
def test_no_two_calls_of_a_model_that_conflict_are_unordered(monkeypatch, any_layout, name):
    monkeypatch.chdir(ROOT)
    lanes, used = run(planned(name, 2))
    assert 0 < sum(lanes) < len(lanes)
    after = [max(found, default=-1) for found in waits(lanes, used)]
    assert unordered(lanes, used, after) == []
    # what the plan is for: the first stream seldom waits, and each wait is for something
    waiting = [at for at, each in enumerate(after) if each >= 0]
    assert sum(not lanes[at] for at in waiting) <= 0.7 * sum(lanes)
    for at in waiting[:: 1 + len(waiting) // 3]:
        assert unordered(lanes, used, [*after[:at], -1, *after[at + 1 :]])


@pytest.mark.parametrize("name", ["caffenet", "resnet50", "squeezenet", "vgg16"])
def test_a_plan_for_two_streams_is_hardly_larger(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    one, two = (planned(name, streams).planned().nbytes for streams in (1, 2))
    assert two <= 1.03 * one + streams.ROOM


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_in_use_is_kept_for_the_second_stream_within_bounds(monkeypatch, any_layout, keeps):
    monkeypatch.chdir(ROOT)
    seen = []
    real = places.kept_until

    def spy(units, lives):
        seen.append((units, lives, until := real(units, lives) if keeps else [*range(len(units))]))
        return until

    monkeypatch.setattr(places, "kept_until", spy)
    lanes, used = run(planned("googlenet", 2))
    ((units, lives, until),) = seen
    assert all(at <= later <= at + streams.LAG for at, later in enumerate(until))
    assert all(later == at for at, later in enumerate(until) if not units[at].lane)
    waiting = sum(bool(found) for found, lane in zip(waits(lanes, used), lanes, strict=True) if not lane)
    assert (waiting < 0.4 * sum(lanes)) == keeps, "without it they take turns, one at a time"
    scratch = [unit.scratch for unit in units]
    fullest = max(_loads(lives.arena, len(units)))
    longer = lifetimes([unit.calls for unit in units], scratch, {*lives.pinned}, until).arena
    assert fullest <= max(_loads(longer, len(units))) <= fullest + streams.ROOM


def _loads(lives, count):
    return [sum(life.nbytes for life in lives if life.first <= at <= life.last) for at in range(count)]
