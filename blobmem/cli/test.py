"""`blobmem test`: what a trained net gives on its test data."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    import numpy as np

    from blobmem.cli.output import Bar, Output
    from blobmem.net import Net

DESCRIPTION = """\
Runs a net in its TEST phase over batches of its own data and averages its outputs, such as accuracy and loss.
Parameters come from a caffemodel, by the names of layers.
"""

EXAMPLE = """\
example, once `blobmem train --solver models/lenet/solver.prototxt` has written its snapshot:
  blobmem test --iterations 20 --model models/lenet/train_val.prototxt \\
    --weights models/lenet/lenet_iter_1250.caffemodel
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "test", run, "average a trained net's outputs over test data", DESCRIPTION, EXAMPLE)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a net or solver file (prototxt)")
    parser.add_argument(
        "--weights",
        type=options.paths,
        required=True,
        metavar="FILE[,FILE]",
        help="trained parameters (caffemodel); later files replace what earlier ones gave",
    )
    parser.add_argument(
        "--iterations", type=options.positive, default=50, metavar="N", help="batches to run (default: %(default)s)"
    )
    options.add_state(parser)
    options.add_device(parser)
    options.add_dtype(parser)
    options.add_graphs(parser)
    options.add_memory(parser, ("keep", "inference"), "keep")


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the batches and print the averages."""
    from blobmem.cli import nets
    from blobmem.cli.output import per_second
    from blobmem.errors import NetError
    from blobmem.footprint import batch_of
    from blobmem.net.builder import specs_of

    spec = nets.in_state(nets.spec_of(args.model, specs_of(args.model), "TEST"), args)
    net = nets.build(spec, device=args.device, dtype=args.dtype, forward_only=True, memory=args.memory)
    if net.inputs:
        raise NetError(
            f"{args.model}: {', '.join(net.inputs)} would have to come from you: `blobmem test` needs a net with a "
            "data layer in its TEST phase (the train_val file rather than the deploy file)"
        )
    nets.load_weights([net], args.weights, output)
    begin = time.perf_counter()
    with output.progress(args.iterations, "batch") as bar:
        means = nets.scalars(_average(net, args.iterations, bar))
    seconds = time.perf_counter() - begin
    nets.show_graphs([net], args.graph_dot, output)
    batch = batch_of(net)
    items = args.iterations * batch
    if output.terminal:
        output.table(f"{net.name}: means of {args.iterations} batches of {batch}", ["output", "mean"],
                     [[name, f"{value:.6g}"] for name, value in means.items()])  # fmt: skip
        output.say(f"{items} items in {seconds:.1f} s, {per_second(items / seconds, 'item')}, on {net.device.name}")
    else:
        output.event("test", "", batches=args.iterations, batch=batch, seconds=seconds, **means)
    return 0


def _average(net: Net, iterations: int, bar: Bar) -> dict[str, np.ndarray]:
    """Means of the net's outputs, element by element, in float64."""
    import numpy as np

    sums: dict[str, np.ndarray] = {}
    for done in range(1, iterations + 1):
        net.run_forward()
        for name in net.outputs:
            values = net.blobs[name].cpu_data().astype(np.float64)
            sums[name] = sums[name] + values if name in sums else values
        bar.update(done)
    return {name: total / iterations for name, total in sums.items()}
