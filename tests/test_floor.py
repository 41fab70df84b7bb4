"""The floor under a training step's time is none that a mix of keeping, evicting and making anew could be below."""

import itertools
import json
import random
import sys

import pytest

import blobmem
from benchmarks import inputs
from benchmarks.floor import LINK, PRICES, Problem, least_sum, main, problem_of
from blobmem import SimulatedDevice
from blobmem.net.plan.times import Times

PER_MS = LINK / 1e3


def made_up(seed):
    """Calls that each make a value or two, of some of the values before; what is needed is any of them."""
    rng, problem = random.Random(seed), Problem(forward=1.0, backward=2.0, beside=30 << 20)
    for call in range(6):
        there = range(len(problem.sizes))
        problem.reads.append(rng.sample(there, min(len(there), rng.randint(0, 2))))
        problem.costs.append(rng.choice([0.0, 0.01, 0.3, 1.0]))
        for _ in range(rng.choice([1, 1, 1, 2])):
            problem.sizes.append(rng.randint(1, 100) << 20)
            problem.makers.append(call)
    problem.needed = sorted(rng.sample(range(len(problem.sizes)), 4))
    return problem


def again(problem, there):
    """What the calls take that run again, where some values are there."""
    calls, wanted = set(), [value for value in problem.needed if value not in there]
    while wanted:
        call = problem.makers[wanted.pop()]
        if call not in calls:
            calls.add(call)
            wanted += [value for value in problem.reads[call] if value not in there]
    return sum(problem.costs[call] for call in calls)


def mixes(problem):
    """Bytes of all sets of values, and what the calls take that run again for the others."""
    values = range(len(problem.sizes))
    for count in range(len(values) + 1):
        for there in itertools.combinations(values, count):
            yield sum(problem.sizes[value] for value in there), again(problem, {*there})


@pytest.mark.parametrize("seed", range(8))
def test_the_least_sum_is_that_of_the_best_of_all_mixes(seed):
    problem = made_up(seed)
    for price in PRICES[10:36:5]:
        best = min(price * nbytes + ms for nbytes, ms in mixes(problem))
        assert least_sum(problem, price) == pytest.approx(best, rel=1e-6, abs=1e-7)


def step_ms(problem, limit):
    """The time of the best mix, with the least on the host that the limit allows, and as little of that activations."""
    best = float("inf")
    for nbytes, ms in mixes(problem):
        away = max(0, nbytes + problem.beside - limit)
        forward = max(problem.forward, (away - problem.beside) / PER_MS)
        if away <= nbytes + problem.beside:
            best = min(best, forward + max(problem.backward + ms, away / PER_MS))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_no_mix_is_faster_than_the_floor(seed):
    problem = made_up(seed)
    whole = sum(problem.sizes) + problem.beside
    floors = [problem.floor_ms(limit) for limit in (whole, whole // 2, whole // 4, 0)]
    assert floors[0] == pytest.approx(3.0) and floors == sorted(floors)
    for limit, floor in zip((whole, whole // 2, whole // 4, 0), floors, strict=True):
        assert floor <= step_ms(problem, limit) + 1e-6


def test_what_must_leave_takes_its_time():
    """One value that takes minutes to be made anew: half of it leaves, which takes longer than forward."""
    half = round(100 * PER_MS)
    problem = Problem([2 * half], [0], [1e6], [[]], [0], forward=10.0, backward=20.0)
    assert problem.floor_ms(half) == pytest.approx(200, rel=0.02)
    assert problem.floor_ms(2 * half) == pytest.approx(30, rel=1e-3)


def test_a_net_is_calls_that_read_what_others_made():
    net = blobmem.Net(
        inputs.with_inputs("lenet", 4), blobmem.TRAIN, device=SimulatedDevice(compute=False), memory="train"
    )
    problem = problem_of(net)
    times, (forward, backward) = Times(net.device), net.compiled()
    assert problem.forward == pytest.approx(sum(times.ms(call) for call in forward.calls))
    assert problem.backward == pytest.approx(sum(times.ms(call) for call in backward.calls), rel=0.05)
    names = [call.layer_name for call in forward.calls]
    pool = names.index("pool1")
    (conv,) = problem.reads[pool]
    assert names[problem.makers[conv]] == "conv1" and problem.sizes[conv] == 4 * 20 * 24 * 24 * 4
    assert {names[problem.makers[value]] for value in problem.needed} >= {"pool1", "pool2", "relu1", "loss"}


def test_no_plan_is_reckoned_to_take_less():
    def net(limit):
        device = SimulatedDevice(limit, compute=False)
        solver = inputs.solver_of(inputs.with_inputs("squeezenet", 2), device=device, memory="train")
        solver.updater.place()
        solver.net.prepare()
        return solver.net

    problem = problem_of(net(None))
    need, free_ms = problem.beside + net(None).planned().nbytes, problem.forward + problem.backward
    for part in (1.2, 1.5):
        floor = problem.floor_ms(int(need / part))
        assert free_ms < floor <= net(int(need / part)).reckoned().ms


SIGNS = """
name: "signs"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "scale" type: "Scale" bottom: "conv" top: "conv" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "last" bottom: "conv" top: "last" %s }
layer { name: "loss" type: "Reduction" bottom: "last" top: "loss" loss_weight: 1 }
"""


AVERAGE = 'type: "Pooling" pooling_param { pool: AVE kernel_size: 2 }'
PRODUCT = 'type: "InnerProduct" inner_product_param { num_output: 2 }'


@pytest.mark.parametrize(("last", "needed"), [(AVERAGE, False), (PRODUCT, True)])
def test_signs_of_what_was_scaled_need_not_be_there(last, needed):
    """What the ReLU made is only needed where a gradient reads it, not its signs alone."""
    net = blobmem.Net(SIGNS % last, blobmem.TRAIN, device=SimulatedDevice(compute=False), memory="train")
    problem, (forward, _) = problem_of(net), net.compiled()
    makers = {forward.calls[problem.makers[value]].layer_name for value in problem.needed}
    assert "norm" in makers and ("relu" in makers) is needed


def test_nothing_is_faster_than_the_step_without_a_limit(tmp_path, monkeypatch, capsys):
    """And if that is faster than its calls together, these are as much shorter."""
    report, rows = tmp_path / "report.json", [{"net": "lenet", "batch": 4, "math": "tf32"} for _ in range(3)]
    for row, ours in zip(rows, ({}, {"ms": 321.0}, {"ms": 1e-3}), strict=True):
        row |= {"ours": ours, "limits": [{"limit": 1 << 30, "ours": {"ms": 400.0}}, {"limit": 1 << 16}]}
    report.write_text(json.dumps({"results": rows}))
    monkeypatch.setattr(sys, "argv", ["floor.py", str(report)])
    main()
    found = [[each["floor_ms"] for each in row["limits"]] for row in json.loads(report.read_text())["results"]]
    assert 1e-3 < found[0][0] <= found[0][1] < 321 and found[1] == [321, 321]
    assert found[2][0] == pytest.approx(1e-3) and 1e-3 < found[2][1] < found[0][1]
    assert "321.00 ms at the least, took 400.00 ms" in capsys.readouterr().out
