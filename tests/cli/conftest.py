"""A net and a solver of three op types, small enough that compiling them is most of the time they take."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from blobmem.cli import main

NET = """
name: "tiny"
layer {
  name: "data" type: "DummyData" top: "data" top: "label" include { phase: TRAIN }
  dummy_data_param {
    shape { dim: 8 dim: 6 } shape { dim: 8 }
    data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 }
  }
}
layer {
  name: "data" type: "DummyData" top: "data" top: "label" include { phase: TEST }
  dummy_data_param {
    shape { dim: 4 dim: 6 } shape { dim: 4 }
    data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 }
  }
}
layer {
  name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } }
}
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""

DATA_NET = """
name: "elsewhere"
layer {
  name: "digits" type: "Data" top: "data" top: "label"
  data_param { source: "not_here_lmdb" batch_size: 4 backend: LMDB }
}
layer {
  name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } }
}
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def records(self):
        """The `event=...` lines as dictionaries; values with spaces are not split further."""
        lines = [line for line in self.out.splitlines() if line.startswith("event=")]
        return [dict(part.split("=", 1) for part in line.split(" ")) for line in lines]

    def events(self, name):
        return [record for record in self.records if record["event"] == name]


@dataclass
class Tiny:
    folder: Path
    net: Path
    solver: Path

    def write_solver(self, **fields):
        values = {"net": f'"{self.net}"', "test_iter": 2, "test_interval": 4, "base_lr": 0.1, "lr_policy": '"fixed"',
                  "max_iter": 8, "display": 2, "random_seed": 1, "snapshot_prefix": f'"{self.folder}/out/tiny"',
                  **fields}  # fmt: skip
        self.solver.write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
        return self.solver


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tiny(tmp_path):
    net, solver = tmp_path / "net.prototxt", tmp_path / "solver.prototxt"
    net.write_text(NET)
    result = Tiny(tmp_path, net, solver)
    result.write_solver()
    return result


@pytest.fixture
def data_net(tmp_path):
    path = tmp_path / "data.prototxt"
    path.write_text(DATA_NET)
    return path


@pytest.fixture
def blobmem(capsys):
    """Run a command line in this process."""

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return call
