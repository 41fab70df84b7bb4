import logging

import numpy as np
import pytest
from PIL import Image

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice
from blobmem.data.source import PREFETCH
from blobmem.data.window_cut import cut_of, cut_out
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import fill_blob
from blobmem.proto.text import read_net, write_binary


def text(source, batch=4, transform="crop_size: 8", extra="", more="", fraction=0.5):
    return (
        f'layer {{ name: "windows" type: "WindowData" top: "data" top: "label" transform_param {{ {transform} }}\n'
        f'  window_data_param {{ source: "{source}" batch_size: {batch} fg_fraction: {fraction} {extra} }} {more} }}'
    )


def net(source, phase=TRAIN, seed=3, settings=None, **options):
    return Net(read_net(text(source, **options)), phase, seed=seed, source="net.prototxt", **(settings or {}))


def layer_of(of):
    return of.layers[0]


class Gallery:
    """Two images and a file with two windows of background and three objects; `pixels` as Caffe has them."""

    boxes = ((0, 0, 9, 9), (5, 3, 30, 20), (2, 2, 20, 28), (0, 1, 12, 19), (3, 3, 10, 12))
    classes = (0, 0, 4, 4, 9)

    def __init__(self, folder):
        rng = np.random.default_rng(0)
        self.folder = folder
        self.pixels = []
        for number, size in enumerate(((30, 40), (20, 15))):
            values = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(values).save(folder / f"{number}.png")
            self.pixels.append(values[:, :, ::-1].transpose(2, 0, 1))
        self.path = folder / "windows.txt"
        self.write(self.boxes)

    def write(self, boxes):
        overlaps = (0.1, 0.2, 0.9, 0.6, 0.5)
        lines = [
            f"{c} {o} {' '.join(map(str, box))}\n" for c, o, box in zip(self.classes, overlaps, boxes, strict=True)
        ]
        self.path.write_text(
            f"# 0\n{self.folder}/0.png\n3\n30\n40\n3\n{''.join(lines[:3])}"
            f"# 1\n{self.folder}/1.png\n3\n20\n15\n2\n{''.join(lines[3:])}"
        )

    def item(self, index, size, pad=0, square=False, mirrored=False):
        """What a window looks like in the net, before mean and scale."""
        pixels = self.pixels[index // 3]
        cut = cut_of(self.boxes[index], pixels.shape[1:], size, pad, square, mirrored)
        result = np.zeros((3, size, size), np.float32)
        result[:, cut.down : cut.down + cut.height, cut.along : cut.along + cut.width] = cut_out(pixels, cut, mirrored)
        return result

    def all(self, size, mirrors=(False,), **options):
        """Every window in every way that it can come, by class."""
        items = [(c, self.item(i, size, mirrored=m, **options)) for i, c in enumerate(self.classes) for m in mirrors]
        return {label: [item for c, item in items if c == label] for label in set(self.classes)}


@pytest.fixture
def gallery(tmp_path):
    return Gallery(tmp_path)


def check(outputs, wanted, change=lambda item: item):
    """Each item is one of those that its label allows; which ones came."""
    came = set()
    for item, label in zip(outputs["data"], outputs["label"].astype(int).tolist(), strict=True):
        found = [n for n, want in enumerate(wanted[label]) if np.array_equal(item, change(want))]
        assert found, label
        came.add((label, found[0]))
    return came


def test_background_first_then_objects(gallery):
    made = net(gallery.path, batch=5)
    assert made.blobs["data"].shape == (5, 3, 8, 8) and made.blobs["label"].shape == (5,)
    came = set()
    for _ in range(12):
        outputs = made.forward()
        assert outputs["label"][:3].tolist() == [0] * 3 and set(outputs["label"][3:].tolist()) <= {4, 9}
        came |= check(outputs, gallery.all(8))
    assert came == {(0, 0), (0, 1), (4, 0), (4, 1), (9, 0)}


def test_the_seed_and_the_position_decide(gallery):
    runs = [
        [net_.forward()["data"].copy() for _ in range(4)] for net_ in (net(gallery.path, seed=s) for s in (1, 1, 2))
    ]
    assert np.array_equal(runs[0], runs[1]) and not np.array_equal(runs[0], runs[2])
    made = net(gallery.path, seed=1)
    layer_of(made).load_state_dict({"position": 8})
    assert np.array_equal(made.forward()["data"], runs[0][2])
    at_once = net(gallery.path, seed=1, more="data_param { prefetch: 0 }")
    assert np.array_equal([at_once.forward()["data"].copy() for _ in range(4)], runs[0])


def test_mirrors_context_square_mean_and_scale(gallery):
    made = net(
        gallery.path,
        transform="crop_size: 8 mirror: true mean_value: 50 scale: 0.5",
        extra='context_pad: 2 crop_mode: "square"',
    )
    wanted = gallery.all(8, (False, True), pad=2, square=True)
    assert any((item == 0).all(axis=(0, 2)).any() for items in wanted.values() for item in items), "nothing is outside"

    def change(item):
        inside = ~(item == 0).all(axis=0)  # no pixel of noise is black
        return np.where(inside, (item - 50) * np.float32(0.5), 0)

    came = set()
    for _ in range(30):
        came |= check(made.forward(), wanted, change)
    assert len(came) == 10


def test_a_mean_image_is_taken_from_behind_the_window(gallery, tmp_path):
    mean = np.random.default_rng(5).integers(0, 99, (3, 12, 12)).astype(np.float32)
    proto = caffe_pb2.BlobProto()
    fill_blob(proto, mean)
    write_binary(proto, tmp_path / "mean.binaryproto")
    made = net(gallery.path, transform=f'crop_size: 8 mean_file: "{tmp_path}/mean.binaryproto"')
    check(made.forward(), gallery.all(8), lambda item: item - mean[:, 2:10, 2:10])
    larger = net(gallery.path, transform=f'crop_size: 14 mean_file: "{tmp_path}/mean.binaryproto"')
    with pytest.raises(NetError, match="mean_file: expected a mean of 3 x 14 x 14 or larger, got 3 x 12 x 12"):
        larger.forward()


def test_the_share_of_objects_is_rounded_down(gallery):
    for batch, fraction, objects in ((4, 0.3, 1), (10, 0.7, 7), (3, 0, 0), (3, 1, 3)):
        made = net(gallery.path, batch=batch, fraction=fraction)
        assert np.count_nonzero(made.forward()["label"]) == objects


def test_cached_images_are_read_once(gallery):
    made = net(gallery.path, batch=16, extra="cache_images: true")
    first = made.forward()
    check(first, gallery.all(8))
    for number in (0, 1):
        (gallery.folder / f"{number}.png").unlink()
    check(made.forward(), gallery.all(8))


def test_gray_images(gallery):
    gallery.path.write_text(gallery.path.read_text().replace("png\n3\n", "png\n1\n"))
    assert net(gallery.path, TEST, transform="crop_size: 6").forward()["data"].shape == (4, 1, 6, 6)


def test_transformation_in_old_places_counts_in_old_files_only(gallery):
    made = net(gallery.path, TEST, transform="crop_size: 8", extra="crop_size: 6 scale: 0.5")
    check(made.forward(), gallery.all(8))
    old = text(gallery.path, transform="", extra="crop_size: 6").replace("layer {", "layers {", 1)
    old = old.replace('type: "WindowData"', "type: WINDOW_DATA")
    assert Net(read_net(old), TEST).forward()["data"].shape == (4, 3, 6, 6)


def test_damage(gallery, caplog):
    (gallery.folder / "1.png").write_bytes(b"")
    made = net(gallery.path, batch=8)
    with pytest.raises(NetError, match=r"1\.png, window .* \(line 1[67] of .*windows\.txt\) cannot be used"):
        for _ in range(4):
            made.forward()
    made = net(gallery.path, batch=8, settings={"skip_damaged": True})
    with caplog.at_level(logging.WARNING, logger="blobmem"):
        for _ in range(6):
            outputs = made.forward()
            assert set(outputs["label"].tolist()) == {0, 4}
    assert len(caplog.records) == 2
    (gallery.folder / "0.png").write_bytes(b"")
    with pytest.raises(NetError, match="no window of (background|objects) in .*windows.txt can be used"):
        for _ in range(PREFETCH + 2):  # those made ahead are good
            made.forward()


def test_a_window_outside_of_its_image_is_damage(gallery):
    gallery.write([(0, 0, 40, 9), *gallery.boxes[1:]])
    with pytest.raises(NetError, match=r"window 0 0 40 9 \(line 7 of .*not inside its image of 30 x 40"):
        for _ in range(20):
            net(gallery.path, batch=32).forward()


def test_wrong_options(gallery, tmp_path):
    cases = {
        "crop_size: expected the size": {"transform": ""},
        "context_pad: expected less than half of crop_size 8, got 4": {"extra": "context_pad: 4"},
        "crop_mode: expected 'warp' or 'square', got 'fill'": {"extra": 'crop_mode: "fill"'},
        "fg_fraction: expected 0 to 1, got 1.5": {"fraction": 1.5},
        "fg_threshold: expected objects in": {"extra": "fg_threshold: 0.95"},
        "bg_threshold: expected background in": {"extra": "bg_threshold: 0"},
        "mean_value: expected one that fits 3 channels": {"transform": "crop_size: 8 mean_value: 1 mean_value: 2"},
        "batch_size: expected 1 or more, got 0": {"batch": 0, "fraction": 0},
    }
    for message, options in cases.items():
        with pytest.raises(NetError, match=message):
            net(gallery.path, **options)
    with pytest.raises(
        NetError, match=r"net\.prototxt: layer 'windows' \(WindowData\), source: .*absent cannot be read"
    ):
        net(tmp_path / "absent")
    with pytest.raises(NetError, match="source: expected a window file, got nothing"):
        net("")


def test_a_stated_shape_stands_in_for_an_absent_file():
    made = net("nowhere", settings={"input_shapes": {"data": (3, 30, 40)}})
    assert made.blobs["data"].shape == (4, 3, 8, 8)


def test_a_simulated_device_gets_the_same(gallery):
    wanted = net(gallery.path).forward()
    found = net(gallery.path, settings={"device": SimulatedDevice(2**24)}).forward()
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
