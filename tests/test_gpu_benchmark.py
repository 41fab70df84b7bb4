"""The GPU benchmarks' own arithmetic, and dry runs of them without a GPU or PyTorch."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import blobmem
from benchmarks import (
    allocators,
    clock,
    feeding,
    footprint,
    gpu,
    gpu_table,
    inputs,
    link,
    many_gpus,
    mnist,
    oversub_table,
    oversubscription,
    sharing,
    streams,
)
from blobmem import SimulatedDevice

pytestmark = pytest.mark.usefixtures("few_plans")
ROOT = Path(__file__).parents[1]


def test_contestants_take_turns_and_all_their_steps():
    order = []
    sides = [clock.Contestant(lambda name=name: order.append(name), lambda: order.append("|")) for name in "ab"]
    clock.race([(sides[0], 6), (sides[1], 3)], 2, clock.Deadline(60))
    assert "".join(order) == "a|b|" + "aa|b|" * 3
    assert [len(side.groups) for side in sides] == [3, 3]
    with pytest.raises(clock.TimeLimit, match="time limit of -1 s"):
        clock.race([(sides[0], 6)], 2, clock.Deadline(-1))


def test_steps_that_can_be_taken_together_are():
    taken = []
    side = clock.Contestant(lambda: taken.append(1), int, several=taken.append)
    clock.race([(side, 6)], 2, clock.Deadline(60))
    assert taken == [1, 2, 2, 2] and len(side.groups) == 3


def test_slow_steps_are_timed_less_often():
    assert [clock.steps_for(ms, 20, 3) for ms in (1, 300, 2000)] == [20, 10, 4]


def test_captured_and_compiled_steps_come_after_the_eager_ones():
    assert gpu.variants("graph,compile,channels_last,eager") == [
        "eager", "channels_last", "graph", "compile", "compile_overhead",
    ]  # fmt: skip
    assert gpu.variants("none") == []


def test_the_better_layout_is_the_one_that_was_faster():
    assert gpu.better_layout({"eager": {"ms": 2.0}, "channels_last": {"ms": 1.0}}, "fp32") == "channels_last"
    assert gpu.better_layout({"eager": {"ms": 1.0}, "channels_last": {"error": "x"}}, "fp32") == "NCHW"


def test_new_rows_take_the_places_of_old_ones():
    rows = [{"net": net, "batch": 1, "math": "fp32", "phase": "train", "sides": {}} for net in "ab"]
    new = [{**rows[0], "sides": {"blobmem": {}}}, {**rows[0], "math": "tf32"}]
    assert gpu.merged(rows, new) == [new[0], rows[1], new[1]]


def test_a_net_is_measured_in_a_process_of_its_own_and_one_that_fails_is_an_error(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--device", "simulated", "--torch", "none", "--steps", "4",
               "--nets", "lenet:2,nosuch:2", "--maths", "fp32", "--out", str(out)]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    train, infer, *failed = json.loads(out.read_text())["results"]
    for row in (train, infer):
        ours, planned = row["sides"]["blobmem"], row["sides"]["planned"]
        assert ours["ms"] > 0 and ours["host_ms"] > 0 and ours["peak_mib"] > planned["peak_mib"] > 1
    assert train["sides"]["blobmem"]["peak_mib"] > infer["sides"]["blobmem"]["peak_mib"]
    assert [row["net"] for row in failed] == ["nosuch"] * 2
    assert "nosuch/train_val.prototxt" in failed[0]["sides"]["blobmem"]["error"]
    assert "nosuch/deploy.prototxt" in failed[1]["sides"]["blobmem"]["error"]


def row(**sides):
    return {"net": "resnet50", "batch": 32, "math": "tf32", "phase": "train", "command": "python x", "sides": sides}


def test_ratios_are_to_pytorchs_better_layout():
    ours = {"ms": 9.0, "host_ms": 2.0, "solver_ms": 9.5, "peak_mib": 100.4, "physical_mib": 102.0}
    eager, last = {"ms": 20.0, "peak_mib": 150.0}, {"ms": 10.0, "peak_mib": 200.0}
    modes = {"compile": {"ms": 8.0}, "compile_overhead": {"ms": 7.0}}
    text = gpu_table.gpu({"machine": {}, "results": [row(blobmem=ours, eager=eager, channels_last=last, **modes)]})
    assert (
        "| ResNet-50, 32 | tf32 | 9.00 | 9.50 | 2.00 | 20.00 | 10.00 | 0.90 | 7.00 | - | 100 (102) | 200 | 0.50 |"
        in text
    )
    assert "Not measured" not in text


def test_what_a_plan_holds_is_beside_pytorchs_smallest_peak():
    keep, planned = {"ms": 10.0, "peak_mib": 300.0}, {"ms": 10.2, "peak_mib": 60.0, "physical_mib": 62.0}
    eager = {"ms": 20.0, "peak_mib": 150.0, "unsearched_mib": 120.0}
    last = {"ms": 12.0, "peak_mib": 200.0, "unsearched_mib": 130.0}
    sides = {"blobmem": keep, "planned": planned, "eager": eager, "channels_last": last, "compile": {"ms": 9.0}}
    text = gpu_table.gpu({"machine": {}, "results": [row(**sides)]})
    assert "| ResNet-50, 32 | tf32 | 300 | 60 (62) | 120 | 0.50 | - | 10.20 | 1.02 | 0.85 |" in text


def test_what_failed_is_said():
    text = gpu_table.gpu({"machine": {}, "results": [row(blobmem={"error": "DeviceError: no\nmore"})]})
    assert "- ResNet-50, 32, training step, tf32, blobmem: DeviceError: no\n" in text


def test_there_is_a_section_for_each_file_that_is_there(tmp_path):
    assert gpu_table.sections(tmp_path) == ""
    device = SimulatedDevice()
    rows = link.compare(device, 1 << 20, 2)
    grown = link.growth(device, 1 << 20, 2)
    report = {"command": "x", "machine": {}, "results": rows, "growth": grown}
    (tmp_path / "link.json").write_text(json.dumps(report))
    text = gpu_table.sections(tmp_path)
    assert text.count("\n| 1 | ") == 3 and "A memory of 1 MiB grows by as much again" in text


def test_blobs_over_the_link_are_copied_once_each_time():
    device = SimulatedDevice()
    ours = link.Ours(device, 1 << 20)
    for direction, up, down in (("to the device", 1, 0), ("to the host", 0, 1), ("both at once", 1, 1)):
        before = device.statistics.snapshot()
        ours.run(direction)
        moved = device.statistics - before
        assert (moved.htod_bytes, moved.dtoh_bytes) == (up << 20, down << 20)


def test_growth_is_in_place_and_keeps_what_is_there():
    grown = link.growth(SimulatedDevice(), 4 << 20, 2)
    assert grown["in_place"] and grown["kept"]


def test_a_fed_step_and_one_on_constant_data_are_timed():
    args = Namespace(device="cpu", math="fp32", records=8, steps=4, seconds=1, time_limit=60)
    result = feeding.compare("lenet:2", args)
    assert result["fed"]["ms"] > 0 and result["ratio"] == result["fed"]["ms"] / result["constant"]["ms"]


def test_shared_and_separate_nets_take_turns_and_differ_in_memory(tmp_path):
    args = Namespace(device="simulated", math="fp32", steps=4, group=2, seconds=1, time_limit=60)
    result = sharing.compare("lenet:4/6", args)
    for figure, ratio in result["ratios"].items():
        assert len(result["separate"][figure]["groups_ms"]) == len(result["shared"][figure]["groups_ms"]) == 2
        assert ratio == result["shared"][figure]["ms"] / result["separate"][figure]["ms"] > 0
    assert result["shared"]["held_mib"] < result["separate"]["held_mib"]
    (tmp_path / "sharing.json").write_text(json.dumps({"command": "x", "machine": {}, "results": [result]}))
    assert f"| LeNet, 4 / 6 | fp32 | test | {result['separate']['test']['ms']:.3f} |" in gpu_table.sections(tmp_path)


def test_one_stream_and_two_take_turns(tmp_path):
    args = Namespace(device="simulated", math="fp32", memory="train", steps=4, group=2, seconds=1, time_limit=60)
    result = streams.compare("lenet", 4, args)
    assert list(result["sides"]) == ["eager 1", "eager 2", "captured 1", "captured 2"]
    assert result["ratios"]["held"] == 1, "it has one stream"
    (tmp_path / "streams.json").write_text(json.dumps({"command": "x", "machine": {}, "results": [result]}))
    assert "| LeNet, 4 | fp32 |" in gpu_table.sections(tmp_path)


def oversubscribed(**options):
    return Namespace(device="simulated", torch=False, steps=4, group=4, seconds=1, time_limit=60, **options)


def test_limits_of_a_need_are_kept_or_the_least_is_granted():
    row = {"net": "lenet", "batch": 16, "math": "fp32"}
    *_, found = oversubscription.compare(row, oversubscribed())
    need = found["ours"]["peak_bytes"]
    assert [each["limit"] for each in found["limits"]] == [int(need / times) for times in (1.5, 2, 4, 7.5)]
    least = found["limits"][-1]["ours"]
    for each in found["limits"]:
        side = each["ours"]
        assert side["peak_bytes"] <= side["granted_bytes"] == max(each["limit"], least["granted_bytes"])
        assert side["out_bytes"] > 0 < side["in_bytes"] and side["speed"] > 0
    found["limits"][0]["checkpointed"] = {"error": "RuntimeError: none"}
    found |= {"command": "x", "gpu": "NVIDIA H100 80GB HBM3"}
    text = oversub_table.section({"machines": {"a": {}, "b": {}}, "results": [found], "curves": []})
    assert len(re.findall(r"\| LeNet, 16 \| H100 \| fp32 \| [\d.]+ \| \d+ \(least\) \|", text)) == 4
    assert "- LeNet, 16, fp32, checkpointed, need / limit 1.5: RuntimeError: none" in text and "svg" not in text


def test_the_batches_of_a_curve_double_until_they_do_not_fit(monkeypatch):
    monkeypatch.setattr("blobmem.net.plan.divisions.Divisions.ways", lambda *_: iter(()))  # which take a while to plan
    args = oversubscribed(curve=5_000_000, points=9)
    ends = {row["batch"]: row for _, row in oversubscription.rows("lenet:8", "fp32", args)}
    *fitting, last = ends.values()
    assert [*ends] == [8 << at for at in range(len(ends))] and len(fitting) > 1
    assert all(row["ours"]["peak_bytes"] <= row["limit"] == 5_000_000 for row in fitting)
    assert "OutOfDeviceMemory" in last["ours"]["error"]
    drawn = ElementTree.fromstring(oversub_table.picture([*ends.values()]))
    assert len(drawn.findall(".//{*}circle")) == len(fitting) + len(oversub_table.SIDES)
    assert f"LeNet, {last['batch']}, fp32, ours: OutOf" in oversub_table.section(
        {"machines": {}, "results": [], "curves": [*ends.values()]}
    )


def test_allocators_take_turns_and_one_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    for name, value in {"REPEATS": 10, "CHURN_STEPS": 50, "CHURN_LARGEST": 1 << 20, "GROWTH": (1000, 2000),
                        "SIZES": {"1 KiB": 1024, "1 MiB": 1 << 20, "2 MiB": 2 << 20}}.items():  # fmt: skip
        monkeypatch.setattr(allocators, name, value)
    made = allocators.device_of
    monkeypatch.setattr(
        allocators, "device_of", lambda word, name, math: made(word, name, math) if name != "rmm" else 1 / 0
    )
    args = Namespace(device="simulated", math="fp32", steps=4, group=2, seconds=1, time_limit=60, nets="lenet:4",
                     allocators="pool,direct,rmm")  # fmt: skip
    pool, direct, failed = allocators.compare(args)
    assert pool["churn"]["driver_mib"] == pool["churn"]["held_mib"] > 0 == pool["churn"]["kept_mib"]
    assert direct["nets"]["lenet:4"]["held_mib"] == pool["nets"]["lenet:4"]["driver_mib"] > 0
    assert failed == {"allocator": "rmm", "error": "ZeroDivisionError: division by zero"}
    report = {"command": "x", "machine": {}, "results": [pool, direct, failed]}
    (tmp_path / "allocators.json").write_text(json.dumps(report))
    page = gpu_table.sections(tmp_path)
    assert "| LeNet, 4: ms | held | taken |" in page and "- rmm: ZeroDivisionError" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| pool", "| direct"]
    assert len({row.count("|") for row in rows}) == 1


def test_what_a_test_net_adds_is_measured_where_it_can_be(tmp_path):
    rows = footprint.measure("lenet:4/4", "simulated", "fp32")
    assert [row["scheme"] for row in rows] == ["separate", "weights", "blobs", "planned"]
    assert all(row["extra"] == row["extra_measured"] for row in rows)
    assert rows[0]["extra"] > rows[1]["extra"] > rows[2]["extra"]
    (tmp_path / "footprint.json").write_text(json.dumps({"command": "x", "machine": {}, "results": rows}))
    held = f"{rows[2]['train'] / 2**20:.1f}"  # with a workspace by the processor's vectors
    row = f"| LeNet, 4 / 4 | blobs | {held} | {held} | - | 0.0 | 0.0 | - | - | - | - |"
    assert row in gpu_table.sections(tmp_path)


def test_lenet_is_trained_and_tested_on_what_a_folder_has(tmp_path, monkeypatch):
    out = tmp_path / "mnist.json"
    folder = str(ROOT / "models" / "lenet" / "mnist")
    monkeypatch.setattr(
        sys, "argv", ["mnist.py", folder, "--device", "cpu", "--iterations", "2", "--seeds", "1", "--out", str(out)]
    )
    mnist.main()
    (row,) = json.loads(out.read_text())["results"]
    assert row["test_images"] == 2000 and 0 <= row["accuracy"] <= 1
    assert f"| 1 | fp32 | 2 | {row['train_s']:.1f} | {row['accuracy']:.2%} |" in gpu_table.sections(tmp_path)


def test_the_two_phases_have_inputs_of_their_own_batches():
    solver = inputs.solver_of(sharing.with_both_inputs("lenet", 4, 6), tests=True, share=True, device=SimulatedDevice())
    assert [net.blobs["data"].shape[0] for net in (solver.net, *solver.test_nets)] == [4, 6]
    assert {"data", "label"} <= set(solver.reports[0].unshared) and "ip1" in solver.reports[0].shared


def test_a_process_for_each_gpu_reports_what_it_holds(tmp_path):
    out = tmp_path / "many_gpus.json"
    command = [sys.executable, "benchmarks/many_gpus.py", "--device", "simulated", "--processes", "2",
               "--net", "lenet:2", "--steps", "2", "--out", str(out)]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    report = json.loads(out.read_text())
    assert [len(row["groups_ms"]) for row in report["results"]] == [2, 2]
    assert report["spread"] == {"peak": 0, "workspace": 0} and report["results"][0]["peak"] > 1 << 20
    assert "| spread | | | 0.000% | - | - | - | 0.000% |" in gpu_table.sections(tmp_path)
    command[command.index("lenet:2")], command[command.index("2")] = "nosuch:2", "1"
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert failed.returncode and "nosuch" in failed.stderr and "ended with 1" in failed.stderr


def test_spreads_are_of_what_all_have():
    rows = [{"peak": 1000, "nvml": None}, {"peak": 1001, "nvml": 5}]
    assert many_gpus.spreads(rows) == {"peak": pytest.approx(0.001)}


def test_there_is_a_process_for_each_gpu(monkeypatch):
    monkeypatch.setattr("blobmem.devices.cuda.context.count", lambda: 3)
    assert many_gpus.words_for(Namespace(device="cuda", processes=None)) == ["cuda:0", "cuda:1", "cuda:2"]
    assert many_gpus.words_for(Namespace(device="cuda", processes=2)) == ["cuda:0", "cuda:1"]


def test_nets_on_constant_data_have_inputs_of_the_batch_in_place_of_data_layers():
    net = blobmem.Net(inputs.with_inputs("caffenet", 3), blobmem.TRAIN, device=SimulatedDevice(compute=False))
    assert net.inputs == ["data", "label"]
    assert net.blobs["data"].shape == (3, 3, 227, 227) and net.blobs["label"].shape == (3,)
    assert not [layer for layer in net.layers if layer.type == "Data"]


@pytest.mark.parametrize(
    ("model", "batch", "below"),
    [
        ("vnet", 2, {"data": 1, "label": 2}),
        ("lstm_lm", 3, {"data": 33278, "cont": 2, "label": 10}),
        ("densenet264", 2, {"data": 1, "label": 10}),
    ],
)
def test_constant_data_is_such_as_the_net_takes(model, batch, below):
    net = blobmem.Net(inputs.with_inputs(model, batch), blobmem.TRAIN, device=SimulatedDevice(compute=False))
    inputs.fill(net, 10)
    assert net.inputs == [*below]
    for name, limit in below.items():
        values = net.blobs[name].cpu_data()
        assert len(values) == batch and 0 <= values.min() < values.max() < limit
        assert name == "data" or (values == values.astype(int)).all()


def test_searches_are_counted_where_they_are_made(monkeypatch):
    from benchmarks.gpu_ours import search_clock
    from blobmem.ops.cuda import algorithms, conv_plans

    choice = algorithms.Choice(algorithms.DIRECT, 0, 0, 1.0)
    monkeypatch.setattr(conv_plans, "_search", lambda *args, **options: choice)
    monkeypatch.setattr(algorithms, "registry", lambda *_: SimpleNamespace(find=lambda key: None))
    wanted = SimpleNamespace(math="fp32"), SimpleNamespace(model="GPU"), SimpleNamespace(version=1)
    with search_clock() as spent:
        assert conv_plans._find(*wanted) is None
    conv_plans._find(*wanted)
    assert spent[1] == 1 and spent[0] > 0
