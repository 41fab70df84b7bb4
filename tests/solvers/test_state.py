"""Solver states in files of both kinds: what is written, what is read, and what does not fit."""

import h5py
import numpy as np
import pytest
from hdf5_files import HOSTILE, replace_with, write_state

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import fill_blob
from blobmem.solvers import state as states
from blobmem.solvers.state import Slot, Slots, State

SHAPES = [(5, 3), (5,), (), (0, 2)]
SLOTS = Slots([Slot(f"parameter {i} of layer 'a'", shape, np.dtype(np.float32)) for i, shape in enumerate(SHAPES)],
              "the 4 parameters of net 'n' under SGD")  # fmt: skip
ARRAYS = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(SHAPES)]
STATE = State(12, 3, "folder/näme.caffemodel", ARRAYS)


def binary(path, state=STATE):
    path.write_bytes(state.to_proto().SerializeToString())
    return path


def hdf5(path, state=STATE):
    path.write_bytes(state.to_hdf5())
    return path


def caffes(path, state=STATE):
    write_state(path, state.iter, state.current_step, state.history, state.learned_net)
    return path


@pytest.mark.parametrize("write", [binary, hdf5, caffes])
def test_there_and_back(tmp_path, write):
    state = State(12, 3, "folder/name", ARRAYS)
    found = states.read(write(tmp_path / "f.solverstate", state), SLOTS)
    assert (found.iter, found.current_step, found.learned_net) == (12, 3, "folder/name")
    for array, expected in zip(found.history, ARRAYS, strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("write", [binary, hdf5])
def test_names_with_accents(tmp_path, write):
    assert states.read(write(tmp_path / "f"), SLOTS).learned_net == "folder/näme.caffemodel"


@pytest.mark.parametrize("write", [binary, hdf5])
def test_without_a_model(tmp_path, write):
    assert states.read(write(tmp_path / "f", State(1, 0, "", ARRAYS)), SLOTS).learned_net == ""


@pytest.mark.parametrize("write", [binary, hdf5])
def test_double_precision(tmp_path, write):
    wide = [array.astype(np.float64) / 3 for array in ARRAYS]
    slots = Slots([Slot(slot.owner, slot.shape, np.dtype(np.float64)) for slot in SLOTS.arrays], "")
    for array, expected in zip(
        states.read(write(tmp_path / "f", State(1, 0, "", wide)), slots).history, wide, strict=True
    ):
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, expected)


def test_hdf5_is_as_caffe_writes_it(tmp_path):
    def described(path):
        def describe(name, item):
            if isinstance(item, h5py.Dataset):
                kind = item.id.get_type()
                found[name] = (item.shape, kind.get_class(), kind.get_size(), item[()].tobytes())

        found = {}
        with h5py.File(path) as file:
            file.visititems(describe)
        return found

    state = State(12, 3, "name.caffemodel.h5", ARRAYS)
    ours, theirs = described(hdf5(tmp_path / "ours", state)), described(caffes(tmp_path / "theirs", state))
    assert ours == theirs
    assert set(ours) == {"iter", "current_step", "learned_net", *(f"history/{i}" for i in range(4))}


def test_legacy_shapes_fit(tmp_path):
    message = STATE.to_proto()
    for proto, shape in zip(message.history[:2], [(1, 1, 5, 3), (1, 1, 1, 5)], strict=True):
        proto.ClearField("shape")
        proto.num, proto.channels, proto.height, proto.width = shape
    (tmp_path / "f").write_bytes(message.SerializeToString())
    assert [array.shape for array in states.read(tmp_path / "f", SLOTS).history] == SHAPES


# -------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("write", [binary, hdf5])
def test_wrong_number_of_arrays(tmp_path, write):
    path = write(tmp_path / "f", State(1, 0, "", ARRAYS[:2]))
    with pytest.raises(NetError, match="f: 2 history arrays, expected 4 for the 4 parameters of net 'n' under SGD"):
        states.read(path, SLOTS)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("write", [binary, hdf5])
def test_wrong_shape_names_the_parameter(tmp_path, write, index):
    arrays = [np.zeros(77, np.float32) if i == index else array for i, array in enumerate(ARRAYS)]
    where = f"history of parameter {index} of layer 'a': shape" if write is binary else f"/history/{index} has shape"
    with pytest.raises(
        NetError, match=rf"f: {where} \(77,\), expected .*{'' if write is binary else f'parameter {index}'}"
    ):
        states.read(write(tmp_path / "f", State(1, 0, "", arrays)), SLOTS)


def test_missing_values_name_the_parameter(tmp_path):
    message = STATE.to_proto()
    del message.history[0].data[3:]
    (tmp_path / "f").write_bytes(message.SerializeToString())
    with pytest.raises(NetError, match="f: history of parameter 0 of layer 'a': .*3 values"):
        states.read(tmp_path / "f", SLOTS)
    del message.history[0].data[:]
    (tmp_path / "f").write_bytes(message.SerializeToString())
    with pytest.raises(NetError, match="f: history of parameter 0 of layer 'a': it has no values"):
        states.read(tmp_path / "f", SLOTS)


@pytest.mark.parametrize("write", [binary, hdf5])
@pytest.mark.parametrize("field", ["iter", "current_step"])
def test_numbers_below_zero(tmp_path, write, field):
    state = State(**{"iter": 1, "current_step": 0, "learned_net": "", "history": ARRAYS, field: -1})
    with pytest.raises(NetError, match=f"f: {field} is -1, expected 0 or more"):
        states.read(write(tmp_path / "f", state), SLOTS)


def test_an_iteration_beyond_32_bits(tmp_path):
    hdf5(tmp_path / "f.h5")
    with h5py.File(tmp_path / "f.h5", "a") as file:
        del file["iter"]
        file["iter"] = 2**63 - 1
    with pytest.raises(NetError, match="iter is 9223372036854775807, expected"):
        states.read(tmp_path / "f.h5", SLOTS)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_history(tmp_path, kind):
    hdf5(tmp_path / "f.h5")
    message = replace_with(kind, tmp_path / "f.h5", "history/0", tmp_path)
    with pytest.raises(NetError, match=rf"f\.h5: /history/0.*{message}"):
        states.read(tmp_path / "f.h5", SLOTS)


@pytest.mark.parametrize("name", ["iter", "current_step", "history", "history/2"])
def test_what_is_missing_is_named(tmp_path, name):
    hdf5(tmp_path / "f.h5")
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file.move(name, f"{name}x")
    with pytest.raises(NetError, match=rf"f\.h5.*/{name}"):
        states.read(tmp_path / "f.h5", SLOTS)


def test_a_model_is_no_state(tmp_path):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["data/a/0"] = ARRAYS[0]
    with pytest.raises(NetError, match=r"f\.h5 has no group /history: it is not a solver's state"):
        states.read(tmp_path / "f.h5", SLOTS)
    message = caffe_pb2.NetParameter(name="n" * 100)
    fill_blob(message.layer.add(name="a").blobs.add(), ARRAYS[0])
    (tmp_path / "f").write_bytes(message.SerializeToString())
    with pytest.raises(NetError, match="it looks like a net"):
        states.read(tmp_path / "f", SLOTS)


def test_cut_short(tmp_path):
    data = hdf5(tmp_path / "f.h5").read_bytes()
    for size in range(0, len(data), 211):
        (tmp_path / "f.h5").write_bytes(data[:size])
        with pytest.raises(NetError, match=r"f\.h5"):
            states.read(tmp_path / "f.h5", SLOTS)
