import numpy as np
import pytest
from PIL import Image

from blobmem import NetError
from blobmem.data.datum import RecordError
from blobmem.data.image_list import Entry, ImageList, open_image, pixels_of


def listed(tmp_path, content, root=""):
    path = tmp_path / "list.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ImageList(path, root)


def test_paths_labels_and_line_numbers(tmp_path):
    images = listed(tmp_path, "a.jpg 3\n\n  b c.png\t-1\r\nd.bmp 0", root="/r/")
    assert len(images) == 3
    assert [images[i] for i in range(3)] == [
        Entry(1, "/r/a.jpg", 3),
        Entry(3, "/r/b c.png", -1),
        Entry(4, "/r/d.bmp", 0),
    ]
    assert images.describe(images[1]) == f"/r/b c.png (line 3 of {tmp_path / 'list.txt'})"


def test_a_path_in_any_encoding_finds_its_file(tmp_path):
    name = b"caf\xe9.bmp"
    Image.new("L", (2, 1), 9).save(tmp_path / "x.bmp")
    (tmp_path / "x.bmp").rename(str(tmp_path).encode().decode() + "/" + name.decode("utf-8", "surrogateescape"))
    images = listed(tmp_path, b"\xef\xbb\xbf" + name + b" 5\n", root=f"{tmp_path}/")
    assert open_image(images[0].path, "gray").pixels().tolist() == [[[9, 9]]]
    images.describe(images[0]).encode()


@pytest.mark.parametrize("line", ["a.jpg", "a.jpg one", "a.jpg 1.5", "a.jpg 99999999999", "7"])
def test_a_line_that_is_none_is_named(tmp_path, line):
    with pytest.raises(NetError, match=r"list\.txt:2: expected a path and a label .*got '" + line):
        listed(tmp_path, f"a.jpg 1\n{line}\n")


def test_lists_without_images(tmp_path):
    with pytest.raises(NetError, match="names no image"):
        listed(tmp_path, " \n\n")
    with pytest.raises(NetError, match="there is no file"):
        ImageList(tmp_path / "absent.txt")


def test_pixels_as_asked_for(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    for kind in ("png", "bmp", "ppm", "tiff", "webp"):
        Image.fromarray(values).save(tmp_path / f"a.{kind}", **({"lossless": True} if kind == "webp" else {}))
        pixels = pixels_of(open_image(tmp_path / f"a.{kind}", "color"))
        assert np.array_equal(pixels, values[:, :, ::-1].transpose(2, 0, 1)), kind
    assert pixels_of(open_image(tmp_path / "a.png", "gray"), 3, 4).shape == (1, 3, 4)


def test_files_that_are_no_images(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"nothing like it")
    with pytest.raises(RecordError, match="no image in JPEG or PNG"):
        open_image(tmp_path / "a.jpg", "color")
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        open_image(tmp_path / "b.jpg", "color")
    with pytest.raises(RecordError, match="cannot be read: Is a directory"):
        open_image(tmp_path, "color")
    Image.effect_noise((40, 40), 50).save(tmp_path / "c.png")
    (tmp_path / "c.png").write_bytes((tmp_path / "c.png").read_bytes()[:400])
    with pytest.raises(RecordError, match="image"):
        pixels_of(open_image(tmp_path / "c.png", "gray"))
