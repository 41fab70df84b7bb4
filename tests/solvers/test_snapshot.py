"""Snapshots on disk: killed at any moment they are the old ones or the new ones; damage is named."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2, hdf5
from blobmem.proto.text import read_binary
from blobmem.solvers import snapshot
from blobmem.solvers.state import Slots, State


class Killed(BaseException):
    """Not an Exception: no clean-up may run, as in a process that is killed."""


NONE = Slots([], "no parameters")


def model_and_state(base, kind, number):
    state = State(number, 0, os.fspath(base) + kind.model, [])
    if kind is snapshot.HDF5:
        return hdf5.encode([("data/a/0", np.full(100, number, np.float32))]), state.to_hdf5()
    model = caffe_pb2.NetParameter(name=f"net {number}")
    model.layer.add(name="a").blobs.add(data=[number] * 100)
    return model, state.to_proto()


def write(base, number, kind=snapshot.BINARY):
    return snapshot.write(os.fspath(base), kind, *model_and_state(base, kind, number), {"number": number})


def read(path):
    return snapshot.read(path, NONE)


def contents(path):
    """The number in each of the three files of a snapshot, read as `restore` does; None if there is none."""
    try:
        found = read(path)
    except NetError as error:
        assert "there is no file" in str(error)
        return None
    if hdf5.is_hdf5(found.model):
        with hdf5.File(found.model) as file:
            value = file.dataset("data/a/0").read(int)[0]
    else:
        value = read_binary(found.model, caffe_pb2.NetParameter).layer[0].blobs[0].data[0]
    return found.state.iter, found.carried["number"], value


@pytest.fixture(params=[snapshot.BINARY, snapshot.HDF5], ids=["binary", "hdf5"])
def kind(request):
    return request.param


class Killer:
    """Kills at the nth call among open, write, fsync, unlink and replace; before it, or half-way through a write."""

    def __init__(self, monkeypatch, at):
        self.at, self.calls = at, 0
        monkeypatch.setattr(snapshot, "open", self.open, raising=False)
        for name in ("fsync", "unlink", "replace"):
            monkeypatch.setattr(snapshot.os, name, self.wrap(getattr(os, name)))

    def strike(self):
        self.calls += 1
        if self.calls == self.at:
            raise Killed

    def wrap(self, function):
        def call(*args):
            self.strike()
            return function(*args)

        return call

    def open(self, path, mode):
        if "w" not in mode:
            return open(path, mode)
        self.strike()
        file = open(path, mode, buffering=0)  # noqa: SIM115
        killer = self

        class File:
            def __enter__(self):
                return self

            def __exit__(self, *exc):
                file.close()

            def write(self, data):
                killer.calls += 1
                if killer.calls == killer.at:
                    file.write(data[: len(data) // 2])
                    raise Killed
                file.write(data)

            def flush(self):
                pass

            def fileno(self):
                return file.fileno()

        return File()


def kill_points():
    """How many calls an undisturbed write makes, an old snapshot being there."""
    return 3 * 3 + 1 + 1 + 3 + 1  # open, write, sync; folder; unlink; replace; folder


@pytest.mark.parametrize("old", [False, True], ids=["fresh", "over an old one"])
@pytest.mark.parametrize("at", range(1, kill_points() + 1))
def test_killed_at_any_moment(tmp_path, at, old, kind):
    base = tmp_path / "s_iter_5"
    path = f"{base}{kind.state}"
    if old:
        write(base, 1, kind)
    with pytest.MonkeyPatch.context() as monkeypatch:
        Killer(monkeypatch, at)
        with pytest.raises(Killed):
            write(base, 2, kind)
    found = contents(path)
    assert found in ([(1, 1, 1), (2, 2, 2)] if old else [None, (2, 2, 2)])
    write(base, 3, kind)
    assert contents(path) == (3, 3, 3)
    expected = {f"s_iter_5{ending}" for ending in (kind.model, kind.sidecar, kind.state)}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_there_are_no_more_calls_than_were_tried(tmp_path, kind):
    write(tmp_path / "s", 1, kind)
    with pytest.MonkeyPatch.context() as monkeypatch:
        killer = Killer(monkeypatch, 0)
        write(tmp_path / "s", 2, kind)
    assert killer.calls == kill_points()


def test_another_snapshot_is_not_touched_by_a_kill(tmp_path):
    write(tmp_path / "s_iter_5", 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        Killer(monkeypatch, 8)
        with pytest.raises(Killed):
            write(tmp_path / "s_iter_10", 2)
    assert contents(f"{tmp_path}/s_iter_5.solverstate") == (1, 1, 1)
    assert contents(f"{tmp_path}/s_iter_10.solverstate") is None


def test_a_full_disk_leaves_the_old_snapshot_and_no_litter(tmp_path, monkeypatch, kind):
    path = write(tmp_path / "s", 1, kind)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot.os, "fsync", full)
    with pytest.raises(NetError, match="cannot be written: No space left on device"):
        write(tmp_path / "s", 2, kind)
    assert contents(path) == (1, 1, 1)
    assert not list(tmp_path.glob("*.part"))


def test_both_kinds_of_one_iteration_live_side_by_side(tmp_path):
    paths = [write(tmp_path / "s", number, kind) for number, kind in ((1, snapshot.BINARY), (2, snapshot.HDF5))]
    assert [contents(path) for path in paths] == [(1, 1, 1), (2, 2, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "s.blobmem.json", "s.caffemodel", "s.caffemodel.h5", "s.h5.blobmem.json", "s.solverstate", "s.solverstate.h5"
    ]  # fmt: skip


def test_files_are_caffes_and_name_each_other(tmp_path):
    path = write(tmp_path / "s", 4)
    state = read_binary(path, caffe_pb2.SolverState)
    assert state.learned_net == f"{tmp_path}/s.caffemodel" == snapshot.model_path(path)
    assert read_binary(state.learned_net, caffe_pb2.NetParameter).name == "net 4"


def test_hdf5_files_name_each_other(tmp_path):
    path = write(tmp_path / "s", 4, snapshot.HDF5)
    assert path == f"{tmp_path}/s.solverstate.h5"
    assert read(path).state.learned_net == f"{tmp_path}/s.caffemodel.h5" == snapshot.model_path(path)


def test_a_moved_snapshot_finds_its_model_beside_it(tmp_path, kind):
    write(tmp_path / "s", 1, kind)
    (tmp_path / "moved").mkdir()
    for path in list(tmp_path.glob("s.*")):
        path.rename(tmp_path / "moved" / path.name)
    moved = f"{tmp_path}/moved/s{kind.state}"
    assert contents(moved) == (1, 1, 1)
    write(tmp_path / "s", 2, kind)  # another one where the state says: the one that belongs with it counts
    assert contents(moved) == (1, 1, 1)


def test_a_renamed_snapshot_finds_its_model(tmp_path, kind):
    write(tmp_path / "s", 1, kind)
    for path in list(tmp_path.glob("s.*")):
        path.rename(tmp_path / path.name.replace("s.", "best.", 1))
    assert contents(f"{tmp_path}/best{kind.state}") == (1, 1, 1)


def test_mixed_files_are_refused(tmp_path):
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2)
    state = (tmp_path / "a.solverstate").read_bytes()
    (tmp_path / "a.solverstate").write_bytes((tmp_path / "b.solverstate").read_bytes())
    with pytest.raises(NetError, match=r"a\.solverstate and .*a\.blobmem\.json were not written together"):
        read(tmp_path / "a.solverstate")
    (tmp_path / "a.solverstate").write_bytes(state)
    (tmp_path / "a.caffemodel").write_bytes((tmp_path / "b.caffemodel").read_bytes())
    with pytest.raises(NetError, match=r"a\.solverstate and .*a\.caffemodel were not written together"):
        read(tmp_path / "a.solverstate")


def test_missing_model(tmp_path):
    path = write(tmp_path / "s", 1)
    (tmp_path / "s.caffemodel").unlink()
    with pytest.raises(NetError, match=r"belongs with .*s\.caffemodel: neither this nor"):
        read(path)


def test_missing_state(tmp_path):
    with pytest.raises(NetError, match="there is no file"):
        read(tmp_path / "s.solverstate")


@pytest.mark.parametrize("damage", [b"", b"hello", b"\x89HDF\r\n\x1a\n", b"\x0a\xff\xff"])
def test_foreign_and_truncated_state(tmp_path, damage):
    path = Path(write(tmp_path / "s", 1))
    (tmp_path / "s.blobmem.json").unlink()
    path.write_bytes(damage)
    with pytest.raises(NetError, match=r"s\.solverstate"):
        read(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is damaged"),
        ("[]", "is not a sidecar of version 1"),
        ('{"version": 99}', "is not a sidecar of version 1"),
        ('{"version": 1}', "sha256 is missing"),
    ],
)
def test_damaged_sidecar(tmp_path, text, message):
    path = write(tmp_path / "s", 1)
    (tmp_path / "s.blobmem.json").write_text(text)
    with pytest.raises(NetError, match=rf"s\.blobmem\.json.*{message}"):
        read(path)


def test_without_sidecar(tmp_path):
    path = write(tmp_path / "s", 1)
    (tmp_path / "s.blobmem.json").unlink()
    found = read(path)
    assert found.carried is None
    assert found.model == f"{tmp_path}/s.caffemodel"


def test_sidecar_is_json_with_what_was_given(tmp_path):
    write(tmp_path / "s", 1)
    sidecar = json.loads((tmp_path / "s.blobmem.json").read_text())
    assert sidecar["number"] == 1
    assert set(sidecar["sha256"]) == {"caffemodel", "solverstate"}


def test_the_format_of_a_solver_file():
    param = caffe_pb2.SolverParameter()
    assert snapshot.kind_of(param) is snapshot.BINARY
    param.snapshot_format = caffe_pb2.SolverParameter.HDF5
    assert snapshot.kind_of(param) is snapshot.HDF5


def test_folder_is_made(tmp_path):
    snapshot.check_folder(f"{tmp_path}/a/b/prefix")
    assert (tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NetError, match="nothing can be written to the folder"):
        snapshot.check_folder(f"{tmp_path}/file/prefix")
