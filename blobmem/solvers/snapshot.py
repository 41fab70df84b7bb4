"""Snapshots on disk: PREFIX_iter_N.caffemodel, PREFIX_iter_N.solverstate as Caffe writes them, and beside them
PREFIX_iter_N.blobmem.json with all else that a run needs to go on bit for bit. In HDF5 the first two end in .h5.

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
from blobmem.solvers import state as states
from blobmem.solvers.state import Slots, State

VERSION = 1
PART = ".part"


@dataclass(frozen=True, slots=True)
class Kind:
    """How the three files of a snapshot end, by the format of the first two."""

    model: str
    sidecar: str
    state: str


BINARY = Kind(".caffemodel", ".blobmem.json", ".solverstate")
HDF5 = Kind(".caffemodel.h5", ".h5.blobmem.json", ".solverstate.h5")


def kind_of(param: Any) -> Kind:
    """The kind that a solver's snapshot_format asks for."""
    return HDF5 if param.snapshot_format == caffe_pb2.SolverParameter.HDF5 else BINARY


def split(path: str) -> tuple[str, Kind]:
    """What comes before the ending of a solverstate's path (all of it if that is another one), and the kind."""
    kind = HDF5 if path.endswith(HDF5.state) else BINARY
    return path.removesuffix(kind.state), kind


def model_path(path: str) -> str:
    """The path of the parameters that `write` put beside a solverstate."""
    base, kind = split(path)
    return base + kind.model


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot as read from disk.

    Attributes:
        path: of the solverstate.
        state: what it says.
        model: path of the caffemodel; None if the state names none.
        sidecar: path that the sidecar has, or would have.
        carried: what the sidecar carries; None where there is none.
    """

    path: str
    state: State
    model: str | None
    sidecar: str
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


def write(base: str, kind: Kind, model: Any, state: Any, carried: dict[str, Any]) -> str:
    """Write the three files of a snapshot: all or nothing, whenever the process is killed.

    Args:
        base: path without extension, PREFIX_iter_N.
        kind: the files' endings.
        model: the net's parameters: the bytes of a file, or a NetParameter.
        state: the bytes of a file, or a SolverState; its learned_net is `base` with the ending of the model.
        carried: plain values for the sidecar.

    Returns the path of the solverstate. Raises NetError if a file cannot be written.
    """
    blobs = {kind.model: _serialize(model, base + kind.model), kind.state: _serialize(state, base + kind.state)}
    hashes = {_key(extension): hashlib.sha256(data).hexdigest() for extension, data in blobs.items()}
    sidecar = {"version": VERSION, "sha256": hashes, **carried}
    blobs[kind.sidecar] = json.dumps(sidecar, indent=1).encode()
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
            os.unlink(base + kind.state)
        for extension in (kind.model, kind.sidecar, kind.state):
            os.replace(base + extension + PART, base + extension)
        _sync_folder(base)
    except OSError as error:
        raise NetError(
            f"snapshot {base} cannot take its name: {error.strerror or error}; its files end in "
            f"{PART}, and restoring {base}{kind.state} will finish it"
        ) from error
    return base + kind.state


def _serialize(content: Any, path: str) -> bytes:
    if isinstance(content, bytes):
        return content
    try:
        return content.SerializeToString()
    except Exception as error:  # the runtimes raise different types beyond 2 GiB
        raise NetError(f"{path} cannot be written: {error}; snapshot_format: HDF5 has no limit") from error


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


def read(path: str | os.PathLike[str], slots: Slots) -> Snapshot:
    """A snapshot by the path of its solverstate, with a sidecar or, as Caffe writes it, without.

    The caffemodel is looked for where the state says, else beside the state, under the name it had or the state's.
    Raises NetError for files that are missing, damaged, of another kind, or not those that were written together, and
    for a history that does not fit `slots`.
    """
    path = os.fspath(path)
    base, kind = split(path)
    if base != path and not os.path.exists(path):
        _finish(base, kind)
    state = states.read(path, slots)
    beside = base + kind.sidecar
    sidecar = _read_sidecar(beside, kind) if base != path else None
    if sidecar is None:
        return Snapshot(path, state, _find_model(path, state), beside, None)
    expected = sidecar["sha256"]
    if _digest(path) != expected[_key(kind.state)]:
        raise NetError(
            f"{path} and {beside} were not written together (sha256 differs): take both from one "
            "snapshot, or remove the second to restore as Caffe does"
        )
    return Snapshot(path, state, _find_model(path, state, expected[_key(kind.model)]), beside, sidecar)


def _find_model(path: str, state: State, digest: str | None = None) -> str | None:
    """The caffemodel of a state, which may have been moved or renamed with it; with a digest, the one that has it."""
    if not state.learned_net:
        return None
    beside = os.fspath(Path(path).parent / Path(state.learned_net.replace("\\", "/")).name)
    renamed = model_path(path)
    found = [name for name in (state.learned_net, beside, renamed) if os.path.isfile(name)]
    if not found:
        raise NetError(f"{path} belongs with {state.learned_net}: neither this nor {beside} nor {renamed} is there")
    matching = [name for name in found if digest is None or _digest(name) == digest]
    if not matching:
        raise NetError(f"{path} and {found[0]} were not written together (sha256 differs): take both from one snapshot")
    return matching[0]


def _read_sidecar(path: str, kind: Kind) -> dict[str, Any] | None:
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
    if not isinstance(hashes, dict) or not {_key(kind.model), _key(kind.state)} <= set(hashes):
        raise NetError(f"{path} is damaged (sha256 is missing): remove it to restore as Caffe does")
    return sidecar


def _finish(base: str, kind: Kind) -> None:
    """Give the files of a complete snapshot their names, if a kill came in between; else leave all as it is."""
    for sidecar_path in (base + kind.sidecar + PART, base + kind.sidecar):
        try:
            sidecar = _read_sidecar(sidecar_path, kind)
        except NetError:
            continue
        if sidecar is None:
            continue
        parts = [sidecar_path]
        for extension in (kind.model, kind.state):
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
