import logging

import numpy as np
import pytest
from PIL import Image

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice
from blobmem.data.order import permutation
from blobmem.data.resize import resize
from blobmem.proto.text import read_net


def text(source, batch=4, transform="", extra="", more="", top='top: "data" top: "label"', root=""):
    return (
        f'layer {{ name: "photos" type: "ImageData" {top} transform_param {{ {transform} }}\n'
        f'  image_data_param {{ source: "{source}" batch_size: {batch} root_folder: "{root}" {extra} }} {more} }}\n'
    )


def net(source, phase=TRAIN, seed=7, after="", settings=None, **options):
    return Net(read_net(text(source, **options) + after), phase, seed=seed, source="net.prototxt", **(settings or {}))


def layer_of(of):
    return of.layers[0]


@pytest.fixture
def album(tmp_path):
    """album(count or sizes): images of random colours, and their list; `.pixels` as Caffe has them, blue first."""

    def make(sizes, name="list.txt", gray=False):
        if isinstance(sizes, int):
            sizes = [(6, 5)] * sizes
        rng = np.random.default_rng(len(sizes))
        make.pixels, lines = [], []
        for number, size in enumerate(sizes):
            values = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
            if gray:
                values = np.repeat(values[:, :, :1], 3, axis=2)
            Image.fromarray(values).save(tmp_path / f"{number}.png")
            make.pixels.append(values[:, :, ::-1].transpose(2, 0, 1).astype(np.float32))
            lines.append(f"{tmp_path}/{number}.png {number}\n")
        (tmp_path / name).write_text("".join(lines))
        return str(tmp_path / name)

    return make


def labels_of(of):
    return of.forward()["label"].astype(int).tolist()


def test_batches_in_order_and_round_again(album):
    made = net(album(6), transform="scale: 0.5 mean_value: 10")
    assert made.blobs["data"].shape == (4, 3, 6, 5) and made.blobs["label"].shape == (4,)
    for first in (0, 4, 8, 12):
        outputs = made.forward()
        wanted = np.arange(first, first + 4) % 6
        assert outputs["label"].tolist() == wanted.tolist()
        expected = (np.stack([album.pixels[n] for n in wanted]) - 10) * np.float32(0.5)
        assert np.array_equal(outputs["data"], expected)


def test_one_top_root_folder_gray_and_float64(album, tmp_path):
    source = album(4, gray=True)
    (tmp_path / "short.txt").write_text("".join(f"{n}.png {n}\n" for n in range(4)))
    made = net(tmp_path / "short.txt", top='top: "data"', root=f"{tmp_path}/", extra="is_color: false",
               settings={"dtype": np.float64})  # fmt: skip
    data = made.forward()["data"]
    assert data.dtype == np.float64
    assert np.array_equal(data[:, 0], [pixels[0] for pixels in album.pixels])
    assert net(source).blobs["data"].shape[1] == 3


def test_images_are_resized_as_asked_for_then_cropped(album):
    source = album([(6, 5), (9, 4), (3, 3), (20, 30)])
    made = net(source, TEST, extra="new_height: 8 new_width: 6", transform="crop_size: 4")
    expected = np.stack([resize(p.astype(np.uint8), 8, 6)[:, 2:6, 1:5] for p in album.pixels])
    assert np.array_equal(made.forward()["data"], expected)


def test_shuffle_is_a_permutation_of_every_epoch_and_of_the_seed(album):
    source = album(6)
    made = net(source, batch=4, extra="shuffle: true")
    stream = [label for _ in range(6) for label in labels_of(made)]
    epochs = [stream[i : i + 6] for i in range(0, 24, 6)]
    for number, epoch in enumerate(epochs):
        assert epoch == permutation(7, "photos/", number, 6).tolist()
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = net(source, seed=8, batch=6, extra="shuffle: true")
    assert labels_of(other) != epochs[0]


def test_a_restored_position_goes_on_bit_for_bit(album):
    source = album(7)
    options = {"transform": "crop_size: 3 mirror: true", "extra": "shuffle: true rand_skip: 5"}
    first = net(source, **options)
    for _ in range(3):
        first.forward()
    state = layer_of(first).state_dict()
    expected = [{name: array.copy() for name, array in first.forward().items()} for _ in range(4)]
    second = net(source, **options)
    for again in (second, first):
        layer_of(again).load_state_dict(state)
        for want in expected:
            outputs = again.forward()
            assert all(np.array_equal(outputs[name], want[name]) for name in want)


def test_batches_made_ahead_are_those_made_at_once(album):
    source = album(10)
    options = {"transform": "crop_size: 4 mirror: true", "extra": "shuffle: true"}
    runs = []
    for prefetch in (0, 4):
        made = net(source, more=f"data_param {{ prefetch: {prefetch} }}", **options)
        runs.append([made.forward()["data"].copy() for _ in range(8)])
    assert np.array_equal(*map(np.stack, runs))


def test_rand_skip_is_below_its_number(album):
    source = album(6)
    starts = {layer_of(net(source, seed=seed, extra="rand_skip: 3")).position for seed in range(20)}
    assert starts == {0, 1, 2}


def test_a_batch_of_one_takes_the_size_of_each_image(album):
    sizes = [(6, 5), (2, 9), (3, 3)]
    made = net(album(sizes), batch=1, after='layer { name: "flat" type: "Flatten" bottom: "data" top: "flat" }')
    for number in (0, 1, 2, 0, 1):
        made.prepare()
        assert made.blobs["data"].shape == (1, 3, *sizes[number])
        flat = made.forward()["flat"]
        assert np.array_equal(flat[0], album.pixels[number].ravel())


def test_a_batch_of_one_keeps_its_size_where_options_give_one(album):
    source = album([(6, 5), (9, 9), (7, 4)])
    for options in ({"extra": "new_height: 5 new_width: 4"}, {"transform": "crop_size: 3"}):
        made = net(source, batch=1, **options)
        shapes = {made.forward()["data"].shape for _ in range(4)}
        assert len(shapes) == 1


def test_images_of_different_sizes_in_a_batch_name_the_line(album):
    made = net(album([(6, 5), (6, 5), (6, 4), (6, 5)]))
    with pytest.raises(
        NetError, match=r"net\.prototxt: layer 'photos' \(ImageData\), source: .*2\.png \(line 3 of .*new_height"
    ):
        made.forward()


def test_transformation_in_old_places_counts_in_old_files_only(album):
    source = album(4)
    made = net(source, TEST, extra='scale: 0.25 crop_size: 3 mirror: true mean_file: "none"', transform="scale: 0.5")
    assert np.array_equal(made.forward()["data"], np.stack(album.pixels) * np.float32(0.5))
    old = read_net(
        'layers { name: "d" type: IMAGE_DATA top: "data" top: "label" '
        f'image_data_param {{ source: "{source}" batch_size: 4 scale: 0.125 }} }}'
    )
    assert np.array_equal(Net(old, TEST).forward()["data"], np.stack(album.pixels) * np.float32(0.125))


# ---------------------------------------------------------------- damage


@pytest.fixture
def torn(album, tmp_path):
    """Six images of which 2 is gone, 3 is no image and 5 is cut off within its pixels."""
    source = album([(16, 15)] * 6)
    (tmp_path / "2.png").unlink()
    (tmp_path / "3.png").write_text("no image")
    data = (tmp_path / "5.png").read_bytes()
    (tmp_path / "5.png").write_bytes(data[: len(data) // 2])
    return source


def test_damage_stops_the_run_where_it_was(torn):
    made = net(torn, batch=2)
    assert labels_of(made) == [0, 1]
    for _ in range(2):
        with pytest.raises(
            NetError, match=r"2\.png \(line 3 of .*list\.txt\) cannot be used: it cannot be read: No such file"
        ):
            made.forward()
        assert layer_of(made).position == 2


def skipping(source, **options):
    return net(source, settings={"skip_damaged": True}, **options)


def test_the_next_good_one_takes_the_place_of_damage(torn, caplog):
    made = skipping(torn, batch=3)
    with caplog.at_level(logging.WARNING, logger="blobmem"):
        stream = [labels_of(made) for _ in range(4)]
    assert stream == [[0, 1, 4], [4, 4, 0]] * 2
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    assert sorted(line for line in (3, 4, 6) if any(f"line {line} of" in text for text in warnings)) == [3, 4, 6]


def test_a_batch_of_one_skips_damage_behind_the_header(torn):
    made = skipping(torn, batch=1)
    assert [labels_of(made)[0] for _ in range(7)] == [0, 1, 4, 4, 4, 0, 0]


def test_a_good_image_that_does_not_fit_is_no_damage(album):
    made = skipping(album([(6, 5), (6, 5), (6, 4), (6, 5)]), batch=4)
    with pytest.raises(NetError, match=r"2\.png \(line 3 of .*only images of one size fit"):
        made.forward()


def test_one_good_image_among_shuffled_ones_is_found(album, tmp_path):
    made = skipping(album(9), batch=4, extra="shuffle: true")
    for number in range(9):
        if number != 4:
            (tmp_path / f"{number}.png").write_bytes(b"")
    assert [labels_of(made) for _ in range(5)] == [[4] * 4] * 5


def test_no_good_image_is_an_error(album, tmp_path):
    made = skipping(album(3), batch=2)
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"")
    with pytest.raises(NetError, match="none of the 3 images of .*list.txt can be used"):
        made.forward()


# ---------------------------------------------------------------- options


def test_wrong_options(album, tmp_path):
    source = album(2)
    with pytest.raises(NetError, match="new_height: expected new_height and new_width both, or neither, got 4, 0"):
        net(source, extra="new_height: 4")
    with pytest.raises(NetError, match="batch_size: expected 1 or more, got 0"):
        net(source, batch=0)
    with pytest.raises(NetError, match=r"net\.prototxt: layer 'photos' \(ImageData\), source: there is no file"):
        net(tmp_path / "absent.txt")
    with pytest.raises(NetError, match="source: expected a list file with lines `path label`, got nothing"):
        net("")
    with pytest.raises(NetError, match="too small for crop_size 9"):
        net(source, transform="crop_size: 9")


def test_a_stated_shape_stands_in_for_an_absent_list():
    shapes = {"data": (3, 20, 30)}
    assert net("nowhere", settings={"input_shapes": shapes}).blobs["data"].shape == (4, 3, 20, 30)
    made = net("nowhere", settings={"input_shapes": shapes}, extra="new_height: 8 new_width: 9")
    assert made.blobs["data"].shape == (4, 3, 8, 9)
    with pytest.raises(NetError, match="nowhere"):
        made.forward()
    for extra in ("", "new_height: 8 new_width: 9"):
        with pytest.raises(NetError, match="input shape of 'data'"):
            net("nowhere", settings={"input_shapes": {"data": (20, 30)}}, extra=extra)


def test_a_simulated_device_gets_the_same(album):
    source = album(4)
    wanted = net(source, transform="scale: 0.5").forward()
    found = net(source, transform="scale: 0.5", settings={"device": SimulatedDevice(2**24)}).forward()
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
