"""The console script `caffe`: Caffe's own commands and flags, carried out by the commands of blobmem.

Flags are written as Caffe takes them: -flag value, -flag=value, with one dash or two, before or after the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from blobmem import cli
from blobmem.version import __version__

USAGE = """\
usage: caffe COMMAND FLAGS

commands:
  train         train a net, or fine-tune it          -solver, -snapshot or -weights, -level, -stage,
                                                      -sigint_effect, -sighup_effect
  test          score a model                         -model, -weights, -iterations, -level, -stage
  device_query  show what the device is               -gpu
  time          time a model, layer by layer          -model, -iterations, -phase, -level, -stage

flags:
  -gpu ID              compute on this GPU; on the host without it
  -solver FILE         the solver file
  -model FILE          the net file
  -weights FILE[,FILE] parameters to begin with (caffemodel)
  -snapshot FILE       the snapshot to go on from (solverstate)
  -iterations N        batches to run (50 without it)
  -phase TRAIN|TEST    which layers `time` includes
  -level N             the net's level
  -stage NAME[,NAME]   the net's stages
  -sigint_effect, -sighup_effect stop|snapshot|none

`blobmem --help` has more commands.
"""

FLAGS = {
    "train": ("solver", "snapshot", "weights", "level", "stage", "sigint_effect", "sighup_effect"),
    "test": ("model", "weights", "iterations", "level", "stage"),
    "device_query": (),
    "time": ("model", "iterations", "phase", "level", "stage"),
}
"""Command -> its flags, besides -gpu; each is an option of blobmem's command of that name, with - for _."""

ALL = {"gpu", *(flag for flags in FLAGS.values() for flag in flags)}
LOGGING = {"logtostderr", "alsologtostderr", "colorlogtostderr", "log_dir", "minloglevel", "stderrthreshold", "v"}
"""glog's flags: taken, without effect."""


class Wrong(Exception):
    """A command line that is none; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line (sys.argv when None) and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or any(word.lstrip("-") in ("help", "h") for word in given if word.startswith("-")):
        print(USAGE, end="")
        return 0 if given else 1
    if any(word.lstrip("-") == "version" for word in given if word.startswith("-")):
        print(f"caffe commands of blobmem {__version__}")
        return 0
    try:
        words = translate(given)
    except Wrong as error:
        print(f"caffe: {error}\n`caffe --help` shows what it takes.", file=sys.stderr)
        return 1
    return cli.main(words)


def translate(words: Sequence[str]) -> list[str]:
    """blobmem's command line for one of Caffe's. Raises Wrong."""
    commands, flags = _parse(words)
    if len(commands) != 1 or commands[0] not in FLAGS:
        raise Wrong(f"expected one of {', '.join(FLAGS)}, got {' '.join(commands) or 'no command'}")
    command = commands[0]
    result = [command.replace("_", "-")]
    for flag, value in flags.items():
        if flag == "gpu":
            result += ["--device", _device(value)]
        elif flag in FLAGS[command]:
            result += [f"--{flag.replace('_', '-')}", value]
    if "iterations" in FLAGS[command] and "iterations" not in flags:
        result += ["--iterations", "50"]
    return result


def _parse(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words that are no flags, and the value of each flag, in order."""
    commands: list[str] = []
    flags: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            commands.append(word)
            continue
        flag, equals, value = word.lstrip("-").partition("=")
        if flag.removeprefix("no") in LOGGING or flag in LOGGING:
            continue
        if flag not in ALL:
            raise Wrong(f"unknown flag -{flag}")
        if not equals:
            value = next(rest, "")
        if value:  # an empty value is Caffe's for absent
            flags[flag] = value
    return commands, flags


def _device(value: str) -> str:
    if not value.isdigit():
        raise Wrong(f"-gpu {value}: expected the number of one GPU; a net is trained on one")
    return f"cuda:{value}"
