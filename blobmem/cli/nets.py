"""What commands that run nets have in common: finding the net in a file, loading weights, reading outputs."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    import numpy as np

    from blobmem.cli.output import Output
    from blobmem.net import Net
    from blobmem.net.builder import Spec, Specs

FEW = 32  # values of one output that are shown one by one


def spec_of(model: Path, specs: Specs, phase: str) -> Spec:
    """The net of that phase in a net file, or the train or first test net of a solver file. Raises NetError."""
    from blobmem.errors import NetError

    train, tests = specs
    if phase == "TRAIN":
        return train
    if not tests:
        raise NetError(f"{model} has no test net: give it a test_iter, or give the net file itself")
    return tests[0]


def in_state(spec: Spec, args: argparse.Namespace) -> Spec:
    """The spec in the state of --level and --stage, where given."""
    level = spec.level if args.level is None else args.level
    return dataclasses.replace(spec, level=level, stages=(*spec.stages, *args.stage))


def build(spec: Spec, **options: Any) -> Net:
    """The net of a spec; options as for Net."""
    from blobmem.net import Net

    return Net(spec.model, spec.phase, level=spec.level, stages=spec.stages, source=spec.source, **options)


def check_input_shapes(model: Path, specs: Specs, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise NetError if a shape is given for a blob that no layer of the file's nets brings in."""
    from blobmem.errors import NetError

    train, tests = specs
    sources = [layer for spec in (train, *tests) for layer in spec.model.layer if not layer.bottom]
    tops = dict.fromkeys(name for layer in sources for name in layer.top)
    for name in shapes:
        if name not in tops:
            raise NetError(f"--input-shape {name}=...: {model} has no such input; it has {', '.join(tops) or 'none'}")


def load_weights(nets: Sequence[Net], files: Sequence[Path], output: Output) -> None:
    """Copy parameters from caffemodels by layer name, and warn of layers that none of them had. Raises NetError."""
    from blobmem.net import weights

    for net in nets:
        found = {name for file in files for name in weights.load(net, file)}
        missing = [name for name in net.params if name not in found]
        if missing:
            source = ", ".join(os.fspath(file) for file in files)
            output.note(f"warning: {source}: no parameters for {', '.join(missing)}, which start from their fillers")


def show_graphs(nets: Sequence[Net], prefix: str | None, output: Output) -> None:
    """What --graph-dot asks for: the CUDA graphs of nets as files, and which layers are in none."""
    if prefix is None:
        return
    for net in nets:
        for name in net.write_graphs(prefix):
            output.note(f"wrote {name}")
        for backward in (False,) if net.forward_only else (False, True):
            for reason, layers in by_reason(net.why_eager(backward)).items():
                if reason:
                    way = "backward" if backward else "forward"
                    output.note(f"{net.identity} {way}, not captured: {', '.join(layers)} ({reason})")


def scalars(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Arrays as single numbers: NAME, NAME[i] for a few elements, mean(NAME) for many."""
    result: dict[str, float] = {}
    for name, array in values.items():
        flat = array.reshape(-1)
        if flat.size == 1:
            result[name] = float(flat[0])
        elif flat.size <= FEW:
            result.update((f"{name}[{index}]", float(value)) for index, value in enumerate(flat))
        else:
            result[f"mean({name})"] = float(flat.mean())
    return result


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> names, from name -> reason."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(name)
    return dict(names)
