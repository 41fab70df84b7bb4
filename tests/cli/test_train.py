import re
import signal

import pytest

from blobmem.cli import train


def test_a_run_on_a_pipe(blobmem, tiny):
    result = blobmem("train", "--solver", tiny.solver)
    assert result.code == 0, result.err
    assert "\x1b" not in result.out and not result.err
    (start,) = result.events("start")
    assert (start["net"], start["parameters"], start["max_iter"]) == ("tiny", "21", "8")
    shown = result.events("train")
    assert [record["iteration"] for record in shown] == ["0", "2", "4", "6", "8"]
    assert float(shown[-1]["loss"]) < float(shown[0]["loss"]) and {record["lr"] for record in shown} == {"0.1"}
    assert [record["iteration"] for record in result.events("test")] == ["0", "4", "8"]
    (done,) = result.events("done")
    assert done["iterations"] == "8" and done["test0_loss"] == result.events("test")[-1]["loss"]
    assert done["snapshot"] == f"{tiny.folder}/out/tiny_iter_8.solverstate"
    assert (tiny.folder / "out" / "tiny_iter_8.caffemodel").exists()


def test_it_ends_with_the_footprint_of_its_nets(blobmem, tiny):
    lines = blobmem("train", "--solver", tiny.solver).out.splitlines()
    table = lines[lines.index("") + 1 :]
    assert table[0] == f"Footprint of {tiny.solver} in MiB"
    assert "weights" in table and "planned" in table and table[-1].endswith("% less")
    table = blobmem("train", "--solver", tiny.solver, "--memory", "keep").out.splitlines()
    assert "weights" in table and "blobs" in table and table[-1].endswith("% less")


def test_sharing_is_the_default_and_said(blobmem, tiny):
    (turns,) = blobmem("train", "--solver", tiny.solver).events("share")
    assert (turns["memory"], turns["shared"], turns["not_shared"]) == ("train", "0", "-")
    (shared,) = blobmem("train", "--solver", tiny.solver, "--memory", "keep").events("share")
    assert int(shared["shared"]) >= 2 and "label" in shared["not_shared"].split(",")
    (apart,) = blobmem("train", "--solver", tiny.solver, "--no-share").events("share")
    assert apart["shared"] == "0"


def losses(result):
    assert result.code == 0, result.err
    return {record["iteration"]: record["loss"] for record in result.events("train")}


def test_sharing_and_device_do_not_change_a_loss(blobmem, tiny):
    expected = losses(blobmem("train", "--solver", tiny.solver))
    assert losses(blobmem("train", "--solver", tiny.solver, "--no-share")) == expected
    assert losses(blobmem("train", "--solver", tiny.solver, "--memory", "keep")) == expected
    assert losses(blobmem("train", "--solver", tiny.solver, "--device", "simulated")) == expected


def test_going_on_from_a_snapshot(blobmem, tiny):
    tiny.write_solver(snapshot=4)
    whole = losses(blobmem("train", "--solver", tiny.solver))
    state = tiny.folder / "out" / "tiny_iter_4.solverstate"
    result = blobmem("train", "--solver", tiny.solver, "--snapshot", state)
    assert result.events("start")[0]["iteration"] == "4" and result.events("done")[0]["iterations"] == "4"
    assert losses(result) == {iteration: whole[iteration] for iteration in ("4", "6", "8")}


def test_beginning_with_weights(blobmem, tiny):
    trained = losses(blobmem("train", "--solver", tiny.solver))
    model = tiny.folder / "out" / "tiny_iter_8.caffemodel"
    result = blobmem("train", "--solver", tiny.solver, "--weights", model)
    assert float(losses(result)["0"]) < float(trained["0"])


def interrupt(monkeypatch, iteration, times, number=signal.SIGINT):
    """Press Ctrl-C so many times in the report of an iteration."""
    report = train.Session._on_display

    def pressed(session, display):
        report(session, display)
        if display.iteration == iteration:
            for _ in range(times):
                signal.raise_signal(number)

    monkeypatch.setattr(train.Session, "_on_display", pressed)


def test_an_interrupt_ends_the_iteration_and_says_how_to_go_on(blobmem, tiny, monkeypatch):
    whole = losses(blobmem("train", "--solver", tiny.solver))
    with monkeypatch.context() as patch:
        interrupt(patch, 4, 1)
        result = blobmem("train", "--solver", tiny.solver)
    state = f"{tiny.folder}/out/tiny_iter_5.solverstate"
    assert result.code == 130 and not result.events("done")
    hint = f"go on with: blobmem train --solver {tiny.solver} --snapshot {state}"
    assert result.err == f"blobmem: interrupted after iteration 5; {hint}\n"
    rest = losses(blobmem("train", "--solver", tiny.solver, "--snapshot", state))
    assert rest == {iteration: whole[iteration] for iteration in ("6", "8")}


def test_hang_up_writes_a_snapshot_and_training_goes_on(blobmem, tiny, monkeypatch):
    interrupt(monkeypatch, 4, 1, signal.SIGHUP)
    result = blobmem("train", "--solver", tiny.solver)
    assert result.code == 0 and [event["iteration"] for event in result.events("snapshot")] == ["5", "8"]


@pytest.mark.parametrize(
    ("name", "effect", "code", "snapshots"),
    [("sigint", "none", 0, ["8"]), ("sigint", "snapshot", 0, ["5", "8"]), ("sighup", "stop", 130, ["5"])],
    ids=["none", "snapshot", "stop"],
)
def test_signals_have_the_effects_asked_for(blobmem, tiny, monkeypatch, name, effect, code, snapshots):
    interrupt(monkeypatch, 4, 1, getattr(signal, name.upper()))
    result = blobmem("train", "--solver", tiny.solver, f"--{name}-effect", effect)
    assert result.code == code and [event["iteration"] for event in result.events("snapshot")] == snapshots


def test_a_log_gets_every_event_on_a_terminal_too(blobmem, tiny, monkeypatch):
    log = tiny.folder / "train.log"
    whole = blobmem("train", "--solver", tiny.solver, "--log", log)
    piped = [record["event"] for record in whole.records if record["event"] != "footprint"]
    assert [line.split()[0].removeprefix("event=") for line in log.read_text().splitlines()] == piped
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    blobmem("train", "--solver", tiny.solver, "--log", log)
    lines = log.read_text().splitlines()
    assert len(lines) == 2 * len(piped), "a log is added to"
    assert "event=train iteration=0 loss=" in log.read_text() and "waited=" in lines[-1]


def test_a_log_that_cannot_be_written(blobmem, tiny):
    result = blobmem("train", "--solver", tiny.solver, "--log", tiny.folder / "absent" / "train.log")
    assert result.code == 1 and "train.log: No such file or directory" in result.err


def test_a_second_interrupt_ends_at_once(blobmem, tiny, monkeypatch):
    interrupt(monkeypatch, 4, 2)
    before = signal.getsignal(signal.SIGINT)
    result = blobmem("train", "--solver", tiny.solver)
    assert result.code == 130 and "interrupted after iteration 5; no snapshot was written" in result.err
    assert signal.getsignal(signal.SIGINT) is before


def test_on_a_terminal_it_is_for_people(blobmem, tiny, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    result = blobmem("train", "--solver", tiny.solver)
    assert result.code == 0 and "event=" not in result.out
    for text in ("Training tiny (21 parameters, batch 8) on cpu to iteration 8", "Test net 0 shares its parameters and",
                 "iteration 4, test net 0: loss ", "Trained 8 iterations in ", "8/8"):  # fmt: skip
        assert text in result.out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr_policy": '"sometimes"'}, "sometimes"),
        ({"type": '"Magic"'}, "Magic"),
        ({"net": '"nowhere.prototxt"'}, "nowhere.prototxt"),
        ({"test_iter": '"two"'}, "test_iter"),
    ],
)
def test_a_wrong_solver(blobmem, tiny, fields, message):
    result = blobmem("train", "--solver", tiny.write_solver(**fields))
    assert result.code == 1 and message in result.err and not result.out


def test_a_net_is_no_solver(blobmem, tiny):
    result = blobmem("train", "--solver", tiny.net)
    assert result.code == 1 and "solver" in result.err.lower() and not result.out


def test_a_device_that_is_too_small(blobmem, tiny):
    result = blobmem("train", "--solver", tiny.solver, "--device", "simulated:200")
    assert result.code == 1 and "may hold 200" in result.err
    least = int(re.search(r"needs at least (\d+) bytes", result.err)[1])
    for room, code in ((least, 0), (least - 1, 1)):
        result = blobmem("train", "--solver", tiny.solver, "--device", "simulated", "--device-memory", room)
        assert result.code == code, result.err


def test_data_that_is_yet_to_be_made(blobmem, tiny, monkeypatch):
    net = tiny.folder / "lenet.prototxt"
    net.write_text(
        'layer { name: "mnist" type: "Data" top: "data" top: "label"\n'
        f'  data_param {{ source: "{tiny.folder}/mnist_train_lmdb" batch_size: 4 backend: LMDB }} }}\n'
    )
    result = blobmem("train", "--solver", tiny.write_solver(net=f'"{net}"'))
    assert result.code == 1 and "blobmem convert mnist" in result.err and str(tiny.folder) in result.err
