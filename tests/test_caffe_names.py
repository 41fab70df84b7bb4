"""`import caffe` means blobmem, in a process of its own for each case."""

import subprocess
import sys
import textwrap


def run(code):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)


def test_modules_are_the_same_objects():
    done = run(
        """
        import blobmem
        blobmem.install_as_caffe()
        blobmem.install_as_caffe()
        import caffe, caffe.io, caffe.proto.caffe_pb2, caffe.pycaffe
        from caffe.proto import caffe_pb2
        from caffe import layers as L, params as P
        from caffe._caffe import Net
        import blobmem.io
        assert caffe is blobmem and caffe.io is blobmem.io and Net is blobmem.Net
        assert caffe_pb2 is blobmem.proto.caffe_pb2 and caffe_pb2.NetParameter
        assert blobmem.io.__spec__.name == "blobmem.io" and blobmem.__spec__.name == "blobmem"
        import importlib.util
        assert importlib.util.find_spec("caffe.nothing") is None
        """
    )
    assert done.returncode == 0, done.stderr


def test_another_caffe_that_is_imported_already(tmp_path):
    (tmp_path / "caffe.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import caffe, blobmem; blobmem.install_as_caffe()"
    done = run(code)
    assert done.returncode == 1
    assert "another caffe is already imported" in done.stderr and "caffe.py" in done.stderr


def test_submodules_that_nothing_has_imported_yet():
    done = run(
        """
        import blobmem
        blobmem.install_as_caffe()
        from caffe.coord_map import crop
        import caffe.draw, caffe.classifier, caffe.net_spec
        import sys
        for name in ("coord_map", "draw", "classifier", "net_spec"):
            assert sys.modules[f"caffe.{name}"] is sys.modules[f"blobmem.{name}"] is getattr(caffe, name)
        assert caffe.Classifier is caffe.classifier.Classifier
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_module_that_caffe_does_not_have_is_named_as_asked_for():
    done = run("import blobmem; blobmem.install_as_caffe(); import caffe.nothing")
    assert done.returncode == 1 and done.stderr.endswith("No module named 'caffe.nothing'\n")


def test_a_part_of_another_caffe_counts_as_well():
    code = "import sys, types; sys.modules['caffe.proto'] = types.ModuleType('proto'); import blobmem; blobmem.{}"
    done = run(code.format("install_as_caffe()"))
    assert done.returncode == 1 and "another caffe.proto is already imported" in done.stderr


def test_modules_are_reloaded_and_pickled_under_their_own_names():
    done = run(
        """
        import importlib, pickle
        import blobmem
        blobmem.install_as_caffe()
        import caffe.coord_map
        assert importlib.reload(caffe.coord_map) is blobmem.coord_map
        assert b"blobmem" in pickle.dumps(caffe.proto.caffe_pb2.Datum(label=3))
        """
    )
    assert done.returncode == 0, done.stderr


def test_what_is_imported_later():
    done = run(
        """
        import sys
        import blobmem
        later = ["blobmem.io", "blobmem.draw", "blobmem.coord_map", "blobmem.classifier", "blobmem.detector"]
        assert not set(later) & set(sys.modules)
        assert blobmem.Detector.__mro__[1] is blobmem.Net and blobmem._caffe is blobmem
        assert all(hasattr(blobmem, name) for name in blobmem.__all__)
        assert not hasattr(blobmem, "nothing")
        """
    )
    assert done.returncode == 0, done.stderr
