"""Imports go one way, from the top of the design's table to the bottom."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "blobmem"
LEVELS = [
    {"cli"},
    {"detector", "fit", "picture", "summary", "timeline"},
    {"classifier", "draw", "footprint", "pycaffe"},
    {"io"},
    {"solvers", "data"},
    {"net"},
    {"layers"},
    {"ops"},
    {"memory"},
    {"devices"},
    {"coord_map"},
    {"net_spec", "logs"},
    {"proto"},
]
ANYWHERE = {"errors", "version", "caffe_names", "dtypes"}
LEVEL = {name: depth for depth, names in enumerate(LEVELS) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("blobmem"):
            parts = node.module.split(".")
            yield from ([parts[1]] if len(parts) > 1 else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "blobmem" and len(parts) > 1:
                    yield parts[1]


def test_imports_point_down():
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ANYWHERE or room == "__init__":
            continue
        for target in imports(path):
            if target in ANYWHERE or target == room:
                continue
            assert target in LEVEL, f"{path} imports blobmem.{target}, which has no place in the layering"
            assert LEVEL[target] > LEVEL[room], f"{path}: {room} must not import {target}"


def test_every_package_has_a_level():
    rooms = {p.stem if p.is_file() else p.name for p in PACKAGE.iterdir() if not p.name.startswith("__")}
    assert rooms <= set(LEVEL) | ANYWHERE
