import gc
import io
import logging
import os
import re
import threading
import time
import tracemalloc

import numpy as np
import PIL.Image
import pytest

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice, build_nets
from blobmem.data import waiting_time
from blobmem.data.batches import BatchLoader
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


# ---------------------------------------------------------------- made ahead


OPTIONS = {"transform": "crop_size: 3 mirror: true scale: 0.25", "batch": 3}


@pytest.mark.parametrize("ahead", [1, 4, 50])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["single", "double"])
def test_prefetching_changes_no_bit(ten, ahead, dtype):
    plain = net(ten, extra="backend: LMDB prefetch: 0", dtype=dtype, **OPTIONS)
    made = net(ten, extra=f"backend: LMDB prefetch: {ahead}", dtype=dtype, **OPTIONS)
    for number in range(40):
        if number in (13, 14, 30):
            for one in (plain, made):
                layer_of(one).load_state_dict({"position": 7 * number})
        if number == 20:
            plain.reseed(99)
            made.reseed(99)
        first = {name: array.copy() for name, array in plain.forward().items()}
        second = made.forward()
        assert all(np.array_equal(first[name], second[name]) for name in first)
    assert layer_of(plain).buffered == 0
    assert 0 < layer_of(made).buffered <= ahead * 3 * 512


def test_a_batch_of_one_keeps_its_shapes_when_made_ahead(make):
    items = [np.full((1, 3, n % 5 + 2), n, np.uint8) for n in range(7)]
    made = net(make(items), batch=1)
    for number in range(40):
        outputs = made.forward()
        assert np.array_equal(outputs["data"], items[number % 7][np.newaxis])
        assert outputs["label"].tolist() == [number % 7]
        if number % 3 == 0:
            made.needs()
            made.prepare()
            assert made.blobs["data"].shape == (1, *items[(number + 1) % 7].shape)


def test_an_error_of_a_batch_made_ahead_stops_the_pass_that_takes_it(make):
    items = list(make.pictures(23))
    made = net(make([*items[:19], b"\xff", *items[19:]]))
    for first in (0, 4, 8, 12):
        assert labels_of(made)[0] == first
    for _ in range(3):
        with pytest.raises(NetError, match=r"^net\.prototxt: layer 'images' \(Data\), source: record b'00000019'"):
            made.forward()
        assert layer_of(made).position == 16
    layer_of(made).load_state_dict({"position": 20})
    assert labels_of(made) == [20, 21, 22, 23]


def test_the_time_that_passes_wait_is_counted(ten, monkeypatch):
    made = net(ten, extra="backend: LMDB prefetch: 0")
    assert waiting_time(made) == 0
    load = BatchLoader.load

    def slow(*arguments):
        time.sleep(0.02)
        load(*arguments)

    monkeypatch.setattr(BatchLoader, "load", slow)
    for _ in range(3):
        made.run_forward()
    assert 0.06 <= waiting_time(made) == layer_of(made).waited < 5


def test_a_net_made_of_several_sources_counts_them_all(ten):
    made = net(ten, more=text(ten, top='top: "other"').replace('"images"', '"more"'))
    made.run_forward()
    first, second = made.layers
    assert waiting_time(made) == first.waited + second.waited > second.waited > 0


def test_threads_end_with_their_net(ten):
    made = Net(read_net(text(ten).replace('"images"', '"mortal"')), TRAIN, seed=1)
    for _ in range(6):
        made.run_forward()

    def alive():
        return [thread for thread in threading.enumerate() if thread.name.startswith("blobmem-mortal")]

    threads = alive()
    assert threads
    gc.disable()
    try:
        del made
        for thread in threads:
            thread.join(10)
        assert not alive()
    finally:
        gc.enable()


# ---------------------------------------------------------------- leaving out damaged records


@pytest.mark.parametrize("ahead", [0, 4])
def test_damaged_records_are_left_out_where_that_is_asked_for(make, caplog, ahead):
    items = list(make.pictures(10))
    path = make([*items[:2], b"\xff", b"\xfe", *items[4:]])
    made = net(path, extra=f"backend: LMDB prefetch: {ahead}", skip_damaged=True)
    batches = [[0, 1, 4, 4], [4, 5, 6, 7], [8, 9, 0, 1], [4, 4, 4, 5], [6, 7, 8, 9]]
    assert [labels_of(made) for _ in range(5)] == batches
    assert layer_of(made).position == 20
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for number, text in enumerate(said):
        assert text.startswith(f"net.prototxt: layer 'images' (Data), source: record b'0000000{number + 2}' of {path} ")
        assert text.endswith(f"it is skipped ({number + 1} so far)")
    assert len(said) == 2


def test_shapes_of_single_records_are_those_of_the_next_good_ones(make):
    items = [np.full((1, 3, n + 2), n, np.uint8) for n in range(4)]
    made = net(make([items[0], b"\xff", items[2], items[3]]), batch=1, skip_damaged=True)
    for n in (0, 2, 2, 3, 0, 2, 2, 3, 0):
        assert np.array_equal(made.forward()["data"], items[n][np.newaxis])


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
    with pytest.raises(NetError, match="source: expected the folder of an LMDB or LevelDB database, got nothing"):
        net("")


def test_the_absence_of_mnist_names_the_command(tmp_path):
    with pytest.raises(NetError, match=r"`blobmem convert mnist FOLDER_OF_MNIST_FILES examples/mnist`"):
        net("examples/mnist/mnist_train_lmdb")
    (tmp_path / "mnist").mkdir()
    with pytest.raises(NetError) as raised:
        net(tmp_path / "mnist_test_lmdb")
    assert f"`blobmem convert mnist {tmp_path / 'mnist'} {tmp_path}`" in str(raised.value)


def test_a_kind_that_is_not_there_is_refused_and_says_what_is(ten, tmp_path):
    level = tmp_path / "level"
    level.mkdir()
    (level / "CURRENT").write_text("MANIFEST-000001\n")
    with pytest.raises(NetError, match=r"layer 'images' \(Data\), backend: expected LEVELDB, which .* is, got LMDB"):
        net(level)
    with pytest.raises(NetError, match="backend: expected LMDB, which .* is, got LEVELDB"):
        net(ten, extra="backend: LEVELDB")
    with pytest.raises(NetError, match="source: expected the folder of a LevelDB database, with CURRENT in it, got"):
        net(tmp_path / "absent", extra="backend: LEVELDB")
    with pytest.raises(NetError, match=r"of an LMDB or LevelDB database, with data\.mdb or CURRENT in it, got"):
        net(tmp_path / "absent", extra="")


@pytest.mark.parametrize("extra", ["", "backend: LEVELDB"], ids=["unstated", "stated"])
def test_leveldb_databases_are_read(make, tmp_path, extra):
    plyvel = pytest.importorskip("plyvel", reason="plyvel, an optional extra, is not installed")
    items = make.pictures(10)
    database = plyvel.DB(str(tmp_path / "level"), create_if_missing=True)
    for number, item in enumerate(items):
        database.put(b"%08d" % number, make.datum(item, number).SerializeToString())
    database.close()
    train, test = net(tmp_path / "level", extra=extra), net(tmp_path / "level", TEST, extra=extra)
    for first in (0, 4, 8, 12):
        wanted = np.arange(first, first + 4) % 10
        for made in (train, test):
            outputs = made.forward()
            assert outputs["label"].tolist() == wanted.tolist()
            assert np.array_equal(outputs["data"], items[wanted])
    layer_of(train).load_state_dict({"position": 35})
    assert labels_of(train) == [5, 6, 7, 8]


def test_an_lmdb_without_a_backend_stated_is_read_as_one(ten, caplog):
    with caplog.at_level(logging.INFO, logger="blobmem"):
        made = net(ten, extra="")
    assert labels_of(made) == [0, 1, 2, 3]
    assert [ten in record.getMessage() for record in caplog.records] == [True]


def test_old_files_ask_for_colour_in_data_param(make, ten):
    file = io.BytesIO()
    PIL.Image.fromarray(make.pictures(1)[0, 0]).save(file, "PNG")
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


@pytest.mark.parametrize("ahead, most", [(0, 16384), (4, 4 * 64 * 4 * 785 + 2**18)])
def test_passes_take_no_new_memory(make, ahead, most):
    made = net(
        make(make.pictures(100, (1, 28, 28))),
        batch=64,
        transform="scale: 0.00390625",
        extra=f"backend: LMDB prefetch: {ahead}",
    )
    for _ in range(5):
        made.run_forward()
    tracemalloc.start()
    try:
        made.run_forward()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(30):
            made.run_forward()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 6 MB of batches went by
    assert now - before < most
    assert peak - before < most + 2**18
