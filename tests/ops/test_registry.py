"""Declaring ops and finding them."""

import subprocess
import sys

import numpy as np
import pytest

from blobmem.ops import registry
from blobmem.ops.registry import ArraySpec, op, table


def test_array_spec():
    spec = ArraySpec.of(np.zeros((2, 3), np.float64))
    assert (spec.shape, spec.dtype, spec.ndim, spec.size, spec.nbytes) == ((2, 3), np.float64, 2, 6, 48)
    assert ArraySpec((), np.dtype("float32")).nbytes == 4


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setitem(registry._tables, "test", {})
    return registry._tables["test"]


def test_decorator_registers_and_returns_the_function(family):
    @op(family="test", workspace=lambda x, *, factor: factor * x.nbytes)
    def double(x, *, ws, factor):
        x *= factor

    entry = family["double"]
    assert entry.fn is double and entry.name == "double"
    assert entry.workspace_bytes(ArraySpec((3,), np.dtype("float32")), factor=2) == 24
    x = np.ones(2)
    entry(x, ws=None, factor=2)
    assert x.tolist() == [2, 2]


def test_bare_decorator_declares_no_workspace():
    assert table("host")["fill"].workspace is None
    assert table("host")["fill"].workspace_bytes(None, value=0.0) == 0


def test_one_name_is_one_op(family):
    def make(module):
        def same(x): ...

        same.__module__ = module
        return op(family="test")(same)

    make("a")
    make("a")  # a module imported again
    with pytest.raises(ValueError, match="two ops named 'same': a and b"):
        make("b")


def test_unknown_family():
    with pytest.raises(KeyError, match="abacus"):
        table("abacus")


def test_importing_blobmem_imports_no_compiler():
    code = "import sys, blobmem, blobmem.ops.registry; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
