import json
import sys
from pathlib import Path

import pytest
from cuda_devices import needs_gpu

from blobmem import footprint as library
from blobmem.devices.cuda.card import Card
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.errors import DeviceError
from blobmem.footprint import SCHEMES

ROOT = Path(__file__).parents[2]


def document(blobmem, *arguments):
    result = blobmem("footprint", *arguments, "--json", "-")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_json_to_standard_output_is_alone_there(blobmem, tiny):
    values = document(blobmem, tiny.net)
    assert set(values["schemes"]) == {*SCHEMES}
    for scheme in values["schemes"].values():
        assert scheme["train_bytes"] == sum(scheme["train_purposes"].values()) > 0
        (test,) = scheme["tests"]
        assert test["batch"] == 4 and test["extra_bytes"] == sum(test["purposes"].values())
    extra = [values["schemes"][name]["tests"][0]["extra_bytes"] for name in ("separate", "weights", "blobs")]
    assert extra[0] > extra[1] > extra[2]
    assert values["reductions"] == [1 - extra[2] / extra[1]]
    planned, bound = (values["schemes"][name]["total_bytes"] for name in ("planned", "lower bound"))
    assert values["planned_over_bound"] == planned / bound >= 1


def test_a_solver_file_counts_its_state(blobmem, tiny):
    parameters = 4 * (6 * 3 + 3)
    purposes = document(blobmem, tiny.solver)["schemes"]["blobs"]["train_purposes"]
    assert purposes["solver state"] == purposes["params"] == parameters
    assert document(blobmem, tiny.net)["schemes"]["blobs"]["train_purposes"]["solver state"] == 0


def test_batches_from_the_command_line(blobmem, tiny):
    values = document(blobmem, tiny.net, "--train-batch", 16, "--test-batch", 2, 32)
    for scheme in values["schemes"].values():
        assert scheme["train_batch"] == 16
        assert [test["batch"] for test in scheme["tests"]] == [2, 32]


def test_json_to_a_file_beside_the_tables(blobmem, tiny):
    target = tiny.folder / "bytes.json"
    result = blobmem("footprint", tiny.net, "--json", target)
    assert result.code == 0 and "net, batch" in result.out
    assert set(json.loads(target.read_text())["schemes"]) == {*SCHEMES}


def test_the_tables(blobmem, tiny):
    result = blobmem("footprint", tiny.net, "--train-batch", 60000, "--test-batch", 30000, 60000)
    assert result.code == 0 and not result.err
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 200 and "\x1b" not in result.out
    table = lines[: lines.index("")]
    assert max(map(len, table)) <= 100
    assert [line for line in table if not line[2:].strip().startswith(("train", "test"))][3:] == [*SCHEMES]
    assert sum(line.startswith("  train 60000 ") for line in table) == 5
    assert sum(line.startswith("+ test 30000 ") for line in table) == 5
    title = lines.index("Added by each test net, in MiB")
    rows = [line.split() for line in lines[title + 3 : title + 5]]
    assert [row[0] for row in rows] == ["30000", "60000"]
    for row in rows:
        before, after, reduction = float(row[1]), float(row[2].lstrip("<")), float(row[3].rstrip("%"))
        assert before >= 1 > after and reduction == pytest.approx(100 * (1 - after / before), abs=10)
    title = lines.index("In all, in MiB")
    rows = [line.rsplit(maxsplit=3) for line in lines[title + 3 : title + 8]]
    assert [name.strip() for name, *_ in rows] == [*SCHEMES]
    (_, _, held, over), (*_, least, one) = rows[3:]
    assert float(over) == pytest.approx(float(held) / float(least), abs=0.02) and one == "1.000"
    assert any("test net 0 does not share" in line and "label" in line for line in lines)


def test_measured_bytes_agree(blobmem, tiny):
    result = blobmem("footprint", tiny.solver, "--measure")
    assert result.code == 0, result.err
    assert "measured" in result.out
    schemes = document(blobmem, tiny.solver, "--measure")["schemes"]
    assert "measured" not in schemes.pop("lower bound")
    for scheme in schemes.values():
        assert scheme["measured"] == [scheme["train_bytes"], scheme["tests"][0]["extra_bytes"]]


def test_a_byte_of_difference_fails(blobmem, tiny, monkeypatch):
    compute = library.footprint

    def off_by_one(*args, **options):
        schemes = compute(*args, **options)
        schemes["blobs"].measured[1] += 1
        return schemes

    monkeypatch.setattr(library, "footprint", off_by_one)
    result = blobmem("footprint", tiny.net, "--measure", "--json", "-")
    assert result.code == 1
    predicted = json.loads(result.out)["schemes"]["blobs"]["tests"][0]["extra_bytes"]
    assert f"blobs, test net 0: {predicted} bytes predicted, {predicted + 1} measured" in result.err


def test_the_plan_as_a_page_and_as_a_trace(blobmem, tiny):
    pytest.importorskip("bokeh")
    page, trace = tiny.folder / "plan.html", tiny.folder / "plan.json"
    result = blobmem("footprint", tiny.net, "--train-batch", 9, "--test-batch", 2, "--html", page, "--trace", trace)
    assert result.code == 0 and not result.err
    assert f"The plan of {tiny.net}" in page.read_text()
    names = [event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"]
    assert {"train net, batch 9", "test net, batch 2"} < {*names}


def test_a_page_needs_bokeh_and_a_trace_does_not(blobmem, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    page, trace = tiny.folder / "plan.html", tiny.folder / "plan.json"
    assert blobmem("footprint", tiny.net, "--trace", trace).code == 0 and trace.exists()
    result = blobmem("footprint", tiny.net, "--html", page)
    assert result.code == 1 and "blobmem[plot]" in result.err and not page.exists()


def test_a_shape_that_no_file_states_is_asked_for(blobmem, data_net):
    result = blobmem("footprint", data_net)
    assert result.code == 1 and not result.out
    assert "'digits'" in result.err and "--input-shape data=" in result.err
    result = blobmem("footprint", data_net, "--input-shape", "data=1x5x5")
    assert result.code == 0 and "train 4" in result.out


def test_a_shape_for_a_blob_that_is_none_of_the_inputs(blobmem, data_net):
    result = blobmem("footprint", data_net, "--input-shape", "date=1x5x5")
    assert result.code == 1 and "it has data, label" in result.err


def test_a_missing_file(blobmem, tiny):
    result = blobmem("footprint", tiny.folder / "nett.prototxt")
    assert result.code == 1 and "did you mean" in result.err and "Traceback" not in result.err


def test_the_documentation_shows_what_the_command_shows(blobmem):
    page = (ROOT / "docs" / "memory.md").read_text()
    shown = page[page.index("In all, in MiB") :].partition("```")[0]
    assert shown in blobmem("footprint", ROOT / "models" / "caffenet" / "solver.prototxt").out


def test_caffenet_needs_neither_data_nor_device(blobmem):
    values = document(blobmem, ROOT / "models" / "caffenet" / "solver.prototxt", "--test-batch", 50, 250)
    small, large = values["schemes"]["blobs"]["tests"]
    assert max(small["extra_bytes"], large["extra_bytes"]) < 2**20


@pytest.fixture
def no_gpu(monkeypatch):
    def count():
        raise DeviceError("no GPU can be used")

    monkeypatch.setattr("blobmem.devices.cuda.context.count", count)


def test_prediction_for_cuda_without_a_gpu(blobmem, tiny, no_gpu):
    simulated, cuda = document(blobmem, tiny.net), document(blobmem, tiny.net, "--device", "cuda")
    for name, scheme in cuda["schemes"].items():
        other = simulated["schemes"][name]
        assert scheme["train_purposes"]["params"] == other["train_purposes"]["params"]
        assert scheme["train_purposes"]["workspace"] >= 8 << 20  # cuBLAS's, in the test net, too
        assert "cards" not in scheme


def test_the_prediction_for_cuda_depends_on_the_math(blobmem, no_gpu):
    model = ROOT / "models" / "caffenet" / "train_val.prototxt"

    def workspace(*options):
        values = document(blobmem, model, "--train-batch", 256, "--device", "cuda", *options)
        return values["schemes"]["blobs"]["train_purposes"]["workspace"]

    assert workspace("--math", "fp32") != workspace("--math", "tf32")


def test_a_second_stream_has_a_workspace_of_its_own(blobmem, tiny, no_gpu):
    def workspace(*options):
        values = document(blobmem, tiny.net, "--device", "cuda", *options)
        return values["schemes"]["blobs"]["train_purposes"]["workspace"]

    assert workspace("--backward-streams", 2) > workspace() == workspace("--backward-streams", 1)


def test_what_the_device_is_made_with(blobmem, tiny, no_gpu, monkeypatch):
    made = []

    def spy(**options):
        made.append(options)
        return PredictedCuda(**options)

    monkeypatch.setattr("blobmem.devices.cuda.predicted.PredictedCuda", spy)
    document(blobmem, tiny.net, "--device", "cuda", "--math", "tf32", "--deterministic")
    assert made == [{"math": "tf32", "deterministic": True}] * 4, "the lower bound is that of the planned nets"
    made.clear()
    document(blobmem, tiny.net, "--device", "cuda", "--device-memory", "1GiB")
    assert made == [{"limit": 1 << 30}] * 4


def test_planned_nets_keep_to_the_memory_that_they_are_given(blobmem, tiny):
    def totals(*options):
        schemes = document(blobmem, tiny.net, "--train-batch", 1000, *options)["schemes"]
        return {name: scheme["total_bytes"] for name, scheme in schemes.items()}

    free = totals()
    limited = totals("--device-memory", free["planned"] - 1000)
    assert limited["planned"] <= free["planned"] - 1000
    assert all(limited[name] == free[name] for name in ("separate", "weights", "blobs"))


@pytest.mark.parametrize("option", [["--math", "tf32"], ["--deterministic"]])
def test_a_simulated_device_has_none_of_a_gpus_options(blobmem, tiny, option):
    result = blobmem("footprint", tiny.net, *option)
    assert result.code == 1 and f"device 'simulated' has no {option[0][2:]}" in result.err


def test_a_gpu_that_is_not_here_cannot_be_measured(blobmem, tiny, no_gpu):
    result = blobmem("footprint", tiny.net, "--device", "cuda", "--measure")
    assert result.code == 1 and "no GPU can be used" in result.err and not result.out


def test_what_the_card_says_is_shown(blobmem, tiny, monkeypatch):
    compute = library.footprint

    def with_cards(*args, **options):
        schemes = compute(*args, **options)
        for scheme in schemes.values():
            scheme.cards = [Card(n << 20, 2 * n << 20, (500 + 2 * n) << 20, None if n else 777 << 20) for n in range(3)]
        return schemes

    monkeypatch.setattr(library, "footprint", with_cards)
    result = blobmem("footprint", tiny.net)
    lines = result.out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("In use on the card"))
    assert [line.split() for line in lines[first + 4 : first + 7]] == [
        ["before", "0.0", "0.0", "500.0", "777.0", "500.0"],
        ["train", "8", "1.0", "2.0", "502.0", "-", "500.0"],
        ["+", "test", "4", "2.0", "4.0", "504.0", "-", "500.0"],
    ]
    cards = document(blobmem, tiny.net)["schemes"]["blobs"]["cards"]
    assert cards[1] == {"held": 1 << 20, "mapped": 2 << 20, "driver": 502 << 20, "nvml": None, "others": 500 << 20}


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("options", [[], ["--math", "tf32", "--deterministic"]])
def test_measured_on_a_gpu(blobmem, tiny, options):
    result = blobmem("footprint", tiny.solver, "--measure", "--device", "cuda", *options)
    assert result.code == 0, result.err
    assert "In use on the card" in result.out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(blobmem, tiny, dtype):
    def total(*options):
        result = blobmem("footprint", tiny.solver, "--json", "-", "--measure", *options)
        assert result.code == 0
        return json.loads(result.out)["schemes"]["planned"]["train_purposes"]

    half, full = total("--dtype", dtype), total()
    assert half["params"] == full["params"] / 2
    more = full["solver state"] + 16 if dtype == "float16" else half["params"]  # masters beside, or their lower halves
    assert half["solver state"] == full["solver state"] + more
    result = blobmem("train", "--solver", tiny.solver, "--dtype", dtype)
    assert result.code == 1 and "give device='cuda' (--device cuda), or take dtype float32" in result.err
