import h5py
import pytest

from blobmem import TEST, Net


@pytest.fixture
def weights(tiny):
    path = tiny.folder / "tiny.caffemodel"
    Net(str(tiny.net), TEST).save(path)
    return path


def test_features_to_a_file_and_to_databases(blobmem, tiny, weights):
    arguments = (
        "extract-features",
        "--model",
        tiny.net,
        "--weights",
        weights,
        "--blobs",
        "ip, label,ip",
        "--passes",
        3,
    )
    result = blobmem(*arguments, "--out", tiny.folder / "out.h5")
    assert result.code == 0, result.err
    assert [(e["blob"], e["records"]) for e in result.events("extract")] == [("ip", "12"), ("label", "12")]
    with h5py.File(tiny.folder / "out.h5") as file:
        assert file["ip"].shape == (12, 3) and (file["label"][...] == 1).all()
    result = blobmem(*arguments, "--out", tiny.folder / "out")
    assert result.code == 0, result.err
    assert [e["path"] for e in result.events("extract")] == [
        str(tiny.folder / f"out_{n}_lmdb") for n in ("ip", "label")
    ]
    again = blobmem(*arguments, "--out", tiny.folder / "out")
    assert again.code == 1 and "exists already" in again.err
    assert blobmem(*arguments, "--out", tiny.folder / "out", "--overwrite").code == 0


def test_what_cannot_be(blobmem, tiny, weights):
    wrong = blobmem(
        "extract-features",
        "--model",
        tiny.net,
        "--weights",
        weights,
        "--blobs",
        "fc7",
        "--passes",
        1,
        "--out",
        tiny.folder / "o",
    )
    assert wrong.code == 1 and "has no blob 'fc7'" in wrong.err
    (tiny.folder / "deploy.prototxt").write_text(
        'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 } } }'
        'layer { name: "y" type: "ReLU" bottom: "x" top: "y" }'
    )
    wrong = blobmem("extract-features", "--model", tiny.folder / "deploy.prototxt", "--weights", weights, "--blobs", "y",
                    "--passes", 1, "--out", tiny.folder / "o")  # fmt: skip
    assert wrong.code == 1 and "needs a net with a data layer" in wrong.err
