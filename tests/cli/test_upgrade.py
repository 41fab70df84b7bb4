V1 = 'layers { name: "p" type: POOLING bottom: "x" top: "y" pooling_param { kernel_size: 2 } }\n'


def test_it_says_what_was_changed(blobmem, tmp_path):
    source, target = tmp_path / "old.prototxt", tmp_path / "new.prototxt"
    source.write_text('input: "x" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8\n' + V1)
    result = blobmem("upgrade", source, target)
    assert result.code == 0 and not result.err
    assert result.out == (
        f"event=upgrade path={target} kind=net format=text upgraded=\"1 V1 layer; input to an Input layer 'input'\"\n"
    )
    assert [line for line in target.read_text().splitlines() if "type:" in line] == [
        '  type: "Input"',
        '  type: "Pooling"',
    ]


def test_a_file_that_is_up_to_date(blobmem, tmp_path):
    source, target = tmp_path / "solver.prototxt", tmp_path / "new.prototxt"
    source.write_text("base_lr: 1 # comment\n")
    result = blobmem("upgrade", source, target)
    assert (result.code, result.events("upgrade")[0]["upgraded"]) == (0, "-")
    assert target.read_text() == "base_lr: 1 # comment\n"


def test_what_has_no_effect_is_a_warning(blobmem, tmp_path):
    source = tmp_path / "net.prototxt"
    source.write_text('layer { name: "d" type: "Data" top: "x" data_param { source: "db" mirror: true } }')
    result = blobmem("upgrade", source, tmp_path / "new.prototxt")
    assert result.code == 0 and result.err.startswith("warning: ") and "mirror of data layer 'd'" in result.err


def test_what_cannot_be_read(blobmem, tmp_path):
    source, target = tmp_path / "net.prototxt", tmp_path / "new.prototxt"
    source.write_text("layer { nam: 3 }")
    result = blobmem("upgrade", source, target)
    assert result.code == 1 and "did you mean name" in result.err.lower().replace("'", "") and not target.exists()
