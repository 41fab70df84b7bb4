"""What a launch packs for a kernel."""

import struct

import numpy as np
import pytest

from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.sources import DIMS, TABLE, Signature, dims, names, signatures

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


@pytest.mark.parametrize("dtype", [F4, F8])
def test_arguments_lie_as_the_compiler_puts_them(dtype):
    signature = Signature("k", ("*", "int", "Dims", "T", "*", "unsigned", "i64", "*"))
    array = CudaArray(4096, (3,), F4, None)
    number = "f" if dtype == F4 else "d"
    packed = signature.packer(dtype).pack(*signature.flat((array, -2, (5, 6), 0.5, None, 7, 8, 1 << 40)))
    assert packed == struct.pack(f"Pi{DIMS}q{number}PIqP", 4096, -2, 5, 6, *[0] * 6, 0.5, 0, 7, 8, 1 << 40)


def test_dims_may_come_as_bytes_and_as_lists():
    signature = Signature("k", ("unsigned", "Dims"))
    expected = struct.pack(f"I{DIMS}q", 1, 2, 3, *[0] * 6)
    for given in ((2, 3), [2, 3], dims((2, 3))):
        assert signature.packer(F4).pack(*signature.flat((1, given))) == expected
    with pytest.raises(struct.error):
        dims(tuple(range(DIMS + 1)))


def test_a_table_begins_where_an_i64_could():
    signature = Signature("k", ("int", "Table"))
    assert len(signature.packer(F4).pack(*signature.flat((1, b"x")))) == 8 + 8 * TABLE


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_arguments(count):
    with pytest.raises(TypeError, match=f"kernel k takes 2 arguments, not {count}"):
        Signature("k", ("*", "int")).flat((1,) * count)


def test_every_kernel_can_be_packed():
    for name in names():
        for signature in signatures(name).values():
            values = {"*": None, "Dims": (1,), "Table": b""}
            given = [values.get(word, 1) for word in signature.types]
            assert signature.packer(F4).pack(*signature.flat(given))


def test_what_a_launch_gives_beside_is_read_off_the_kernel_too():
    """A number that its source defines; and none of most."""
    assert {each.shared for each in signatures("conv_pointwise").values()} == {101376}
    assert {each.shared for each in signatures("conv_near").values()} == {115712}
    assert not any(each.shared for each in signatures("norm").values())
