"""What tests of layers share: nets of one layer over inputs, on both devices."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TRAIN, Net


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


@pytest.fixture
def layer_net():
    """Make a net of the layers `text` over inputs named by keyword, each a shape; they get random values."""

    def make(text, phase=TRAIN, device=None, dtype=np.float32, force_backward=True, **shapes):
        inputs = "".join(
            f'layer {{ name: "in_{name}" type: "Input" top: "{name}" input_param {{ shape {{ '
            + " ".join(f"dim: {d}" for d in shape)
            + " } } }\n"
            for name, shape in shapes.items()
        )
        head = 'name: "n" force_backward: true\n' if force_backward else 'name: "n"\n'
        net = Net(head + inputs + text, phase, device=device, seed=1, dtype=dtype)
        rng = np.random.default_rng(0)
        for name in shapes:
            net.blobs[name].data[...] = rng.normal(size=net.blobs[name].shape)
        return net

    return make
