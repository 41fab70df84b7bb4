"""Ops on the host, compiled by numba where NumPy is slow. Importing this package alone imports no compiler."""

MODULES = (
    "conv", "eltwise", "fillers", "linear", "loss", "lrn", "neuron", "norm", "pool", "rank", "shape", "update"
)  # fmt: skip
"""The modules whose import registers the ops."""
