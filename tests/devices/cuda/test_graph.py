"""What is told to a graph whose kernels have other arguments from launch to launch."""

from blobmem.devices.cuda.graph import Varied


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
