"""The updates of all solver types in NumPy, as their papers and Caffe's documentation have them."""

import numpy as np

HISTORIES = {"SGD": 1, "Nesterov": 1, "AdaGrad": 1, "RMSProp": 1, "AdaDelta": 2, "Adam": 2}
OPTIONS = {
    "SGD": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9},
    "AdaGrad": {"delta": 1e-3},
    "RMSProp": {"rms_decay": 0.95, "delta": 1e-3},
    "AdaDelta": {"momentum": 0.9, "delta": 1e-3},
    "Adam": {"momentum": 0.9, "momentum2": 0.99, "delta": 1e-3},
}
"""Some for each type."""


def fields(kind):
    """The solver fields of a type with its options."""
    return f'type: "{kind}" ' + " ".join(f"{name}: {value}" for name, value in OPTIONS[kind].items())


def step(kind, gradient, history, rate, *, momentum=0.0, momentum2=0.0, rms_decay=0.0, delta=0.0):
    """What is taken from the parameter, and the new history, for a gradient with its decay in it."""
    if kind == "SGD":
        velocity = momentum * history[0] + rate * gradient
        return velocity, [velocity]
    if kind == "Nesterov":
        velocity = momentum * history[0] + rate * gradient
        return (1 + momentum) * velocity - momentum * history[0], [velocity]
    if kind == "AdaGrad":
        squares = history[0] + gradient**2
        return rate * gradient / (np.sqrt(squares) + delta), [squares]
    if kind == "RMSProp":
        squares = rms_decay * history[0] + (1 - rms_decay) * gradient**2
        return rate * gradient / (np.sqrt(squares) + delta), [squares]
    if kind == "AdaDelta":
        squares = momentum * history[0] + (1 - momentum) * gradient**2
        update = gradient * np.sqrt((history[1] + delta) / (squares + delta))
        return rate * update, [squares, momentum * history[1] + (1 - momentum) * update**2]
    mean = momentum * history[0] + (1 - momentum) * gradient
    squares = momentum2 * history[1] + (1 - momentum2) * gradient**2
    return rate * mean / (np.sqrt(squares) + delta), [mean, squares]


def corrected(kind, rate, iteration, momentum=0.0, momentum2=0.0):
    """Adam's rate in an iteration counted from 0; the rate itself for others."""
    if kind != "Adam":
        return rate
    return rate * np.sqrt(1 - momentum2 ** (iteration + 1)) / (1 - momentum ** (iteration + 1))
