import io

import numpy as np
import PIL.Image
import pytest

from blobmem.data.datum import RecordError, unpack
from blobmem.data.images import CompressedImage, ImageError
from blobmem.proto import caffe_pb2


def packed(values, mode=None, kind="PNG", **options):
    image = PIL.Image.fromarray(values)
    file = io.BytesIO()
    (image if mode is None else image.convert(mode)).save(file, kind, **options)
    return file.getvalue()


def colours():
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def test_colours_come_blue_first_and_by_channel():
    values = colours()
    image = CompressedImage(packed(values))
    assert image.shape == (3, 5, 7)
    assert np.array_equal(image.pixels(), values[:, :, ::-1].transpose(2, 0, 1))


def test_gray_images_have_one_channel_and_transparent_ones_four():
    values = colours()
    gray = CompressedImage(packed(values[:, :, 0]))
    assert np.array_equal(gray.pixels(), values[np.newaxis, :, :, 0])
    clear = np.dstack([values, values[:, :, :1]])
    image = CompressedImage(packed(clear))
    assert image.shape == (4, 5, 7)
    assert np.array_equal(image.pixels(), clear[:, :, (2, 1, 0, 3)].transpose(2, 0, 1))


def test_palettes_are_looked_up():
    values = np.zeros((4, 4, 3), np.uint8)
    values[1:3] = 204, 0, 51
    assert np.array_equal(CompressedImage(packed(values, "P")).pixels()[:, 1, 1], [51, 0, 204])


def test_colour_and_gray_as_asked_for():
    values = colours()
    gray = CompressedImage(packed(values), "gray").pixels()
    assert gray.shape == (1, 5, 7)
    # ITU-R 601-2
    assert np.abs(gray[0] - values @ [0.299, 0.587, 0.114]).max() < 1
    colour = CompressedImage(packed(values[:, :, 1]), "color").pixels()
    assert np.array_equal(colour, np.broadcast_to(values[:, :, 1], (3, 5, 7)))


def test_jpeg():
    values = np.full((16, 16, 3), (250, 120, 10), np.uint8)
    pixels = CompressedImage(packed(values, kind="JPEG", quality=95)).pixels().astype(int)
    assert np.abs(pixels - np.array([10, 120, 250]).reshape(3, 1, 1)).max() < 6


def test_more_than_8_bits_are_refused():
    with pytest.raises(ImageError, match="more than 8 bits"):
        CompressedImage(packed(np.full((3, 3), 70000 % 65536, np.uint16)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_damaged_images_are_record_errors(kind):
    good = packed(np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8), kind=kind)
    rng = np.random.default_rng(2)
    broken = [good[:stop] for stop in range(0, len(good) - 20, 97)]
    for _ in range(60):
        changed = bytearray(good)
        for at in rng.integers(0, len(good), 3):
            changed[at] = rng.integers(256)
        broken.append(bytes(changed))
    refused = 0
    for data in broken:
        try:
            shape, pixels = unpack(caffe_pb2.Datum(encoded=True, data=data))
            assert pixels().shape == shape
        except RecordError as error:
            refused += "image" in str(error)
    assert refused >= len(range(0, len(good) - 20, 97))
