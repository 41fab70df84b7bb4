"""LeNet and a small residual net on MNIST in float32, float16 and bfloat16: losses and accuracies side by side.

    python benchmarks/half.py models/lenet/mnist --out benchmarks/results/half.json
    python benchmarks/half.py models/lenet/mnist --steps 20,10    # a dry run

FOLDER has the four idx files, gzipped or not. What counts is the mean loss of the last 100 iterations, within 2% of
float32's, and the accuracy on the test images, within 0.3 points.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import blobmem  # noqa: E402
from benchmarks import machine, mnist  # noqa: E402
from benchmarks.gpu_ours import device_of  # noqa: E402
from blobmem.data import mnist as databases  # noqa: E402
from blobmem.proto.text import read_net  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")
LAST = 100  # iterations whose losses are averaged


def _convolution(name: str, bottom: str, outputs: int, stride: int = 1, relu: bool = True) -> str:
    """Convolution, batch norm, scale and, if asked for, ReLU."""
    return f"""
    layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{
            num_output: {outputs} kernel_size: 3 pad: 1 stride: {stride} bias_term: false
            weight_filler {{ type: "msra" }} }} }}
    layer {{ name: "{name}_bn" type: "BatchNorm" bottom: "{name}" top: "{name}"
            batch_norm_param {{ moving_average_fraction: 0.9 }} }}
    layer {{ name: "{name}_scale" type: "Scale" bottom: "{name}" top: "{name}" scale_param {{ bias_term: true }} }}
    """ + (f'layer {{ name: "{name}_relu" type: "ReLU" bottom: "{name}" top: "{name}" }}' if relu else "")


def _block(name: str, bottom: str, outputs: int, stride: int) -> str:
    """Two convolutions, and what is added to them."""
    text = _convolution(f"{name}_a", bottom, outputs, stride) + _convolution(
        f"{name}_b", f"{name}_a", outputs, relu=False
    )
    beside = bottom
    if stride > 1:
        text, beside = text + _convolution(f"{name}_c", bottom, outputs, stride, relu=False), f"{name}_c"
    return (
        text
        + f"""
    layer {{ name: "{name}" type: "Eltwise" bottom: "{name}_b" bottom: "{beside}" top: "{name}" }}
    layer {{ name: "{name}_relu" type: "ReLU" bottom: "{name}" top: "{name}" }}"""
    )


def residual_net(lenet: Any) -> Any:
    """A net of three residual blocks over LeNet's data."""
    body = _convolution("begin", "data", 16)
    body += _block("one", "begin", 16, 1) + _block("two", "one", 32, 2) + _block("three", "two", 64, 2)
    body += """
    layer { name: "pool" type: "Pooling" bottom: "three" top: "pool" pooling_param { pool: AVE global_pooling: true } }
    layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
            inner_product_param { num_output: 10 weight_filler { type: "msra" } } }
    layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
    layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }"""
    net = read_net(body)
    net.name = "residual"
    sources = [layer for layer in lenet.layer if layer.type == "Data"]
    layers = [*sources, *net.layer]
    del net.layer[:]
    net.layer.extend(layers)
    return net


def falling(param: Any, steps: int) -> None:
    """A rate that falls to nothing: at a constant one the running statistics of batch norm are not yet those of the
    weights at the end, and float32's own accuracies differ by ten points from seed to seed."""
    param.lr_policy, param.base_lr, param.power, param.max_iter = "poly", 0.02, 1.0, steps


def run(param: Any, dtype: str, steps: int, device: Any) -> dict[str, Any]:
    """One training run: the mean of its last losses, and what the test nets give."""
    solver = blobmem.get_solver(param, device=device, dtype=dtype, memory="train", share=True)
    losses: list[float] = []
    solver.add_callback(on_iteration=lambda _, loss: losses.append(loss))
    seconds, scores = mnist.trained(solver, steps)
    return {"dtype": dtype, "steps": steps, "train_s": seconds, "last_loss": float(np.mean(losses[-LAST:])),
            "left_out": solver.updater.steps_left_out, "loss_scale": solver.updater.loss_scale, **scores}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the idx files")
    parser.add_argument("--steps", default="500,300", help="of LeNet and of the residual net (default: %(default)s)")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--seeds", default="1,2,3", help="of as many runs (default: %(default)s)")
    machine.add_options(parser)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _, tests = databases.convert(args.folder, folder)
        for net, steps in zip(("lenet", "residual"), map(int, args.steps.split(",")), strict=True):
            for seed in map(int, args.seeds.split(",")):
                exact: dict[str, Any] = {}
                for dtype in args.dtypes.split(","):
                    param = mnist.solver_param(Path(folder), tests.records, seed)
                    if net == "residual":
                        param.net_param.CopyFrom(residual_net(param.net_param))
                        falling(param, steps)
                    row = {"net": net, "seed": seed, **run(param, dtype, steps, device_of(args.device, "fp32"))}
                    exact = exact or row
                    row["loss_ratio"] = row["last_loss"] / exact["last_loss"]
                    row["accuracy_points"] = 100 * (row["accuracy"] - exact["accuracy"])
                    rows.append(row)
                    print(row, flush=True)
    machine.report(args, rows)


if __name__ == "__main__":
    main()
