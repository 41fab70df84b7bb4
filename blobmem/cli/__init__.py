"""The command line: one module per command. A command says what it takes, asks the library, prints what it gives.

Exit codes: 0 fine; 1 something the user gave is wrong, or the run failed (one message on stderr); 2 the command line
itself is wrong; 130 interrupted. A traceback is always a bug of ours, or of a script that `run` runs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from blobmem.cli import (
    algorithms,
    compute_mean,
    convert,
    device_query,
    draw,
    extract_features,
    fit,
    footprint,
    options,
    parse_log,
    run,
    stress,
    summary,
    test,
    time,
    train,
    upgrade,
)
from blobmem.version import __version__

if TYPE_CHECKING:
    from blobmem.cli.output import Output

COMMANDS = (
    train, test, time, footprint, fit, summary, draw, convert, compute_mean, extract_features, run, upgrade, parse_log,
    device_query, algorithms, stress,
)  # fmt: skip

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and the way to more."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n`{self.prog} --help` shows what it takes.\n")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    result = Parser(
        prog="blobmem",
        usage="blobmem [-h] [--version] COMMAND ...",
        description=(
            "Trains, tests and measures Caffe nets on one memory system whose every byte is accounted for.\n"
            "Sizes are in MiB (2^20 bytes), times in milliseconds unless they say otherwise."
        ),
        epilog=(
            "a first session, from the top folder of a clone:\n"
            "  blobmem footprint models/caffenet/solver.prototxt    # what sharing saves\n"
            "  blobmem convert mnist models/lenet/mnist models/lenet\n"
            "  blobmem train --solver models/lenet/solver.prototxt  # a minute or two\n"
            "\n"
            "Output that goes to a file or a pipe has no bars and no colours; NO_COLOR=1 drops colours anywhere.\n"
            "Exit codes: 0 fine, 1 wrong input or a failed run, 2 wrong command line, 130 interrupted."
        ),
        formatter_class=options.Formatter,
    )
    result.add_argument("--version", action="version", version=f"blobmem {__version__}")
    # argparse makes the column of names as wide as this
    title, width = "commands", "COMMAND ...".ljust(2 + len("extract-features"))
    commands = result.add_subparsers(title=title, metavar=width, prog="blobmem", required=True, parser_class=Parser)
    for command in COMMANDS:
        command.add(commands)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (sys.argv when None) and return its exit code.

    Raises SystemExit, as argparse does, for --help, --version and a wrong command line.
    """
    commands = parser()
    args = commands.parse_args(arguments)
    if isinstance(getattr(args, "device", None), str):
        from blobmem.errors import DeviceError

        try:
            args.device = options.make_device(args)
        except DeviceError as error:
            commands.error(f"argument --device: {error}")
    from blobmem.cli.output import Output

    output = Output()
    with _messages_to(output):
        try:
            code: int = args.run(args, output)
            sys.stdout.flush()
        except KeyboardInterrupt:
            output.error("interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            # whoever read our output has seen enough; without this, Python complains when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except Exception as error:
            message = _for_people(error)
            if message is None:
                raise
            output.error(message)
            return FAILED
    program = getattr(args, "program", None)
    if program is not None:  # a script that a command prepared: its errors, warnings and exit code are its own
        program()
    return code


def _for_people(error: Exception) -> str | None:
    """The message of an error that is not a bug of ours; None for one that may be."""
    from blobmem.errors import BlobmemError

    if isinstance(error, BlobmemError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {str(error) or 'the machine has no more'}; use smaller batches"
    if isinstance(error, OSError):
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        return ": ".join([*names, error.strerror or str(error)])
    return None


@contextlib.contextmanager
def _messages_to(output: Output) -> Iterator[None]:
    """Let warnings and the package's log lines come out as one line each."""

    def show(message: Warning | str, *_: Any) -> None:
        output.note(f"warning: {message}")

    handler = _Lines(output)
    logger = logging.getLogger("blobmem")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


class _Lines(logging.Handler):
    """Log records as lines of the output."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self.output = output

    def filter(self, record: logging.LogRecord) -> bool:
        """All warnings; of the rest not what a solver reports, which `train` shows in its own way."""
        return record.levelno >= logging.WARNING or "solvers" not in record.pathname.replace(os.sep, "/").split("/")

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        self.output.note(prefix + record.getMessage())
