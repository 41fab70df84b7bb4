"""A Python layer for nets of tests: `python_param { module: "doubling" layer: "Twice" }`."""

from blobmem import Layer


class Twice(Layer):
    """Its top is twice its bottom."""

    def setup(self, bottom, top): ...

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = 2 * bottom[0].data

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = 2 * top[0].diff
