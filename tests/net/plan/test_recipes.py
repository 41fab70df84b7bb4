"""What a search has found, kept for other processes: they have the same plan without one."""

import json

import numpy as np
import pytest
from cuda_devices import EXACT_GPU
from plan_nets import DATA, assert_same, conv, layer, loss, norm, scaled_chain

from blobmem import SimulatedDevice, get_solver
from blobmem.errors import OutOfDeviceMemory
from blobmem.net.plan import levels, recipes, times
from blobmem.proto.text import read_net, read_solver

pytestmark = pytest.mark.usefixtures("few_plans")


class Gpu(SimulatedDevice):
    """What has times in files as a GPU has."""

    model, math, deterministic = "of tests", "fp32", False

    def __init__(self, limit=None):
        super().__init__(limit)


@pytest.fixture(autouse=True)
def no_algorithms(monkeypatch):
    """What a convolution's plan took when it was chosen is not known of that."""
    chosen = times.Times._chosen
    monkeypatch.setattr(
        times.Times, "_chosen", lambda self, each: None if isinstance(self._device, Gpu) else chosen(self, each)
    )


WIDE = 'inner_product_param { num_output: 300 weight_filler { type: "xavier" } }'
IMAGES = DATA.replace("dim: 3", "dim: 4").replace("dim: 6 dim: 5", "dim: 16 dim: 16")
LARGE = conv("c1", "data", outputs=32) + conv("c2", "c1", outputs=32)
HALF = layer("Pooling", "p", "c2", "p", "pooling_param { kernel_size: 2 stride: 2 }")
CHAIN = scaled_chain(9)
MANY = DATA.replace("dim: 3", "dim: 128").replace("dim: 6 dim: 5", "dim: 64 dim: 64")
NETS = {
    "chain": DATA + CHAIN + loss("l8"),
    "many": MANY + CHAIN + loss("l8"),  # of which chunks of a GPU's memory are a small part
    "wide": DATA + conv("c", "data", outputs=8) + norm("c") + layer("InnerProduct", "fc", "c", "fc", WIDE) + loss("fc"),
    "large": IMAGES + LARGE + HALF + conv("c3", "p") + loss("c3"),
    "norms": IMAGES + conv("c1", "data", outputs=32) + norm("c1") + conv("c2", "c1", outputs=32) + norm("c2") + HALF
    + conv("c3", "p", outputs=32) + norm("c3") + loss("c3"),
}  # fmt: skip


FIND, KEEP = recipes.Kept.find, recipes.Kept.keep


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where plans are kept, which they are in no other tests."""
    monkeypatch.setattr(recipes.Kept, "find", FIND)
    monkeypatch.setattr(recipes.Kept, "keep", KEEP)
    monkeypatch.setenv("BLOBMEM_CACHE", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch):
    """How often there was a search."""
    found, search = list[object](), levels._searched

    def counted(net, made):
        found.append(net)
        return search(net, made)

    monkeypatch.setattr(levels, "_searched", counted)
    return found


def trained(name, limit=None, make=Gpu, steps=3):
    """A solver after so many steps."""
    param = read_solver('base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 random_seed: 1')
    param.net_param.CopyFrom(read_net(NETS[name]))
    solver = get_solver(param, device=make(limit=limit), memory="train")
    solver.step(steps)
    return solver


def limit_of(name, part):
    """The least that a net needs, and such a part of what it would take beyond that."""
    with pytest.raises(OutOfDeviceMemory) as caught:
        trained(name, 1)
    least = caught.value.requested
    return least + int(part * (trained(name).net.device.statistics.peak_bytes - least))


def parameters(solver):
    return [blob.cpu_data().copy() for blobs in solver.net.params.values() for blob in blobs]


def plan_of(solver):
    """What runs, and where all lies."""
    net = solver.net
    calls = [
        [(each.op, each.layer, *(operand.op_shape for operand in each.present())) for each in schedule.calls]
        for schedule in net.compiled()
    ]
    return calls, [(tenant.ranges, tenant.first, tenant.last) for tenant in net._plan.tenants]


def of_kind(content):
    """What there is in a file that need not be."""
    less = content["less"] or {}
    found = {name for name in ("abreast", "division", "moves", "state", "away") if content[name]}
    return found | {name for name in ("anew", "rounds", "apart") if less.get(name)}


SLOW, FAST = 1e6, 1e12


@pytest.mark.parametrize(
    "name, part, link, state, kind",
    [
        ("chain", 0.2, FAST, False, {"away"}),
        ("chain", 0.6, SLOW, False, {"anew"}),
        ("chain", 0.1, SLOW, False, {"rounds", "away"}),
        ("wide", 0.2, FAST, True, {"state", "anew"}),
        ("large", 0.35, 1e10, True, {"state", "division", "moves"}),
        ("large", 0.2, SLOW, False, {"division"}),
        ("norms", 0.02, SLOW, False, {"abreast", "rounds"}),
    ],
)
def test_another_process_has_the_same_plan_without_a_search(
    monkeypatch, folder, searches, name, part, link, state, kind
):
    monkeypatch.setattr(times, "LINK", link)
    monkeypatch.setattr(levels, "FROM", levels.FROM if state else 1 << 40)
    limit = limit_of(name, part)
    searches.clear()
    first, second = (trained(name, limit) for _ in range(2))
    assert len(searches) == 1
    (path,) = folder.glob("*.json")
    assert kind <= of_kind(json.loads(path.read_text()))
    assert plan_of(first) == plan_of(second)
    assert_same(parameters(first), parameters(second))
    assert second.net.device.statistics.peak_bytes <= limit
    assert second.net.reckoned().ms == first.net.reckoned().ms


def test_times_that_are_others_by_now_are_searched_for(monkeypatch, folder, searches):
    """Before calls are made of what was found by others, whose updates and copies may be elsewhere."""
    limit, made, recalled = limit_of("chain", 0.3), recipes.Kept._made, []
    monkeypatch.setattr(recipes.Kept, "_made", lambda self, content: recalled.append(1) or made(self, content))
    for rate in (1e9, 1e8):
        monkeypatch.setattr(times, "MEMORY", rate)
        searches.clear()
        recalled.clear()
        trained("chain", limit)
        assert len(searches) == 1 and not recalled
        trained("chain", limit)
        assert len(searches) == 1 and recalled
    assert len([*folder.glob("*.json")]) == 1


@pytest.mark.parametrize("what", ["limit", "program"])
def test_what_a_search_depends_on_names_the_file(monkeypatch, folder, searches, what):
    limit = limit_of("chain", 0.3)
    trained("chain", limit)
    if what == "program":
        monkeypatch.setattr(recipes, "_sources", lambda: "changed")
    searches.clear()
    trained("chain", limit + (what == "limit") * 512)
    assert len(searches) == 1 and len([*folder.glob("*.json")]) == 2


def damaged(text, how):
    content = json.loads(text)
    if how == "cut off":
        return text[: len(text) // 2]
    if how == "empty":
        return "{}"
    if how == "too large":
        content["away"] = [each + 10_000 for each in content["away"]]
    if how == "of another kind":
        content["away"] = "none"
    if how == "another plan":
        content["away"] = content["away"][:1]
    return json.dumps(content)


@pytest.mark.parametrize("how", ["cut off", "empty", "too large", "of another kind", "another plan"])
def test_a_damaged_file_is_left_aside(folder, searches, how):
    limit = limit_of("chain", 0.3)
    usual = parameters(trained("chain", limit))
    (path,) = folder.glob("*.json")
    good = path.read_text()
    path.write_text(damaged(good, how))
    searches.clear()
    assert_same(parameters(trained("chain", limit)), usual)
    assert len(searches) == 1 and path.read_text() == good


def test_where_nothing_can_be_kept_there_is_a_search(monkeypatch, tmp_path, searches):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLOBMEM_CACHE", str(tmp_path / "file"))
    limit = limit_of("chain", 0.3)
    searches.clear()
    assert all(np.isfinite(each).all() for _ in range(2) for each in parameters(trained("chain", limit)))
    assert len(searches) == 2


@pytest.mark.parametrize("make", [EXACT_GPU])
def test_a_gpu_has_the_same_plan_without_a_search(folder, searches, make):
    """With its own times, which the first solver's second step measures, and in graphs."""
    needed = trained("many", make=make, steps=6).net.device.statistics.peak_bytes
    first = trained("many", int(0.7 * needed), make=make, steps=6)
    assert searches
    searches.clear()
    second = trained("many", int(0.7 * needed), make=make, steps=6)
    assert not searches and plan_of(first) == plan_of(second)
    assert_same(parameters(first), parameters(second))
