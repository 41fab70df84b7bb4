"""The rows are the plan's, and by a plain second computation nothing overlaps."""

from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest

from blobmem import NetError, SimulatedDevice, build_nets
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.footprint import footprint, stated_shapes
from blobmem.memory import Side, SyncedMemory
from blobmem.net.builder import specs_of
from blobmem.net.plan import Plan
from blobmem.timeline import timelines

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
DEVICES = {"simulated": None, "cuda": partial(PredictedCuda, math="tf32")}


@cache
def found(name, device):
    """The timelines of a model by scheme."""
    return timelines(MODELS / name / "solver.prototxt", make_device=DEVICES[device])


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Paths in the models start there."""
    monkeypatch.chdir(ROOT)


def test_every_row_of_a_small_net(chain):
    train, test = chain["planned"]
    assert (train.net, test.net) == ("train net, batch 2", "test net, batch 2")
    assert train.calls[:3] == ["fc1: inner_product_forward", "relu: relu_forward", "fc2: inner_product_forward"]
    assert [(row.name, row.purpose, row.shape, row.nbytes, row.layer) for row in train.rows] == [
        ("a", "data", (2, 300), 2400, "fc1"),
        ("b", "data", (2, 200), 1600, "fc2"),
        ("c<1>", "data", (2, 100), 800, "fc3"),
        ("loss/difference", "internal", (2, 100), 800, "loss"),
        ("c<1>.diff", "diffs", (2, 100), 800, "loss"),
        ("b.diff", "diffs", (2, 200), 1600, "fc3"),
        ("a.diff", "diffs", (2, 300), 2400, "fc2"),
    ]
    spans = {row.name: (train.calls[row.first], train.calls[row.last]) for row in train.rows}
    assert spans["a"] == ("fc1: inner_product_forward", "relu: relu_backward")
    assert spans["c<1>"] == ("fc3: inner_product_forward", "loss: euclidean_loss_forward")
    assert spans["a.diff"] == ("fc2: inner_product_backward_data", "fc1: inner_product_backward_bias")
    assert [(row.name, row.first, row.last) for row in test.rows] == [("a", 0, 2), ("b", 2, 3)]


def test_without_a_plan_each_has_its_own_place(chain):
    train, test = chain["unplanned"]
    assert [row[:-1] for row in train.rows] == [row[:-1] for row in chain["planned"][0].rows]
    # offsets are multiples of 512
    assert [row.offset for row in test.rows] == [0, 2560] and test.nbytes == 2560 + 2048


def test_the_peak_of_a_small_net(chain):
    test = chain["planned"][1]
    assert test.loads() == [2400, 2400, 4000, 1600]
    assert test.peak() == 2 and [row.name for row in test.live(2)] == ["a", "b"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["lenet", "resnet50"])
def test_rows_are_the_plan(name, device):
    for timeline in found(name, device)["planned"]:
        assert max(row.offset + row.nbytes for row in timeline.rows) == timeline.nbytes
        largest = 0
        for call in range(len(timeline.calls)):
            live = sorted((r.offset, r.nbytes) for r in timeline.rows if r.first <= call <= r.last)
            for (offset, nbytes), (above, _) in pairwise(live):
                assert offset + nbytes <= above
            largest = max(largest, sum(nbytes for _, nbytes in live))
        assert largest == sum(row.nbytes for row in timeline.live(timeline.peak()))
        assert largest <= timeline.nbytes <= 1.02 * largest


def test_a_solvers_updates_are_calls_and_gradients_live_until_then():
    train = timelines(MODELS / "lenet" / "solver.prototxt")["planned"][0]
    rows = {row.name: row for row in train.rows if row.purpose == "gradients"}
    assert [*rows] == [
        f"{layer}.diff" for layer in ("ip2/0", "ip2/1", "ip1/0", "ip1/1", "conv2/1", "conv2/0", "conv1/1", "conv1/0")
    ]
    assert [rows["ip1/0.diff"].shape, rows["ip1/0.diff"].layer] == [(500, 800), "ip1"]
    assert [train.calls[row.last] for row in rows.values()] == [f"{name.split('/')[0]}: sgd_update" for name in rows]
    # what is little waits, for ip1's weights and for the end
    ends = sorted(row.last for row in rows.values())
    assert ends == [*range(ends[0], ends[0] + 4), *range(len(train.calls) - 4, len(train.calls))]
    without = timelines(MODELS / "lenet" / "train_val.prototxt")["planned"][0]
    assert not [row for row in without.rows if row.purpose == "gradients"]


def test_arrays_channels_last_are_rows_of_their_own():
    train = timelines(MODELS / "caffenet" / "solver.prototxt", make_device=DEVICES["cuda"])["planned"][0]
    names = [row.name for row in train.rows]
    assert "conv3 (channels last)" in names and "conv3" not in names
    usual, last = (next(row for row in train.rows if row.name == f"pool5{form}") for form in ("", " (channels last)"))
    assert usual.offset != last.offset and usual.shape == last.shape == (256, 256, 6, 6)
    assert "fc6 (scratch)" in names


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["lenet", "resnet50"])
def test_unplanned_is_what_nets_take_that_keep_their_blobs(name, device):
    """The footprint, less what lies outside a plan."""
    model, make = MODELS / name / "solver.prototxt", DEVICES[device] or partial(SimulatedDevice, compute=False)
    kept = footprint(model, schemes=["weights"], make_device=make)["weights"].train
    timeline = found(name, device)["unplanned"][0]
    places = {row.offset: max(r.nbytes for r in timeline.rows if r.offset == row.offset) for row in timeline.rows}
    net = build_nets(model, device=make(), input_shapes=stated_shapes(specs_of(model))).train
    net.prepare()
    schedules, arena = net.compiled(), SyncedMemory(0, net.device)
    Plan(net, schedules, net.read_after(), arena)
    needs = [need for schedule in schedules for need in schedule.needs() if need.side is Side.DEVICE]
    outside = {need.memory: need.nbytes for need in needs if need.memory is not arena}
    assert kept.total - kept.purposes["solver state"] == sum(places.values()) + sum(outside.values())
    assert max(offset + nbytes for offset, nbytes in places.items()) == timeline.nbytes


def test_what_is_evicted_is_on_its_way_on_two_streams(chain, evicting):
    assert not any(timeline.copies for found in chain.values() for timeline in found)
    away, back = ([copy for copy in evicting.copies if copy.out is out] for out in (True, False))
    assert [*map(len, (away, back))] == [sum(f": {op}" in call for call in evicting.calls) for op in ("evict", "fetch")]
    assert away and {copy.name for copy in away} == {copy.name for copy in back}
    for stream in (away, back):
        assert all(one.end <= other.begin for one, other in pairwise(stream))
        assert all(0 < copy.begin < copy.end <= len(evicting.calls) and copy.ms > 0 for copy in stream)
    for copy in back:
        rows = [row for row in evicting.rows if row.name == copy.name and row.first <= copy.begin]
        first, last = rows[0], rows[-1]
        assert first.last < last.first and last.nbytes == copy.nbytes and copy.end < last.last + 1


def test_batches_and_names_of_several_test_nets():
    found = timelines(MODELS / "lenet" / "train_val.prototxt", train_batch=3, test_batches=[4, 5])["planned"]
    assert [timeline.net for timeline in found] == ["train net, batch 3", "test net 0, batch 4", "test net 1, batch 5"]


def test_a_net_without_a_plan():
    layers = 'name: "n" layer { name: "d" type: "Input" top: "x" input_param { shape { dim: 2 } } }'
    with pytest.raises(NetError, match=r"net 'n' \(TRAIN\) has no plan to show: none of its layers"):
        timelines(layers)
    layers += 'layer { name: "f" type: "Filter" bottom: "x" bottom: "x" top: "y" }'
    with pytest.raises(NetError, match="shapes depend on values"):
        timelines(layers)
