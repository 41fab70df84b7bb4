"""Callbacks and the texts of outputs."""

import numpy as np
import pytest

from blobmem.solvers.events import Callbacks, Outputs


def test_callbacks_are_called_in_order_and_none_is_no_callback():
    seen = []
    callbacks = Callbacks()
    callbacks.add(on_start=lambda: seen.append(1), on_test=None)
    callbacks.add(on_start=lambda: seen.append(2))
    for callback in callbacks.on_start:
        callback()
    assert seen == [1, 2]
    assert callbacks.on_test == []


def test_what_cannot_be_called_is_refused_before_anything_is_added():
    callbacks = Callbacks()
    with pytest.raises(TypeError, match="on_test must be callable, got int"):
        callbacks.add(on_start=print, on_test=3)
    assert callbacks.on_start == []


def test_lines():
    outputs = Outputs({"loss": np.array(0.5), "accuracy": np.array([0.25, 1.0])}, {"loss": 2.0})
    assert outputs.lines() == ["loss = 0.5 (times 2 in the loss)", "accuracy[0] = 0.25", "accuracy[1] = 1"]


def test_large_arrays_take_one_line():
    assert Outputs({"prob": np.full((64, 10), 0.1)}, {}).lines() == ["prob: 640 values, mean 0.1"]
