"""The floor under a training step's time is none that a mix of keeping, evicting and making anew could be below."""

import json
import random
import sys

import pytest

import blobmem
from benchmarks import inputs
from benchmarks.floor import PER_MS, floor_ms, main
from benchmarks.mixes import Problem, Run, Single, problem_of
from blobmem import SimulatedDevice
from blobmem.net.plan.times import Times


def made_up(seed, count=5):
    """Calls that each make a value of some before, others that read some of these and what the one before them made,
    and updates of state by what they make."""
    rng = random.Random(seed)
    problem = Problem(turn=count, state=[rng.randint(1, 60) << 20 for _ in range(3)])
    for at in range(2 * count):
        before = range(min(at, count))
        reads = rng.sample(before, min(len(before), rng.randint(1, 2))) + [at - 1] * (at > count)
        call = Single(rng.choice([0.0, 0.01, 0.3, 1.0, 3.0]), reads, [at], [at % 3] if rng.random() < 0.5 else [])
        problem.sizes.append(rng.randint(1, 100) << 20)
        problem.calls.append(call)
        problem.runs.append(Run(call.ms, range(at, at + 1), [*reads, at] if rng.random() < 0.7 else [at]))
    for number in range(3):
        gradient = rng.randrange(count, 2 * count)
        problem.calls.append(Single(0.1, [gradient], [], [number], [number]))
        problem.runs.append(Run(0.1, range(len(problem.runs), len(problem.runs) + 1), []))
    return problem


class Step:
    """A step, each of whose calls ends with the copies there and back that it waits for, all begun as it begins.

    Args:
        away: of values of forward, "host" or "nowhere" if they are given away once they are made, and whenever they
            have been used; others, and state that is not in `moved`, stay.
    """

    def __init__(self, problem, away, moved):
        self.problem, self.away, self.moved = problem, away, moved
        self.there, self.ms, self.peak = set(), 0.0, 0
        self.runs, self.came, self.sent = 0.0, 0, 0  # of one call: its time, with that of others before, and bytes

    def get(self, value):
        if value in self.there:
            return
        if self.away.get(value) == "host":
            self.came += self.problem.sizes[value]
            self.there.add(value)
        else:
            self.call(value)  # whose number is the value's

    def call(self, number):
        for value in self.problem.calls[number].reads:
            self.get(value)
        self.runs += self.problem.calls[number].ms
        self.there.update(self.problem.calls[number].makes)

    def run(self):
        sizes, state, calls = self.problem.sizes, self.problem.state, self.problem.calls
        last = {value: at for at, call in enumerate(calls) for value in call.reads}
        for at, call in enumerate(calls):
            self.runs, self.came = 0.0, sum(state[number] for number in call.state if number in self.moved)
            self.call(at)
            lasts = [number for number in range(len(state)) if number not in self.moved or number in call.state]
            self.peak = max(self.peak, sum(sizes[each] for each in self.there) + sum(state[each] for each in lasts))
            self.sent = sum(state[number] for number in call.updates if number in self.moved)
            self.sent += sum(sizes[each] for each in call.makes if self.away.get(each) == "host")
            self.ms += max(self.runs, self.came / PER_MS, self.sent / PER_MS)
            self.there = {each for each in self.there if each not in self.away and last.get(each, -1) > at}
        return self


@pytest.mark.parametrize("seed", range(40))
def test_no_mix_is_faster_than_the_floor(seed):
    problem, rng = made_up(seed), random.Random(seed)
    away = {value: rng.choice(["host", "nowhere"]) for value in range(problem.turn) if rng.random() < 0.6}
    step = Step(problem, away, rng.sample(range(3), rng.randint(0, 3))).run()
    floor = floor_ms(problem, step.peak)
    assert floor <= step.ms * (1 + 1e-6)
    assert floor_ms(problem, step.peak, 2) <= floor * (1 + 1e-6)
    assert floor >= problem.forward + problem.backward - 1e-6


def test_with_room_for_all_nothing_takes_longer():
    problem = made_up(0)
    assert floor_ms(problem, 1 << 40) == pytest.approx(problem.forward + problem.backward)


def chain(*sizes, read, ms=1.0, again=1e6):
    """Calls that each make a value of the one before, and one that reads some."""
    calls = [Single(again, [at - 1] if at else [], [at]) for at in range(len(sizes))]
    runs = [Run(ms, range(at, at + 1), []) for at in range(len(sizes) + 1)]
    return Problem(len(sizes), runs, [*calls, Single(ms, [*read])], [*sizes])


def test_what_must_leave_takes_its_time():
    """Half of a value that takes minutes to be made anew leaves and comes back, which takes longer than the calls."""
    half = round(100 * PER_MS)
    problem = chain(2 * half, read=[0], ms=10.0)
    assert floor_ms(problem, half) == pytest.approx(200, rel=0.01)
    assert floor_ms(problem, 2 * half) == pytest.approx(20, rel=0.01)


def test_what_runs_again_takes_its_time():
    """Or as much leaves as can while calls run: the first of two values in a chain is kept, of which the last is made."""
    mib = 1 << 20
    problem = chain(1000 * mib, 1000 * mib, read=[0, 1], again=30.0)
    problem.calls[1].ms = 2.0
    assert floor_ms(problem, 2000 * mib) == pytest.approx(3.0)
    assert 3.0 + 1.7 < floor_ms(problem, 1000 * mib) < 3.0 + 2.0


def test_a_call_is_there_as_a_whole():
    """Beside two arrays there is no room for state, which then comes behind them, for its update."""
    mib, ms = 1 << 20, (200 << 20) / PER_MS
    problem = chain(100 * mib, 100 * mib, read=[0])
    problem.runs[1].there = [0, 1]
    problem.sizes.append(0)
    problem.calls[2].makes = [2]
    problem.calls.append(Single(1.0, [2], [], [0], [0]))
    problem.runs.append(Run(1.0, range(3, 4), []))
    problem.state = [200 * mib]
    assert ms > 3.0
    for limit, away in ((400, 0.0), (350, 0.25), (200, 1.0)):
        assert floor_ms(problem, limit * mib) == pytest.approx(2.0 + max(2.0, away * ms))


def test_moments_are_where_state_has_to_take_turns_too():
    """Six updates at once, with room for the state of one, are waited for, though the link is idle later on."""
    mib = 1 << 20
    problem = chain(200 * mib, 200 * mib, read=[0])
    problem.runs[0].there = problem.runs[1].there = [0]
    for number in range(6):
        problem.calls.append(Single(0.1, [], [], [number], [number]))
        problem.runs.append(Run(0.1, range(3 + number, 4 + number), []))
    problem.runs += [Run(10.0, range(9, 9), []) for _ in range(3)]
    problem.state = [200 * mib] * 6
    comes = 5 * 200 * mib / PER_MS
    assert floor_ms(problem, 250 * mib, 0) < 36
    assert floor_ms(problem, 250 * mib, 6) > 20 + comes


def test_of_a_call_without_room_a_slice_is_there():
    """Half of the second array, so that there is no room for all of the first: three tenths of it leave and come."""
    mib = 1 << 20
    problem = chain(1000 * mib, 1000 * mib, read=[0])
    problem.runs[1].there = [0, 1]
    assert floor_ms(problem, 2000 * mib) == floor_ms(problem, 1500 * mib) == pytest.approx(3.0)
    assert floor_ms(problem, 1200 * mib) == pytest.approx(2 * 300 * mib / PER_MS, rel=1e-4)
    problem.runs[1].beside = 300 * mib  # of 1500, say
    assert floor_ms(problem, 1500 * mib) == pytest.approx(3.0)


def test_a_net_is_calls_that_read_what_others_made():
    net = blobmem.Net(
        inputs.with_inputs("lenet", 4), blobmem.TRAIN, device=SimulatedDevice(compute=False), memory="train"
    )
    problem = problem_of(net)
    times, (forward, backward) = Times(net.device), net.compiled()
    assert problem.forward == pytest.approx(sum(times.ms(call) for call in forward.calls))
    assert problem.backward == pytest.approx(sum(times.ms(call) for call in backward.calls), rel=0.05)
    names = [call.layer_name for call in (*forward.calls, *backward.calls)]
    pool = problem.calls[names.index("pool1")]
    makers = {value: names[number] for number, call in enumerate(problem.calls) for value in call.makes}
    (conv,) = pool.reads
    assert makers[conv] == "conv1" and problem.sizes[conv] == 4 * 20 * 24 * 24 * 4
    behind = problem.calls[problem.runs[problem.turn].calls.start :]
    needed = {makers[value] for call in behind for value in call.reads}
    assert needed >= {"pool1", "pool2", "relu1", "loss"}
    pooled = next(run for run in problem.runs if names[run.calls[-1]] == "pool1")
    assert {makers[value] for value in pooled.there} == {"conv1", "pool1"}


def test_gradients_that_are_read_later_are_beside_a_run():
    """Of a sum's two sides one has its gradient while that of the other is made."""
    net = blobmem.Net(BRANCHES, blobmem.TRAIN, device=SimulatedDevice(compute=False), memory="train")
    problem, (forward, backward) = problem_of(net), net.compiled()
    names = [call.layer_name for call in (*forward.calls, *backward.calls)]
    beside = {names[run.calls[-1]]: run.beside for run in problem.runs[problem.turn :]}
    nbytes = 2 * 4 * 8 * 8 * 4
    assert beside["last"] == 0 and beside["side"] >= nbytes
    assert all(run.beside == 0 for run in problem.runs[: problem.turn])


def solved(model, batch, limit):
    solver = inputs.solver_of(
        inputs.with_inputs(model, batch), device=SimulatedDevice(limit, compute=False), memory="train"
    )
    solver.updater.place()
    solver.net.prepare()
    return solver.net


@pytest.mark.parametrize(("model", "batch", "parts"), [("squeezenet", 2, (1.2, 1.5)), ("lenet", 64, (1.2, 1.4))])
def test_no_plan_is_reckoned_to_take_less(model, batch, parts):
    """On a device that is deterministic, where state is evicted before slices are taken."""
    problem, free = problem_of(solved(model, batch, None)), solved(model, batch, None)
    need = sum(problem.state) + free.planned().nbytes
    for part in parts:
        net = solved(model, batch, int(need / part))
        assert net.reckoned().ms >= floor_ms(problem, int(need / part), 8) >= problem.forward + problem.backward - 1e-6


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


BRANCHES = """
name: "branches"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "first" type: "Convolution" bottom: "data" top: "first"
  convolution_param { num_output: 4 kernel_size: 1 } }
layer { name: "side" type: "Convolution" bottom: "first" top: "side"
  convolution_param { num_output: 4 kernel_size: 1 } }
layer { name: "act" type: "TanH" bottom: "side" top: "act" }
layer { name: "sum" type: "Eltwise" bottom: "first" bottom: "act" top: "sum" }
layer { name: "last" bottom: "sum" top: "last" type: "Convolution"
  convolution_param { num_output: 1 kernel_size: 1 } }
layer { name: "loss" type: "Reduction" bottom: "last" top: "loss" loss_weight: 1 }
"""
AVERAGE = 'type: "Pooling" pooling_param { pool: AVE kernel_size: 2 }'
PRODUCT = 'type: "InnerProduct" inner_product_param { num_output: 2 }'


@pytest.mark.parametrize(("last", "needed"), [(AVERAGE, False), (PRODUCT, True)])
def test_signs_of_what_was_scaled_need_not_be_there(last, needed):
    """What the ReLU made is only needed where a gradient reads it, not its signs alone."""
    net = blobmem.Net(SIGNS % last, blobmem.TRAIN, device=SimulatedDevice(compute=False), memory="train")
    problem, (forward, _) = problem_of(net), net.compiled()
    ahead = problem.runs[problem.turn].calls.start
    ways = zip(problem.calls[:ahead], forward.calls, strict=True)
    makers = {value: call.layer_name for made, call in ways for value in made.makes}
    found = {makers.get(value) for call in problem.calls[ahead:] for value in call.reads}
    assert "norm" in found and ("relu" in found) is needed


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
