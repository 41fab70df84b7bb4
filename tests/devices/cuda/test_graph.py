"""What is told to a graph whose kernels have other arguments from launch to launch, and what becomes of its memory sets."""

import cuda_devices
import numpy as np
import pytest

from blobmem.devices.cuda.calls import bindings
from blobmem.devices.cuda.graph import FEW, Varied


class Kernel:
    """A launcher whose arguments are words, and go where all its launches find them."""

    def __call__(self, grid, block, arguments):
        self.pack(arguments)

    def parameters(self, grid, block):
        return self

    def pack(self, arguments):
        self.words = " ".join(arguments)
        return self.words.encode()

    def put(self, packed):
        self.words = packed.decode()


class Graph:
    """Stands for the device, too: has one kernel, and what each node of it is told."""

    def __init__(self):
        self.one, self.nodes = Kernel(), []

    def kernel(self, source, name, dtype):
        return self.one

    def last_node(self):
        self.nodes.append([self.one.words])
        return len(self.nodes) - 1

    def set_node(self, node, parameters):
        self.nodes[node].append(parameters.words)


def test_what_was_told_under_a_key_is_told_again():
    graph = Graph()
    varied = Varied(graph, graph)

    def queue(word):
        for number in "12":
            varied.kernel("", "", None)((1,), 1, (word, number))

    def tell(word, key=None):
        again = varied.again(key)
        if again:
            queue(word)
        return again

    queue("made")
    assert [tell("a"), tell("b", 5), tell("c", 6), tell("wrong", 5), tell("wrong", 6), tell("d")] == [
        True, True, True, False, False, True
    ]  # fmt: skip
    assert varied.again(7)
    varied.kernel("", "", None)((1,), 1, ("half", "1"))  # and then it was interrupted
    assert [tell("e", 7), tell("wrong", 7)] == [True, False]
    for number, told in zip("12", graph.nodes, strict=True):
        words = [word.removesuffix(f" {number}") for word in told if "half" not in word]
        assert words == ["made", "a", "b", "c", "b", "c", "d", "e", "e"]


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_devices.has_gpu(), reason="needs a GPU")
def test_little_is_zeroed_by_kernels_in_its_turn():
    """What is more, or not zero, is set as it was captured; work before and after it is before and after it still."""
    device, count = cuda_devices.make_gpu(), 3 * FEW
    address, copy = device.allocate(count), device.allocate(count)

    def queue(graph):
        device.set_bytes(address, 7, count)
        device.set_bytes(address + FEW, 0, FEW)
        device.set_bytes(address + 4, 0, 4)
        bindings().cuMemcpyDtoDAsync(copy, address, count, device.compute_stream().native)
        device.set_bytes(address, 0, 2 * FEW)

    try:
        graph = device.capture(queue)
        nodes = bindings().cuGraphGetNodes(graph._graph, 5)[1]
        kinds = [bindings().cuGraphNodeGetType(node)[1].name.rpartition("_")[2] for node in nodes]
        assert sorted(kinds) == ["KERNEL", "KERNEL", "MEMCPY", "MEMSET", "MEMSET"]
        for _ in range(2):
            graph.launch()
        device.synchronize()
        found = np.empty((2, count), np.uint8)
        device.memcpy_dtoh(found[0], copy)
        device.memcpy_dtoh(found[1], address)
        expected = np.full((2, count), 7, np.uint8)
        expected[0, FEW : 2 * FEW] = expected[0, 4:8] = expected[1, : 2 * FEW] = 0
        np.testing.assert_array_equal(found, expected)
    finally:
        device.free(address)
        device.free(copy)
