import json
from pathlib import Path

MODELS = Path(__file__).parents[2] / "models"


def test_the_table(blobmem, tiny):
    result = blobmem("summary", tiny.net)
    assert result.code == 0 and not result.err
    lines = result.out.splitlines()
    assert lines[0] == f"{tiny.net} (TRAIN), batch 8"
    rows = [line.split() for line in lines[4:]]
    assert rows[0] == ["data", "DummyData", "8x6", "-", "-", "<0.1"] and rows[1] == ["8"]
    assert rows[2] == ["ip", "InnerProduct", "8x3", "21", "144", "<0.1"]
    assert rows[3][:3] == ["loss", "SoftmaxWithLoss", "1"]
    assert rows[4] == ["total", "21", "144", "<0.1"]
    assert lines[-1] == "Multiply-adds for each of 8 items: 18"


def test_phase_and_batch(blobmem, tiny):
    assert "(TEST), batch 4" in blobmem("summary", tiny.net, "--phase", "TEST").out
    result = blobmem("summary", tiny.solver, "--batch", 1)
    assert result.code == 0 and "batch 1" in result.out and "for each" not in result.out


def test_json_is_alone_on_standard_output(blobmem, tiny):
    values = json.loads(blobmem("summary", tiny.net, "--json", "-").out)
    assert (values["net"], values["phase"], values["batch"]) == ("tiny", "TRAIN", 8)
    assert values["layers"][1] == {
        "name": "ip", "type": "InnerProduct", "tops": {"ip": "8x3"}, "parameters": 21, "statistics": 0,
        "multiply_adds": 144, "bytes": 96,
    }  # fmt: skip
    assert values["totals"] == {
        "parameters": 21, "statistics": 0, "multiply_adds": 144, "bytes": 8 * 6 * 4 + 8 * 4 + 96 + 4,
    }  # fmt: skip


def test_json_to_a_file_beside_the_table(blobmem, tiny):
    target = tiny.folder / "summary.json"
    assert "InnerProduct" in blobmem("summary", tiny.net, "--json", target).out
    assert json.loads(target.read_text())["totals"]["parameters"] == 21


def test_statistics_are_told(blobmem):
    result = blobmem("summary", MODELS / "resnet50" / "train_val.prototxt", "--phase", "TEST")
    assert "Beside the parameters, running statistics: 53,173 values" in result.out


def test_a_shape_that_no_file_states(blobmem, data_net):
    result = blobmem("summary", data_net)
    assert result.code == 1 and "--input-shape data=" in result.err and not result.out
    assert "4x1x5x5" in blobmem("summary", data_net, "--input-shape", "data=1x5x5").out
    assert blobmem("summary", data_net, "--input-shape", "date=1x5x5").code == 1


def test_shapes_that_depend_on_values(blobmem, tmp_path):
    path = tmp_path / "filter.prototxt"
    path.write_text(
        'layer { name: "in" type: "Input" top: "x" top: "keep" input_param { shape { dim: 4 dim: 6 } shape { dim: 4 } } }'
        'layer { name: "filter" type: "Filter" bottom: "x" bottom: "keep" top: "kept" }'
    )
    assert "<=4x6" in blobmem("summary", path).out
