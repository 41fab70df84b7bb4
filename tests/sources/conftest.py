"""Small databases for the tests of data sources."""

import numpy as np
import pytest

from blobmem.data.writer import new_database
from blobmem.proto import caffe_pb2


def datum(values, label=0):
    """The Datum of an array (channels, height, width), uint8 as bytes and anything else as floats."""
    values = np.asarray(values)
    channels, height, width = values.shape
    message = caffe_pb2.Datum(channels=channels, height=height, width=width, label=label)
    if values.dtype == np.uint8:
        message.data = values.tobytes()
    else:
        message.float_data.extend(values.ravel().tolist())
    return message


def pictures(count, shape=(1, 4, 5), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture
def make(tmp_path):
    """make(items, name): a database of Datum messages, arrays (label: their number) or bytes, keyed by number."""

    def build(items, name="db"):
        path = tmp_path / name
        with new_database(path) as writer:
            for number, item in enumerate(items):
                if isinstance(item, np.ndarray):
                    item = datum(item, label=number)
                value = item if isinstance(item, bytes) else item.SerializeToString()
                writer.put(b"%08d" % number, value)
        return str(path)

    build.datum, build.pictures = datum, pictures
    return build
