"""The pages that are made from the package, which has to be installed: `python docs/generate.py`.

coverage.md          what of Caffe runs here: the registries against the facts in caffe.tsv
commands.md          the command line, from its parsers
api/layer_types.md   every registered layer type, with its docstring

A test compares them with what this writes.
"""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import blobmem
from blobmem import cli
from blobmem.cli import caffe
from blobmem.ops.host.fillers import KINDS
from blobmem.solvers import POLICIES, solver_types

DOCS = Path(__file__).parent
MADE = "<!-- Made by `python docs/generate.py`; do not edit. -->\n"


class Fact(NamedTuple):
    """A row of caffe.tsv.

    Attributes:
        kind: layer, community, solver or tool.
        name: as Caffe, or the fork, has it.
        here: of a tool, what stands for it here ("command NAME" or "python NAME"); of a layer, its options' messages.
        origin: where a community layer comes from.
        note: what there is to say; of a thing that is absent, the reason.
    """

    kind: str
    name: str
    here: str
    origin: str
    note: str


def facts(kind: str) -> list[Fact]:
    """The rows of caffe.tsv of one kind."""
    lines = (DOCS / "caffe.tsv").read_text().splitlines()
    return [Fact(*line.split("\t")) for line in lines if line.startswith(f"{kind}\t")]


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *body))


# -------------------------------------------------------------------- coverage.md


def coverage() -> str:
    """The text of coverage.md."""
    layers, solvers, tools = facts("layer"), facts("solver"), facts("tool")
    parts = [
        MADE,
        "# What of Caffe runs here\n",
        "Of Caffe (BVLC's master branch) there are here "
        f"{_count(fact.name in blobmem.layer_types() for fact in layers)} layer types, "
        f"{_count(fact.name in solver_types() for fact in solvers)} solver types and "
        f"{_count(stands_for(tool) != '' for tool in tools)} tools. This page is made by asking the package what it "
        "has registered; a dash stands for what it has not.\n",
        "## Layers\n",
        "`options` are the fields of a layer in prototxt; what means nothing here (`engine`) is accepted.\n",
        layer_table(layers),
        "## Community layers\n",
        "From forks whose nets are in use. Types that are not here can be [written in Python](adding_a_layer.md).\n",
        layer_table(facts("community")),
        "## Solvers, policies, fillers\n",
        table(
            ("solver type", "class"),
            *((code(fact.name), _class(solver_types().get(fact.name))) for fact in solvers),
        ),
        f"Learning-rate policies: {', '.join(map(code, POLICIES))}. Fillers: {', '.join(map(code, KINDS))}.\n",
        "## Tools\n",
        table(
            ("Caffe", "here", "note"), *((code(tool.name), stands_for(tool) or "-", tool.note or " ") for tool in tools)
        ),
        "Besides: " + ", ".join(code(f"blobmem {name}") for name in own_commands()) + ".\n",
    ]
    return "\n".join(parts)


def layer_table(rows: list[Fact]) -> str:
    """Layers by name, with the class that carries each out."""
    known = blobmem.layer_types()
    cells = []
    for fact in rows:
        options = ", ".join(map(code, fact.here.split(","))) if fact.here != "-" else " "
        note = "; ".join(filter(None, (fact.origin, fact.note))) or " "
        cells.append((code(fact.name), _class(known.get(fact.name)), options, note))
    return table(("type", "class", "options", "note"), *cells)


def stands_for(tool: Fact) -> str:
    """What stands for a tool, as Markdown; empty if nothing does, whatever caffe.tsv says."""
    kind, _, name = tool.here.partition(" ")
    if kind == "command":
        return code(f"blobmem {name}") if name in command_names() else ""
    return code(f"blobmem.{name}") if kind == "python" and hasattr(blobmem, name) else ""


def command_names() -> list[str]:
    """All commands and, where a command has kinds ("convert mnist"), these too."""
    return [" ".join(path) for path, _ in parsers(cli.parser())]


def own_commands() -> list[str]:
    """Commands that stand for no tool of Caffe."""
    taken = {tool.here.removeprefix("command ").split(" ")[0] for tool in facts("tool")}
    return [name for name in command_names() if " " not in name and name not in taken]


def _count(there: Iterable[bool]) -> str:
    answers = list(there)
    return f"all {len(answers)}" if all(answers) else f"{sum(answers)} of {len(answers)}"


def _class(cls: type | None) -> str:
    return code(f"{cls.__module__}.{cls.__qualname__}") if cls else "-"


def code(text: str) -> str:
    return f"`{text}`"


# -------------------------------------------------------------------- commands.md


def commands() -> str:
    """The text of commands.md."""
    parser = cli.parser()
    parts = [MADE, "# Command line\n", prose(parser.description), prose(parser.epilog)]
    for path, command in parsers(parser):
        parts += ["#" * (1 + len(path)) + f" blobmem {' '.join(path)}\n", prose(command.description)]
        parts += list(_arguments(command))
        if len(path) == 1 or command.epilog != _parent(parser, path).epilog:
            parts.append(prose(command.epilog))
    parts += [
        "## caffe\n",
        "Caffe's own command line, carried out by these commands.\n",
        f"```text\n{caffe.USAGE}```\n",
    ]
    return "\n".join(part for part in parts if part)


def parsers(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below a parser with the words that lead to it, in the order they were declared."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield (*path, name), command
                yield from parsers(command, (*path, name))


def _parent(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Any:
    return dict(parsers(parser))[path[:-1]]


def prose(text: str | None) -> str:
    """Help text as Markdown: indented lines are examples."""
    blocks = []
    for example, group in itertools.groupby((text or "").splitlines(), lambda line: not line or line.startswith(" ")):
        lines = "\n".join(group)
        if not example:
            blocks.append(lines.replace("<", "&lt;"))
        elif lines.strip():
            blocks.append(f"```text\n{textwrap.dedent(lines).strip()}\n```")
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """What a command takes, as a table; nothing for a command that only has kinds."""
    shown = [
        action
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    if shown:
        yield table(("argument", "meaning"), *((code(_usage(action)), _meaning(action)) for action in shown))


def _usage(action: argparse.Action) -> str:
    """How an argument is written: `--json FILE`, `MODEL`, `[FILE]`."""
    values = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    value = " ".join(values) if isinstance(values, tuple) else str(values)
    if action.nargs == "+":
        value = f"{value} ..."
    if not action.option_strings:
        return f"[{value}]" if action.nargs == "?" else value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _meaning(action: argparse.Action) -> str:
    needed = " (required)" if action.required and action.option_strings else ""
    return f"{(action.help or '') % vars(action)}{needed}".replace("|", "\\|").replace("<", "&lt;")


# -------------------------------------------------------------------- api/layer_types.md


def layer_types() -> str:
    """The text of api/layer_types.md."""
    parts = [
        MADE,
        "# Layer types\n",
        "What each type computes, in the words of the class that carries it out. [Coverage](../coverage.md) names the "
        "messages with their options.\n",
    ]
    for name, cls in sorted(blobmem.layer_types().items(), key=lambda item: item[0].lower()):
        parts += [f"## {name}\n", f"```{{eval-rst}}\n.. autoclass:: {cls.__module__}.{cls.__qualname__}\n```\n"]
    return "\n".join(parts)


PAGES = {"coverage.md": coverage, "commands.md": commands, "api/layer_types.md": layer_types}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
