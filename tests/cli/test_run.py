"""`blobmem run`, beside what Python itself does with the same script."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AS_CAFFE = "import sys; sys.path.insert(0, {root!r}); import blobmem; blobmem.install_as_caffe()\n"


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Run a script with `blobmem run` and with `python`, where caffe is blobmem as well."""
    site = tmp_path / "site"
    site.mkdir()
    folder = tmp_path / "scripts"
    folder.mkdir()

    def run(code, *arguments, name="script.py"):
        (folder / name).write_text(textwrap.dedent(code))
        # importing us takes most of the time
        (site / "sitecustomize.py").write_text(AS_CAFFE.format(root=str(ROOT)) if "caffe" in code else "")
        results = []
        for path, command in ((ROOT, ["-m", "blobmem", "run"]), (site, [])):
            monkeypatch.setenv("PYTHONPATH", str(path))
            results.append(
                subprocess.run(
                    [sys.executable, *command, name, *arguments],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    check=False,
                )
            )
        return results

    return run


def test_a_script_is_main(both, tmp_path):
    (tmp_path / "scripts" / "helper.py").write_text("import caffe\nnames = caffe.__name__")
    code = '''\
        """What it says."""
        import sys
        import caffe, caffe.io, helper
        import __main__
        from caffe.proto import caffe_pb2
        from caffe import layers as L
        assert __main__.sys is sys
        print(__name__, __file__, __doc__, __spec__, __cached__, sys.argv, sys.path[0], helper.names)
        print(L.ReLU(L.Input()).to_proto().layer[1].name, __loader__.get_filename(), sorted({*globals()} - {'__annotations__'}))
    '''
    ours, pythons = both(code, "--help", "--", "-x", "a b")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == pythons.stdout and "'--help', '--', '-x', 'a b'" in ours.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('bye')",
        "import sys; sys.exit()",
        "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as error:\n    raise ValueError('x') from error",
        "import caffe\ncaffe.Net('nothing.prototxt', caffe.TEST)",
        "x = = 1",
        "raise KeyboardInterrupt",
        "import warnings; warnings.warn('careful')",
        "import sys\nsys.excepthook = lambda *_: print('mine')\nraise ValueError",
        "import atexit; atexit.register(print, 'end')\nraise ValueError('x')",
    ],
    ids=["code", "text", "none", "chain", "net", "syntax", "interrupt", "warning", "hook", "atexit"],
)
def test_ends_are_pythons_own(both, code):
    ours, pythons = both(code)
    assert (ours.returncode, ours.stdout, ours.stderr) == (pythons.returncode, pythons.stdout, pythons.stderr)


def test_a_folder_beside_the_script_does_not_hide_ours(both, tmp_path):
    other = tmp_path / "scripts" / "caffe"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the wrong caffe')")
    ours, _ = both(
        "import sys; sys.path.insert(0, '.')\nimport caffe, caffe.io\nprint(caffe.__name__, caffe.io.__name__)"
    )
    assert (ours.returncode, ours.stdout) == (0, "blobmem blobmem.io\n"), ours.stderr


def test_a_script_that_is_not_there(blobmem, tmp_path):
    (tmp_path / "train.py").write_text("")
    result = blobmem("run", tmp_path / "trian.py")
    assert result.code == 1 and not result.out
    assert result.err == f"blobmem: there is no file {tmp_path}/trian.py; did you mean {tmp_path}/train.py?\n"


def test_another_caffe_is_refused(blobmem, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "caffe", type(sys)("caffe"))
    (tmp_path / "script.py").write_text("raise AssertionError('this must not run')")
    result = blobmem("run", tmp_path / "script.py")
    assert result.code == 1 and "another caffe is already imported" in result.err
