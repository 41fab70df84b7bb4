"""The frame of the command line: help, exit codes, errors, warnings."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from blobmem.cli import COMMANDS, stress
from blobmem.errors import NetError, OutOfDeviceMemory
from blobmem.proto.text import read_solver
from blobmem.version import __version__

ROOT = Path(__file__).parents[2]
NAMES = [command.__name__.rsplit(".", 1)[1].replace("_", "-") for command in COMMANDS]


def raising(error):
    def run(args, output):
        raise error

    return run


@pytest.fixture
def command_that(monkeypatch):
    """Let `blobmem stress` do something else."""
    return lambda run: monkeypatch.setattr(stress, "run", run)


def test_version(blobmem):
    result = blobmem("--version")
    assert (result.code, result.out) == (0, f"blobmem {__version__}\n")


@pytest.mark.parametrize("name", [*NAMES, "convert mnist", "convert images", "convert csv"])
def test_help_teaches(blobmem, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    result = blobmem(*name.split(), "--help")
    assert result.code == 0 and not result.err
    assert "\nexample" in result.out and f"  blobmem {name.split()[0]} " in result.out
    assert max(map(len, result.out.splitlines())) <= 80


def test_help_names_every_command(blobmem, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = blobmem("--help")
    assert all(f"\n    {name} " in result.out for name in NAMES)
    assert max(map(len, result.out.splitlines())) <= 80


def test_help_imports_no_compiler_and_no_terminal_library():
    code = (
        "import sys; from blobmem.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'numba', 'lmdb', 'rich'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train"],
        ["train", "--solver", "f", "--weights", "a", "--snapshot", "b"],
        ["train", "--solver", "f", "--device", "toaster"],
        ["train", "--solver", "f", "--device", "simulated:lots"],
        ["time", "--model", "f", "--iterations", "0"],
        ["footprint", "f", "--input-shape", "data"],
        ["stress", "--steps", "few"],
        ["convert", "cifar"],
    ],
)
def test_a_wrong_command_line_is_two_lines_and_2(blobmem, arguments):
    result = blobmem(*arguments)
    assert result.code == 2 and not result.out
    first, second = result.err.splitlines()
    assert first.startswith("blobmem") and second.endswith("--help` shows what it takes.")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NetError("layer 'x' is wrong"), "layer 'x' is wrong"),
        (OutOfDeviceMemory("no room for 'conv1'"), "no room for 'conv1'"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), "a/b: No such file or directory"),
        (PermissionError("not allowed"), "not allowed"),
        (MemoryError(), "out of memory: the machine has no more; use smaller batches"),
    ],
)
def test_a_users_mistake_is_one_message_and_1(blobmem, command_that, error, message):
    command_that(raising(error))
    result = blobmem("stress")
    assert (result.code, result.out, result.err) == (1, "", f"blobmem: {message}\n")


def test_a_bug_keeps_its_traceback(blobmem, command_that):
    command_that(raising(ZeroDivisionError("oops")))
    with pytest.raises(ZeroDivisionError, match="oops"):
        blobmem("stress")


def test_interrupted_is_130(blobmem, command_that):
    command_that(raising(KeyboardInterrupt()))
    assert blobmem("stress").code == 130


def test_warnings_and_log_lines_are_one_line_each(blobmem, command_that):
    def run(args, output):
        warnings.warn("adopted memory had to grow", UserWarning, stacklevel=1)
        logging.getLogger("blobmem").warning("layer '%s' is odd", "x")
        logging.getLogger("blobmem.proto").info("upgraded")
        return 0

    command_that(run)
    shown = warnings.showwarning
    result = blobmem("stress")
    assert result.code == 0 and not result.out
    assert result.err == "warning: adopted memory had to grow\nwarning: layer 'x' is odd\nupgraded\n"
    assert warnings.showwarning is shown and not logging.getLogger("blobmem").handlers


def test_a_reader_that_stops_reading_is_no_error():
    code = (
        "from blobmem.cli import main, stress\ndef run(args, output):\n    for _ in range(9999): output.say('x' * 99)\n"
    )
    code += "stress.run = run\nraise SystemExit(main(['stress']))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout.readline() == b"x" * 99 + b"\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_python_m_blobmem():
    done = subprocess.run([sys.executable, "-m", "blobmem", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"blobmem {__version__}\n")


def test_the_example_of_test_names_the_snapshot_that_training_lenet_writes(blobmem):
    solver = read_solver(ROOT / "models" / "lenet" / "solver.prototxt")
    assert f"--weights {solver.snapshot_prefix}_iter_{solver.max_iter}.caffemodel" in blobmem("test", "--help").out
