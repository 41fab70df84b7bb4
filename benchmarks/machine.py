"""What a GPU's figures depend on: the card, the driver, the libraries' versions; and reports that say so."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import blobmem
from blobmem import devices

PACKAGES = ("nvidia-cudnn-frontend", "nvidia-cublas", "nvidia-cublas-cu13", "nvmath-python", "cuda-bindings", "pycuda")


def add_options(parser: argparse.ArgumentParser) -> None:
    """--device and --out, which `report` looks at."""
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)


def report(args: argparse.Namespace, results: list[dict[str, Any]], **more: Any) -> None:
    """Write results to --out, if it is given, with the command and the machine that they are of."""
    if args.out:
        command = " ".join(["python", *sys.argv])
        content = {"command": command, "machine": described(args.device, False), "results": results, **more}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


def described(word: str, with_torch: bool) -> dict[str, Any]:
    """Facts by name; those that cannot be had are left out."""
    facts: dict[str, Any] = {"python": platform.python_version(), "blobmem": blobmem.__version__}
    with contextlib.suppress(Exception):  # a device that fails has a message in every row
        facts |= {name: value for name, value in devices.get(word).describe().items() if name != "free_bytes"}
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
    with contextlib.suppress(Exception):
        import cudnn

        facts["cudnn"] = cudnn.backend_version()
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    if with_torch:
        with contextlib.suppress(Exception):
            import torch

            facts |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
            facts["torch_cudnn"] = torch.backends.cudnn.version()
    return facts
