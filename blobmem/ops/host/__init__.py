"""Ops on the host, compiled by numba where NumPy is slow. Importing this package alone imports no compiler."""

MODULES = (
    "activation", "axpy", "boxes", "class_loss", "conv", "eltwise", "fillers", "im2col", "indices", "linear", "loss",
    "lrn", "mvn", "neuron", "norm", "normalize", "pair_loss", "pool", "rank", "recurrent_lstm", "recurrent_rnn",
    "recurrent_unit", "reduction", "region", "reorder",
    "resample", "shape", "spp", "update"
)  # fmt: skip
"""The modules whose import registers the ops."""
