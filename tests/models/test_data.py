"""The data that models/generate makes up, and that the nets they are for learn from it."""

from pathlib import Path

import numpy as np
import pytest
from small_models import SMALL, write_small

import blobmem
from models.generate import data

ROOT = Path(__file__).resolve().parents[2]


RATES = {"densenet264": 0.05, "vnet": 0.001, "lstm_lm": 1.0}


@pytest.mark.parametrize("name", SMALL)
def test_nets_learn_from_it(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    path = write_small(name, tmp_path)
    solver = blobmem.get_solver(
        f'net: "{path}" base_lr: {RATES[name]} lr_policy: "fixed" momentum: 0.9 clip_gradients: 5 random_seed: 1 '
        f"test_iter: 1 test_interval: 1000 test_initialization: false"
    )
    losses = []
    for _ in range(16):
        solver.step(1)
        losses.append(float(solver.net.blobs["loss"].data))
    assert np.isfinite(losses).all() and np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3])
    solver.test_nets[0].forward()
    assert 0 <= float(solver.test_nets[0].blobs["accuracy"].data) <= 1


def test_the_command_writes_what_the_files_name(monkeypatch, tmp_path, capsys):
    """A row of it is what the kept train_val file takes, and nothing is overwritten."""
    monkeypatch.chdir(tmp_path)
    command = ["data", "lstm_lm", "--train", "20", "--test", "10", "--into", "models"]
    monkeypatch.setattr("sys.argv", command)
    data.main()
    assert "20 to train" in capsys.readouterr().out
    net = blobmem.Net(ROOT / "models" / "lstm_lm" / "train_val.prototxt", blobmem.TRAIN, device=counting())
    assert {name: net.blobs[name].shape for name in ("data", "cont", "label")} == dict.fromkeys(
        ("data", "cont", "label"), (1408, 40)
    )
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit):
        data.main()
    assert "train.h5" in capsys.readouterr().err


def counting():
    return blobmem.SimulatedDevice(compute=False)
