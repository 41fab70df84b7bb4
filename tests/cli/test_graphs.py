"""--no-cuda-graphs, --graph-dot, --allocator and --backward-streams of the commands that run nets."""

import pytest
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda
from late_streams import LateCuda

from blobmem import devices

pytestmark = needs_compiler


@pytest.fixture
def made(monkeypatch):
    """The options of the GPUs that are asked for; emulated ones are given."""
    options = []

    def make(ordinal, memory, given):
        options.append(given)
        device = EmulatedCuda()
        device.graphs = given.get("graphs", True)
        return device

    monkeypatch.setattr(devices, "_gpu", make)
    monkeypatch.setattr("blobmem.net.captured.LEAST", 2)
    return options


def run(blobmem, tiny, command, *options):
    """Train, then the command."""
    tiny.write_solver(snapshot_prefix=f'"{tiny.folder}/tiny"', max_iter=12)
    training = ["train", "--solver", tiny.solver]
    if command == "train":
        return blobmem(*training, *options)
    if command == "time":
        return blobmem("time", "--model", tiny.net, *options)
    assert blobmem(*training).code == 0
    return blobmem("test", "--model", tiny.net, "--weights", tiny.folder / "tiny_iter_12.caffemodel", *options)


@pytest.mark.parametrize("command", ["train", "test", "time"])
def test_graphs_as_dot_files(blobmem, tiny, made, command):
    result = run(blobmem, tiny, command, "--device", "cuda", "--graph-dot", tiny.folder / "dot")
    assert result.code == 0, result.err
    phase = "TEST" if command == "test" else "TRAIN"
    path = tiny.folder / f"dot-tiny-{phase}-forward-0.dot"
    assert f"wrote {path}" in result.err and path.read_text().startswith("digraph")
    assert made == [{}]


@pytest.mark.parametrize("command", ["train", "test", "time"])
def test_without_graphs(blobmem, tiny, made, command):
    result = run(blobmem, tiny, command, "--device", "cuda", "--no-cuda-graphs", "--graph-dot", tiny.folder / "dot")
    assert result.code == 0, result.err
    assert made == [{"graphs": False}] and not list(tiny.folder.glob("*.dot"))
    assert "forward, not captured: data, ip, loss (the device captures nothing)" in result.err


def test_an_allocator_is_for_a_gpu(blobmem, tiny, made):
    assert run(blobmem, tiny, "time", "--device", "cuda", "--allocator", "async").code == 0
    assert made == [{"allocator": "async"}]
    result = run(blobmem, tiny, "time", "--allocator", "async")
    assert result.code == 2 and "device 'cpu' has no allocator: that is for a GPU" in result.err


@pytest.mark.parametrize("command", ["train", "time"])
def test_on_two_streams(monkeypatch, blobmem, tiny, command):
    used = []
    monkeypatch.setattr(devices, "_gpu", lambda *_: used.append(LateCuda("side")) or used[-1])
    for streams in (1, 2):
        result = run(blobmem, tiny, command, "--device", "cuda", "--no-cuda-graphs", "--backward-streams", streams)
        assert result.code == 0, result.err
    # layer by layer the only one that learns has nothing to run beside
    assert [device.queued[True] > 0 for device in used] == [False, command == "train"]
