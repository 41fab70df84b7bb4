import re
from pathlib import Path

import pytest

from blobmem.footprint import SCHEMES
from blobmem.ops.cuda import algorithms

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_choices_of_ones_own(tmp_path, monkeypatch):
    """Algorithms are those of the package."""
    monkeypatch.setattr(algorithms, "folder", lambda: tmp_path / "algorithms")
    algorithms._registry.cache_clear()
    yield
    algorithms._registry.cache_clear()


def table(result):
    """The rows of the table by scheme: {column: cell}."""
    lines = result.out.splitlines()
    (rule,) = (index for index, line in enumerate(lines) if re.fullmatch("-+", line))
    heads = lines[rule - 1].split()
    rows = [line.rsplit(maxsplit=len(heads) - 1) for line in lines[rule + 1 : rule + 1 + len(SCHEMES)]]
    return {row[0].strip(): dict(zip(heads, row, strict=True)) for row in rows}


def test_batches_and_what_holds_the_memory(blobmem, tiny):
    result = blobmem("fit", tiny.solver, "--device-memory", "16MiB", "--test-batch", 64)
    assert result.code == 0 and not result.err
    assert result.out.startswith(f"Largest batches of {tiny.solver} in 16.0 MiB, and what holds these\n")
    rows = table(result)
    assert list(rows) == [*SCHEMES]
    for row in rows.values():
        assert 15 < float(row["total"]) <= 16 and row["left"] in ("0.0", "<0.1")
    assert "test" in result.out.splitlines()[1] and "  64  " in result.out
    assert "planned: arrays take turns" in result.out


def test_a_card_is_not_all_for_nets(blobmem, tiny):
    result = blobmem("fit", tiny.net, "--card", "878MiB")
    assert result.code == 0 and "in 39.0 MiB" in result.out and "839.0 are for CUDA's context" in result.out
    assert all(float(row["total"]) % 2 == 0 for row in table(result).values())


@pytest.mark.parametrize("room", [["--device-memory", "1KiB"], ["--card", "500MiB"]])
def test_what_does_not_fit(blobmem, tiny, room):
    result = blobmem("fit", tiny.net, *room)
    assert result.code == 1 and "with a training batch of 1 under every scheme" in result.err
    assert all(float(row["left"]) < 0 for row in table(result).values())


@pytest.mark.parametrize(
    "options, said",
    [([], "one of the arguments --device-memory --card is required"),
     (["--card", "1GiB", "--device-memory", "1GiB"], "not allowed with argument"),
     (["--card", "much"], "--card")],
)  # fmt: skip
def test_one_amount_of_memory_is_asked_for(blobmem, tiny, options, said):
    result = blobmem("fit", tiny.net, *options)
    assert result.code == 2 and said in result.err


def test_for_a_simulated_device(blobmem, data_net):
    room = ["--device-memory", "1MiB", "--input-shape", "data=1x5x5", "--device", "simulated"]
    result = blobmem("fit", data_net, *room)
    assert result.code == 0 and not result.err
    result = blobmem("fit", data_net, *room, "--math", "tf32")
    assert result.code == 1 and "device 'simulated' has no math" in result.err
    result = blobmem("fit", data_net, "--card", "1GiB", "--input-shape", "date=1x5x5")
    assert result.code == 1 and "it has data, label" in result.err


def test_the_documentation_has_what_the_command_finds(blobmem):
    result = blobmem("fit", ROOT / "models" / "caffenet" / "solver.prototxt", "--card", "16GiB")
    assert result.code == 0 and result.err.count("no algorithm is known for some convolutions") == 1
    page = (ROOT / "docs" / "memory.md").read_text()
    rule = result.out.splitlines().index(next(line for line in result.out.splitlines() if line.startswith("---")))
    for line in result.out.splitlines()[rule + 1 : rule + 6]:
        scheme, train, test = re.match(r"(\D+?) +(\d+) +(\d+) ", line).groups()
        assert f"| {scheme} | {train} | {test} |\n" in page


def test_a_pace(blobmem, tiny):
    asked = ["fit", tiny.solver, "--device", "simulated", "--device-memory"]
    result = blobmem(*asked, "64KiB", "--max-slowdown", "1.1")
    assert result.code == 0 and not result.err
    assert result.out.startswith(f"Largest training batch of {tiny.solver} in 0.1 MiB, at most 1.1 times slower\n")
    batch, ms, free, times, rate, _ = result.out.splitlines()[4].split()
    assert int(batch) > 100 and 1 <= float(times) <= 1.1
    assert float(ms) / float(free) == pytest.approx(float(times), rel=0.05)
    assert 1e3 * int(batch) / float(ms) == pytest.approx(float(rate), rel=0.5)
    result = blobmem(*asked, "100", "--max-slowdown", "1.1")
    assert result.code == 1 and "a training batch of 1 of" in result.err and "does not fit" in result.err
    result = blobmem(*asked, "1KiB", "--max-slowdown", "0.9")
    assert result.code == 2 and "expected a number of at least 1" in result.err
