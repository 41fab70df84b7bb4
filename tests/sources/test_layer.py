import gc
import io
import logging
import os
import re
import tracemalloc

import numpy as np
import pytest

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice, build_nets
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net


def text(path, batch=4, transform="", extra="backend: LMDB", top='top: "data" top: "label"', more=""):
    return (
        f'layer {{ name: "images" type: "Data" {top} transform_param {{ {transform} }}\n'
        f'  data_param {{ source: "{path}" batch_size: {batch} {extra} }} }}\n{more}'
    )


def net(path, phase=TRAIN, seed=7, **options):
    settings = {name: options.pop(name) for name in list(options) if name not in text.__code__.co_varnames[:6]}
    return Net(read_net(text(path, **options)), phase, seed=seed, source="net.prototxt", **settings)


def layer_of(of):
    return of.layers[0]


@pytest.fixture
def ten(make):
    return make(make.pictures(10))


def labels_of(of):
    return of.forward()["label"].tolist()


def test_batches_in_order_and_round_again(make):
    items = make.pictures(10)
    made = net(make(items), transform="scale: 0.5")
    assert made.blobs["data"].shape == (4, 1, 4, 5)
    assert made.blobs["label"].shape == (4,)
    for first in (0, 4, 8, 12):
        outputs = made.forward()
        wanted = np.arange(first, first + 4) % 10
        assert np.array_equal(outputs["label"], wanted)
        assert np.array_equal(outputs["data"], items[wanted] * np.float32(0.5))
    assert layer_of(made).position == 16


def test_one_top_and_float64(make):
    items = make.pictures(4)
    made = net(make(items), top='top: "data"', transform="scale: 0.1", dtype=np.float64)
    assert np.array_equal(made.forward()["data"], items * np.float64(np.float32(0.1)))


def test_building_reads_shapes_and_takes_nothing(ten):
    made = net(ten)
    made.prepare()
    made.needs()
    assert layer_of(made).position == 0
    assert labels_of(made) == [0, 1, 2, 3]


def test_a_restored_position_goes_on_bit_for_bit(ten):
    options = {"transform": "crop_size: 3 mirror: true"}
    first = net(ten, **options)
    for _ in range(3):
        first.forward()
    state = layer_of(first).state_dict()
    assert state == {"position": 12}
    expected = [{name: array.copy() for name, array in first.forward().items()} for _ in range(3)]
    second = net(ten, **options)
    second.forward()
    for again in (second, first):
        layer_of(again).load_state_dict(state)
        for want in expected:
            outputs = again.forward()
            assert all(np.array_equal(outputs[name], want[name]) for name in want)


@pytest.mark.parametrize("position", [-1, "3", None, 1.5])
def test_a_position_that_is_none(ten, position):
    made = net(ten)
    with pytest.raises(NetError, match="expected 0 or more"):
        layer_of(made).load_state_dict({"position": position})
    assert labels_of(made) == [0, 1, 2, 3]


def test_chance_is_the_seeds_and_changes_from_pass_to_pass(make):
    path = make(make.pictures(4, (2, 9, 9)))
    runs = []
    for seed in (1, 1, 2):
        made = net(path, seed=seed, transform="crop_size: 4 mirror: true")
        runs.append(np.stack([made.forward()["data"].copy() for _ in range(3)]))
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    assert not np.array_equal(runs[0][0], runs[0][1])


def test_the_phase_decides_on_crops(make):
    items = make.pictures(4, (1, 8, 8))
    data = net(make(items), TEST, transform="crop_size: 4").forward()["data"]
    assert np.array_equal(data, items[:, :, 2:6, 2:6])
    assert not np.array_equal(net(make(items, "b"), TRAIN, transform="crop_size: 4").forward()["data"], data)


def test_rand_skip_is_below_its_number_and_the_seeds(ten):
    starts = {}
    for seed in range(30):
        made = net(ten, seed=seed, extra="backend: LMDB rand_skip: 5")
        starts[seed] = layer_of(made).position
        assert labels_of(made)[0] == starts[seed] == layer_of(net(ten, seed=seed, extra="rand_skip: 5")).position
    assert set(starts.values()) == set(range(5))


def test_a_batch_of_one_takes_the_shape_of_the_next_record(make):
    items = [np.full((1, 3, n + 2), n, np.uint8) for n in range(3)]
    more = 'layer { name: "flat" type: "Flatten" bottom: "data" top: "flat" }'
    made = net(make(items), batch=1, more=more)
    for n in (0, 1, 2, 0):
        made.prepare()
        assert made.blobs["data"].shape == (1, 1, 3, n + 2)
        made.needs()
        assert made.forward()["flat"].tolist() == [[n] * 3 * (n + 2)]


def test_another_shape_within_a_batch_names_the_record(make):
    items = [np.zeros((1, 3, 3), np.uint8)] * 3 + [np.zeros((1, 3, 4), np.uint8)]
    made = net(make(items))
    with pytest.raises(
        NetError, match=r"net\.prototxt: layer 'images' \(Data\), source: record b'00000003' of .*1 x 3 x 4"
    ):
        made.forward()


def test_a_bad_record_stops_the_run_where_it_was(make):
    items = list(make.pictures(6))
    made = net(make([*items, b"\xff\xff\xff"]))
    assert labels_of(made) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(NetError, match="record b'00000006'"):
            made.forward()
        assert layer_of(made).position == 4


# ---------------------------------------------------------------- what is there, what is said


def test_an_absent_database_says_where_it_was_looked_for_and_what_to_do(tmp_path):
    path = str(tmp_path / "absent")
    with pytest.raises(NetError) as raised:
        net(path)
    said = str(raised.value)
    assert said.startswith("net.prototxt: layer 'images' (Data), source: ")
    assert path in said
    assert "--input-shape data=CxHxW" in said
    with pytest.raises(NetError, match=f"relative paths start at {re.escape(os.getcwd())}"):
        net("no_such_folder/lmdb")
    (tmp_path / "folder").mkdir()
    with pytest.raises(NetError, match="a folder without it"):
        net(tmp_path / "folder")
    with pytest.raises(NetError, match="source: expected the folder of an LMDB database, got nothing"):
        net("")


def test_the_absence_of_mnist_names_the_command(tmp_path):
    with pytest.raises(NetError, match=r"`blobmem convert mnist FOLDER_OF_MNIST_FILES examples/mnist`"):
        net("examples/mnist/mnist_train_lmdb")
    (tmp_path / "mnist").mkdir()
    with pytest.raises(NetError) as raised:
        net(tmp_path / "mnist_test_lmdb")
    assert f"`blobmem convert mnist {tmp_path / 'mnist'} {tmp_path}`" in str(raised.value)


def test_leveldb_is_refused_and_says_what_to_state(ten, tmp_path):
    level = tmp_path / "level"
    level.mkdir()
    (level / "CURRENT").write_text("MANIFEST-000001\n")
    for extra in ("backend: LEVELDB", ""):
        with pytest.raises(NetError, match=r"layer 'images' \(Data\), backend: expected `backend: LMDB`"):
            net(level, extra=extra)
    with pytest.raises(NetError, match=r"is one\), got LEVELDB"):
        net(ten, extra="backend: LEVELDB")
    with pytest.raises(NetError, match=r"is absent\), got LEVELDB"):
        net(tmp_path / "absent", extra="backend: LEVELDB")


def test_an_lmdb_without_a_backend_stated_is_read_as_one(ten, caplog):
    with caplog.at_level(logging.INFO, logger="blobmem"):
        made = net(ten, extra="")
    assert labels_of(made) == [0, 1, 2, 3]
    assert [ten in record.getMessage() for record in caplog.records] == [True]


def test_old_files_ask_for_colour_in_data_param(make, ten):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow, an optional extra, is not installed")
    file = io.BytesIO()
    pillow.fromarray(make.pictures(1)[0, 0]).save(file, "PNG")
    gray = make([caffe_pb2.Datum(encoded=True, data=file.getvalue(), label=6)], "gray")
    assert net(gray).blobs["data"].shape == (4, 1, 4, 5)
    made = net(gray, extra="force_encoded_color: true")
    assert made.forward()["data"].shape == (4, 3, 4, 5)
    assert made.blobs["label"].data.tolist() == [6] * 4


def test_wrong_options(ten):
    with pytest.raises(NetError, match=r"batch_size: expected 1 or more, got 0"):
        net(ten, batch=0)
    with pytest.raises(NetError, match="either a mean_file or mean_value"):
        net(ten, transform='mean_file: "x" mean_value: 1')
    with pytest.raises(NetError, match=r"mean_file: .*no_such_mean"):
        net(ten, transform='mean_file: "no_such_mean"')
    with pytest.raises(NetError, match="too small for crop_size 9"):
        net(ten, transform="crop_size: 9")


# ---------------------------------------------------------------- stated shapes


def test_a_stated_shape_stands_in_for_an_absent_database():
    made = net("nowhere", input_shapes={"data": (3, 20, 30)}, batch=1, extra="")
    assert made.blobs["data"].shape == (1, 3, 20, 30)
    assert made.needs()
    cropped = net("nowhere", input_shapes={"data": (3, 20, 30)}, transform='crop_size: 16 mean_file: "nowhere"')
    assert cropped.blobs["data"].shape == (4, 3, 16, 16)
    with pytest.raises(NetError, match="nowhere"):
        cropped.forward()
    assert layer_of(cropped).position == 0


def test_a_stated_shape_runs_on_a_device_that_does_not_compute():
    device = SimulatedDevice(2**30, compute=False)
    made = net("nowhere", input_shapes={"data": (3, 20, 30)}, device=device)
    made.forward()
    assert layer_of(made).position == 0


def test_a_stated_shape_holds_for_the_records(make):
    items = make.pictures(4)
    made = net(make(items), input_shapes={"data": (1, 4, 5)})
    assert np.array_equal(made.forward()["data"], items)
    other = net(make(items, "other"), input_shapes={"data": (1, 5, 4)}, batch=1)
    with pytest.raises(NetError, match="record b'00000000'"):
        other.forward()


@pytest.mark.parametrize("shape", [(20, 30), (1, 0, 3), (8, 1, 20, 30), (1, 4, 4)])
def test_a_stated_shape_must_make_sense(shape):
    with pytest.raises(NetError, match="input shape of 'data'"):
        net("nowhere", input_shapes={"data": shape}, transform="crop_size: 5")


# ---------------------------------------------------------------- nets


def test_two_nets_read_one_database_each_at_its_own_pace(ten):
    train, test = net(ten), net(ten, TEST, batch=3)
    assert labels_of(train) == [0, 1, 2, 3]
    assert labels_of(test) == [0, 1, 2]
    assert labels_of(train) == [4, 5, 6, 7]
    assert labels_of(test) == [3, 4, 5]
    del train
    gc.collect()
    assert labels_of(test) == [6, 7, 8]


LOSS = """
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def test_train_and_test_nets_that_share_blobs(ten, tmp_path):
    file = tmp_path / "net.prototxt"
    data = text(ten, 4, "scale: 0.01").strip()[:-1] + "include { phase: TRAIN } }\n"
    data += text(ten, 3, "scale: 0.01").strip()[:-1] + "include { phase: TEST } }\n"
    file.write_text(data + LOSS)
    nets = {share: build_nets(str(file), share=share) for share in (True, False)}
    nets[False].train.share_with(nets[True].train)
    nets[False].tests[0].share_with(nets[True].train)
    for _ in range(6):
        for part in ("train", "test"):
            losses = []
            for share in (True, False):
                made = nets[share].train if part == "train" else nets[share].tests[0]
                losses.append(made.run_forward())
                if part == "train":
                    made.run_backward()
            assert losses[0] == losses[1] > 0


def test_on_a_simulated_device_only_the_batch_travels(ten):
    device = SimulatedDevice(2**26)
    made = net(ten, device=device, more=LOSS, transform="scale: 0.01")
    on_host = net(ten, more=LOSS, transform="scale: 0.01")
    made.run_forward()
    on_host.run_forward()
    before = device.statistics.snapshot()
    assert made.run_forward() == pytest.approx(on_host.run_forward(), rel=1e-6)
    after = device.statistics.snapshot()
    assert after.htod_bytes - before.htod_bytes == 4 * (20 + 1) * 4


def test_passes_take_no_new_memory(make):
    made = net(make(make.pictures(100, (1, 28, 28))), batch=64, transform="scale: 0.00390625")
    for _ in range(3):
        made.run_forward()
    tracemalloc.start()
    try:
        made.run_forward()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            made.run_forward()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now - before < 16384
    assert peak - before < 2**17
