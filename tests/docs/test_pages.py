"""Pages that are made are what the package makes of them now, and name all that Caffe has."""

import importlib.util
import re
from pathlib import Path

import pytest

import blobmem
from blobmem.solvers import solver_types

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DATA = ROOT / "tests" / "data"

spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


def own(types):
    """Types of the package: other tests of the same process may have registered some of their own."""
    return {name: cls for name, cls in types.items() if cls.__module__.startswith("blobmem.")}


@pytest.fixture(autouse=True)
def only_our_layers(monkeypatch):
    types = own(blobmem.layer_types())
    monkeypatch.setattr(blobmem, "layer_types", lambda: types)


def schema(file, kind, message):
    """Names that a table of messages has for one message."""
    rows = (line.split("\t") for line in (DATA / file).read_text().splitlines() if line[:1] != "#")
    return {row[2] for row in rows if row[:2] == [kind, message]}


def options(kind):
    return {name for fact in generate.facts(kind) for name in fact.here.split(",")} - {"-"}


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_is_what_the_package_makes_of_it(name):
    assert (DOCS / name).read_text() == generate.PAGES[name](), "run python docs/generate.py"


def test_every_layer_of_caffe_is_here():
    absent = [fact.name for fact in generate.facts("layer") if fact.name not in blobmem.layer_types()]
    assert absent == []


def test_every_options_message_of_caffe_belongs_to_a_layer():
    messages = {name for name in schema("schema.tsv", "field", "LayerParameter") if name.endswith("_param")}
    assert options("layer") == messages
    assert options("community") <= messages | schema("community.tsv", "field", "LayerParameter")
    assert schema("community.tsv", "field", "LayerParameter") <= options("community")


def test_every_registered_type_is_in_a_table():
    tables = {fact.name for kind in ("layer", "community") for fact in generate.facts(kind)}
    assert set(blobmem.layer_types()) - {"Convert"} <= tables  # which nets in half precision put in by themselves


def test_every_solver_of_caffe_is_here():
    names = {fact.name for fact in generate.facts("solver")}
    assert names == set(solver_types())
    assert {name.upper() for name in names} == schema("schema.tsv", "enum", "SolverParameter.SolverType")


def test_what_is_absent_has_a_reason():
    for fact in generate.facts("community"):
        assert (fact.name in blobmem.layer_types()) != fact.note.startswith("absent: "), fact.name
    for tool in generate.facts("tool"):
        assert generate.stands_for(tool) or tool.note, tool.name


def test_a_layer_or_tool_that_goes_shows_as_a_dash(monkeypatch):
    types = {name: cls for name, cls in blobmem.layer_types().items() if name != "ReLU"}
    monkeypatch.setattr(blobmem, "layer_types", lambda: types)
    assert "| `ReLU` | - |" in generate.coverage() and "60 of 61 layer types" in generate.coverage()
    monkeypatch.setattr(generate, "command_names", lambda: ["train"])
    assert "| `caffe train` | `blobmem train` |" in generate.coverage()
    assert "| `caffe time` | - |" in generate.coverage()


def test_the_command_line_page_has_every_option():
    page = generate.commands()
    for path, command in generate.parsers(generate.cli.parser()):
        section = re.search(rf"(?ms)^#+ blobmem {' '.join(path)}\n(.*?)(?=^## |\Z)", page)[1]
        for option in command._option_string_actions:
            assert option in ("-h", "--help") or re.search(rf"{option}[ `,]", section), (path, option)


def test_help_text_becomes_markdown():
    text = "What it does.\n\nexample, a line:\n  run this\n    and that\n\nFor x < y."
    made = "What it does.\n\nexample, a line:\n\n```text\nrun this\n  and that\n```\n\nFor x &lt; y.\n"
    assert generate.prose(text) == made
    assert generate.prose(None) == ""


def test_links_of_the_readme_lead_somewhere():
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text()):
            assert "://" in target or (ROOT / target).exists(), target
