import struct

import h5py
import numpy as np
import pytest
from PIL import Image

from blobmem.data.database import open_records
from blobmem.proto import caffe_pb2

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


# ---------------------------------------------------------------- images


@pytest.fixture
def photos(tmp_path):
    """Two classes of two images."""
    folder = tmp_path / "photos"
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for image in range(2):
            Image.new("RGB", (8, 6), (10 * number, image, 3)).save(folder / name / f"{image}.png")
    return folder


def first_record(path):
    reader = open_records(path)
    return caffe_pb2.Datum.FromString(next(iter(reader.read(0, 1)))[1])


def test_a_folder_of_images(blobmem, photos, tmp_path):
    target = tmp_path / "db"
    result = blobmem("convert", "images", photos, target, "--resize", "4x5", "--gray", "--shuffle", "--seed", "3")
    assert result.code == 0, result.err
    (event,) = result.events("convert")
    assert (event["path"], event["records"]) == (str(target), "4")
    datum = first_record(target)
    assert (datum.channels, datum.height, datum.width) == (1, 4, 5)
    assert (tmp_path / "db_labels.txt").read_text() == "cat\ndog\n"


def test_a_list_of_images_compressed(blobmem, photos, tmp_path):
    (tmp_path / "list.txt").write_text("cat/0.png 5\nnone.png 6\ndog/1.png 7\n")
    arguments = ("convert", "images", tmp_path / "list.txt", tmp_path / "db", "--root", photos)
    result = blobmem(*arguments)
    assert result.code == 1 and "none.png (line 2 of " in result.err
    result = blobmem(*arguments, "--skip-damaged", "--encode-type", "jpg")
    assert result.code == 0 and "warning: " in result.err and "none.png" in result.err
    assert result.events("convert")[0]["records"] == "2"
    datum = first_record(tmp_path / "db")
    assert datum.encoded and datum.data.startswith(b"\xff\xd8") and datum.label == 5


@pytest.mark.parametrize("size", ["4", "4x", "0x3", "4x5x6"])
def test_a_size_that_is_none(blobmem, tmp_path, size):
    result = blobmem("convert", "images", tmp_path, tmp_path / "db", "--resize", size)
    assert result.code == 2 and "expected HEIGHTxWIDTH" in result.err


# ---------------------------------------------------------------- tables


def test_a_table_to_hdf5_and_to_a_database(blobmem, tmp_path):
    (tmp_path / "a.csv").write_text("x\ty\tclass\n1\t2\t0\n3\t4\t1\n")
    for target in (tmp_path / "a.h5", tmp_path / "db"):
        result = blobmem("convert", "csv", tmp_path / "a.csv", target, "--label", "class", "--separator", "tab")
        assert result.code == 0, result.err
        assert result.events("convert")[0]["records"] == "2"
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["data"][...].tolist() == [[1, 2], [3, 4]] and file["label"][...].tolist() == [0, 1]
    assert list(first_record(tmp_path / "db").float_data) == [1, 2]


def test_options_of_tables(blobmem, tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    assert (
        blobmem("convert", "csv", tmp_path / "a.csv", tmp_path / "a.h5", "--header", "yes", "--label", "-1").code == 0
    )
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["data"][...].tolist() == [[3]] and file["label"][...].tolist() == [4]
    again = blobmem("convert", "csv", tmp_path / "a.csv", tmp_path / "a.h5")
    assert again.code == 1 and "exists already" in again.err
    assert blobmem("convert", "csv", tmp_path / "a.csv", tmp_path / "a.h5", "--overwrite").code == 0
    wrong = blobmem("convert", "csv", tmp_path / "a.csv", tmp_path / "b.h5", "--separator", "ab")
    assert wrong.code == 2 and "expected one character or the word tab" in wrong.err
