"""How kernels are compiled and kept."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import blobmem

KERNELS = """
from blobmem.ops.host.compiled import kernel, part

@part
def helper(x):
    return x + {add}

@kernel
def add(x):
    return helper(x)
"""
SHOW = "import {name}; print({name}.add(1), sum({name}.add.stats.cache_hits.values()))"


@pytest.fixture
def run(tmp_path):
    """Run code in a process with a copy of the package; returns what it prints."""
    source = Path(blobmem.__file__).parent
    for name, files in (("ops/host", "*.py"), ("ops", "*.py"), ("proto", "files.py")):
        (tmp_path / "blobmem" / name).mkdir(parents=True, exist_ok=True)
        for file in (source / name).glob(files):
            shutil.copy(file, tmp_path / "blobmem" / name)
    (tmp_path / "blobmem" / "__init__.py").touch()
    shutil.copy(source / "errors.py", tmp_path / "blobmem")

    def run(code, **environment):
        names = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path / "home")}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "XDG_"))}
        done = subprocess.run([sys.executable, "-c", code], env=clean | names | environment, capture_output=True, text=True,
                              cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


def test_code_is_kept_and_follows_its_sources(run, tmp_path):
    module = tmp_path / "blobmem" / "ops" / "host" / "probe.py"
    module.write_text(KERNELS.format(add=1))
    show = SHOW.format(name="blobmem.ops.host.probe")
    assert run(show) == ["2", "0"]
    os.utime(module, (1, 1))  # as in another checkout
    assert run(show) == ["2", "1"]
    # another module of the package, from which code may have been taken, changes
    (module.parent / "other.py").write_text("# nothing\n")
    assert run(show) == ["2", "0"]


def test_code_follows_the_files_of_its_parts(run, tmp_path):
    """Wherever these are, and whoever calls them."""
    begin, helper, add = KERNELS.split("\n\n")
    between = "@part\ndef between(x):\n    return helper(x)\n"
    (tmp_path / "far.py").write_text(f"{begin}\n{helper}\n".format(add=1))
    (tmp_path / "near.py").write_text(
        f"{begin}\nfrom far import helper\n\n{between}\n{add.replace('helper(x)', 'between(x)')}"
    )
    show = SHOW.format(name="near")
    assert run(show) == ["2", "0"] and run(show) == ["2", "1"]
    (tmp_path / "far.py").write_text(f"{begin}\n{helper}\n".format(add=2))
    assert run(show) == ["3", "0"]


def test_a_place_that_cannot_be_written(run, tmp_path):
    host = tmp_path / "blobmem" / "ops" / "host"
    (host / "probe.py").write_text(KERNELS.format(add=1))
    (host / "__pycache__").touch()  # so that no folder can be made there, whoever we are
    show = SHOW.format(name="blobmem.ops.host.probe")
    assert run(show) == ["2", "0"]
    assert run(show) == ["2", "1"]
    assert list((tmp_path / "home").rglob("*.nbc"))


def test_no_place_at_all(run, tmp_path):
    host = tmp_path / "blobmem" / "ops" / "host"
    (host / "probe.py").write_text(KERNELS.format(add=1))
    (host / "__pycache__").touch()
    (tmp_path / "home").touch()
    show = SHOW.format(name="blobmem.ops.host.probe")
    assert run(show) == ["2", "0"]
    assert run(show) == ["2", "0"]


def test_kernels_release_the_lock():
    from blobmem.ops.host.channels import affine

    assert affine.targetoptions["nogil"]
