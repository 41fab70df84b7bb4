"""What tests of CUDA ops share: a device to run them on, and a comparison with the host's op.

    def test_relu(cuda, rng):
        x = rng.normal(size=(3, 7)).astype(np.float32)
        cuda.compare("relu_forward", x, Out(x.shape), slope=0.1)          # runs both, compares every operand
        y, = cuda.run("relu_forward", x, np.zeros_like(x), slope=0.1)[1:]   # runs the CUDA op, gives all operands back

The device is the emulated one; on a machine with a GPU every test also runs on that (marked gpu).
"""

import numpy as np
import pytest
from cuda_devices import EMULATED, GPU

from blobmem.ops.registry import ArraySpec, table


class Runner:
    """Runs ops on `device`, over host arrays that are taken there and back."""

    def __init__(self, device):
        self.device = device

    def run(self, name, *operands, host_workspace=False, **attributes):
        """All operands after the CUDA op; arrays that are one object share their memory (in place)."""
        op, device = table("cuda")[name], self.device
        specs = [None if a is None else ArraySpec.of(a) for a in operands]
        needed = op.workspace_bytes(*specs, device=device, **attributes) if op.workspace is not None else 0
        places, arrays = {}, []
        for array in operands:
            if array is None:
                arrays.append(None)
                continue
            if id(array) not in places:
                address = device.allocate(max(array.nbytes, 1), name)
                if array.nbytes:
                    device.memcpy_htod(address, np.ascontiguousarray(array))
                places[id(array)] = address
            arrays.append(device.as_array(places[id(array)], array.shape, array.dtype))
        scratch = None
        if op.workspace is not None:
            scratch = device.allocate(needed + 1, "ws")
            device.memset(scratch, 0xFF, needed + 1)  # not a number, whatever it is taken for
            device.memset(scratch + needed, 0xA5, 1)
            attributes["ws"] = device.as_array(scratch, (needed,), np.uint8)
        try:
            op(*arrays, **attributes)
            device.synchronize()
            results = []
            for array in operands:
                if array is not None:
                    result = np.empty_like(array, order="C")
                    if array.nbytes:
                        device.memcpy_dtoh(result, places[id(array)])
                    results.append(result)
                else:
                    results.append(None)
            if scratch is not None:
                guard = np.empty(1, np.uint8)
                device.memcpy_dtoh(guard, scratch + needed)
                assert guard[0] == 0xA5, f"{name} wrote beyond its workspace of {needed} bytes"
            return results
        finally:
            for address in places.values():
                device.free(address)
            if scratch is not None:
                device.free(scratch)

    def compare(self, name, *operands, rtol=1e-5, atol=None, **attributes):
        """Run the host's op and the CUDA op on copies of the operands and compare all of them afterwards.

        Differences may be `rtol` of each array's largest value (1e-12 for float64 unless `rtol` is given), or `atol`.
        """
        host = table("host")[name]
        copies = {id(a): a.copy() for a in operands if a is not None}
        expected = [None if a is None else copies[id(a)] for a in operands]
        extra = {}
        if host.workspace is not None:
            specs = [None if a is None else ArraySpec.of(a) for a in operands]
            extra["ws"] = np.empty(host.workspace_bytes(*specs, **attributes) + 64, np.uint8)
        host(*expected, **attributes, **extra)
        got = self.run(name, *operands, **attributes)
        for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            if mine is None:
                continue
            if not np.issubdtype(mine.dtype, np.floating):
                np.testing.assert_array_equal(mine, theirs, err_msg=f"{name}, operand {index}")
                continue
            finite = np.abs(theirs[np.isfinite(theirs)])
            close = rtol if mine.dtype == np.float32 or rtol != 1e-5 else 1e-12
            tolerance = atol if atol is not None else close * max(finite.max(initial=0), 1e-30)
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance, err_msg=f"{name}, operand {index}")
        return got


@pytest.fixture(params=[EMULATED, GPU])
def cuda(request):
    return Runner(request.param())


@pytest.fixture
def rng():
    return np.random.default_rng(0)
