"""A Sphinx extension for docstrings that are plain text.

Formulas such as `|x|` and `y = x ** 2` are no markup here; `code` is, and so are an indented block and Google's
sections, which napoleon reads afterwards. Layers, whose objects nobody makes by hand, show no arguments.
"""

from __future__ import annotations

import re
from typing import Any

from blobmem.layers import Layer

_CODE = re.compile(r"(`[^`\n]+`)")
_MARKUP = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def rest(lines: list[str]) -> list[str]:
    """Lines of plain text as reStructuredText."""
    result: list[str] = []
    literal = False
    for line in lines:
        indented = line.startswith(" ")
        if indented and not literal and _starts_block(result):
            result[-1:] = ["", "::", ""] if not result[-1] else [result[-1], "", "::", ""]
            literal = True
        elif line and not indented:
            literal = False
        result.append(line if literal else _escaped(line))
    return result


def _starts_block(before: list[str]) -> bool:
    """Whether an indented line here is an example: it follows an empty line, and is in no section."""
    if not before or before[-1]:
        return False
    heads = [line for line in before if line and not line.startswith(" ")]
    return not heads or heads[-1] not in ("Args:", "Attributes:", "Class attributes:", "Raises:", "Returns:")


def _escaped(line: str) -> str:
    parts = _CODE.split(line)
    return "".join(f"`{part}`" if _CODE.fullmatch(part) else _MARKUP.sub(r"\\\1", part) for part in parts)


def _on_docstring(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = rest(lines)
    if what in ("attribute", "property"):
        # napoleon takes what stands before a colon in the first line for a type, but not if nothing follows it
        lines[:1] = lines[0].replace(": ", ":\n", 1).split("\n")


def _on_signature(
    _app: Any, what: str, _name: str, thing: Any, _options: Any, _signature: Any, _returns: Any
) -> tuple[str, None] | None:
    return ("", None) if what == "class" and isinstance(thing, type) and issubclass(thing, Layer) else None


def setup(app: Any) -> dict[str, bool]:
    """Connect; before napoleon, which has priority 500."""
    app.connect("autodoc-process-docstring", _on_docstring, priority=400)
    app.connect("autodoc-process-signature", _on_signature)
    return {"parallel_read_safe": True}
