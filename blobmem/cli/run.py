"""`blobmem run`: a script written for Caffe, whose `import caffe` gives blobmem."""

from __future__ import annotations

import argparse
import builtins
import functools
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from blobmem.caffe_names import install_as_caffe
from blobmem.cli import options
from blobmem.proto.files import MAX_TEXT, read_bytes

if TYPE_CHECKING:
    from blobmem.cli.output import Output

DESCRIPTION = """\
Runs a Python script as `python SCRIPT ARGUMENTS` does, except that caffe and all caffe.X that it imports are blobmem's.
"""

EXAMPLE = """\
example:
  blobmem run classify.py --center_only cat.jpg predictions.npy

All that follows the script is for the script, options too. Exit codes and tracebacks are its own; in a program of your
own, blobmem.install_as_caffe() before the first `import caffe` does the same.
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "run", run, "run a script written for Caffe's Python", DESCRIPTION, EXAMPLE)
    parser.add_argument("script", metavar="SCRIPT", help="the script's file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what is in its sys.argv[1:]")


def run(args: argparse.Namespace, output: Output) -> int:
    """Read the script, and leave the rest to after this command, so that what the script raises is its own."""
    source = read_bytes(args.script, MAX_TEXT)
    try:
        install_as_caffe()
    except ImportError as error:
        output.error(str(error))
        return 1
    args.program = functools.partial(execute, args.script, args.arguments, source)
    return 0


def execute(script: str, arguments: Sequence[str], source: bytes) -> None:
    """Be the script: it is `__main__` from now on. Raises what it raises."""
    path = os.path.abspath(script)
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path, __cached__=None, __builtins__=builtins, __loader__=SourceFileLoader("__main__", path)
    )
    sys.modules["__main__"] = module
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    show = _Show()
    sys.excepthook = show
    show.code = compile(source, path, "exec", dont_inherit=True)
    exec(show.code, module.__dict__)


class _Show:
    """An excepthook that leaves out what ran the script."""

    def __init__(self) -> None:
        self.code: CodeType | None = None
        self._show = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code is not self.code:
            trace = trace.tb_next
        self._show(kind, error.with_traceback(trace), trace)
