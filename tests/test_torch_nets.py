"""The nets that PyTorch is timed with compute what ours do. Needs PyTorch; skipped without it."""

import numpy as np
import pytest

import blobmem

torch = pytest.importorskip("torch")

from benchmarks import inputs, torch_nets, torch_segments  # noqa: E402


def outputs(model, batch, seed=3):
    """The deploy net's and its twin's outputs for the same images and parameters, after one batch's statistics."""
    trained = blobmem.Net(inputs.with_inputs(model, batch), blobmem.TRAIN, seed=seed)
    inputs.fill(trained, 10)
    trained.run_forward()
    net = blobmem.Net(
        inputs.with_inputs(model, batch, deploy=True), blobmem.TEST, forward_only=True, params_from=trained
    )
    inputs.fill(net, 10)
    module = torch_nets.twin(net).eval()
    torch_nets.load(module, net)
    net.run_forward()
    with torch.no_grad():
        theirs = module(torch.from_numpy(net.blobs["data"].cpu_data().copy())).numpy()
    return net.blobs[net.outputs[0]].cpu_data(), theirs


@pytest.mark.parametrize("model", ["lenet", "caffenet", "googlenet", "inception_v3", "resnet50_v2"])
def test_the_twin_of_a_deploy_net_gives_its_outputs(model):
    ours, theirs = outputs(model, 2)
    np.testing.assert_allclose(theirs, ours, rtol=2e-3, atol=1e-6)


def smaller(param):
    """The net with a twentieth of the numbers, if it is one of those that take minutes on a CPU."""
    data = param.layer[0].input_param.shape
    if param.name == "V-Net":
        data[0].dim[2:] = data[1].dim[1:] = [16, 16, 16]
    for layer in param.layer:
        if param.name == "V-Net" and layer.name != "scores":
            layer.convolution_param.num_output //= 4
            layer.tile_param.tiles = 4
        if param.name == "LSTM-LM":
            layer.embed_param.input_dim = layer.inner_product_param.num_output = 50
    return param


@pytest.mark.parametrize("model", ["googlenet", "resnet50", "resnet1001", "vnet", "lstm_lm"])
def test_the_twin_of_a_train_net_gives_its_loss_and_gradients(model):
    param = smaller(inputs.with_inputs(model, 2))
    for layer in param.layer:
        layer.ClearField("dropout_param")
        if layer.type == "Dropout":  # draws otherwise
            layer.dropout_param.dropout_ratio = 0
    net = blobmem.Net(param, blobmem.TRAIN, seed=3, dtype=np.float64)
    inputs.fill(net, 10)
    module = torch_nets.twin(net).double().train()
    torch_nets.load(module, net)
    loss = module(*(torch.from_numpy(net.blobs[name].data) for name in net.inputs))
    assert net.run_forward() == pytest.approx(loss.item(), rel=1e-6)
    net.run_backward()
    loss.backward()
    first = next(node.layer for node in net.nodes if node.layer.blobs)
    found = next(module.parameters()).grad.numpy()
    np.testing.assert_allclose(found, first.blobs[0].diff, rtol=0, atol=1e-6 * np.abs(found).max())


def test_in_segments_a_twin_gives_the_same_gradients():
    net = blobmem.Net(smaller(inputs.with_inputs("vnet", 2)), blobmem.TRAIN, seed=3, dtype=np.float64)
    inputs.fill(net, 10)
    module = torch_nets.twin(net).double().train()
    arrays = [torch.from_numpy(net.blobs[name].data) for name in net.inputs]
    module(*arrays).backward()
    whole = [parameter.grad for parameter in module.parameters()]
    found = [*torch_segments.segmentations(module)]
    assert [len(cuts) for cuts in found] == [3, 4]
    module.zero_grad()
    parts = torch_segments.segmented(module, found[-1])
    parts(*arrays).backward()
    for parameter, gradient in zip(module.parameters(), whole, strict=True):
        np.testing.assert_allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-15)
    inner = [each for each in parts.children() if isinstance(each, torch_segments.Checkpointed)]
    assert len(inner) == len(found[-1])


def test_what_a_twin_cannot_do_is_an_error():
    text = 'layer { name: "d" type: "Input" top: "d" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 4 } } }'
    scale = text + 'layer { name: "s" type: "Scale" bottom: "d" top: "s" }'
    with pytest.raises(ValueError, match="layer 's': a Scale that follows no BatchNorm"):
        torch_nets.twin(blobmem.Net(scale, blobmem.TEST))
    mvn = text + 'layer { name: "m" type: "MVN" bottom: "d" top: "m" }'
    with pytest.raises(ValueError, match="layer 'm': MVN has no counterpart"):
        torch_nets.twin(blobmem.Net(mvn, blobmem.TEST))
