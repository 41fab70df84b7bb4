"""Rules, splits and batch sizes, on messages alone."""

import pytest

from blobmem.errors import NetError
from blobmem.net.graph import filter_net, insert_splits, net_state, set_batch
from blobmem.proto.text import read_net


def names(net):
    return [layer.name for layer in net.layer]


RULES = """
layer { name: "always" type: "ReLU" }
layer { name: "train" type: "ReLU" include { phase: TRAIN } }
layer { name: "not-train" type: "ReLU" exclude { phase: TRAIN } }
layer { name: "deep" type: "ReLU" include { min_level: 2 } }
layer { name: "shallow" type: "ReLU" include { max_level: 1 } }
layer { name: "a-and-b" type: "ReLU" include { stage: "a" stage: "b" } }
layer { name: "not-a" type: "ReLU" include { not_stage: "a" } }
layer { name: "a-or-b" type: "ReLU" include { stage: "a" } include { stage: "b" } }
"""


@pytest.mark.parametrize(
    "state, expected",
    [
        (net_state(0), {"train", "shallow", "not-a"}),
        (net_state(1), {"not-train", "shallow", "not-a"}),
        (net_state(1, level=2), {"not-train", "deep", "not-a"}),
        (net_state(1, stages=["a"]), {"not-train", "shallow", "a-or-b"}),
        (net_state(0, stages=["a", "b"]), {"train", "shallow", "a-and-b", "a-or-b"}),
    ],
)
def test_rules(state, expected):
    net = filter_net(read_net(RULES), state)
    assert set(names(net)) == expected | {"always"}
    assert all(layer.phase == state.phase for layer in net.layer)


def test_include_and_exclude_together_are_refused():
    net = read_net('layer { name: "x" type: "ReLU" include { phase: TRAIN } exclude { phase: TEST } }')
    with pytest.raises(NetError, match="net.prototxt: layer 'x'.*either include or exclude"):
        filter_net(net, net_state(0), "net.prototxt")


def test_split_names_are_caffes():
    net = read_net("""
        layer { name: "d" type: "Input" top: "x" }
        layer { name: "r" type: "ReLU" bottom: "x" top: "x" }
        layer { name: "a" type: "Power" bottom: "x" top: "a" }
        layer { name: "b" type: "Power" bottom: "x" top: "b" }
        layer { name: "e" type: "Eltwise" bottom: "a" bottom: "b" top: "e" }
    """)
    split = insert_splits(net)
    assert names(split) == ["d", "r", "x_r_0_split", "a", "b", "e"]
    assert list(split.layer[2].top) == ["x_r_0_split_0", "x_r_0_split_1"]
    assert split.layer[3].bottom[0] == "x_r_0_split_0"
    assert split.layer[4].bottom[0] == "x_r_0_split_1"
    assert list(split.layer[1].bottom) == ["x"]  # in place is one use, and no split


def test_a_loss_that_is_used_again_moves_its_weight_to_the_split():
    net = read_net("""
        layer { name: "d" type: "Input" top: "x" }
        layer { name: "l" type: "Power" bottom: "x" top: "l" loss_weight: 2 }
        layer { name: "u" type: "Power" bottom: "l" top: "u" }
    """)
    split = insert_splits(net)
    assert names(split) == ["d", "l", "l_l_0_split", "u"]
    assert list(split.layer[1].loss_weight) == [0]
    assert list(split.layer[2].loss_weight) == [2, 0]
    assert split.layer[3].bottom[0] == "l_l_0_split_1"


def test_unknown_bottom_names_layer_and_candidates():
    net = read_net('layer { name: "d" type: "Input" top: "x" } layer { name: "r" type: "ReLU" bottom: "y" top: "z" }')
    with pytest.raises(NetError, match="layer 'r' .*bottom 0.*'y'.*the last ones are: x"):
        insert_splits(net)


def test_set_batch():
    net = read_net("""
        layer { name: "a" type: "Data" top: "a" data_param { batch_size: 3 } }
        layer { name: "b" type: "Input" top: "b" top: "c" input_param { shape { dim: 3 dim: 4 } shape { dim: 3 } } }
        layer { name: "d" type: "DummyData" top: "d" dummy_data_param { num: 3 channels: 1 height: 1 width: 1 } }
        layer { name: "r" type: "ReLU" bottom: "a" top: "e" }
    """)
    assert set_batch(net, 7) == 3
    assert net.layer[0].data_param.batch_size == 7
    assert [list(shape.dim) for shape in net.layer[1].input_param.shape] == [[7, 4], [7]]
    assert list(net.layer[2].dummy_data_param.num) == [7]
