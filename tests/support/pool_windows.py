"""Windows of a pooling layer over a plane, for tests of its ops."""

import numpy as np


def window_of(plane, kernel, stride, pad):
    """Plane, its pooled size as Caffe rounds it, and the op's attributes."""
    out = []
    for size, k, s, p in zip(plane, kernel, stride, pad, strict=True):
        n = -(-(size + 2 * p - k) // s) + 1
        out.append(n - 1 if p and (n - 1) * s >= size + p else n)
    return plane, tuple(out), {"kernel": kernel, "stride": stride, "pad": pad}


def in_bytes(places, plane, kernel, stride, pad):
    """A mask of places in the plane (images, channels, rows, columns) as one of places in windows."""
    rows, columns = np.indices(places.shape[2:])
    down = places // plane[1] - (rows * stride[0] - pad[0])
    across = places % plane[1] - (columns * stride[1] - pad[1])
    assert ((places < 0) | ((down >= 0) & (down < kernel[0]) & (across >= 0) & (across < kernel[1]))).all()
    return np.where(places < 0, 255, down * kernel[1] + across).astype(np.uint8)
