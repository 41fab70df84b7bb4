"""The page of figures is what the results say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_from_the_results():
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    for name, text in {"benchmarks.md": table.page(), **table.pictures()}.items():
        assert (ROOT / "docs" / name).read_text() == text
