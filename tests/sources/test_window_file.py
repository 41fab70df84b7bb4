import pytest

from blobmem import NetError
from blobmem.data.window_file import Windows

FILE = """# 0
a.jpg
3
50
60
4
5 0.75 1 2 30 40
5 0.5 0 0 59 49
2 0.25 10 10 20 20
7 0.1 3 3 4 4

# 1
sub dir/b.jpg
3
20
20
1
1 1 0 0 9 9
"""


@pytest.fixture
def read(tmp_path):
    def make(content=FILE, foreground=0.5, background=0.2, root=""):
        path = tmp_path / "windows.txt"
        path.write_text(content)
        return Windows(path, root, foreground, background)

    return make


def test_objects_and_background(read):
    windows = read(root="/r/")
    assert windows.images == ["/r/a.jpg", "/r/sub dir/b.jpg"] and windows.channels == 3
    assert [tuple(windows.window(True, i)) for i in range(3)] == [
        (7, 0, 5, (1, 2, 30, 40)), (8, 0, 5, (0, 0, 59, 49)), (18, 1, 1, (0, 0, 9, 9)),
    ]  # fmt: skip
    assert windows.window(False, 0) == (10, 0, 0, (3, 3, 4, 4))
    assert len(windows.foreground) == 3 and len(windows.background) == 1
    assert windows.describe(windows.window(True, 2)) == f"/r/sub dir/b.jpg, window 0 0 9 9 (line 18 of {windows.path})"


def test_thresholds_that_overlap_make_objects_first(read):
    windows = read(foreground=0.25, background=0.9)
    assert len(windows.foreground) == 4 and len(windows.background) == 1


def test_an_overlap_equal_to_a_threshold_that_binary_numbers_lack(read):
    windows = read(FILE.replace("0.5 0 0", "0.3 0 0"), foreground=0.3, background=0.3)
    assert windows.window(True, 1).line == 8


WRONG = {
    "mark": ("# 1", "1", 12, "expected `# ` and the number of an image, got '1'"),
    "channels": ("20\n20\n1\n1 1", "x\n20\n1\n1 1", 15, "expected the height of an image, got 'x'"),
    "kinds": ("sub dir/b.jpg\n3", "sub dir/b.jpg\n1", 14, "expected 3 channels for sub dir/b.jpg, got '1'"),
    "four": ("2 0.25 10 10 20 20", "2 0.25 10 10 20", 9, "expected class, overlap and four corners of a window"),
    "word": ("2 0.25 10 10 20 20", "2 0.25 10 ten 20 20", 9, "got '2 0.25 10 ten 20 20'"),
    "half": ("2 0.25 10 10 20 20", "2 0.25 10 10.5 20 20", 9, "four corners"),
    "huge": ("2 0.25 10 10 20 20", "2 0.25 10 10 20 9999999999", 9, "four corners"),
    "class": ("5 0.5 0 0", "0 0.5 0 0", 8, "expected a class of 1 or more for an object"),
    "short": ("1 1 0 0 9 9\n", "", 17, "got the end of the file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named(read, case):
    old, new, line, message = WRONG[case]
    assert FILE.count(old) == 1
    with pytest.raises(NetError) as raised:
        read(FILE.replace(old, new))
    assert f"windows.txt:{line}: " in str(raised.value) and message in str(raised.value)


def test_files_without_windows(read, tmp_path):
    with pytest.raises(NetError, match="has no images: expected a window file"):
        read("\n")
    with pytest.raises(NetError, match="absent cannot be read: No such file"):
        Windows(tmp_path / "absent", "", 0.5, 0.5)
    assert len(read("# 0\na.jpg\n1\n5\n5\n0\n").background) == 0
