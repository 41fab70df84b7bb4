"""Nets that belong together: the train net and the test nets of a solver or net file, sharing memory."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blobmem import devices
from blobmem.errors import NetError
from blobmem.layers.base import TEST, TRAIN, default_seed
from blobmem.net.net import Net
from blobmem.net.sharing import SharingReport
from blobmem.proto import caffe_pb2
from blobmem.proto.text import is_text, read_net, read_solver


@dataclass(slots=True)
class Spec:
    """One net to build: a NetParameter with its source for messages, and the state to build it in."""

    model: Any
    source: str
    phase: int
    level: int = 0
    stages: tuple[str, ...] = ()


Specs = tuple[Spec, list[Spec]]
"""A train net and its test nets."""


@dataclass(slots=True)
class Nets:
    """A train net with its test nets.

    Attributes:
        train: the train net.
        tests: the test nets in the solver's order.
        reports: for each test net, what it shares with the nets before it, and why not the rest.
    """

    train: Net
    tests: list[Net] = field(default_factory=list)
    reports: list[SharingReport] = field(default_factory=list)


def _open(name: str, solver_source: str) -> tuple[Any, str]:
    """A net named in a solver: as Caffe from the working directory, else beside the solver file."""
    path = Path(name)
    if not path.exists() and solver_source and (Path(solver_source).parent / path.name).exists():
        path = Path(solver_source).parent / path.name
    return read_net(path), os.fspath(path)


def _spec(model: Any, source: str, phase: int, states: Sequence[Any]) -> Spec:
    """The net's state is the phase, overlaid by the net's own and then the solver's."""
    merged = caffe_pb2.NetState(phase=phase)
    merged.MergeFrom(model.state)
    for state in states:
        merged.MergeFrom(state)
    return Spec(model, source, merged.phase, merged.level, tuple(merged.stage))


def solver_specs(param: Any, source: str = "") -> Specs:
    """The train net and the test nets that a SolverParameter names, in Caffe's order of looking.

    Raises NetError unless there is exactly one train net, and a test_iter for each test net.
    """
    where = f"{source}: " if source else ""
    generic = (["net"] if param.HasField("net") else []) + (["net_param"] if param.HasField("net_param") else [])
    train = [name for name in ("train_net", "train_net_param") if param.HasField(name)]
    if len(generic) > 1 or len(train) + bool(generic and not train) != 1:
        raise NetError(f"{where}a solver names one train net, by net, net_param, train_net or train_net_param")

    @functools.cache  # the train net's file is mostly the test nets' too
    def get(name: str) -> tuple[Any, str]:
        value = getattr(param, name)
        return _open(value, source) if isinstance(value, str) else (read_net(value), source)

    train_states = [param.train_state] if param.HasField("train_state") else []
    train_spec = _spec(*get((train or generic)[0]), TRAIN, train_states)
    tests = [(read_net(model), source) for model in param.test_net_param]
    tests += [_open(name, source) for name in param.test_net]
    count = len(param.test_iter)
    if len(tests) > count or (len(tests) < count and not generic):
        raise NetError(
            f"{where}test_iter: expected one value for each test net, got {count} for {len(tests)} test nets"
        )
    tests += [get(generic[0]) for _ in range(count - len(tests))] if generic else []
    states: list[Sequence[Any]] = [[] for _ in tests]
    if param.test_state:
        if len(param.test_state) != len(tests):
            raise NetError(f"{where}test_state: expected none or {len(tests)}, one for each test net")
        states = [[state] for state in param.test_state]
    return train_spec, [_spec(model, name, TEST, extra) for (model, name), extra in zip(tests, states, strict=True)]


_SOLVER_FIELD = re.compile(r"(?m)^\s*(base_lr|lr_policy|max_iter|net|net_param|train_net|train_net_param)\s*[:{]")


def is_solver(model: Any) -> bool:
    """Whether a file, a text or a message is a solver's rather than a net's. Anything unreadable is not."""
    if hasattr(model, "DESCRIPTOR"):
        return bool(model.DESCRIPTOR.name == "SolverParameter")
    try:
        text = Path(model).read_text("utf-8", "replace")
    except (OSError, ValueError):
        text = os.fspath(model)
    return _SOLVER_FIELD.search(text) is not None


def specs_of(model: Any) -> Specs:
    """The nets of a solver or net file, or message; a net alone gives one train and one test net."""
    path = os.fspath(model) if isinstance(model, str | os.PathLike) and not is_text(model) else ""
    if is_solver(model):
        return solver_specs(read_solver(model), path)
    net = read_net(model)
    return _spec(net, path, TRAIN, []), [_spec(net, path, TEST, [])]


def build_nets(
    model: Any,
    share: bool = True,
    *,
    device: devices.Device | str | None = None,
    seed: int | None = None,
    dtype: Any = np.float32,
    train_batch: int | None = None,
    test_batches: Sequence[int] = (),
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    share_params: bool = True,
    forward_only_tests: bool = True,
    skip_damaged: bool = False,
    memory: str = "keep",
    keep: Iterable[str] = (),
    backward_streams: int | str = 1,
) -> Nets:
    """The train net and the test nets of a solver or net file, sharing parameters and every eligible blob.

    Args:
        model: path of a solver or net prototxt, its message, or what `specs_of` made of either.
        share: share blobs by name; otherwise parameters only.
        device, seed, dtype, input_shapes, skip_damaged: as for Net; a device's word names one device for all.
        train_batch: batch size of the train net, if not the file's.
        test_batches: batch sizes of the test nets, one each; a net file gives as many test nets.
        share_params: False keeps even the parameters apart.
        forward_only_tests: the test nets never run backward, and keep nothing for it.
        memory: as for Net, of the train net; with another than "keep" the test nets have "inference", and `share` puts
            all of them into one arena, instead of blobs by name. Where the train net has layers whose shapes depend on
            values, all keep their blobs, and share them by name.
        keep: as for Net, names of blobs of any of the nets.
        backward_streams: as for Net.

    Raises NetError for anything wrong in the files.
    """
    train_spec, test_specs = model if isinstance(model, tuple) else specs_of(model)
    if test_batches and len(test_batches) != len(test_specs):
        if len(test_specs) > 1:
            raise NetError(f"{len(test_batches)} test batches given for {len(test_specs)} test nets")
        test_specs = [test_specs[0]] * len(test_batches) if test_specs else []
    seed = default_seed() if seed is None else seed
    common: dict[str, Any] = {
        "device": None if device is None else devices.get(device), "seed": seed, "dtype": dtype,
        "input_shapes": input_shapes, "skip_damaged": skip_damaged, "backward_streams": backward_streams,
    }  # fmt: skip
    train = _build(train_spec, batch=train_batch, memory=memory, **common)
    nets = Nets(train)
    common["memory"] = memory if memory == "keep" else "inference"
    # the arena is as large as the train net needs it anyway, but for want of memory
    common["passes"] = () if memory == "keep" else ("slices",)
    for index, spec in enumerate(test_specs):
        batch = test_batches[index] if test_batches else None
        test = _build(
            spec, batch=batch, params_from=train if share_params else None, forward_only=forward_only_tests, **common
        )
        if len(test_specs) > 1:  # messages about sharing name nets
            test.identity.label += f" number {index}"
        nets.tests.append(test)
    if share:
        _share(nets)
    else:
        nets.reports = [SharingReport() for _ in nets.tests]
    _keep([train, *nets.tests], frozenset(keep))
    return nets


def _share(nets: Nets) -> None:
    """Let each test net share with those before it: an arena, or blobs by name if the train net has to keep its own."""
    every = [nets.train, *nets.tests]
    if not nets.train.takes_turns:
        for net in nets.tests:
            net.keep_blobs()
    for index, test in enumerate(nets.tests, 1):
        report = SharingReport()
        for other in every[:index]:
            found = test.share_blobs_with(other)
            report.shared.update(found.shared)
            report.unshared = {k: v for k, v in found.unshared.items() if k not in report.shared}
        nets.reports.append(report)


def _keep(nets: Sequence[Net], names: frozenset[str]) -> None:
    """Let each net keep those of the blobs that it has. Raises NetError for one that none has."""
    for net in nets:
        net.kept = names & {*net.blobs, *net.internals}
    unknown = names.difference(*(net.kept for net in nets))
    if unknown:
        raise NetError(f"keep: no net has a blob '{min(unknown)}'; the train net has {', '.join(nets[0].blobs)}")


def _build(spec: Spec, **options: Any) -> Net:
    return Net(spec.model, spec.phase, level=spec.level, stages=spec.stages, source=spec.source, **options)
