"""Files written entirely or not at all, and read within bounds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from blobmem.errors import NetError
from blobmem.proto import files


def test_write_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_atomic(path, b"one")
    files.write_atomic(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["f"]


def test_modes_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    files.write_atomic(tmp_path / "f", b"")
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "f"
    files.write_atomic(path, b"old")

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(NetError, match="f cannot be written: No space left on device"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_an_interrupt_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    files.write_atomic(path, b"old")

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_bytes_are_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def recorded(name: str) -> Callable[..., None]:
        original = getattr(os, name)

        def call(*args: object) -> None:
            calls.append(name)
            original(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(files.os, name, recorded(name))
    files.write_atomic(tmp_path / "f", b"x")
    assert calls[:2] == ["fsync", "replace"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NetError, match=r"create the folder .*nowhere first"):
        files.write_atomic(tmp_path / "nowhere" / "f", b"")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    files.write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    files.write_atomic(path, b"x")
    assert files.read_bytes(path, 10) == b"x"


def test_the_limit_is_inclusive(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "f", 5) == b"12345"
    with pytest.raises(NetError, match="is larger than"):
        files.read_bytes(tmp_path / "f", 4)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_are_read_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    threading.Thread(target=lambda: path.write_bytes(b"text"), daemon=True).start()
    assert files.read_bytes(path, 100) == b"text"


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_an_endless_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_TEXT", 3 * 2**20)
    with pytest.raises(NetError, match="is larger than 3 MiB"):
        files.read_bytes("/dev/zero", 2**31 - 1)
