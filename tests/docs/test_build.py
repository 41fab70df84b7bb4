"""Sphinx builds the pages without a warning, and docstrings come through as they were written."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

spec = importlib.util.spec_from_file_location("plain_docstrings", DOCS / "plain_docstrings.py")
plain_docstrings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plain_docstrings)

CASES = {
    "bars": ("y = |x|.", r"y = \|x\|."),
    "stars": ("y = x ** 2 * z", r"y = x \*\* 2 \* z"),
    "backslash": (r"a\b", r"a\\b"),
    "underscore at the end": ("the weights w_ of x_1", r"the weights w\_ of x_1"),
    "code": ("a `x | y` and |z|", r"a ``x | y`` and \|z\|"),
    "example": ("Say:\n\n    a * b\n\nThen c * d.", "Say:\n\n::\n\n    a * b\n\nThen c \\* d."),
    "section": ("Args:\n    x: one * two.", "Args:\n    x: one \\* two."),
    "section of two parts": ("Args:\n    x: one.\n\n    y: a | b.", "Args:\n    x: one.\n\n    y: a \\| b."),
}


@pytest.mark.parametrize("case", CASES)
def test_plain_text_is_kept(case):
    text, expected = CASES[case]
    assert "\n".join(plain_docstrings.rest(text.split("\n"))) == expected


def test_without_a_warning(tmp_path):
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason="needs the extra docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-E", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    types = (tmp_path / "api" / "layer_types.html").read_text()
    assert "y = |x|." in types and "alpha * (exp(x) - 1)" in types
    assert "SolverParameter" in (tmp_path / "examples.html").read_text()
    assert (tmp_path / "_images" / "memory.svg").exists()
