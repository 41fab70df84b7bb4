import tracemalloc

import h5py
import numpy as np
import pytest

from blobmem import TEST, Net, NetError, SimulatedDevice
from blobmem.data.order import permutation
from blobmem.proto.text import read_net

SIZES = (5, 3, 4)


def text(source, batch=4, extra="", tops=("data", "label"), more=""):
    names = " ".join(f'top: "{top}"' for top in tops)
    return (
        f'layer {{ name: "rows" type: "HDF5Data" {names} '
        f'hdf5_data_param {{ source: "{source}" batch_size: {batch} {extra} }} {more} }}'
    )


def net(source, seed=3, settings=None, **options):
    return Net(read_net(text(source, **options)), TEST, seed=seed, source="net.prototxt", **(settings or {}))


def layer_of(of):
    return of.layers[0]


@pytest.fixture
def files(tmp_path):
    """Three files whose rows are numbered through: labels 0 to 11, data ten times that."""
    first = 0
    lines = []
    for number, size in enumerate(SIZES):
        labels = np.arange(first, first + size)
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["label"] = labels
            file["data"] = np.repeat(labels[:, None] * 10.0, 6, axis=1).reshape(size, 2, 3)
        first += size
        lines.append(f"{tmp_path}/{number}.h5\n")
    path = tmp_path / "files.txt"
    path.write_text("\n".join(lines))
    return path


def stream_of(made, passes):
    stream = []
    for _ in range(passes):
        outputs = made.forward()
        labels = outputs["label"].astype(int)
        assert np.array_equal(outputs["data"], np.broadcast_to(labels[:, None, None] * 10.0, outputs["data"].shape))
        stream += labels.tolist()
    return stream


@pytest.mark.parametrize("batch", [1, 4, 5, 30])
def test_rows_file_by_file_and_round_again(files, batch):
    made = net(files, batch=batch)
    assert made.blobs["data"].shape == (batch, 2, 3) and made.blobs["label"].shape == (batch,)
    assert stream_of(made, 4) == [n % 12 for n in range(4 * batch)]


def test_shuffle_mixes_files_and_rows_but_not_rows_of_different_files(files):
    made = net(files, batch=4, extra="shuffle: true")
    stream = stream_of(made, 12)
    file_of = np.repeat(np.arange(3), SIZES)
    orders, firsts = set(), np.cumsum([0, *SIZES])
    for epoch in range(4):
        labels = stream[12 * epoch : 12 * epoch + 12]
        assert sorted(labels) == list(range(12))
        order = permutation(3, "rows/files", epoch, 3).tolist()
        wanted = [firsts[f] + row for f in order for row in permutation(3, f"rows/rows/{f}", epoch, SIZES[f]).tolist()]
        assert labels == wanted
        assert file_of[labels].tolist() == [f for f in order for _ in range(SIZES[f])]
        orders.add(tuple(order))
    assert len(orders) > 1
    assert stream_of(net(files, seed=4, extra="shuffle: true"), 3) != stream[:12]


def test_a_restored_position_goes_on_bit_for_bit(files):
    options = {"batch": 5, "extra": "shuffle: true"}
    first = net(files, **options)
    stream_of(first, 3)
    state = layer_of(first).state_dict()
    assert state == {"position": 15}
    expected = stream_of(first, 5)
    second = net(files, **options)
    for again in (second, first):
        layer_of(again).load_state_dict(state)
        assert stream_of(again, 5) == expected
    assert stream_of(net(files, more="data_param { prefetch: 0 }", **options), 8)[15:] == expected


def test_any_number_of_tops(files, tmp_path):
    assert net(files, tops=("label",)).forward()["label"].tolist() == [0, 1, 2, 3]
    for number, size in enumerate(SIZES):
        with h5py.File(tmp_path / f"{number}.h5", "a") as file:
            file["clip"] = np.zeros((size, 7, 1), np.int8)
    made = net(files, tops=("label", "clip", "data"), settings={"dtype": np.float64})
    outputs = made.forward()
    assert {name: array.shape for name, array in outputs.items()} == {
        "label": (4,),
        "clip": (4, 7, 1),
        "data": (4, 2, 3),
    }
    assert outputs["data"].dtype == np.float64


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (2**20, 64), np.float32, chunks=(1024, 64))  # 256 MiB, none of it written
        file["data"][12345] = 7
    (tmp_path / "files.txt").write_text(str(path))
    made = net(tmp_path / "files.txt", tops=("data",), batch=1)
    layer_of(made).load_state_dict({"position": 12345})
    tracemalloc.start()
    try:
        assert np.all(made.forward()["data"] == 7)
        made.forward()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**22


def test_what_is_wrong_names_the_layer_and_the_file(files, tmp_path):
    start = r"net\.prototxt: layer 'rows' \(HDF5Data\), "
    with pytest.raises(NetError, match=start + r"transform_param: expected none"):
        net(files, more="transform_param { scale: 2 }")
    with pytest.raises(NetError, match=start + "source: there is no file"):
        net(tmp_path / "absent.txt")
    with pytest.raises(NetError, match=start + "source: expected a file that lists"):
        net("")
    with pytest.raises(NetError, match=r"0\.h5 is an HDF5 file itself: name it in a text file"):
        net(tmp_path / "0.h5")
    with pytest.raises(NetError, match=start + r"source: .*0\.h5 has no dataset 'image'"):
        net(files, tops=("image",))
    with pytest.raises(NetError, match="batch_size: expected 1 or more, got 0"):
        net(files, batch=0)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(NetError, match="names no file"):
        net(tmp_path / "empty.txt")
    files.write_text(f"{tmp_path}/0.h5\n{tmp_path}/9.h5\n")
    with pytest.raises(NetError, match=r"there is no file .*9\.h5"):
        net(files)


def test_a_file_that_goes_away_stops_the_run_where_it_was(files, tmp_path):
    made = net(files, batch=5)
    stream_of(made, 1)
    (tmp_path / "1.h5").unlink()
    for _ in range(2):
        with pytest.raises(NetError, match=r"layer 'rows' .*there is no file .*1\.h5"):
            made.forward()
        assert layer_of(made).position == 5


def test_stated_shapes_stand_in_for_absent_files():
    made = net("nowhere", settings={"input_shapes": {"data": (2, 3)}})
    assert made.blobs["data"].shape == (4, 2, 3) and made.blobs["label"].shape == (4,)
    made = net("nowhere", settings={"input_shapes": {"data": (2, 3), "label": (9,)}})
    assert made.blobs["label"].shape == (4, 9)
    made = net("nowhere", settings={"input_shapes": {"data": (2, 3)}, "device": SimulatedDevice(2**24, compute=False)})
    made.forward()


def test_stated_shapes_hold_for_the_files(files):
    made = net(files, settings={"input_shapes": {"data": (3, 2)}})
    with pytest.raises(NetError, match="input shape of 'data': expected 2 x 3, as in the files, got 3 x 2"):
        made.forward()


def test_a_simulated_device_gets_the_same(files):
    made = net(files, settings={"device": SimulatedDevice(2**24)})
    assert stream_of(made, 4) == [n % 12 for n in range(16)]
