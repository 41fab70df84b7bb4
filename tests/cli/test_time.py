import json

import pytest


def test_a_row_for_each_layer(blobmem, tiny):
    result = blobmem("time", "--model", tiny.net, "--iterations", 2)
    assert result.code == 0, result.err
    title, head, _, *rows = result.out.splitlines()
    assert "(TRAIN) on cpu" in title and head.split() == ["layer", "type", "forward", "backward"]
    assert [row.split()[0] for row in rows] == ["data", "ip", "loss", "whole"]
    assert rows[0].split()[-1] == "-", "data has no backward pass"
    assert float(rows[1].split()[-1]) > 0 and float(rows[-1].split()[-1]) > 0


def test_json(blobmem, tiny):
    result = blobmem("time", "--model", tiny.solver, "--iterations", 3, "--json", "-", "--device", "simulated")
    assert result.code == 0, result.err
    values = json.loads(result.out)
    assert (values["device"], values["phase"], values["iterations"]) == ("simulated", "TRAIN", 3)
    assert [layer["type"] for layer in values["layers"]] == ["DummyData", "InnerProduct", "SoftmaxWithLoss"]
    assert values["forward_ms"] > max(layer["forward_ms"] for layer in values["layers"])
    assert values["backward_ms"] > 0


def test_the_test_phase_has_no_backward_pass(blobmem, tiny):
    result = blobmem("time", "--model", tiny.solver, "--phase", "TEST", "--iterations", 1, "--json", "-")
    assert result.code == 0, result.err
    values = json.loads(result.out)
    assert values["backward_ms"] is None and values["forward_ms"] > 0
    assert all(layer["backward_ms"] is None for layer in values["layers"])


def test_an_absent_database_is_replaced_by_random_input(blobmem, data_net):
    result = blobmem("time", "--model", data_net, "--iterations", 1)
    assert result.code == 1 and "not_here_lmdb" in result.err
    result = blobmem("time", "--model", data_net, "--iterations", 1, "--input-shape", "data=1x5x5", "--batch", 2)
    assert result.code == 0, result.err
    assert result.err == "layer 'digits': random input in place of not_here_lmdb\n"
    assert "Input" in result.out


def test_a_solver_without_test_net(blobmem, tiny):
    tiny.solver.write_text(f'net: "{tiny.net}" base_lr: 0.1 lr_policy: "fixed" max_iter: 1')
    result = blobmem("time", "--model", tiny.solver, "--phase", "TEST")
    assert result.code == 1 and "no test net" in result.err


@pytest.mark.parametrize("text", ["layer { nme: 1 }", "name: 3"])
def test_a_wrong_file_names_its_line(blobmem, tiny, text):
    tiny.net.write_text(text)
    result = blobmem("time", "--model", tiny.net)
    assert result.code == 1 and f"{tiny.net}:1:" in result.err and not result.out


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
def test_layer_by_layer_where_arrays_take_turns(blobmem, tiny, phase):
    result = blobmem("time", "--model", tiny.net, "--iterations", 1, "--phase", phase, "--memory", "train")
    assert result.code == 0, result.err
