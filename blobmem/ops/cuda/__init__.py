"""Ops on CUDA devices: cuDNN, cuBLAS, and kernels of our own. A module of ops has its host twin's name, but for `feed`,
whose ops do what the host does where it makes batches, and `fused`, whose ops do what several of the host's do."""

from pathlib import Path

MODULES = tuple(
    path.stem
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem in ("feed", "fused") or ((path.parents[1] / "host" / path.name).exists() and path.stem != "__init__")
)
