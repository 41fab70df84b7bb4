"""Net: building, running in parts, gradients, parameters, reshaping, files, errors, running out."""

import copy
import gc
import logging
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import (
    TEST,
    TRAIN,
    BlobmemError,
    DeviceError,
    Net,
    NetError,
    OutOfDeviceMemory,
    SimulatedDevice,
    build_nets,
    devices,
    set_random_seed,
)
from blobmem.memory import Head
from blobmem.memory.blob import from_dlpack

MLP = """
name: "mlp"
layer { name: "in" type: "Input" top: "x" top: "t" input_param { shape { dim: 4 dim: 6 } shape { dim: 4 dim: 3 } } }
layer { name: "ip1" type: "InnerProduct" bottom: "x" top: "ip1"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip2" bottom: "t" top: "loss" }
"""


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def filled(net, seed=0):
    rng = np.random.default_rng(seed)
    for name in net.inputs:
        net.blobs[name].data[...] = rng.normal(size=net.blobs[name].shape)
    return net


def test_pycaffes_face(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    assert list(net.blobs) == ["x", "t", "ip1", "ip2", "loss"]
    assert list(net.params) == ["ip1", "ip2"]
    assert [blob.shape for blob in net.params["ip1"]] == [(5, 6), (5,)]
    assert net.inputs == ["x", "t"]
    assert net.outputs == ["loss"]
    assert [layer.type for layer in net.layers][:2] == ["Input", "InnerProduct"]
    assert net.layers[1].blobs[0] is net.params["ip1"][0]
    out = net.forward()
    assert list(out) == ["loss"] and out["loss"].shape == ()
    assert set(net.forward(blobs=["ip2"])) == {"loss", "ip2"}
    assert list(net.forward(end="ip1")) == ["ip1"]


def test_inputs_by_keyword(device):
    net = Net(MLP, TRAIN, device=device, seed=1)
    x, t = np.ones((4, 6)), np.zeros((4, 3))
    first = float(net.forward(x=x, t=t)["loss"])
    net.blobs["x"].data[...], net.blobs["t"].data[...] = x, t
    assert float(net.forward()["loss"]) == first
    with pytest.raises(ValueError, match="inputs of this net are x, t; got x"):
        net.forward(x=x)
    with pytest.raises(ValueError, match="batch of 4, got 5"):
        net.forward(x=np.ones((5, 6)), t=np.zeros((5, 3)))
    with pytest.raises(KeyError, match="no layer 'ip9'.*layers: in, ip1"):
        net.forward(start="ip9")


def test_older_calls_and_bad_ones(tmp_path):
    path, weights = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    path.write_text(MLP)
    net = Net(path, TRAIN, seed=1)
    net.save(weights)
    again = Net(str(path), str(weights), TEST)
    np.testing.assert_array_equal(again.params["ip1"][0].cpu_data(), net.params["ip1"][0].cpu_data())
    keyword = Net(str(path), TEST, weights=weights)
    np.testing.assert_array_equal(keyword.params["ip2"][0].cpu_data(), net.params["ip2"][0].cpu_data())
    with pytest.raises(TypeError, match="needs a phase"):
        Net(path)
    with pytest.raises(NetError, match="none.prototxt"):
        Net(tmp_path / "none.prototxt", TRAIN)


def test_parts_of_the_net_equal_the_whole(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    whole = float(net.forward()["loss"])
    net.backward()
    grads = [blob.diff.copy() for blob in net.params["ip1"]]
    net.clear_param_diffs()
    net.forward(end="relu")
    assert float(net.forward(start="ip2")["loss"]) == whole
    assert set(net.backward(end="ip2")) == {"ip1"}
    net.backward(start="relu")
    for grad, blob in zip(grads, net.params["ip1"], strict=True):
        np.testing.assert_array_equal(grad, blob.diff)


CONV = """
name: "conv" force_backward: true
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 dim: 6 dim: 6 } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "y"
  convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "square" type: "Power" bottom: "y" top: "z" power_param { power: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "z" top: "out"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
"""


def test_layers_after_the_end_of_a_pass_need_not_fit_its_input(device):
    """As scripts do that look into a classifier with images of any size."""
    net = filled(Net(CONV, TEST, device=device, seed=1))
    small = np.array(net.forward()["out"])
    corner = net.blobs["x"].data.copy()
    for size in ((9, 7), (4, 5), (8, 8)):
        net.blobs["x"].reshape(1, 2, *size)
        filled(net)
        assert net.forward(end="square")["z"].shape == (1, 3, size[0] - 2, size[1] - 2)
        assert net.blobs["out"].shape == (1, 2)
        net.blobs["z"].diff[...] = 1
        assert net.backward(start="square")["x"].shape == (1, 2, *size)
        with pytest.raises(NetError, match="'ip'.*bottom"):
            net.forward()
    net.blobs["x"].reshape(1, 2, 6, 6)
    net.blobs["x"].data[...] = corner
    np.testing.assert_array_equal(net.forward()["out"], small)


def test_a_pass_that_starts_later_takes_the_shape_that_a_script_gave(device):
    net = filled(Net(CONV, TEST, device=device, seed=1))
    net.forward()
    net.blobs["y"].reshape(5, 3, 4, 4)
    net.blobs["y"].data[...] = np.arange(5).reshape(5, 1, 1, 1)
    out = net.forward(start="square")["out"]
    assert out.shape == (5, 2)
    np.testing.assert_allclose(out[4] - out[0], 16 * (out[1] - out[0]), rtol=1e-4)
    assert net.forward()["out"].shape == (1, 2), "a whole pass has the shapes that the input gives"


def test_gradients_accumulate_until_cleared(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    net.forward()
    net.backward()
    once = net.params["ip1"][0].diff.copy()
    net.backward()
    np.testing.assert_allclose(net.params["ip1"][0].diff, 2 * once, rtol=1e-6)
    net.clear_param_diffs()
    assert not net.params["ip1"][0].cpu_diff().any()
    net.backward()
    np.testing.assert_array_equal(net.params["ip1"][0].diff, once)


def test_clearing_gradients_shows_in_arrays_that_a_script_holds(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    net.forward()
    net.backward()
    blob, unseen = net.params["ip1"]
    for held in (blob.diff, blob.diff[1:], blob.cpu_diff()):
        blob.diff[...] = 2
        assert held.any()
        net.clear_param_diffs()
        assert not held.any() and not blob.diff.any()
    assert unseen.diff_view.memory.is_zero(0, unseen.nbytes)
    held = blob.diff
    net.clear_param_diffs()
    held[...] = 1  # a write, as long as the other side has not been asked
    once = net.params["ip2"][0].diff.copy()
    net.backward()
    added = blob.diff.copy()
    del held
    net.clear_param_diffs()
    assert blob.diff_view.memory.is_zero(0, blob.nbytes) and not once.any()
    net.backward()
    np.testing.assert_allclose(added, blob.diff + 1, rtol=1e-6)


def test_backward_from_a_hand_set_gradient(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    net.forward()
    diff = np.full((4, 3), 0.5, np.float32)
    net.blobs["ip2"].diff[...] = diff
    net.backward(start="ip2")
    np.testing.assert_allclose(net.params["ip2"][1].diff, diff.sum(0))
    headless = Net(MLP.replace('bottom: "t" top: "loss"', 'bottom: "t" top: "loss" loss_weight: 0'), TRAIN, seed=1)
    assert headless.backward() is not None
    with pytest.raises(ValueError, match="takes the gradients of loss; got ip2"):
        net.backward(ip2=diff)


def test_a_script_may_change_the_gradient_of_the_loss(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    net.forward()
    net.backward()
    once = net.params["ip1"][0].diff.copy()
    net.clear_param_diffs()
    net.blobs["loss"].diff[...] = 3
    net.forward()
    net.backward()
    np.testing.assert_allclose(net.params["ip1"][0].diff, 3 * once, rtol=1e-5)


def test_building_allocates_no_activation(device):
    net = Net(MLP, TRAIN, device=device, seed=1)
    for blob in net.blobs.values():
        memory = blob.data_view.memory
        assert memory.cpu_capacity == memory.gpu_capacity == 0
        assert memory.head in (Head.UNINITIALIZED,)
    if not device.is_host:
        assert device.statistics.allocations == 0


def test_reshape_on_the_fly(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    net.run_forward()
    for batch in (2, 9, 4):
        net.blobs["x"].reshape(batch, 6)
        net.blobs["t"].reshape(batch, 3)
        filled(net, batch)
        loss = net.run_forward()
        net.run_backward()
        fresh = Net(MLP.replace("dim: 4", f"dim: {batch}"), TRAIN, seed=1)
        filled(fresh, batch)
        assert loss == pytest.approx(fresh.run_forward(), rel=1e-6)
        assert net.blobs["ip2"].shape == (batch, 3)
    net.blobs["x"].reshape(4, 7)
    with pytest.raises(NetError, match=r"layer 'ip1' \(InnerProduct\), bottom: expected 6 values.*'x' \(4 x 7\)"):
        net.run_forward()


SHARED = """
force_backward: true
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 3 dim: 4 } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" param { name: "w" lr_mult: 2 } param { name: "b" }
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" } param { name: "b" decay_mult: 0 }
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
"""


def test_parameters_shared_by_name(device):
    net = filled(Net(SHARED, TRAIN, device=device, seed=1))
    assert net.params["a"][0].data_view == net.params["b"][0].data_view
    assert [(p.name, p.lr_mult, p.decay_mult) for p in net.learnable] == [("w", 2.0, 1.0), ("b", 1.0, 0.0)]
    net.params["a"][0].data[...] = np.eye(4)
    assert (net.params["b"][0].cpu_data() == np.eye(4)).all()
    net.run_forward()
    net.blobs["b"].diff[...] = 1
    net.run_backward()
    x = net.blobs["x"].cpu_data()
    np.testing.assert_allclose(net.params["a"][0].cpu_diff(), 2 * np.ones((4, 3)) @ x, rtol=1e-5)


def test_nets_after_one_seed_are_repeatable_and_not_alike():
    def weights():
        set_random_seed(7)
        return [Net(MLP, TRAIN).params["ip1"][0].data.copy() for _ in range(2)]

    try:
        first, again = weights(), weights()
    finally:
        set_random_seed(None)
    np.testing.assert_array_equal(first, again)
    assert (first[0] != first[1]).any()
    assert (Net(MLP, TRAIN).params["ip1"][0].data != Net(MLP, TRAIN).params["ip1"][0].data).any()


def test_parameters_that_cannot_be_shared():
    wider = SHARED.replace('bottom: "a" top: "b"', 'bottom: "x" top: "b"')
    wider = "num_output: 5".join(wider.rsplit("num_output: 4", 1))
    with pytest.raises(NetError, match="layer 'b'.*param 0: expected the shape of 'w' in layer 'a'"):
        Net(wider, TRAIN)
    other = SHARED.replace('top: "b" param { name: "w" }', 'top: "b" param { name: "w" lr_mult: 3 }')
    with pytest.raises(NetError, match=r"lr_mult: expected that of the shared 'w', 2.0, got 3.0"):
        Net(other, TRAIN)


@pytest.mark.parametrize(
    "text, message",
    [
        ('layer { name: "a" type: "Relu" bottom: "x" top: "y" }', "layer 'a': unknown type 'Relu'; did you mean .*ReLU"),
        ('layer { name: "x_in_0_split" type: "ReLU" bottom: "x" top: "y" } layer { name: "a" type: "ReLU" bottom: "x" '
         'top: "z" }', "two layers of this phase are named 'x_in_0_split'"),
        ('layer { name: "a" type: "ReLU" bottom: "x" top: "y" } layer { name: "b" type: "TanH" bottom: "x" top: "y" }',
         "layer 'b'.*top: expected a name that no earlier layer produces.*'y'"),
        ('layer { name: "a" type: "ReLU" bottom: "x" bottom: "x" top: "y" }', "layer 'a'.*bottom: expected 1, got 2"),
        ('layer { name: "c" type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 2 } }',
         "layer 'c' .*kernel_size: expected a value"),
        ('layer { name: "c" type: "Convolution" bottom: "x" top: "y" convolution_param { kernel_size: 9 num_output: 2 } }',
         "kernel_size: expected a window that fits"),
        ('layer { name: "c" type: "Convolution" bottom: "x" top: "y" '
         "convolution_param { kernel_size: 1 num_output: 2 group: 2 } }", "group: expected a divisor of 3 channels"),
        ('layer { name: "p" type: "Pooling" bottom: "x" top: "y" }', "layer 'p'.*kernel_size: expected 1 or more"),
        ('layer { name: "i" type: "InnerProduct" bottom: "x" top: "y" }', "num_output: expected 1 or more"),
        ('layer { name: "d" type: "Dropout" bottom: "x" top: "y" dropout_param { dropout_ratio: 1 } }', "dropout_ratio"),
        ('layer { name: "s" type: "Softmax" bottom: "x" top: "y" softmax_param { axis: 4 } }', "axis: expected an axis of"),
        ('layer { name: "f" type: "InnerProduct" bottom: "x" top: "y" '
         'inner_product_param { num_output: 1 weight_filler { type: "magic" } } }', "layer 'f'.*filler type.*'magic'"),
        ('layer { name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param { shape { dim: 7 dim: -1 } } }',
         "layer 'r'.*shape: expected"),
        ('layer { name: "r" type: "ReLU" bottom: "x" top: "y" propagate_down: true propagate_down: true }',
         "propagate_down: expected none or 1"),
    ],
)  # fmt: skip
def test_wrong_models_name_layer_and_field(text, message, tmp_path):
    path = tmp_path / "wrong.prototxt"
    head = 'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 4 } } }\n'
    path.write_text(head + text)
    with pytest.raises(NetError, match=message) as error:
        Net(path, TRAIN)
    assert "wrong.prototxt" in str(error.value)


def test_layers_of_one_name_as_caffe_takes_them(tmp_path, caplog):
    text = CONV.replace('name: "square"', 'name: "conv"') + (
        'layer { name: "conv" type: "InnerProduct" bottom: "out" top: "again" inner_product_param { num_output: 2 '
        'weight_filler { type: "xavier" } } }'
    )
    net = filled(Net(text, TRAIN, seed=1))
    assert net.layer_names == ["in", "conv", "conv_2", "ip", "conv_3"]
    assert "the second layer named 'conv' (Power) is called 'conv_2' here" in caplog.text
    assert list(net.params) == ["conv", "ip", "conv_3"]
    net.save(tmp_path / "w.caffemodel")
    other = filled(Net(text, TRAIN, weights=tmp_path / "w.caffemodel", seed=2))
    np.testing.assert_array_equal(other.forward()["again"], net.forward()["again"])


def test_propagate_down_stops_a_gradient(device):
    text = MLP.replace('bottom: "ip1" top: "ip2"', 'bottom: "ip1" top: "ip2" propagate_down: false')
    net = filled(Net(text, TRAIN, device=device, seed=1))
    net.run_forward()
    net.run_backward()
    assert net.params["ip2"][0].cpu_diff().any()
    assert not net.params["ip1"][0].cpu_diff().any()


def test_frozen_layers_cost_nothing_backward():
    net = Net(MLP.replace('bottom: "x" top: "ip1"', 'bottom: "x" top: "ip1" param { lr_mult: 0 } param { lr_mult: 0 }'),
              TRAIN, seed=1)  # fmt: skip
    layers = {call.layer_name for call in net.compiled()[1].calls}
    assert layers == {"loss", "ip2"}


def test_files_round_trip_and_mismatches(tmp_path):
    net = Net(MLP, TRAIN, seed=1)
    net.save(tmp_path / "a.caffemodel")
    other = Net(MLP, TRAIN, seed=2)
    other.copy_from(tmp_path / "a.caffemodel")
    for name in net.params:
        for mine, theirs in zip(net.params[name], other.params[name], strict=True):
            np.testing.assert_array_equal(mine.cpu_data(), theirs.cpu_data())
    renamed = Net(MLP.replace('"ip2"', '"new"'), TRAIN, seed=2)
    before = renamed.params["new"][0].cpu_data().copy()
    renamed.copy_from(tmp_path / "a.caffemodel")
    np.testing.assert_array_equal(renamed.params["new"][0].cpu_data(), before)
    wider = Net(MLP.replace("num_output: 5", "num_output: 6"), TRAIN, seed=2)
    values = wider.params["ip1"][0].cpu_data().copy()
    with pytest.raises(NetError, match=r"a.caffemodel: layer 'ip1', parameter 0 has shape \(5, 6\), \(6, 6\) in"):
        wider.copy_from(tmp_path / "a.caffemodel")
    np.testing.assert_array_equal(wider.params["ip1"][0].cpu_data(), values)


def test_a_layer_without_values_in_the_file_is_an_error():
    net = Net(MLP, TRAIN, seed=1)
    stripped = net.to_proto()
    del next(layer for layer in stripped.layer if layer.name == "ip2").blobs[:]
    other = Net(MLP, TRAIN, seed=2)
    before = other.params["ip1"][0].cpu_data().copy()
    with pytest.raises(NetError, match="layer 'ip2' has 0 parameters, 2 in net 'mlp'"):
        other.copy_from(stripped)
    np.testing.assert_array_equal(other.params["ip1"][0].cpu_data(), before)


def test_nets_that_share_parameters_have_gradients_of_their_own(device):
    net, other = (filled(Net(MLP, TRAIN, seed=seed, device=device), seed) for seed in (1, 2))
    other.share_with(net)
    net.forward()
    net.backward()
    before = net.params["ip1"][0].cpu_diff().copy()
    other.forward()
    other.backward()
    np.testing.assert_array_equal(net.params["ip1"][0].cpu_diff(), before)
    alone = filled(Net(MLP, TRAIN, seed=1, device=device), 2)
    alone.forward()
    alone.backward()
    np.testing.assert_array_equal(other.params["ip1"][0].cpu_diff(), alone.params["ip1"][0].cpu_diff())


def test_a_loss_without_a_top_gets_a_name_that_is_free():
    plain = MLP.replace('bottom: "t" top: "loss"', 'bottom: "t"')
    assert Net(plain, TRAIN).outputs == ["loss"]
    net = filled(
        Net(plain.replace('"ip2"', '"loss"').replace('name: "loss" type: "Inner', 'name: "ip2" type: "Inner'), TRAIN)
    )
    assert net.outputs == ["loss_2"]
    assert net.run_forward() == net.blobs["loss_2"].cpu_data() > 0


def test_a_layer_may_have_a_phase_of_its_own():
    text = MLP + 'layer { name: "d" type: "Dropout" bottom: "ip1" top: "d" %s }\n'
    assert [Net(text % own, TRAIN).layers[-1].phase for own in ("", "phase: TRAIN", "phase: TEST")] == [0, 0, 1]
    net = filled(Net(text % "phase: TEST", TRAIN, seed=1))
    net.forward()
    np.testing.assert_array_equal(net.blobs["d"].cpu_data(), net.blobs["ip1"].cpu_data())


def test_stages_of_the_model_add_to_those_given():
    extra = "".join(
        f'layer {{ name: "{s}" type: "Power" bottom: "ip1" top: "{s}" include {{ stage: "{s}" }} }}\n' for s in "pqr"
    )
    net = Net('state { stage: "p" }\n' + MLP + extra, TRAIN, stages=["q", "p"])
    assert net.outputs == ["loss", "p", "q"]
    assert list(net.param.state.stage) == ["p", "q"]


def test_outputs_are_in_caffes_order():
    extra = 'layer {{ name: "{0}" type: "Power" bottom: "ip1" top: "{0}" }}\n'
    net = Net(MLP + extra.format("z") + extra.format("Z") + extra.format("a"), TRAIN)
    assert net.outputs == ["Z", "a", "loss", "z"]
    assert list(net.forward()) == net.outputs


def test_seed_decides_the_fillers():
    first, second, third = (Net(MLP, TRAIN, seed=seed).params["ip1"][0].cpu_data() for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert (first != third).any()


def test_debug_info_logs_every_layer(caplog):
    net = filled(Net("debug_info: true\n" + MLP, TRAIN, seed=1))
    plain = filled(Net(MLP, TRAIN, seed=1))
    with caplog.at_level(logging.INFO, "blobmem"):
        assert net.run_forward() == plain.run_forward()
        net.run_backward()
    assert "[forward] layer ip2, top ip2 data" in caplog.text
    assert "[backward] layer ip1, param ip1/0 diff" in caplog.text


def test_running_out_changes_nothing_and_can_be_repeated():
    free = SimulatedDevice()
    net = filled(Net(MLP, TRAIN, device=free, seed=1))
    expected = net.run_forward()
    net.run_backward()
    plan = free.statistics.bytes_held
    calls = free.statistics.allocations + free.statistics.grows
    device = SimulatedDevice(capacity=plan - 1)
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    assert net.run_forward() == expected
    with pytest.raises(OutOfDeviceMemory, match="asked for.*free.*largest holders"):
        net.run_backward()
    device.capacity = plan
    net.run_backward()

    for ordinal in range(1, calls + 1):
        device = SimulatedDevice(fail_at=ordinal)
        net = filled(Net(MLP, TRAIN, device=device, seed=1))
        failures = 0
        for run in (net.run_forward, net.run_backward):
            before = device.statistics.bytes_held
            iteration = net.state.iteration
            try:
                loss = run()
            except OutOfDeviceMemory:
                failures += 1
                assert device.statistics.bytes_held == before
                assert net.state.iteration == iteration
                loss = run()
            if run == net.run_forward:
                assert loss == expected
        assert failures == 1


def test_an_input_array_kept_is_uploaded_each_time():
    device = SimulatedDevice()
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    array = net.blobs["x"].data
    net.run_forward()
    array[...] = 0
    loss = net.run_forward()
    reference = filled(Net(MLP, TRAIN, seed=1))
    reference.blobs["x"].data[...] = 0
    assert loss == reference.run_forward()
    del array
    gc.collect()
    net.run_forward()
    before = device.statistics.htod_copies
    net.run_forward()
    assert device.statistics.htod_copies == before


def test_an_array_outlives_its_net(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    array = net.forward()["loss"]
    value = float(array)
    del net
    gc.collect()
    assert float(array) == value
    if not device.is_host:
        assert device.statistics.bytes_held <= device.statistics.peak_bytes


def test_a_net_gives_its_device_memory_back():
    device = SimulatedDevice()
    for _ in range(3):
        net = filled(Net(MLP, TRAIN, device=device, seed=1))
        net.run_forward()
        net.run_backward()
        del net
    scratch = [nbytes for label, nbytes in device.holders() if label == "workspace"]
    assert device.statistics.bytes_held == sum(scratch)


def test_a_steady_step_makes_no_python_garbage_to_speak_of():
    net = filled(Net(MLP.replace("num_output: 5", "num_output: 2000").replace("dim: 4", "dim: 500"), TRAIN, seed=1))

    def step():
        net.clear_param_diffs()
        net.run_forward()
        net.run_backward()

    step()
    step()
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("batch", [2, 9])
def test_an_input_reshaped_before_the_first_pass(device, batch):
    net, built = Net(MLP, TRAIN, device=device, seed=1), Net(MLP, TRAIN, device=device, seed=1, batch=batch)
    for name in net.inputs:
        net.blobs[name].reshape(built.blobs[name].shape)
    assert filled(net).forward()["loss"] == filled(built).forward()["loss"]
    assert net.blobs["ip2"].shape == (batch, 3)


def test_debug_mode_reports_a_late_write_but_not_to_an_input(monkeypatch):
    monkeypatch.setattr("blobmem.memory.debug", True)
    net = filled(Net(MLP, TRAIN, device=SimulatedDevice(), seed=1))
    inputs, weights = net.blobs["x"].data, net.params["ip1"][0].data
    net.run_forward()
    inputs[...] = 3
    net.run_forward()
    weights[...] = 3
    with pytest.raises(BlobmemError, match="late write"):
        net.run_forward()


def test_running_out_in_another_thread_comes_before_anything_is_written():
    """Its workspace is another one, which is not there yet."""
    device = SimulatedDevice()
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    net.run_forward()
    net.run_backward()
    net.clear_param_diffs()
    net.run_forward()
    net.compiled()[1]._steps[-1].scratch = 512  # as if the last call of the pass needed some
    net._spans.clear()
    net._span(True, 0, len(net.layers) - 1)
    device.capacity = device.statistics.bytes_held
    errors = []

    def run():
        try:
            net.run_backward()
        except OutOfDeviceMemory as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert all(entry.blob.diff_view.memory.head is Head.UNINITIALIZED for entry in net.learnable)


def test_a_held_input_array_counts_in_a_forward_that_starts_later(device):
    net = filled(Net(MLP, TRAIN, device=device, seed=1))
    held = net.blobs["x"].data
    net.forward()
    held[...] = 0
    net.forward(start="ip1")
    assert not net.blobs["ip1"].cpu_data().any()


def test_a_pass_that_fails_half_way_can_be_repeated():
    net = Net(DROPOUT, TRAIN, seed=1)
    net.blobs["x"].data[...] = 1
    expected = net.run_forward()
    again = Net(DROPOUT, TRAIN, seed=1)
    again.blobs["x"].data[...] = 1
    again.blobs["l"].data[...] = 99
    with pytest.raises(ValueError, match="99"):
        again.run_forward()
    again.blobs["l"].data[...] = 0
    assert again.run_forward() == expected


DROPOUT = """
layer { name: "in" type: "Input" top: "x" top: "l" input_param { shape { dim: 4 dim: 50 } shape { dim: 4 } } }
layer { name: "d" type: "Dropout" bottom: "x" top: "d" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "d" bottom: "l" top: "loss" }
"""


def test_a_model_that_has_values_begins_with_them(tmp_path, device):
    trained = Net(MLP, TRAIN, device=device, seed=1)
    again = Net(trained.to_proto(), TRAIN, device=device, seed=2)
    for name, blobs in trained.params.items():
        for mine, theirs in zip(again.params[name], blobs, strict=True):
            np.testing.assert_array_equal(mine.data, theirs.data)
    assert not any(layer.blobs for layer in again.param.layer)


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_net_is_not_copied_as_an_object(copies):
    with pytest.raises(TypeError, match="net 'mlp' .* cannot be copied or pickled: net.save"):
        copies(Net(MLP, TRAIN))


def test_an_adopted_input_is_read_at_every_pass(device):
    net = Net('input: "x" input_shape { dim: 2 dim: 3 } ' + DOUBLE, TEST, device=device)
    array = np.ones((2, 3), np.float32)
    net.blobs["x"].share_data(from_dlpack(array, device=device))
    for value in (1, 5, 7):
        array[...] = value
        assert (net.forward()["y"] == 2 * value).all()


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_waits_while_a_net_is_built_and_planned(enabled):
    collected = []
    watch = lambda phase, info: collected.append(info)  # noqa: E731
    thresholds, was = gc.get_threshold(), gc.isenabled()
    net = Net(MLP, TRAIN, memory="train")
    try:
        gc.set_threshold(20, 2, 2)
        (gc.enable if enabled else gc.disable)()
        gc.callbacks.append(watch)
        net._compile()
        during = len(collected)
        with pytest.raises(NetError):
            Net(MLP.replace("EuclideanLoss", "Nothing"), TRAIN)
        assert gc.isenabled() == enabled
    finally:
        gc.callbacks.remove(watch)
        gc.set_threshold(*thresholds)
        (gc.enable if was else gc.disable)()
    assert during <= 2 * 3, "but for what is due when it is over"


DOUBLE = 'layer { name: "double" type: "Power" bottom: "x" top: "y" power_param { scale: 2 } }'


def test_devices_by_their_words():
    net = Net(MLP, TRAIN, device="simulated:1MiB")
    assert net.device.capacity == 2**20
    net.move_to("cpu")
    assert net.device is devices.HOST
    nets = build_nets(MLP, device="simulated")
    assert {each.device for each in nets.tests} == {nets.train.device}
    with pytest.raises(DeviceError, match="tpu"):
        Net(MLP, TRAIN, device="tpu")
