"""Windows of a pooling layer over a plane, for tests of its ops."""


def window_of(plane, kernel, stride, pad):
    """Plane, its pooled size as Caffe rounds it, and the op's attributes."""
    out = []
    for size, k, s, p in zip(plane, kernel, stride, pad, strict=True):
        n = -(-(size + 2 * p - k) // s) + 1
        out.append(n - 1 if p and (n - 1) * s >= size + p else n)
    return plane, tuple(out), {"kernel": kernel, "stride": stride, "pad": pad}
