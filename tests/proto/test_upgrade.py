"""V1 nets, old inputs, old BatchNorm layers and old solvers, brought up to date."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.upgrade import SOLVER_TYPES, V1_TYPES, upgrade_net, upgrade_solver


def parse(text: str, kind=caffe_pb2.NetParameter):
    return text_format.Parse(text, kind())


def check_upgrade(before: str, after: str):
    net = parse(before)
    done = upgrade_net(net)
    assert net == parse(after)
    assert not upgrade_net(net), "an upgraded net is up to date"
    return done


V1_NET = """
name: "v1"
layers {
  name: "data" type: DATA top: "data" top: "label"
  data_param { source: "db" backend: LMDB batch_size: 4 scale: 0.5 mean_file: "m" crop_size: 7 mirror: true }
  include { phase: TRAIN stage: "s" }
}
layers {
  name: "conv" type: CONVOLUTION bottom: "data" top: "conv"
  blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0
  param: "w" blob_share_mode: PERMISSIVE
  convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } }
  exclude { min_level: 2 }
}
layers {
  name: "loss" type: SOFTMAX_LOSS bottom: "conv" bottom: "label" loss_weight: 0.25 loss_param { ignore_label: 9 }
}
"""

V2_NET = """
name: "v1"
layer {
  name: "data" type: "Data" top: "data" top: "label"
  data_param { source: "db" backend: LMDB batch_size: 4 }
  transform_param { scale: 0.5 mean_file: "m" crop_size: 7 mirror: true }
  include { phase: TRAIN stage: "s" }
}
layer {
  name: "conv" type: "Convolution" bottom: "data" top: "conv"
  param { name: "w" share_mode: PERMISSIVE lr_mult: 1 decay_mult: 1 }
  param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } }
  exclude { min_level: 2 }
}
layer {
  name: "loss" type: "SoftmaxWithLoss" bottom: "conv" bottom: "label" loss_weight: 0.25 loss_param { ignore_label: 9 }
}
"""


def test_v1_net() -> None:
    done = check_upgrade(V1_NET, V2_NET)
    assert done.steps == ["3 V1 layers", "1 data layer to transform_param"]
    assert str(done) == "upgraded 3 V1 layers, 1 data layer to transform_param"


def test_a_current_net_is_left_as_it_is() -> None:
    done = check_upgrade(V2_NET, V2_NET)
    assert not done and str(done) == "up to date"


@pytest.mark.parametrize("name", [v.name for v in caffe_pb2.V1LayerParameter.LayerType.DESCRIPTOR.values])
def test_every_v1_type_has_a_name_today(name: str) -> None:
    net = parse(f'layers {{ name: "a" type: {name} }}')
    upgrade_net(net)
    assert net.layer[0].type == V1_TYPES[name]
    # Whoever mixes up two rows of the table breaks this: both spell the same word.
    special = {"SOFTMAX_LOSS": "SOFTMAXWITHLOSS", "NONE": ""}
    assert net.layer[0].type.upper() == special.get(name, name.replace("_", ""))


def test_every_v1_setting_moves_over() -> None:
    """Each sub-message of a V1 layer, filled with something, is found under its name in the new layer."""
    old = caffe_pb2.V1LayerParameter(name="all")
    moved = [f.name for f in old.DESCRIPTOR.fields if f.name.endswith("_param") or f.name in ("include", "exclude")]
    assert len(moved) > 25
    for name in moved:
        target = getattr(old, name)
        target = target.add() if hasattr(target, "add") else target
        target.SetInParent()
    net = caffe_pb2.NetParameter(layers=[old])
    upgrade_net(net)
    assert {field.name for field, _ in net.layer[0].ListFields()} == {"name", *moved}


@pytest.mark.parametrize("kind,name", [("IMAGE_DATA", "image_data_param"), ("WINDOW_DATA", "window_data_param")])
def test_transformations_of_other_data_layers(kind: str, name: str) -> None:
    check_upgrade(
        f'layers {{ type: {kind} {name} {{ source: "s" scale: 2 mirror: false }} }}',
        f'layer {{ type: "{V1_TYPES[kind]}" {name} {{ source: "s" }} transform_param {{ scale: 2 mirror: false }} }}',
    )


def test_transformations_of_todays_data_layers_stay_without_effect_and_are_told() -> None:
    text = 'layer { name: "d" type: "Data" data_param { source: "s" scale: 2 } }'
    net = parse(text)
    done = upgrade_net(net)
    assert net == parse(text)
    assert done.steps == [] and "scale of data layer 'd'" in done.ignored[0]


def test_binary_v1_net_with_blobs() -> None:
    old = parse(V1_NET)
    blob = old.layers[1].blobs.add(num=3, channels=1, height=3, width=3)
    blob.data.extend(range(27))
    old.layers[1].blobs.add(double_data=[1, 2, 3]).shape.dim.append(3)
    net = caffe_pb2.NetParameter.FromString(old.SerializeToString())
    upgrade_net(net)
    assert list(net.layer[1].blobs) == list(old.layers[1].blobs)
    assert not net.layers


def test_both_formats_in_one_net_are_refused() -> None:
    with pytest.raises(NetError, match=r"'old'.*'new'.*write all of them as `layer`"):
        upgrade_net(parse('layers { name: "old" } layer { name: "new" }'))


def test_input_dim() -> None:
    done = check_upgrade(
        'input: "a" input: "b" input_dim: [1, 2, 3, 4, 5, 6, 7, 8] layer { name: "l" }',
        'layer { name: "input" type: "Input" top: "a" top: "b" '
        '        input_param { shape { dim: [1, 2, 3, 4] } shape { dim: [5, 6, 7, 8] } } } layer { name: "l" }',
    )
    assert done.steps == ["input to an Input layer 'input'"]


def test_input_shape() -> None:
    check_upgrade(
        'input: "a" input_shape { dim: [5, 3] } layer { name: "l" } layer { name: "m" }',
        'layer { name: "input" type: "Input" top: "a" input_param { shape { dim: [5, 3] } } } '
        'layer { name: "l" } layer { name: "m" }',
    )


def test_input_layer_takes_a_free_name() -> None:
    net = parse('input: "a" input_shape { dim: 1 } layer { name: "input" } layer { name: "input_1" }')
    upgrade_net(net)
    assert [layer.name for layer in net.layer] == ["input_2", "input", "input_1"]


def test_input_shape_goes_before_input_dim() -> None:
    net = parse('input: "a" input_shape { dim: 9 } input_dim: [1, 2, 3, 4]')
    done = upgrade_net(net)
    assert list(net.layer[0].input_param.shape[0].dim) == [9]
    assert done.ignored == ["input_dim beside input_shape"]
    assert not net.input_dim


@pytest.mark.parametrize("dims", ["", "input_dim: 1", "input_dim: [1, 2, 3, 4]", "input_shape { dim: 1 }"])
def test_inputs_without_a_shape_for_each_are_refused(dims: str) -> None:
    with pytest.raises(NetError, match=r"2 inputs \(a, b\)"):
        upgrade_net(parse(f'input: "a" input: "b" {dims}'))


def test_input_names_in_a_file_of_weights_go() -> None:
    done = check_upgrade(
        'input: "a" layer { name: "l" blobs { data: 1 } }',
        'layer { name: "l" blobs { data: 1 } }',
    )
    assert done.steps


def test_inputs_of_a_v1_net() -> None:
    check_upgrade(
        'input: "a" input_dim: [1, 2, 3, 4] layers { name: "r" type: RELU bottom: "a" top: "a" }',
        'layer { name: "input" type: "Input" top: "a" input_param { shape { dim: [1, 2, 3, 4] } } } '
        'layer { name: "r" type: "ReLU" bottom: "a" top: "a" }',
    )


def test_batch_norm_with_three_params() -> None:
    done = check_upgrade(
        'layer { type: "BatchNorm" param { lr_mult: 0 } param { name: "v" lr_mult: 2 } param { decay_mult: 0 } }',
        'layer { type: "BatchNorm" param { lr_mult: 0 decay_mult: 0 } param { name: "v" lr_mult: 0 decay_mult: 0 } '
        "param { lr_mult: 0 decay_mult: 0 } }",
    )
    assert done.steps == ["1 BatchNorm layer to lr_mult and decay_mult 0"]


@pytest.mark.parametrize("text", ['type: "BatchNorm" param {} param {}', 'type: "Scale" param {} param {} param {}'])
def test_other_params_are_left_alone(text: str) -> None:
    check_upgrade(f"layer {{ {text} }}", f"layer {{ {text} }}")


@pytest.mark.parametrize("old,new", SOLVER_TYPES.items())
def test_solver_type(old: str, new: str) -> None:
    solver = parse(f'net: "n" solver_type: {old}', caffe_pb2.SolverParameter)
    done = upgrade_solver(solver)
    assert solver == parse(f'net: "n" type: "{new}"', caffe_pb2.SolverParameter)
    assert new.upper() == old
    assert len(done.steps) == 1


def test_two_solver_types_are_refused() -> None:
    with pytest.raises(NetError, match="remove solver_type"):
        upgrade_solver(parse('solver_type: ADAM type: "Adam"', caffe_pb2.SolverParameter))


def test_nets_inside_a_solver() -> None:
    old, new = 'layers { name: "r" type: RELU }', 'layer { name: "r" type: "ReLU" }'
    form = "net_param {{ {0} }} train_net_param {{ {0} }} test_net_param {{ {0} }} test_net_param {{ {0} }}"
    solver = parse(form.format(old), caffe_pb2.SolverParameter)
    done = upgrade_solver(solver)
    assert solver == parse(form.format(new), caffe_pb2.SolverParameter)
    assert done.steps == ["1 V1 layer"] * 4
    assert not upgrade_solver(caffe_pb2.SolverParameter())
