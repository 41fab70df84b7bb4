"""Footprints: what is predicted is what a device holds, to the byte; and the pull request's table."""

from collections import Counter
from pathlib import Path

import pytest
from cuda_devices import needs_gpu
from in_place import given_up

from blobmem import NetError, SimulatedDevice, build_nets
from blobmem.devices.cuda.device import CudaDevice
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.footprint import (
    BOUND,
    CHUNK,
    PLANNED,
    PURPOSES,
    SCHEMES,
    _Block,
    _fullest,
    _stacked,
    footprint,
    over_bound,
    parse_input_shape,
    purposes_of,
    reduction,
    stated_shapes,
    to_json,
)
from blobmem.memory import Side
from blobmem.net.builder import specs_of
from blobmem.net.needs import secure
from blobmem.ops.cuda import algorithms
from blobmem.proto.text import read_solver

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "models"
MIB = 1 << 20
NAMES = ["lenet", "alexnet", "googlenet", "vgg16", "resnet50", "squeezenet", "inception_v3"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Paths in the models start there."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def caffenet():
    return footprint(MODELS / "caffenet" / "train_val.prototxt", train_batch=256, test_batches=[50, 250], measured=True)


@pytest.mark.parametrize("batch, blob_mib", [(50, 200.6), (250, 1002.9)])
def test_caffenets_test_net_costs_nothing(batch, blob_mib):
    schemes = footprint(MODELS / "caffenet" / "solver.prototxt", train_batch=256, test_batches=[batch], measured=True)
    weights, blobs = schemes["weights"].tests[0], schemes["blobs"].tests[0]
    assert weights.blob_bytes / MIB == pytest.approx(blob_mib, abs=0.05)
    assert weights.total / MIB == pytest.approx(blob_mib, rel=0.003)
    assert blobs.total < MIB
    assert reduction(schemes, 0) > 0.99
    assert_measured(schemes)
    train, both = schemes["blobs"].train.total / MIB, sum(schemes[PLANNED].predicted) / MIB
    row = f"| {batch} | {train:.1f} | {weights.total / MIB:.1f} | <0.1 | 100.0% | {both:.1f} |"
    assert row in (ROOT / "README.md").read_text()


def assert_measured(schemes):
    """What ran held what was predicted; the lower bound cannot run."""
    for scheme in schemes.values():
        assert scheme.measured == (None if scheme.name == BOUND else scheme.predicted)


@pytest.mark.parametrize("name", ["lenet", "caffenet"])
def test_a_second_stream_holds_what_is_predicted(name):
    """By the plan of the backward pass, or by the second workspace."""
    one, two = (
        footprint(MODELS / name / "solver.prototxt", schemes=["blobs", PLANNED], measured=True, backward_streams=streams,
                  make_device=lambda: PredictedCuda(math="tf32"))
        for streams in (1, 2)
    )  # fmt: skip
    assert_measured(two)
    for scheme in ("blobs", PLANNED):
        assert one[scheme].train.total < two[scheme].train.total
        more = {key: nbytes - one[scheme].train.purposes[key] for key, nbytes in two[scheme].train.purposes.items()}
        assert {key for key, nbytes in more.items() if nbytes} == {"workspace"} or scheme == PLANNED


def test_separate_nets_hold_their_own_parameters(caffenet):
    parameters = caffenet["separate"].tests[0].purposes["params"]
    assert parameters == 4 * 60_965_224
    assert caffenet["weights"].tests[0].purposes["params"] == 0


def test_each_test_net_counts_beyond_all_before_it(caffenet):
    assert [held.batch for held in caffenet["blobs"].tests] == [50, 250]
    assert all(held.total < MIB for held in caffenet["blobs"].tests)
    assert caffenet["blobs"].measured == caffenet["blobs"].predicted


def test_room_for_exactly_the_plan_with_the_test_pass_at_50_first():
    """The order in which the pull request failed."""
    shapes = {"data": (3, 227, 227)}
    options = {"train_batch": 256, "test_batches": [50], "input_shapes": shapes, "seed": 0}
    plan = sum(footprint(MODELS / "caffenet" / "train_val.prototxt", **{k: v for k, v in options.items() if k != "seed"},
                         schemes=["blobs"])["blobs"].predicted)  # fmt: skip
    device = SimulatedDevice(capacity=plan, compute=False)
    nets = build_nets(MODELS / "caffenet" / "train_val.prototxt", device=device, **options)
    nets.tests[0].run_forward()
    nets.train.run_forward()
    nets.train.run_backward()
    assert device.statistics.bytes_held == device.statistics.peak_bytes == plan
    assert device.statistics.moves == 0
    nets.tests[0].run_forward()
    assert device.statistics.bytes_held == plan


@pytest.mark.parametrize("name, batch", [("caffenet", 256), ("googlenet", 32), ("vgg16", 64)])
def test_gradients_that_are_used_up_are_held_only_where_most_is_in_use(name, batch):
    """With `iter_size` 1 they take turns in the arena; with 2 they have to last."""
    totals, gradients = [], []
    for size in (1, 2):
        solver = read_solver(MODELS / name / "solver.prototxt")
        solver.iter_size = size
        planned = footprint(solver, train_batch=batch, schemes=[PLANNED], measured=True)[PLANNED]
        assert planned.measured == planned.predicted
        totals.append(planned.train.total)
        gradients.append(planned.train.purposes["gradients"])
    learned = {"caffenet": 60_965_224, "googlenet": 13_378_280, "vgg16": 138_357_544}[name]
    assert gradients[1] == 4 * learned
    largest = {"caffenet": 9216 * 4096, "googlenet": 1024 * 1000, "vgg16": 25088 * 4096}[name]
    assert gradients[0] <= 4 * (largest + learned / 8)
    assert 0.5 * (gradients[1] - gradients[0]) <= totals[1] - totals[0] <= gradients[1]


@pytest.mark.parametrize("name", NAMES)
def test_prediction_equals_measurement(name):
    schemes = footprint(MODELS / name / "solver.prototxt", measured=True)
    assert_measured(schemes)
    separate, weights, blobs, planned, bound = (sum(schemes[kind].predicted) for kind in SCHEMES)
    assert separate > weights > blobs > planned >= bound
    assert schemes[PLANNED].train.total <= 1.02 * schemes[BOUND].train.total
    assert over_bound(schemes) == planned / bound <= 1.02


@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "inception_v3"), "caffenet"])
def test_a_plan_for_a_gpu_that_is_not_here(name):
    schemes = footprint(
        MODELS / name / "solver.prototxt", schemes=[PLANNED, BOUND], measured=True, make_device=PredictedCuda
    )
    assert_measured(schemes)
    assert 1 <= over_bound(schemes) <= 1.02


def test_a_thousand_layers():
    schemes = footprint(MODELS / "resnet1001" / "train_val.prototxt", schemes=[PLANNED, BOUND], measured=True)
    assert_measured(schemes)
    assert over_bound(schemes) <= 1.02
    assert schemes[PLANNED].train.purposes["gradients"] == 4 * 10_327_706
    assert schemes[PLANNED].tests[0].total < MIB


class Least:
    """What a net has to hold during a pass, found by walking its calls with the set of arrays that are in use.

    Attributes:
        stays: memory -> bytes, of all that is there before or after the pass, or travels to the host.
        load: bytes of the rest that are in use at the fullest moment; `purposes` has them by purpose.
    """

    def __init__(self, net):
        net.needs(backward=not net.forward_only)
        units = [unit for schedule in net.compiled()[: 1 if net.forward_only else 2] for unit in schedule.units()]
        sizes, last, self.load, self.purposes = {}, {}, 0, Counter()
        stays = {*net.read_after()} | {memory for memory, replaced in net.first_uses().items() if not replaced}
        for at, unit in enumerate(units):
            for operand in (operand for call in unit.calls for operand in call.present()):
                view = operand.view
                sizes[view.memory] = max(sizes.get(view.memory, 0), view.offset + view.nbytes)
                last[view.memory] = at
                stays |= {view.memory} if unit.travels else set()
        self.stays = {memory: sizes[memory] for memory in stays if memory in sizes}
        alive, purposes = {}, purposes_of(net)
        for at, unit in enumerate(units):
            used = dict.fromkeys(operand.view.memory for call in unit.calls for operand in call.present())
            born = used.keys() - stays - alive.keys()
            alive |= dict.fromkeys(memory for memory in used if memory in born)
            (only,) = unit.calls  # none is fused where there is no GPU
            held = alive.keys() - given_up(only, [memory for memory in alive if last[memory] == at], born)
            load = sum(sizes[memory] for memory in held) + unit.scratch
            if load > self.load:
                self.load, self.purposes = load, Counter(workspace=unit.scratch)
                for memory in held:
                    self.purposes[purposes[memory]] += sizes[memory]
            alive = dict.fromkeys(memory for memory in alive if last[memory] > at)
        for memory, nbytes in self.stays.items():
            self.purposes[purposes[memory]] += nbytes


@pytest.mark.parametrize("name", [*NAMES, "caffenet"])
def test_the_lower_bound_is_what_a_walk_over_the_calls_finds(name):
    model = MODELS / name / "train_val.prototxt"
    schemes = footprint(model, schemes=[PLANNED, BOUND])
    nets = build_nets(model, device=SimulatedDevice(compute=False), seed=0, memory="train",
                      input_shapes=stated_shapes(specs_of(model)))  # fmt: skip
    train, test = Least(nets.train), Least(nets.tests[0])
    assert schemes[BOUND].train.total == train.load + sum(train.stays.values())
    assert {k: v for k, v in schemes[BOUND].train.purposes.items() if v} == {
        k: v for k, v in train.purposes.items() if v
    }
    together = {**test.stays, **train.stays}
    assert sum(schemes[BOUND].predicted) == max(train.load, test.load) + sum(together.values())
    for net, least in ((nets.train, train), (nets.tests[0], test)):  # each by itself, in its own arena
        assert least.load <= net.planned().nbytes <= 1.02 * least.load
    gaps = schemes[PLANNED].train.purposes["gaps"]
    assert gaps == nets.train.planned().nbytes - train.load
    assert schemes[PLANNED].train.purposes == {**schemes[BOUND].train.purposes, "gaps": gaps}


def test_of_a_larger_arena_what_lies_beyond_the_smaller_counts():
    """LeNet's test batch of 100 takes more than its training batch of 64; after one of 200 it takes no more."""
    model = MODELS / "lenet" / "train_val.prototxt"
    large, small = footprint(model, test_batches=[200, 100], schemes=[PLANNED], measured=True)[PLANNED].tests
    assert large.purposes["data"] > 5 * MIB and sum(large.purposes.values()) == large.total
    assert small.purposes == {**dict.fromkeys(PURPOSES, 0), "data": small.total}
    assert small.total < MIB, "its inputs"


def test_what_is_in_use_at_the_fullest_moment():
    blocks = [
        _Block("data", 0, 10, 0, 1),
        _Block("diffs", 20, 30, 1, 2),
        _Block("workspace", 12, 15, 1, 1),
        _Block("internal", 0, 25, 3, 3),
    ]
    # 23 bytes at moment 1, in 30 of the arena; 25 at moment 3
    assert _fullest(blocks[:3]) == blocks[:3]
    assert _fullest(blocks) == blocks[3:]
    assert _fullest(blocks[:3], 14) == [_Block("diffs", 20, 30, 1, 2), _Block("workspace", 14, 15, 1, 1)]
    assert _stacked(blocks[:3]) == (
        [_Block("data", 0, 10, 0, 1), _Block("diffs", 10, 20, 1, 2), _Block("workspace", 20, 23, 1, 1)], 23,
    )  # fmt: skip
    assert _fullest([]) == [] and _stacked([]) == ([], 0)


def test_scratch_of_an_update_could_lie_in_the_arena():
    """It has a workspace of its own; at that moment nothing of the arena is in use."""
    solver = read_solver(MODELS / "lenet" / "solver.prototxt")
    solver.clip_gradients = 3
    schemes = footprint(solver, schemes=[PLANNED, BOUND], make_device=PredictedCuda)
    planned, bound = (schemes[name].train for name in (PLANNED, BOUND))
    scratch = planned.total - bound.total - planned.purposes["gaps"]
    assert scratch == planned.purposes["workspace"] - bound.purposes["workspace"] > 0


def test_a_net_whose_shapes_depend_on_values_is_not_planned():
    text = """
        layer { name: "in" type: "Input" top: "x" top: "s" input_param { shape { dim: 4 dim: 9 } shape { dim: 4 } } }
        layer { name: "f" type: "Filter" bottom: "x" bottom: "s" top: "y" }
        layer { name: "a" type: "TanH" bottom: "y" top: "a" }
        layer { name: "b" type: "TanH" bottom: "a" top: "b" }
    """
    schemes = footprint(text)
    assert schemes[PLANNED].predicted == schemes[BOUND].predicted == schemes["blobs"].predicted


def test_steady_state_of_a_big_net_makes_no_allocator_call():
    device = SimulatedDevice(compute=False)
    nets = build_nets(MODELS / "googlenet" / "train_val.prototxt", device=device, train_batch=4, test_batches=[2],
                      input_shapes={"data": (3, 224, 224)}, seed=0)  # fmt: skip
    for _ in range(2):
        nets.train.run_forward()
        nets.train.run_backward()
        nets.tests[0].run_forward()
        nets.train.clear_param_diffs()
    before = device.statistics.snapshot()
    nets.train.run_forward()
    nets.train.run_backward()
    nets.tests[0].run_forward()
    change = device.statistics - before
    assert change.allocator_calls == 0
    assert change.dtoh_bytes == 4 * change.dtoh_copies, "losses are read, and nothing else"


def test_a_net_file_has_no_solver_state_and_a_solver_file_has():
    net = footprint(MODELS / "lenet" / "train_val.prototxt", schemes=["blobs"])["blobs"].train.purposes
    solver = footprint(MODELS / "lenet" / "solver.prototxt", schemes=["blobs"])["blobs"].train.purposes
    assert net["solver state"] == 0
    assert solver["solver state"] == solver["params"] == solver["gradients"] == 4 * 431_080
    assert {k: v for k, v in net.items() if k != "solver state"} == {
        k: v for k, v in solver.items() if k != "solver state"
    }


def test_json_has_the_promised_form(caffenet):
    schemes = to_json(caffenet)["schemes"]
    assert set(schemes) == {"separate", "weights", "blobs", "planned", "lower bound"}
    for scheme in schemes.values():
        assert isinstance(scheme["train_bytes"], int)
        assert [test["batch"] for test in scheme["tests"]] == [50, 250]
        assert all(isinstance(test["extra_bytes"], int) for test in scheme["tests"])


def test_a_shape_that_nobody_states_is_asked_for():
    text = """
        layer { name: "d" type: "Data" top: "pixels" data_param { source: "nowhere" batch_size: 2 backend: LMDB } }
        layer { name: "r" type: "ReLU" bottom: "pixels" top: "r" }
    """
    with pytest.raises(NetError, match=r"layer 'd'.*pixels=|--input-shape"):
        footprint(text)
    schemes = footprint(text, input_shapes={"pixels": (3, 4, 5)})
    assert schemes["blobs"].train.purposes["data"] == 2 * 2 * 60 * 4


def test_input_shapes_on_the_command_line():
    assert parse_input_shape("data=3x227x227") == ("data", (3, 227, 227))
    for text in ("data", "data=", "data=3x", "=3", "data=3xx4"):
        with pytest.raises(ValueError, match="no input shape"):
            parse_input_shape(text)


def test_needs_do_not_run_anything():
    device = SimulatedDevice(compute=False)
    nets = build_nets(
        MODELS / "lenet" / "train_val.prototxt", device=device, input_shapes={"data": (1, 28, 28)}, seed=0
    )
    needs = nets.train.needs(backward=True)
    assert device.statistics.allocator_calls == 0
    assert any(need.side is Side.DEVICE for need in needs)
    secure(needs)
    held = device.statistics.bytes_held
    nets.train.run_forward()
    nets.train.run_backward()
    assert device.statistics.bytes_held == held


def test_a_net_with_debug_info_can_be_measured():
    """A device that only counts has no values to log."""
    text = (ROOT / "models" / "lenet" / "train_val.prototxt").read_text()
    schemes = footprint(f"debug_info: true\n{text}", input_shapes={"data": (1, 28, 28)}, measured=True)
    assert_measured(schemes)


def test_host_bytes_and_rounding():
    shapes = {"data": (1, 28, 28)}
    model = MODELS / "lenet" / "train_val.prototxt"
    scheme = footprint(model, input_shapes=shapes, schemes=["blobs"])["blobs"]
    device = SimulatedDevice(compute=False)
    nets = build_nets(model, device=device, input_shapes=shapes, seed=0)
    for net, held in ((nets.train, scheme.train), (nets.tests[0], scheme.tests[0])):
        before = host_bytes(nets)
        parameters = before if net is nets.train else 0  # filled when the nets were built
        net.run_forward()
        if net is nets.train:
            net.run_backward()
        assert host_bytes(nets) - before + parameters == held.host
    total = sum(scheme.predicted)
    assert 0 <= scheme.train.rounding + scheme.tests[0].rounding < 8 * 2 * MIB
    assert (total + scheme.train.rounding + scheme.tests[0].rounding) % (2 * MIB) == 0


def host_bytes(nets):
    memories = set()
    for net in (nets.train, *nets.tests):
        for blob in (*net.blobs.values(), *net.internals.values(), *(p for ps in net.params.values() for p in ps)):
            memories |= {blob.data_view.memory, blob.diff_view.memory}
    return sum(memory.cpu_capacity for memory in memories)


@pytest.fixture
def choices_of_their_own(tmp_path, monkeypatch):
    """The files of chosen algorithms are two empty folders."""
    for name in ("shipped", "own"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(algorithms, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(algorithms, "folder", lambda: tmp_path / "own")
    algorithms._registry.cache_clear()
    yield tmp_path / "own"
    algorithms._registry.cache_clear()


def test_prediction_for_a_gpu_that_is_not_here(choices_of_their_own, monkeypatch):
    model = MODELS / "lenet" / "train_val.prototxt"
    asked = []

    class Device(PredictedCuda):
        def __init__(self):
            super().__init__()
            asked.append(self)

    unknown = footprint(model, schemes=["blobs"], measured=True, make_device=Device)["blobs"]
    assert unknown.measured == unknown.predicted and asked[-1].uncertain
    limit = unknown.train.purposes["workspace"]
    assert limit >= algorithms.WORKSPACE_LIMIT

    choices = {}
    with monkeypatch.context() as patch:
        choice = algorithms.Choice("eng0", 0, 12345 * 512, 0.1)
        patch.setattr(algorithms, "predict", lambda model, math, key: choices.setdefault(key.text, choice))
        footprint(model, schemes=["blobs"], make_device=Device)
    path = choices_of_their_own / algorithms.file_name("NVIDIA H200", 91900, "fp32")
    assert choices and algorithms.write(path, choices)
    algorithms._registry.cache_clear()
    known = footprint(model, schemes=["blobs"], measured=True, make_device=Device)["blobs"]
    assert known.measured == known.predicted and not asked[-1].uncertain
    assert 12345 * 512 <= known.train.purposes["workspace"] < 12345 * 512 + 4 * MIB < limit
    known, unknown = (s.train.purposes | {"workspace": 0} for s in (known, unknown))
    assert known == unknown


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("batch", [50, 250])
def test_the_pull_requests_table_on_a_gpu(batch):
    model = MODELS / "caffenet" / "solver.prototxt"
    schemes = footprint(
        model,
        train_batch=256,
        test_batches=[batch],
        measured=True,
        make_device=CudaDevice,
        schemes=["weights", "blobs"],
    )
    for scheme in schemes.values():
        assert scheme.measured == scheme.predicted
        before, train, test = scheme.cards
        assert [train.held - before.held, test.held - train.held] == scheme.measured
        assert 0 <= train.mapped - train.held < 0.01 * train.held
        assert before.others > 0
    assert schemes["blobs"].tests[0].total < MIB
    _, train, test = schemes["blobs"].cards
    assert test.mapped - train.mapped <= CHUNK
    assert reduction(schemes, 0) > 0.99
