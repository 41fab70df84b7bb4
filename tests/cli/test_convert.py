import struct

import numpy as np
import pytest

FILES = {"train": 6, "t10k": 4}


@pytest.fixture
def mnist(tmp_path):
    """Four idx files with a few images of 5 x 5."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for prefix, count in FILES.items():
        pictures = np.arange(count * 25, dtype=np.uint8)
        head = struct.pack(">4B3I", 0, 0, 8, 3, count, 5, 5)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(head + pictures.tobytes())
        head = struct.pack(">4BI", 0, 0, 8, 1, count)
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(head + bytes(range(count)))
    return folder


def test_mnist_to_two_databases(blobmem, mnist, tmp_path):
    target = tmp_path / "made"
    result = blobmem("convert", "mnist", mnist, target)
    assert result.code == 0, result.err
    assert [(record["path"], record["records"]) for record in result.events("convert")] == [
        (str(target / "mnist_train_lmdb"), "6"),
        (str(target / "mnist_test_lmdb"), "4"),
    ]
    assert (target / "mnist_train_lmdb" / "data.mdb").exists()


def test_what_is_there_is_kept_unless_told(blobmem, mnist, tmp_path):
    assert blobmem("convert", "mnist", mnist, tmp_path).code == 0
    again = blobmem("convert", "mnist", mnist, tmp_path)
    assert again.code == 1 and "exists already" in again.err
    assert blobmem("convert", "mnist", mnist, tmp_path, "--overwrite").code == 0


def test_a_folder_without_the_files(blobmem, tmp_path):
    result = blobmem("convert", "mnist", tmp_path, tmp_path)
    assert result.code == 1 and "train-images" in result.err
