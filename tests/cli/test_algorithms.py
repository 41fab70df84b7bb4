import pytest

from blobmem.net.plan import recipes
from blobmem.ops.cuda import algorithms
from blobmem.ops.cuda.algorithms import Choice

NAME = "NVIDIA-H200_cudnn91900_fp32.json"


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOBMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(algorithms, "SHIPPED", tmp_path / "shipped")
    algorithms.write(
        tmp_path / "shipped" / NAME, {"a": Choice("eng1", 0, 1 << 20, 0.5), "b": Choice("eng2", 1, 0, 2.0)}
    )


def mine():
    algorithms.write(algorithms.folder() / NAME, {"b": Choice("eng3", 2, 0, 1.0)})


def test_list(blobmem):
    mine()
    result = blobmem("algorithms", "list")
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert result.code == 0
    assert "a eng1 1.00 0.500" in lines and "b eng2 0.00 2.000" in lines and "b eng3 0.00 1.000" in lines
    assert sum(NAME in line for line in lines) == 2


def test_list_of_nothing(blobmem):
    (algorithms.SHIPPED / NAME).unlink()
    assert "no choices yet" in blobmem("algorithms", "list").out


def test_clear_leaves_those_of_the_package(blobmem):
    mine()
    recipes.folder().mkdir()
    (recipes.folder() / "plan.json").write_text("{}")
    result = blobmem("algorithms", "clear")
    assert (result.code, len(result.events("clear"))) == (0, 2)
    assert algorithms.files() == [algorithms.SHIPPED / NAME] and not [*recipes.folder().iterdir()]


def test_export_merges(blobmem, tmp_path):
    mine()
    result = blobmem("algorithms", "export", tmp_path / "new")
    assert result.events("export")[0]["choices"] == "2"
    assert algorithms.read(tmp_path / "new" / NAME) == {
        "a": Choice("eng1", 0, 1 << 20, 0.5),
        "b": Choice("eng3", 2, 0, 1.0),
    }


def test_export_to_where_nothing_can_be_written(blobmem, tmp_path):
    (tmp_path / "file").write_text("")
    result = blobmem("algorithms", "export", tmp_path / "file")
    assert result.code == 1 and "file" in result.err
