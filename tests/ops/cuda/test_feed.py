"""Batches of bytes on their way into a net on CUDA."""

import numpy as np
import pytest

from blobmem.data.prefetch_batch import places


class Batch:
    """Bytes with cuts and labels, of one batch or several, as a unit and as what is taken; counts how often it was sent."""

    ready, number, place, left = (), 0, 0, None

    def __init__(self, *arrays):
        self.offsets = places([(array.shape, array.dtype) for array in arrays])
        self.packed = np.zeros(self.offsets[-1], np.uint8)
        for offset, array in zip(self.offsets, arrays, strict=False):
            self.packed[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        self.events = []

    @property
    def unsent(self):
        return [] if self.packed is None else [self]

    def sent(self, event):
        self.events.append(event)


def reference(pixels, cuts, mean, scale, dtype):
    """(pixels - mean) * scale, item by item."""
    out = pixels.astype(dtype)
    for item, (top, left, turned) in zip(out, cuts, strict=True):
        if turned:
            item[...] = item[:, :, ::-1].copy()
        if mean is not None:
            height, width = item.shape[1:]
            window = mean if mean.shape[1:] == (1, 1) else mean[:, top : top + height, left : left + width]
            item -= window[:, :, ::-1] if turned else window
    return out * dtype(scale)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 3, 5, 7), (2, 1, 28, 28), (1, 2, 3, 227), (5, 4, 1, 1), (2, 3, 9, 33)], ids=str)
@pytest.mark.parametrize("mean", ["none", "values", "value", "image"])
def test_images(cuda, rng, shape, dtype, mean):
    items, channels, height, width = shape
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    cuts = np.stack([rng.integers(0, top, items) for top in (3, 4, 2)], axis=1).astype(np.int32)
    labels = rng.integers(0, 1000, items).astype(dtype)
    shapes = {"values": (channels, 1, 1), "value": (1, 1, 1), "image": (channels, height + 2, width + 3)}
    means = rng.normal(100, 20, shapes[mean]).astype(dtype) if mean in shapes else None
    batch = Batch(pixels, cuts, labels)
    nan = np.full(shape, np.nan, dtype), np.full(items, np.nan, dtype)
    scale = float(np.float32(0.017))
    options = {"take": lambda device: batch, "places": batch.offsets, "scale": scale, "mirror": True}
    packed = np.zeros_like(batch.packed)
    *_, data, given = cuda.run("feed_images", packed, means, *nan, **options)
    assert np.array_equal(data, reference(pixels, cuts, means, scale, dtype))
    assert np.array_equal(given, labels)
    *_, data, _ = cuda.run("feed_images", packed, means, nan[0], None, **options)
    assert np.array_equal(data, reference(pixels, cuts, means, scale, dtype))
    assert len(batch.events) == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("on_device", [False, True])
def test_each_batch_of_a_unit(cuda, rng, dtype, on_device, monkeypatch):
    count, items, shape = (2, 3), 5, (2, 3, 7)
    pixels = rng.integers(0, 256, (*count, items, *shape), dtype=np.uint8)
    cuts = rng.integers(0, 2, (*count, items, 3)).astype(np.int32)
    labels = rng.integers(0, 1000, (*count, items)).astype(dtype)
    mean = rng.normal(100, 20, (2, 4, 8)).astype(dtype)
    units = [Batch(pixels[at], cuts[at], labels[at]) for at in range(2)]
    units[1].place = 1
    packed = np.concatenate([unit.packed if on_device else np.zeros_like(unit.packed) for unit in units])
    link, told = cuda.device.link(), []
    send, used = link.send, link.used
    monkeypatch.setattr(link, "send", lambda target, source: told.append(target.address) or send(target, source))
    monkeypatch.setattr(link, "used", lambda array: told.append(array.address) or used(array))
    for unit, number in ((1, 2), (0, 0), (1, 1), (0, 2)):
        batch = units[unit]
        batch.number, batch.left = 3 * unit + number, None if on_device else 1 - unit
        batch.packed = None if on_device else batch.packed
        nan = np.full((items, *shape), np.nan, dtype), np.full(items, np.nan, dtype)
        options = {"take": lambda device, batch=batch: batch, "places": batch.offsets, "scale": 0.5, "mirror": True}
        *_, data, given = cuda.run("feed_images_of_unit", packed, mean, *nan, together=3, **options)
        assert np.array_equal(data, reference(pixels[unit, number], cuts[unit, number], mean, 0.5, dtype))
        assert np.array_equal(given, labels[unit, number])
        if not on_device:  # what is left is told of first
            before, now = told[-2:]
            assert now - before == (2 * unit - 1) * batch.offsets[-1]
    assert len(told) == sum(len(unit.events) for unit in units) * 2
    assert [len(unit.events) for unit in units] == ([0, 0] if on_device else [2, 2])


@pytest.mark.parametrize("name, more", [("feed_images", {}), ("feed_images_of_unit", {"together": 2})])
def test_a_batch_that_has_no_bytes_goes_to_the_tops(cuda, rng, name, more):
    batch = Batch()
    batch.number = -1
    batch.packed, batch.ready = None, [rng.normal(size=shape).astype(np.float32) for shape in ((2, 1, 3, 3), (2,))]
    operands = np.zeros(64, np.uint8), None, *map(np.zeros_like, batch.ready)
    got = cuda.run(name, *operands, take=lambda device: batch, places=(0, 0, 0), scale=2.0, mirror=False, **more)
    assert all(np.array_equal(a, b) for a, b in zip(got[2:], batch.ready, strict=True))
