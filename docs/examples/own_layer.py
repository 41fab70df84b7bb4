"""Layers of one's own, in both ways: y = x^2 as an op and a layer, and in Python at once.

The first runs wherever a net does and takes part in all that the memory system does; the second computes with NumPy on
the host, as Python layers written for Caffe do.
"""

import numpy as np

import blobmem as caffe
from blobmem.ops.call import call, overwrite, overwrite_diff, read, read_diff
from blobmem.ops.registry import op


@op
def square_forward(x, y):
    """y = x^2; x and y may be one array."""
    np.multiply(x, x, out=y)


@op
def square_backward(x, dy, dx):
    """dx = 2 x dy."""
    np.multiply(x, dy, out=dx)
    dx *= 2


@caffe.register_layer
class Square(caffe.Layer):
    """y = x^2."""

    type = "Square"

    def setup(self, bottom, top):
        if top[0] is bottom[0]:
            raise self.error("top", "another blob than the bottom, which the gradient needs", top[0].name)

    def reshape(self, bottom, top):
        top[0].reshape_like(bottom[0])

    def forward(self, bottom, top):
        yield call("square_forward", read(bottom[0]), overwrite(top[0]))

    def backward(self, bottom, top, propagate_down):
        if propagate_down[0]:
            yield call("square_backward", read(bottom[0]), read_diff(top[0]), overwrite_diff(bottom[0]))


class PythonSquare(caffe.Layer):
    """y = x^2, for `type: "Python"`."""

    def setup(self, bottom, top):
        if len(bottom) != 1:
            raise ValueError("PythonSquare takes one bottom")

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data ** 2

    def backward(self, top, propagate_down, bottom):
        if propagate_down[0]:
            bottom[0].diff[...] = 2 * bottom[0].data * top[0].diff


NET = """
force_backward: true
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
layer { name: "y" bottom: "x" top: "y" %s }
layer { name: "loss" type: "Reduction" bottom: "y" top: "loss" loss_weight: 1 }
"""
kinds = {
    "op": 'type: "Square"',
    "python": f'type: "Python" python_param {{ module: "{__name__}" layer: "PythonSquare" }}',
}

# Both on the host, and on a device, where the Python layer's arrays come to the host by themselves.
x = np.arange(6, dtype=np.float32).reshape(2, 3)
for name, device in (("cpu", None), ("simulated", caffe.SimulatedDevice())):
    for kind, text in kinds.items():
        net = caffe.Net(NET % text, caffe.TRAIN, device=device)
        y = net.forward(x=x, blobs=["y"])["y"]
        gradient = net.backward()["x"]
        assert np.array_equal(y, x * x) and np.array_equal(gradient, 2 * x)
        print(f"{kind} on {name}: y = {y.ravel()}, gradient {gradient.ravel()}")
