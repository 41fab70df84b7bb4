"""Fit: what is found fits to the byte, and the next larger batch does not."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobmem import OutOfDeviceMemory, SimulatedDevice, build_nets
from blobmem.fit import CARD_OVERHEAD, MOST, fit, largest, largest_at
from blobmem.footprint import BOUND, CHUNK, PLANNED, SCHEMES, feed_zeros, footprint

pytestmark = pytest.mark.usefixtures("few_plans")
ROOT = Path(__file__).parents[1]
LENET = ROOT / "models" / "lenet" / "train_val.prototxt"
MIB = 1 << 20


def simulated():
    return SimulatedDevice(compute=False)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def lenet():
    return fit(LENET, 64 * MIB, input_shapes={"data": (1, 28, 28)}, make_device=simulated)


def runs(scheme, train, test):
    """Whether a train net and a test net of these batches run on a device of 64 MiB, with nothing evicted."""
    nets = build_nets(
        LENET, scheme != "weights", device=SimulatedDevice(64 * MIB, compute=False), seed=0, train_batch=train,
        test_batches=[test], input_shapes={"data": (1, 28, 28)}, memory="train" if scheme == PLANNED else "keep",
    )  # fmt: skip
    nets.train.passes = frozenset()  # or it would take its batch in slices
    for net in (nets.train, *nets.tests):
        feed_zeros(net)
    try:
        nets.train.run_forward()
        nets.train.run_backward()
        nets.tests[0].run_forward()
    except OutOfDeviceMemory:
        return False
    return not nets.train.pieces


@pytest.mark.parametrize("scheme", ["weights", "blobs", PLANNED])
def test_the_device_agrees(lenet, scheme):
    found = lenet[scheme]
    (test,) = found.test_batches
    assert test >= 100 and found.nbytes <= 64 * MIB
    assert runs(scheme, found.train_batch, test)
    assert not runs(scheme, found.train_batch, test + 1)
    assert not runs(scheme, found.train_batch + 1, 100)


def test_what_shares_more_fits_more(lenet):
    assert list(lenet) == [*SCHEMES]
    batches = [found.train_batch for found in lenet.values()]
    assert batches == sorted(batches) and batches[0] < batches[2] < batches[3]
    for found in lenet.values():
        assert found.nbytes == sum(net.total for net in found.nets)
        assert sum(net.batch for net in found.nets) == found.train_batch + sum(found.test_batches)


def test_test_batches_that_are_given_stay(lenet):
    found = fit(LENET, 64 * MIB, test_batch=7, input_shapes={"data": (1, 28, 28)}, schemes=["weights"])["weights"]
    assert found.test_batches == [7] and found.train_batch > lenet["weights"].train_batch


def test_whole_chunks_and_a_net_without_test_nets():
    solver = f'net: "{LENET}" base_lr: 1 lr_policy: "fixed" max_iter: 1'
    found = fit(solver, 33 * MIB, chunks=True, schemes=["blobs", PLANNED])
    for best in found.values():
        assert best.test_batches == [] and best.nbytes % CHUNK == 0 and best.nbytes <= 32 * MIB
        assert best.footprint.train.purposes["solver state"] == 4 * 431_080
    (more,) = fit(solver, 33 * MIB, schemes=[PLANNED]).values()
    assert more.train_batch > found[PLANNED].train_batch


def test_one_item_that_does_not_fit():
    found = fit(LENET, 4 * MIB, test_batch=1, schemes=["separate", PLANNED, BOUND])
    assert found["separate"].train_batch == 0 < found[PLANNED].train_batch <= found[BOUND].train_batch
    assert found["separate"].footprint.train.batch == 1 and found["separate"].nbytes > 4 * MIB


def test_the_overhead_of_a_card_is_what_was_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "footprint.json").read_text())["results"]
    assert math.ceil(max(row["others"] for row in rows) / MIB) * MIB == CARD_OVERHEAD


# -------------------------------------------------------------------- the search


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**6)), max_size=4),
    st.integers(0, 10**9), st.integers(1, 50), st.integers(0, 10**5),
)  # fmt: skip
def test_the_largest_batch_of_bytes_that_grow(bends, room, low, guess):
    """Bytes along a line with bends, or not at all."""
    tried = []

    def held(batch):
        tried.append(batch)
        return sum(slope * max(0, batch - bend) for bend, slope in bends)

    found = largest(held, room, low, guess)
    assert len(tried) < 64 and all(low <= batch <= MOST for batch in tried)
    if found == 0:
        assert held(low) > room
    else:
        assert held(found) <= room and (found == MOST or held(found + 1) > room)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(0, 30))
def test_where_bytes_do_not_grow_it_is_a_batch_that_fits_before_one_that_does_not(table, room):
    def held(batch):
        return table[batch - 1] if batch <= len(table) else 31

    found = largest(held, room, 1, 2)
    assert found == 0 if table[0] > room else held(found) <= room < held(found + 1)


DEEP = 'layer { name: "data" type: "Input" top: "0" input_param { shape { dim: 4 dim: 8 dim: 32 dim: 32 } } }'
for at in range(6):
    options = "num_output: 8 kernel_size: 3 pad: 1 weight_filler { type: 'msra' }"
    DEEP += f"""layer {{ name: "c{at}" type: "Convolution" bottom: "{at}" top: "{at + 1}" convolution_param {{ {options} }} }}
                layer {{ name: "r{at}" type: "TanH" bottom: "{at + 1}" top: "{at + 1}" }}"""
DEEP += 'layer { name: "loss" type: "Reduction" bottom: "6" top: "loss" loss_weight: 1 }'


def reckoned(batch, nbytes):
    """Milliseconds of a training step; infinite if it does not fit."""
    device = SimulatedDevice(nbytes, compute=False)
    nets = build_nets(DEEP, device=device, seed=0, train_batch=batch, memory="train")
    try:
        return nets.train.reckoned().ms
    except OutOfDeviceMemory:
        return math.inf


@pytest.mark.parametrize("slowdown", [1.2, 1.5])
def test_a_batch_at_a_slowdown_is_that_slow_and_the_next_larger_one_slower(slowdown):
    found = largest_at(DEEP, MIB, slowdown)
    assert (found.ms, found.free_ms) == (reckoned(found.batch, MIB), reckoned(found.batch, None))
    assert found.ms <= slowdown * found.free_ms
    assert footprint(DEEP, train_batch=found.batch, schemes=[PLANNED])[PLANNED].train.total > MIB
    assert reckoned(found.batch + 1, MIB) > slowdown * reckoned(found.batch + 1, None)


def test_where_one_item_does_not_fit_there_is_no_pace():
    found = largest_at(LENET, MIB, 1.1, input_shapes={"data": (1, 28, 28)})
    assert (found.batch, found.ms, found.moved) == (1, math.inf, 0) and found.free_ms > 0
