"""Damaged images, and the lists and window files that name them; tables of numbers and MNIST's files too."""

import io
import struct
import zlib

import numpy as np
import pytest
from mutations import damage_bytes, damage_header, damage_text
from PIL import Image
from strangers import fuzz, success_or_error

from blobmem import TRAIN, Net, NetError
from blobmem import io as pycaffe_io
from blobmem.data import mnist, tables
from blobmem.data.datum import RecordError
from blobmem.data.image_list import open_image, pixels_of
from blobmem.data.window_file import Windows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")

_PIXELS = np.random.default_rng(0).integers(0, 256, (9, 11, 4), dtype=np.uint8)


def _images():
    """One of each format and kind of pixels."""
    plain = ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP")
    kinds = {"RGB": plain, "L": plain, "RGBA": ("PNG", "WEBP"), "P": ("PNG", "BMP"), "1": ("PNG", "BMP")}
    for mode, formats in kinds.items():
        for name in formats:
            file = io.BytesIO()
            Image.fromarray(_PIXELS).convert(mode).save(file, name)
            yield file.getvalue()


IMAGES = list(_images())


@fuzz(120)
def test_images(chance, tmp_path):
    path = tmp_path / "damaged"
    damage = damage_header if chance.random() < 0.5 else damage_bytes
    path.write_bytes(damage(chance.choice(IMAGES), chance))
    with success_or_error(RecordError):
        pixels_of(open_image(path, chance.choice((None, "color", "gray"))), *chance.choice(((), (5, 6))))
    with success_or_error(OSError):
        pycaffe_io.load_image(path)


def _gigapixels(width, height):
    """A PNG file with nothing in it but the claim."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pieces = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in pieces)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_an_image_of_gigapixels_is_named_and_not_allocated(tmp_path):
    path, listed = tmp_path / "huge.png", tmp_path / "list.txt"
    path.write_bytes(_gigapixels(60_000, 60_000))
    listed.write_text(f"{path} 1\n")
    source = f'image_data_param {{ source: "{listed}" batch_size: 1 new_height: 4 new_width: 4 }}'
    with pytest.raises(NetError, match=r"layer 'd'.*huge\.png \(line 1 of .*3600000000 pixels\) exceeds limit"):
        Net(f'layer {{ name: "d" type: "ImageData" top: "x" top: "y" {source} }}', TRAIN)
    with pytest.raises(OSError, match=r"huge\.png cannot be read as an image: .*3600000000 pixels"):
        pycaffe_io.load_image(path)


def batches_of(kind, options, chance):
    text = f'layer {{ name: "d" type: "{kind}" top: "x" top: "y" {options} }}'
    net = Net(text, TRAIN, skip_damaged=chance.random() < 0.3)
    for _ in range(3):
        net.run_forward()


def damaged(text, chance, path, words):
    if chance.random() < 0.8:
        path.write_text(damage_text(text, chance, words), encoding="utf-8")
    else:
        path.write_bytes(damage_bytes(text.encode(), chance))


@fuzz(60)
def test_lists(chance, tmp_path):
    path, image = tmp_path / "list.txt", tmp_path / "an image"
    image.write_bytes(IMAGES[0])
    damaged(f"{image} 3\n{image} 0\n{image} -1\n", chance, path, ("99999999999", "1.5", "\0", "x" * 300, "\u0661"))
    size = chance.choice(("batch_size: 1", "batch_size: 3 new_height: 5 new_width: 6"))
    with success_or_error():
        batches_of("ImageData", f'image_data_param {{ source: "{path}" {size} }}', chance)


WINDOWS = """# 0
{0}
3
9
11
3
1 0.9 1 1 5 5
2 0.7 0 0 3 3
0 0.1 2 2 8 8
# 1
{0}
3
9
11
1
0 0.2 1 1 4 4
"""


@fuzz(80)
def test_windows(chance, tmp_path):
    path, image = tmp_path / "windows.txt", tmp_path / "image"
    image.write_bytes(IMAGES[0])
    damaged(WINDOWS.format(image), chance, path, ("1e9", "-5", "0x3", "1_0", "9" * 30))
    options = f'window_data_param {{ source: "{path}" batch_size: 4 crop_mode: "{chance.choice(("warp", "square"))}" }}'
    with success_or_error():
        batches_of("WindowData", "transform_param { crop_size: 4 } " + options, chance)


@pytest.mark.parametrize(
    "count, message",
    [("999999999", "expected 999999999 windows"), ("9" * 5000, "number of windows")],
    ids=["nine digits", "thousands of digits"],
)
def test_windows_that_are_not_there(tmp_path, count, message):
    path = tmp_path / "windows.txt"
    path.write_text(f"# 0\nimage\n3\n9\n11\n{count}\n1 0.9 1 1 5 5\n")
    with pytest.raises(NetError, match=rf"windows\.txt:[67]: .*{message}"):
        Windows(path, "", 0.5, 0.5)


@fuzz(60)
def test_tables(chance, tmp_path):
    path = tmp_path / "table.csv"
    damaged("a,b,label\n" + "1,2,0\n3,4,1\n5.5,6,2\n" * 3, chance, path, ("1e400", "nan", "\0", '"', "\u0663"))
    with success_or_error():
        label = chance.choice((None, "label", "3", "-1", "²", "\u0663"))
        tables.convert(path, tmp_path / chance.choice(("made.h5", "made")), label=label, overwrite=True)


@fuzz(150)
def test_idx_files(chance, tmp_path):
    path = tmp_path / "idx"
    path.write_bytes(damage_bytes(struct.pack(">IIII", 0x803, 2, 3, 3) + bytes(18), chance))
    with success_or_error():
        assert mnist.read_idx(path, 3).nbytes <= path.stat().st_size
