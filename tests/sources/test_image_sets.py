import io
import logging

import numpy as np
import pytest
from PIL import Image

from blobmem import TEST, Net, NetError
from blobmem.data.database import open_records
from blobmem.data.image_sets import Recipe, convert, labels_file
from blobmem.data.order import permutation
from blobmem.data.resize import resize
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net


def noise(height=6, width=5, seed=0, gray=False):
    shape = (height, width) if gray else (height, width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def planes(values):
    """As Caffe has them: channels first, blue first."""
    return values[np.newaxis] if values.ndim == 2 else values[:, :, ::-1].transpose(2, 0, 1)


def records(path):
    reader = open_records(path)
    return [(key, caffe_pb2.Datum.FromString(value)) for key, value in reader.read(0, len(reader))]


def values_of(datum):
    return np.frombuffer(datum.data, np.uint8).reshape(datum.channels, datum.height, datum.width)


def decoded(datum):
    image = Image.open(io.BytesIO(datum.data))
    return image.format, np.asarray(image)


@pytest.fixture
def listed(tmp_path):
    """Four images of noise and a list of them, labels 10 to 13; `values` of them."""
    folder = tmp_path / "in" / "sub"
    folder.mkdir(parents=True)
    values = [noise(seed=n) for n in range(4)]
    for number, image in enumerate(values):
        Image.fromarray(image).save(folder / f"{number}.png")
    path = tmp_path / "list.txt"
    path.write_text("".join(f"sub/{n}.png {10 + n}\n" for n in range(4)))
    return path, tmp_path / "in", values


def test_raw_records_in_the_lists_order(listed, tmp_path):
    path, root, values = listed
    progress = []
    made = convert(path, tmp_path / "db", Recipe(), root=root, progress=lambda *now: progress.append(now))
    assert made.records == 4 and made.path == tmp_path / "db" and made.nbytes > 0
    found = records(tmp_path / "db")
    assert [key for key, _ in found] == [b"%08d_sub/%d.png" % (n, n) for n in range(4)]
    assert [datum.label for _, datum in found] == [10, 11, 12, 13]
    for (_, datum), image in zip(found, values, strict=True):
        assert not datum.encoded and np.array_equal(values_of(datum), planes(image))
    assert progress == [(4, 4)]
    assert not labels_file(tmp_path / "db").exists()


def test_resized_and_gray(listed, tmp_path):
    path, root, values = listed
    convert(path, tmp_path / "db", Recipe(size=(3, 4)), root=root)
    for (_, datum), image in zip(records(tmp_path / "db"), values, strict=True):
        assert np.array_equal(values_of(datum), resize(planes(image), 3, 4))
    convert(path, tmp_path / "gray", Recipe(gray=True), root=root)
    for (_, datum), image in zip(records(tmp_path / "gray"), values, strict=True):
        assert np.array_equal(values_of(datum), np.asarray(Image.fromarray(image).convert("L"))[np.newaxis])


def test_compressed_files_are_kept_where_they_can(listed, tmp_path):
    path, root, values = listed
    files = [(root / "sub" / f"{n}.png").read_bytes() for n in range(4)]
    convert(path, tmp_path / "kept", Recipe(encoded=True), root=root)
    assert [datum.data for _, datum in records(tmp_path / "kept")] == files
    assert all(datum.encoded for _, datum in records(tmp_path / "kept"))
    convert(path, tmp_path / "resized", Recipe(size=(3, 4), encoded=True), root=root)
    for (_, datum), image in zip(records(tmp_path / "resized"), values, strict=True):
        kind, rows = decoded(datum)
        assert kind == "PNG" and np.array_equal(planes(rows), resize(planes(image), 3, 4))
    convert(path, tmp_path / "gray", Recipe(gray=True, encoded=True), root=root)
    assert {decoded(datum)[1].shape for _, datum in records(tmp_path / "gray")} == {(6, 5)}
    convert(path, tmp_path / "jpg", Recipe(encoded=True, encoding="jpg"), root=root)
    assert {decoded(datum)[0] for _, datum in records(tmp_path / "jpg")} == {"JPEG"}


def test_kinds_that_databases_do_not_hold_become_png(tmp_path):
    image = noise()
    Image.fromarray(image).save(tmp_path / "a.ppm")
    Image.fromarray(noise(gray=True)).save(tmp_path / "b.png")  # not the three channels that are asked for
    (tmp_path / "list.txt").write_text("a.ppm 0\nb.png 1\n")
    convert(tmp_path / "list.txt", tmp_path / "db", Recipe(encoded=True), root=tmp_path)
    (_, first), (_, second) = records(tmp_path / "db")
    assert decoded(first)[0] == decoded(second)[0] == "PNG"
    assert np.array_equal(decoded(first)[1], image) and decoded(second)[1].shape == (6, 5, 3)


def test_shuffle_follows_the_seed(listed, tmp_path):
    path, root, _ = listed
    orders = set()
    for seed in range(6):
        convert(path, tmp_path / f"db{seed}", Recipe(), root=root, shuffle=True, seed=seed)
        found = records(tmp_path / f"db{seed}")
        labels = [datum.label - 10 for _, datum in found]
        assert labels == permutation(seed, "convert", 0, 4).tolist()
        assert [key for key, _ in found] == [b"%08d_sub/%d.png" % (at, n) for at, n in enumerate(labels)]
        orders.add(tuple(labels))
    assert len(orders) > 1


@pytest.fixture
def classes(tmp_path):
    folder = tmp_path / "classes"
    for number, name in enumerate(("zebra", "ant", "cow/calf", ".hidden")):
        (folder / name).mkdir(parents=True)
        for image in range(2):
            Image.fromarray(noise(seed=10 * number + image)).save(folder / name / f"{image}.PNG")
        (folder / name / "notes.txt").write_text("")
    (folder / "loose.png").write_bytes(b"")
    return folder


def test_a_folder_of_classes(classes, tmp_path):
    made = convert(classes, tmp_path / "db", Recipe())
    assert made.records == 6
    found = records(tmp_path / "db")
    assert [(key[9:].decode(), datum.label) for key, datum in found] == [
        ("ant/0.PNG", 0), ("ant/1.PNG", 0), ("cow/calf/0.PNG", 1), ("cow/calf/1.PNG", 1), ("zebra/0.PNG", 2), ("zebra/1.PNG", 2),
    ]  # fmt: skip
    assert np.array_equal(values_of(found[0][1]), planes(noise(seed=10)))
    assert (tmp_path / "db_labels.txt").read_text() == "ant\ncow\nzebra\n"
    with pytest.raises(NetError, match="db exists already"):
        convert(classes, tmp_path / "db", Recipe())
    convert(classes, tmp_path / "db", Recipe(), overwrite=True)
    (tmp_path / "other_labels.txt").write_text("mine")
    with pytest.raises(NetError, match="other_labels.txt exists already"):
        convert(classes, tmp_path / "other", Recipe())
    assert not (tmp_path / "other").exists()


def test_a_folder_without_classes(tmp_path):
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(NetError, match="has no folders with images in them"):
        convert(tmp_path / "empty", tmp_path / "db", Recipe())


def test_images_of_another_size(listed, tmp_path):
    path, root, _ = listed
    Image.fromarray(noise(7, 5)).save(root / "sub" / "2.png")
    for encoded in (False, True):
        with pytest.raises(
            NetError, match=r"2\.png \(line 3 of .*list\.txt\) is 3 x 7 x 5, and the first image is 3 x 6 x 5"
        ):
            convert(path, tmp_path / "db", Recipe(encoded=encoded), root=root, check_size=True)
        assert not (tmp_path / "db").exists()
    assert convert(path, tmp_path / "db", Recipe(), root=root).records == 4


def test_damage_is_an_error_or_skipped(listed, tmp_path, caplog):
    path, root, _ = listed
    (root / "sub" / "1.png").write_bytes(b"")
    (root / "sub" / "3.png").write_bytes((root / "sub" / "3.png").read_bytes()[:70])
    for encoded in (False, True):
        with pytest.raises(NetError, match=r"1\.png \(line 2 of .*list\.txt\) cannot be used"):
            convert(path, tmp_path / "db", Recipe(encoded=encoded), root=root)
    assert not (tmp_path / "db").exists()
    with caplog.at_level(logging.WARNING, logger="blobmem"):
        assert convert(path, tmp_path / "db", Recipe(), root=root, skip_damaged=True).records == 2
    assert [key for key, _ in records(tmp_path / "db")] == [b"00000000_sub/0.png", b"00000002_sub/2.png"]
    assert len(caplog.records) == 2
    with pytest.raises(NetError, match="none of the 4 images can be used"):
        convert(path, tmp_path / "none", Recipe(), root=tmp_path, skip_damaged=True)
    assert not (tmp_path / "none").exists()


def test_what_is_made_a_data_layer_reads(listed, tmp_path):
    path, root, values = listed
    for encoded in (False, True):
        target = tmp_path / f"db{encoded}"
        convert(path, target, Recipe(encoded=encoded), root=root)
        net = Net(read_net(
            'layer { name: "d" type: "Data" top: "data" top: "label" '
            f'data_param {{ source: "{target}" backend: LMDB batch_size: 4 }} }}'), TEST)  # fmt: skip
        outputs = net.forward()
        assert np.array_equal(outputs["data"], [planes(image) for image in values])
        assert outputs["label"].tolist() == [10, 11, 12, 13]


def test_long_paths_have_short_keys(tmp_path):
    folder = tmp_path.joinpath(*["d" * 100] * 6)
    folder.mkdir(parents=True)
    Image.fromarray(noise()).save(folder / "a.png")
    (tmp_path / "list.txt").write_text(f"{folder}/a.png 0\n{folder}/a.png 1\n")
    convert(tmp_path / "list.txt", tmp_path / "db", Recipe())
    assert [len(key) for key, _ in records(tmp_path / "db")] == [511, 511]
