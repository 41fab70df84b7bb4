"""Small nets with everything random in them, and solvers over them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem.data.mnist import convert
from blobmem.devices import HOST
from blobmem.proto.text import read_net
from blobmem.solvers import get_solver

ROOT = Path(__file__).parents[2]
NOISY = """
name: "noisy"
layer {
  name: "data" type: "DummyData" top: "x" top: "target"
  dummy_data_param {
    shape { dim: 6 dim: 5 } shape { dim: 6 dim: 3 }
    data_filler { type: "gaussian" } data_filler { type: "uniform" min: -1 max: 1 }
  }
}
layer {
  name: "i1" type: "InnerProduct" bottom: "x" top: "h" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 8 weight_filler { type: "xavier" } }
}
layer { name: "r" type: "ReLU" bottom: "h" top: "h" }
layer { name: "drop" type: "Dropout" bottom: "h" top: "h" }
layer {
  name: "i2" type: "InnerProduct" bottom: "h" top: "y"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } }
}
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "target" top: "loss" }
"""

SOLVER = """
net: "{net}"
base_lr: 0.05 {update} weight_decay: 0.001 lr_policy: "multistep" gamma: 0.5 stepvalue: 4 stepvalue: 9
max_iter: 12 average_loss: 3 test_iter: 2 test_iter: 3 test_interval: 3 snapshot_prefix: "{folder}/s"
"""


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


@pytest.fixture(scope="session")
def lenet(tmp_path_factory):
    """LeNet with its databases in a folder of its own."""
    folder = tmp_path_factory.mktemp("mnist")
    convert(ROOT / "models" / "lenet" / "mnist", folder)
    net = read_net(ROOT / "models" / "lenet" / "train_val.prototxt")
    for layer in net.layer:
        if layer.type == "Data":
            layer.data_param.source = str(folder / Path(layer.data_param.source).name)
    return net


@pytest.fixture
def noisy(tmp_path):
    """`noisy(more, **options)` makes a solver over NOISY with two test nets; `more` are further solver fields, `update`
    those of the update."""
    net = tmp_path / "net.prototxt"
    net.write_text(NOISY)

    def make(more="", *, text=SOLVER, update="momentum: 0.9", **options):
        file = tmp_path / "solver.prototxt"
        file.write_text(text.format(net=net, folder=tmp_path / "snapshots", update=update) + more)
        return get_solver(file, **{"device": HOST, "seed": 7, **options})

    return make


def weights_of(solver):
    return {blob.name: blob.cpu_data().copy() for blobs in solver.net.params.values() for blob in blobs}


def history_of(solver):
    return {blob.name: blob.cpu_data().copy() for blob in solver.updater.state_blobs()}


def record(solver):
    """Everything a solver reports from now on."""
    seen = SimpleNamespace(losses=[], tests=[], displays=[], snapshots=[])
    solver.add_callback(
        on_iteration=lambda iteration, loss: seen.losses.append((iteration, loss)),
        on_test=seen.tests.append,
        on_display=seen.displays.append,
        on_snapshot=seen.snapshots.append,
    )
    return seen


def flat_tests(seen):
    """Test results as plain values."""
    return [
        (t.index, t.iteration, t.passes, {k: v.tolist() for k, v in t.outputs.values.items()}, t.loss)
        for t in seen.tests
    ]


def assert_same(a, b):
    """Dictionaries of arrays, equal bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), f"{name} differs by {np.abs(a[name] - b[name]).max()}"


@pytest.fixture
def tools():
    return SimpleNamespace(
        weights=weights_of, history=history_of, record=record, flat_tests=flat_tests, same=assert_same,
        data=Path(__file__).parents[1] / "data", noisy_text=NOISY,
    )  # fmt: skip
