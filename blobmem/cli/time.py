"""`blobmem time`: how long each layer of a net takes."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options
from blobmem.version import __version__

if TYPE_CHECKING:
    from blobmem.cli.output import Bar, Output
    from blobmem.net import Net
    from blobmem.net.builder import Spec

DESCRIPTION = """\
Runs a net layer by layer and shows the median time of each layer's forward and backward pass, in milliseconds.
A first pass, in which kernels are compiled, does not count; net inputs get random values.
"""

EXAMPLE = """\
examples:
  blobmem time --model models/lenet/deploy.prototxt --phase TEST
  blobmem time --model models/caffenet/train_val.prototxt --batch 4

A data layer whose database is not here is replaced by random input, if the file or --input-shape states its shape.
Nets in the TEST phase are timed forward only. JSON has milliseconds too.
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "time", run, "time each layer, forward and backward", DESCRIPTION, EXAMPLE)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a net or solver file (prototxt)")
    parser.add_argument(
        "--phase", choices=("TRAIN", "TEST"), default="TRAIN", help="which layers to include (default: %(default)s)"
    )
    parser.add_argument(
        "--iterations", type=options.positive, default=10, metavar="N", help="passes to time (default: %(default)s)"
    )
    parser.add_argument("--batch", type=options.positive, metavar="N", help="items in a batch, instead of the file's")
    options.add_input_shape(parser)
    options.add_state(parser)
    options.add_device(parser)
    options.add_dtype(parser)
    options.add_graphs(parser)
    options.add_streams(parser)
    options.add_memory(parser, ("keep", "train"), "keep")
    parser.add_argument("--json", metavar="FILE", help="write the times as JSON; - writes that alone to the output")


def run(args: argparse.Namespace, output: Output) -> int:
    """Build the net, time it, print the table."""
    from blobmem.cli import nets
    from blobmem.cli.footprint import write_json
    from blobmem.footprint import stated_shapes
    from blobmem.net.builder import specs_of

    specs = specs_of(args.model)
    nets.check_input_shapes(args.model, specs, dict(args.input_shape))
    spec = nets.in_state(nets.spec_of(args.model, specs, args.phase), args)
    _replace_absent_data(spec, {**stated_shapes(specs), **dict(args.input_shape)}, args, output)
    tests = args.phase == "TEST"
    given = {"device": args.device, "dtype": args.dtype, "memory": args.memory}
    streams = args.backward_streams
    net = nets.build(spec, batch=args.batch, forward_only=tests, backward_streams=streams, **given)
    _fill_inputs(net)
    with output.progress(args.iterations + 1, "pass") as bar:
        result = _measure(net, args.iterations, bar)
    if args.graph_dot:
        _run_whole(net)
    nets.show_graphs([net], args.graph_dot, output)
    result = {"model": str(args.model), "version": __version__, "device": net.device.name, "phase": args.phase,
              "dtype": args.dtype, "iterations": args.iterations, **result}  # fmt: skip
    if args.json:
        write_json(args.json, result)
    if args.json != "-":
        _show(result, output)
    return 0


# ---------------------------------------------------------------- input


SOURCES = {
    "Data": "data_param", "ImageData": "image_data_param", "WindowData": "window_data_param",
    "HDF5Data": "hdf5_data_param",
}  # fmt: skip
"""Layer type -> its message, whose `source` may be absent."""


def _replace_absent_data(
    spec: Spec, shapes: Mapping[str, tuple[int, ...]], args: argparse.Namespace, output: Output
) -> None:
    """Put Input layers in place of data layers that cannot be read but have a known shape, or are given one."""
    from blobmem.cli import nets
    from blobmem.net.graph import included, net_state

    given = dict(args.input_shape)
    state = net_state(spec.phase, spec.level, spec.stages)
    absent = []
    for layer in spec.model.layer:
        if layer.type in SOURCES and layer.top and layer.top[0] in shapes and included(layer, state):
            source = getattr(layer, SOURCES[layer.type]).source
            if layer.top[0] in given or not os.path.exists(source):
                absent.append((layer, source))
    if not absent:
        return
    probe = nets.build(spec, input_shapes={layer.top[0]: shapes[layer.top[0]] for layer, _ in absent})
    for layer, source in absent:
        layer.type = "Input"
        for name in layer.top:
            layer.input_param.shape.add(dim=probe.blobs[name].shape)
        output.note(f"layer '{layer.name}': random input in place of {source or 'its data'}")


def _fill_inputs(net: Net) -> None:
    """Normal values for data, zeros (a class that any net has) for labels."""
    import numpy as np

    generator = np.random.default_rng(0)
    labels = {
        name
        for layer in net.layers
        if layer.type != "EuclideanLoss" and (layer.type.endswith("Loss") or layer.type == "Accuracy")
        for name in net.bottom_names[layer.name][1:]
    }
    for split in net.layers:
        if split.type == "Split" and labels & set(net.top_names[split.name]):
            labels.update(net.bottom_names[split.name])
    for name in net.inputs:
        values = net.blobs[name].data
        values[...] = 0 if name in labels else generator.standard_normal(values.shape, np.float32)


# ---------------------------------------------------------------- times


def _measure(net: Net, iterations: int, bar: Bar) -> dict[str, Any]:
    """Medians by layer, and of whole passes, in ms; the first pass is left out."""
    from statistics import median

    count = len(net.layers)
    forward: list[list[float]] = [[] for _ in range(count)]
    backward: list[list[float]] = [[] for _ in range(count)]
    trains = [not net.forward_only and _runs(net, index) for index in range(count)]
    for iteration in range(iterations + 1):
        if not net.forward_only:
            net.clear_param_diffs()
        for index in range(count):
            forward[index].append(_milliseconds(net, net.run_forward, index))
        for index in reversed(range(count)):
            if trains[index]:
                backward[index].append(_milliseconds(net, net.run_backward, index))
        bar.update(iteration + 1)
    layers = [
        {
            "name": layer.name,
            "type": layer.type,
            "forward_ms": median(forward[index][1:]),
            "backward_ms": median(backward[index][1:]) if trains[index] else None,
        }
        for index, layer in enumerate(net.layers)
    ]
    return {"layers": layers, "forward_ms": _median_pass(forward), "backward_ms": _median_pass(backward)}


def _run_whole(net: Net) -> None:
    """Whole passes, after which what can be captured is: single layers seldom are."""
    for _ in range(4):
        net.run_forward()
        if not net.forward_only:
            net.clear_param_diffs()
            net.run_backward()


def _runs(net: Net, index: int) -> bool:
    """Whether a layer has anything to do backward."""
    start, stop = net.compiled()[1].span(range(index, index + 1))
    return stop > start


def _milliseconds(net: Net, run: Callable[[int, int], Any], index: int) -> float:
    begin = time.perf_counter()
    run(index, index)
    net.device.synchronize()
    return (time.perf_counter() - begin) * 1e3


def _median_pass(times: list[list[float]]) -> float | None:
    from statistics import median

    passes = [sum(layer) for layer in zip(*filter(None, times), strict=True)]
    return median(passes[1:]) if passes else None


def _show(result: Mapping[str, Any], output: Output) -> None:
    rows = [
        [layer["name"], layer["type"], _ms(layer["forward_ms"]), _ms(layer["backward_ms"])]
        for layer in (*result["layers"], {"name": "whole pass", "type": "", **result})
    ]
    where = f"{result['model']} ({result['phase']}) on {result['device']}"
    title = f"{where}: medians over {result['iterations']} iterations, in ms"
    output.table(title, ["layer", "type", "forward", "backward"], rows, texts=2)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
