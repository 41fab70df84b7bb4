"""What a run carries: passes, data positions, seed."""

import logging
from contextlib import ExitStack
from types import SimpleNamespace
from typing import ClassVar

import pytest

from blobmem import NetError
from blobmem.solvers import carried


class Positioned:
    """A layer that carries a position."""

    internal: ClassVar[dict] = {}
    blobs = ()

    def __init__(self, layer, position):
        self.name, self.position = layer, position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = int(state["position"])


@pytest.fixture
def nets(noisy):
    solver = noisy()
    for index, net in enumerate((solver.net, *solver.test_nets)):
        net.layers.append(Positioned("source", index))
        net.nodes.append(SimpleNamespace(layer=net.layers[-1]))
    return [solver.net, *solver.test_nets]


def test_collect(nets):
    nets[1].state.iteration = 9
    entries = carried.collect(nets)
    assert [entry["passes"] for entry in entries] == [0, 9, 0]
    assert [entry["layers"] for entry in entries] == [{"source": {"position": i}} for i in range(3)]


def test_load_layers_and_take_it_back(nets):
    state = {"nets": [{"layers": {"source": {"position": 50 + i}}} for i in range(3)]}
    with ExitStack() as undo:
        carried.load_layers(nets, state, "f", undo)
        assert [net.layers[-1].position for net in nets] == [50, 51, 52]
    assert [net.layers[-1].position for net in nets] == [0, 1, 2]


def test_a_state_that_does_not_fit_names_the_layer(nets):
    state = {"nets": [{"layers": {"source": {"position": 5}}}, {"layers": {"source": {"place": 1}}}]}
    with pytest.raises(NetError, match=r"f: layer 'source' cannot go on from \{'place': 1\}"), ExitStack() as undo:
        carried.load_layers(nets, state, "f", undo)
    assert [net.layers[-1].position for net in nets] == [0, 1, 2]


def test_a_layer_that_is_gone_is_a_warning(nets, caplog):
    with caplog.at_level(logging.WARNING, "blobmem"), ExitStack() as undo:
        carried.load_layers(nets, {"nets": [{"layers": {"old": {"position": 1}}}]}, "f", undo)
    assert "has no layer 'old'" in caplog.text


def test_counters(nets, caplog):
    state = {"seed": 99, "nets": [{"passes": 4}, {"passes": 5}]}
    with caplog.at_level(logging.WARNING, "blobmem"):
        carried.load_counters(nets, state, "f")
    assert [net.state.iteration for net in nets] == [4, 5, 0]
    assert [net.state.seed for net in nets] == [99] * 3
    assert "written with 2 nets, there are 3 now" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"seed": "1"}, {"losses": None}, {"losses": ["x"]}, {"nets": []}, {"nets": [{"passes": 1}]}, {"nets": [3]}],
)
def test_damage_is_noticed(change):
    sound = {"seed": 1, "losses": [0.5], "nets": [{"passes": 1, "layers": {}}]}
    carried.check(sound, "f")
    with pytest.raises(NetError, match="f: the sidecar is damaged"):
        carried.check({**sound, **change}, "f")
