import numpy as np
import pytest

from blobmem import TEST, Net


@pytest.fixture
def weights(tiny):
    """Parameters that give class 1 whatever comes in, so that loss and its mean are known."""
    net = Net(str(tiny.net), TEST)
    net.params["ip"][0].data[...] = 0
    net.params["ip"][1].data[...] = (0, 1, 0)
    path = tiny.folder / "tiny.caffemodel"
    net.save(path)
    return path


def test_means_of_the_outputs(blobmem, tiny, weights):
    result = blobmem("test", "--model", tiny.net, "--weights", weights, "--iterations", 3)
    assert result.code == 0, result.err
    (record,) = result.events("test")
    assert (record["batches"], record["batch"]) == ("3", "4")
    assert float(record["loss"]) == pytest.approx(np.log(np.exp(1) + 2) - 1, abs=1e-5)


def test_a_solver_file_and_the_simulated_device(blobmem, tiny, weights):
    options = ("--weights", weights, "--iterations", 1, "--device", "simulated:1MiB")
    result = blobmem("test", "--model", tiny.solver, *options)
    assert result.code == 0, result.err
    assert float(result.events("test")[0]["loss"]) == pytest.approx(np.log(np.exp(1) + 2) - 1, abs=1e-5)


def test_where_arrays_take_turns_the_means_are_the_same(blobmem, tiny, weights):
    options = ("--model", tiny.net, "--weights", weights, "--iterations", 3)
    kept, turns = (blobmem("test", *options, "--memory", mode) for mode in ("keep", "inference"))
    assert turns.code == 0, turns.err
    assert turns.events("test")[0]["loss"] == kept.events("test")[0]["loss"]


def test_layers_without_parameters_are_warned_of(blobmem, tiny, weights):
    tiny.net.write_text(tiny.net.read_text().replace('name: "ip"', 'name: "other"'))
    result = blobmem("test", "--model", tiny.net, "--weights", weights, "--iterations", 1)
    assert result.code == 0
    assert result.err.startswith("warning: ") and "no parameters for other" in result.err


def test_a_net_that_waits_for_its_user(blobmem, tiny, weights):
    tiny.net.write_text(
        'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 } } }\n'
        'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 3 } }\n'
    )
    result = blobmem("test", "--model", tiny.net, "--weights", weights)
    assert result.code == 1 and "data layer" in result.err


def test_weights_that_are_not_there(blobmem, tiny):
    result = blobmem("test", "--model", tiny.net, "--weights", tiny.folder / "none.caffemodel")
    assert result.code == 1 and "none.caffemodel" in result.err


def test_a_device_that_is_too_small(blobmem, tiny, weights):
    result = blobmem("test", "--model", tiny.net, "--weights", weights, "--device", "simulated:64")
    assert result.code == 1 and "free" in result.err and "Traceback" not in result.err
