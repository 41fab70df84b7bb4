"""Snapshots on disk: PREFIX_iter_N.caffemodel, PREFIX_iter_N.solverstate as Caffe writes them, and beside them
PREFIX_iter_N.blobmem.json with all else that a run needs to go on bit for bit.

Written so that a run killed at any moment leaves the old snapshot of that name or the new one, never a mixture. All
three files are written and synced under temporary names first; then the old solverstate goes, and the new files take
their names, the solverstate last. A kill between these steps is made good by `read`, which finishes the renaming.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_binary

VERSION = 1
MODEL, SIDECAR, STATE = ".caffemodel", ".blobmem.json", ".solverstate"
PART = ".part"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot as read from disk.

    Attributes:
        path: of the solverstate.
        state: the SolverState.
        model: path of the caffemodel; None if the state names none.
        carried: what the sidecar carries; None where there is none.
    """

    path: str
    state: Any
    model: str | None
    carried: dict[str, Any] | None


def check_folder(prefix: str) -> None:
    """Make the folder of a snapshot prefix if need be. Raises NetError if files cannot be written there."""
    folder = os.path.dirname(prefix) or "."
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NetError(
            f"snapshot_prefix '{prefix}': nothing can be written to the folder {folder} ({error.strerror or error}); "
            "give another snapshot_prefix, or snapshot: 0 and snapshot_after_train: false for none"
        ) from error


# -------------------------------------------------------------------- writing


def write(base: str, model: Any, state: Any, carried: dict[str, Any]) -> str:
    """Write the three files of a snapshot: all or nothing, whenever the process is killed.

    Args:
        base: path without extension, PREFIX_iter_N.
        model: the NetParameter with its parameters' values.
        state: the SolverState; its learned_net is filled in here.
        carried: plain values for the sidecar.

    Returns the path of the solverstate. Raises NetError if a file cannot be written.
    """
    state.learned_net = base + MODEL
    blobs = {MODEL: _serialize(model, base + MODEL), STATE: _serialize(state, base + STATE)}
    hashes = {_key(extension): hashlib.sha256(data).hexdigest() for extension, data in blobs.items()}
    sidecar = {"version": VERSION, "sha256": hashes, **carried}
    blobs[SIDECAR] = json.dumps(sidecar, indent=1).encode()
    try:
        for extension, data in blobs.items():
            _write_synced(base + extension + PART, data)
        _sync_folder(base)
    except OSError as error:
        for extension in blobs:
            with contextlib.suppress(OSError):
                os.unlink(base + extension + PART)
        raise NetError(
            f"snapshot {base} cannot be written: {error.strerror or error}; free space, or give another snapshot_prefix"
        ) from error
    try:
        # from here on `read` can finish what a kill interrupts
        with contextlib.suppress(FileNotFoundError):
            os.unlink(base + STATE)
        for extension in (MODEL, SIDECAR, STATE):
            os.replace(base + extension + PART, base + extension)
        _sync_folder(base)
    except OSError as error:
        raise NetError(
            f"snapshot {base} cannot take its name: {error.strerror or error}; its files end in "
            f"{PART}, and restoring {base}{STATE} will finish it"
        ) from error
    return base + STATE


def _serialize(message: Any, path: str) -> bytes:
    try:
        return message.SerializeToString()
    except Exception as error:  # the runtimes raise different types beyond 2 GiB
        raise NetError(f"{path} cannot be written: {error}") from error


def _write_synced(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: str) -> None:
    """Make renamings last; where folders cannot be synced (Windows) the system does it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -------------------------------------------------------------------- reading


def read(path: str | os.PathLike[str]) -> Snapshot:
    """A snapshot by the path of its solverstate, with a sidecar or, as Caffe writes it, without.

    The caffemodel is looked for where the state says, else beside the state, under the name it had or the state's.
    Raises NetError for files that are missing, damaged, of another kind, or not those that were written together.
    """
    path = os.fspath(path)
    if path.endswith((".h5", ".hdf5")):
        raise NetError(
            f"{path}: this version reads binary solverstates only, not HDF5; write it with snapshot_format: BINARYPROTO"
        )
    base = path.removesuffix(STATE)
    if base != path and not os.path.exists(path):
        _finish(base)
    state = read_binary(path, caffe_pb2.SolverState)
    sidecar = _read_sidecar(base + SIDECAR) if base != path else None
    if sidecar is None:
        return Snapshot(path, state, _find_model(path, state), None)
    expected = sidecar["sha256"]
    if _digest(path) != expected[_key(STATE)]:
        raise NetError(
            f"{path} and {base}{SIDECAR} were not written together (sha256 differs): take both from one "
            "snapshot, or remove the second to restore as Caffe does"
        )
    return Snapshot(path, state, _find_model(path, state, expected[_key(MODEL)]), sidecar)


def _find_model(path: str, state: Any, digest: str | None = None) -> str | None:
    """The caffemodel of a state, which may have been moved or renamed with it; with a digest, the one that has it."""
    if not state.learned_net:
        return None
    beside = os.fspath(Path(path).parent / Path(state.learned_net.replace("\\", "/")).name)
    renamed = path.removesuffix(STATE) + MODEL
    found = [name for name in (state.learned_net, beside, renamed) if os.path.isfile(name)]
    if not found:
        raise NetError(f"{path} belongs with {state.learned_net}: neither this nor {beside} nor {renamed} is there")
    matching = [name for name in found if digest is None or _digest(name) == digest]
    if not matching:
        raise NetError(f"{path} and {found[0]} were not written together (sha256 differs): take both from one snapshot")
    return matching[0]


def _read_sidecar(path: str) -> dict[str, Any] | None:
    """What a sidecar carries, None if there is none. Raises NetError if it is not one that this version reads."""
    try:
        with open(path, "rb") as file:
            sidecar = json.loads(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise NetError(f"{path} is damaged ({error}): remove it to restore as Caffe does") from error
    if not isinstance(sidecar, dict) or sidecar.get("version") != VERSION:
        raise NetError(f"{path} is not a sidecar of version {VERSION}: remove it to restore as Caffe does")
    hashes = sidecar.get("sha256")
    if not isinstance(hashes, dict) or not {_key(MODEL), _key(STATE)} <= set(hashes):
        raise NetError(f"{path} is damaged (sha256 is missing): remove it to restore as Caffe does")
    return sidecar


def _finish(base: str) -> None:
    """Give the files of a complete snapshot their names, if a kill came in between; else leave all as it is."""
    for sidecar_path in (base + SIDECAR + PART, base + SIDECAR):
        try:
            sidecar = _read_sidecar(sidecar_path)
        except NetError:
            continue
        if sidecar is None:
            continue
        parts = [sidecar_path]
        for extension in (MODEL, STATE):
            names = (base + extension + PART, base + extension)
            parts += [name for name in names if _digest(name) == sidecar["sha256"][_key(extension)]][:1]
        if len(parts) == 3:
            _take_names([name for name in parts if name.endswith(PART)])
            return


def _take_names(parts: list[str]) -> None:
    try:
        for name in parts:
            os.replace(name, name.removesuffix(PART))
    except OSError as error:
        raise NetError(f"{parts[0]} cannot take its name: {error.strerror or error}; allow writing there") from error


def _key(extension: str) -> str:
    return extension[1:]


def _digest(path: str) -> str | None:
    """The sha256 of a file, None if there is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
