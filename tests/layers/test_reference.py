"""Every layer against what the original Caffe computed: recorded inputs, outputs and gradients, on all devices."""

from pathlib import Path

import numpy as np
import pytest
from cuda_devices import EMULATED, GPU, TF32_GPU

from blobmem import TEST, TRAIN, Net, SimulatedDevice
from blobmem.devices import HOST

CASES = sorted((Path(__file__).parents[1] / "data" / "layers").glob("*.npz"))
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3}  # of the array's largest value


def group(case, kind):
    return {key.split("/", 1)[1]: case[key] for key in case.files if key.startswith(kind + "/")}


def param(net, key):
    layer, index = key.rsplit("/", 1)
    return net.params[layer][int(index)]


@pytest.mark.parametrize(
    "make_device",
    [pytest.param(lambda: HOST, id="host"), pytest.param(SimulatedDevice, id="simulated"), EMULATED, GPU, TF32_GPU],
)
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_matches_caffe(path, make_device):
    case = np.load(path)
    device = make_device()
    tolerance = TOLERANCE[getattr(device, "math", "fp32")]

    def check(name, got, expected):
        assert got.shape == expected.shape, name
        scale = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * max(scale, 1e-30), err_msg=name)

    net = Net(str(case["prototxt"]), {"TRAIN": TRAIN, "TEST": TEST}[str(case["phase"])], device=device, seed=1)
    for key, values in group(case, "param").items():
        param(net, key).data[...] = values
    for name, values in group(case, "in").items():
        net.blobs[name].data[...] = values
    net.needs()  # of a GPU finds algorithms, too, and looks at what they make
    before = device.statistics.snapshot()
    net.run_forward()
    if not device.is_host:
        # losses are what the user reads; nothing else leaves the device
        losses = sum(blob.nbytes for name, blob in net.blobs.items() if blob.shape == ())
        assert (device.statistics - before).dtoh_bytes <= losses
    for name, values in group(case, "out").items():
        check(f"top {name}", net.blobs[name].cpu_data(), values)
    for key, values in group(case, "after").items():
        check(f"param {key} after forward", param(net, key).cpu_data(), values)
    bottom_diffs, param_diffs = group(case, "bottomdiff"), group(case, "paramdiff")
    if not bottom_diffs and not param_diffs:
        return
    for name, values in group(case, "topdiff").items():
        net.blobs[name].diff[...] = values
    before = device.statistics.dtoh_copies
    net.run_backward()
    assert device.statistics.dtoh_copies == before
    for name, values in bottom_diffs.items():
        check(f"gradient of {name}", net.blobs[name].cpu_diff(), values)
    for key, values in param_diffs.items():
        check(f"gradient of param {key}", param(net, key).cpu_diff(), values)
