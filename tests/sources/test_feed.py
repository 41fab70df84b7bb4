"""Images that travel to a CUDA device as bytes become, there, the bits that the host makes of them."""

import io
import threading
import time

import numpy as np
import PIL.Image
import pytest
from cuda_devices import EMULATED, GPU

from blobmem import TEST, TRAIN, Net, NetError, build_nets
from blobmem.data import feed
from blobmem.data.prefetch_line import Line
from blobmem.devices import HOST
from blobmem.errors import OutOfDeviceMemory
from blobmem.footprint import purposes_of
from blobmem.memory.slot import Slot
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import fill_blob
from blobmem.proto.text import read_net, write_binary
from blobmem.solvers import get_solver


@pytest.fixture(params=[EMULATED, GPU])
def device(request):
    return request.param()


@pytest.fixture(autouse=True)
def waiting(monkeypatch):
    """What is asked whether it is made is waited for, so that it is always sent at one time."""
    is_made = Line.is_made
    monkeypatch.setattr(Line, "is_made", lambda self, *which: bool(self.peek(*which)) and is_made(self, *which))


@pytest.fixture(params=[1, 3, 32], autouse=True)
def together(request, monkeypatch):
    """Batches that are sent at once, where they are small."""
    monkeypatch.setattr(feed, "_MOST_TOGETHER", request.param)
    return request.param


def packed_bytes(items, values, dtype=np.float32):
    """Of items of so many bytes, as they travel: bytes, cuts and labels."""
    parts = items * values, items * 12, items * np.dtype(dtype).itemsize
    return sum(-(-nbytes // 64) * 64 for nbytes in parts)


def held_bytes(items, batches, values):
    """What a device holds for batches of so many items that are sent so many at once."""
    return packed_bytes(items, values) if batches == 1 else 2 * packed_bytes(batches * items, values)


def text(path, batch=4, transform="", extra="backend: LMDB", top='top: "data" top: "label"', name="images"):
    return (
        f'layer {{ name: "{name}" type: "Data" {top} transform_param {{ {transform} }}\n'
        f'  data_param {{ source: "{path}" batch_size: {batch} {extra} }} }}\n'
    )


def pair(message, device, phase=TRAIN, **options):
    """A net on the host and one on the device."""
    make = {"phase": phase, "seed": 7, "source": "net.prototxt", **options}
    return Net(read_net(message), device=HOST, **make), Net(read_net(message), device=device, **make)


def check(plain, made, passes):
    """Pass by pass, both nets give the same bits."""
    for _ in range(passes):
        expected = {name: array.copy() for name, array in plain.forward().items()}
        outputs = made.forward()
        assert outputs.keys() == expected.keys()
        for name, array in outputs.items():
            assert array.dtype == expected[name].dtype
            assert np.array_equal(array, expected[name]), name
        assert made.layers[0].state_dict() == plain.layers[0].state_dict()


def on_bytes(net):
    return [layer.sends_bytes for layer in net.layers if hasattr(layer, "sends_bytes")]


def mean_file(path, shape, dtype=np.float32):
    proto = caffe_pb2.BlobProto()
    fill_blob(proto, np.random.default_rng(5).normal(120, 30, (1, *shape)).astype(dtype))
    write_binary(proto, path)
    return path


TRANSFORMS = {
    "plain": "",
    "scale": "scale: 0.00390625",
    "value": "mean_value: 7.3 scale: 0.017",
    "values": "mean_value: 104.1 mean_value: 117.2 mean_value: 123.3 mirror: true",
    "mirror": "mirror: true",
    "crop": "crop_size: 5 mirror: true scale: 0.1",
    "file": 'mean_file: "{mean}" scale: 0.3',
    "all": 'mean_file: "{mean}" crop_size: 6 mirror: true scale: 0.0125',
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("phase", [TRAIN, TEST], ids=["train", "test"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_same_bits_as_on_the_host(make, tmp_path, device, transform, phase, dtype):
    path = make(make.pictures(10, (3, 9, 11)))
    transform = transform.replace("{mean}", str(mean_file(tmp_path / "mean.binaryproto", (3, 9, 11))))
    plain, made = pair(text(path, transform=transform), device, phase, dtype=dtype)
    check(plain, made, 8)
    assert on_bytes(plain) == [False] and on_bytes(made) == [True]


@pytest.mark.parametrize("extra", ["prefetch: 0", "prefetch: 1", "prefetch: 4 rand_skip: 9"])
def test_however_many_are_made_ahead(make, device, extra):
    path = make(make.pictures(23, (1, 6, 5)))
    plain, made = pair(text(path, extra=extra, transform="crop_size: 4 mirror: true"), device)
    check(plain, made, 12)
    for number, at in enumerate((40, 3)):
        for one in (plain, made):
            one.layers[0].load_state_dict({"position": at})
            one.reseed(number)
        check(plain, made, 4)
    assert (made.layers[0].buffered > 0) and made.layers[0].waited > 0


def test_one_top(make, device):
    plain, made = pair(text(make(make.pictures(6)), top='top: "data"', transform="mean_value: 3"), device)
    check(plain, made, 4)


def test_records_of_different_sizes_in_one_batch(make, device, together):
    sizes = np.random.default_rng(2).integers(5, 12, (13, 2))
    items = [make.pictures(1, (3, *size), seed)[0] for seed, size in enumerate(sizes)]
    plain, made = pair(text(make(items), transform="crop_size: 5 mirror: true mean_value: 10"), device)
    check(plain, made, 9)
    # what travels is what is left of them
    assert made.internals["images/bytes"].nbytes == held_bytes(4, together, 3 * 5 * 5)


def test_a_batch_of_one_takes_the_size_of_each_record(make, device):
    items = [np.full((1, 3, n % 5 + 2), n, np.uint8) for n in range(7)]
    plain, made = pair(text(make(items), batch=1, transform="mean_value: 1"), device)
    check(plain, made, 30)


def test_compressed_images(make, device):
    items = []
    for number, values in enumerate(make.pictures(6, (7, 9, 3))):
        file = io.BytesIO()
        PIL.Image.fromarray(values).save(file, "PNG")
        items.append(caffe_pb2.Datum(encoded=True, data=file.getvalue(), label=number))
    for transform in ("force_color: true crop_size: 4 mirror: true", "force_gray: true scale: 0.5"):
        plain, made = pair(text(make(items, transform[:9]), transform=transform), device)
        check(plain, made, 6)
        assert on_bytes(made) == [True]


def test_records_of_floats_travel_as_floats(make, device):
    items = np.random.default_rng(3).normal(size=(6, 2, 5, 5)).astype(np.float32)
    plain, made = pair(text(make(list(items)), transform="crop_size: 3 scale: 0.3"), device)
    check(plain, made, 6)
    assert on_bytes(made) == [False] and not made.internals


@pytest.mark.parametrize("ahead", [0, 4])
def test_floats_among_bytes(make, device, ahead):
    items = list(make.pictures(12))
    items[5] = np.random.default_rng(3).normal(size=(1, 4, 5)).astype(np.float32)
    message = text(make(items), batch=3, extra=f"prefetch: {ahead}", transform="scale: 0.3 mirror: true")
    plain, made = pair(message, device)
    check(plain, made, 20)


def test_a_net_that_moves_within_a_unit_that_cannot_be_made(make, device):
    items = list(make.pictures(40))
    items[9] = np.random.default_rng(3).normal(size=items[9].shape).astype(np.float32)
    plain, made = pair(text(make(items)), device)
    check(plain, made, 1)
    for place in (HOST, device):
        made.move_to(place)
        check(plain, made, 1 if place is HOST else 8)


@pytest.mark.parametrize("extra", ["", "shuffle: true", "new_height: 6 new_width: 7"])
def test_image_files(tmp_path, device, extra):
    rng, lines = np.random.default_rng(1), []
    for number in range(7):
        PIL.Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{tmp_path}/{number}.png {number}\n")
    (tmp_path / "list.txt").write_text("".join(lines))
    message = (
        'layer { name: "photos" type: "ImageData" top: "data" top: "label" '
        "transform_param { crop_size: 5 mirror: true mean_value: 3 scale: 0.2 }\n"
        f'  image_data_param {{ source: "{tmp_path}/list.txt" batch_size: 3 {extra} }} }}\n'
    )
    plain, made = pair(message, device)
    check(plain, made, 8)
    assert on_bytes(made) == [True]


# ---------------------------------------------------------------- units of several batches


def test_any_position_after_any_other(make, device):
    """Within a unit and out of it, forth and back, in step with it and not, with one seed and another."""
    plain, made = pair(text(make(make.pictures(23, (1, 6, 5))), transform="crop_size: 4 mirror: true"), device)
    for position, seed in (
        (0, 7),
        (4, 7),
        (8, 7),
        (0, 7),
        (9, 7),
        (5, 7),
        (13, 7),
        (13, 8),
        (17, 8),
        (129, 8),
        (125, 8),
    ):
        for net in (plain, made):
            net.layers[0].load_state_dict({"position": position})
            net.reseed(seed)
        check(plain, made, 2)


def test_two_nets_over_one_database_each_have_their_units(make, device):
    path = make(make.pictures(23, (1, 6, 5)))
    pairs = [pair(text(path, batch=batch, transform="mirror: true"), device) for batch in (4, 4, 3)]
    for turn in range(12):
        for number, (plain, made) in enumerate(pairs):
            check(plain, made, 1 + (turn + number) % 2)


def test_what_a_device_has_of_a_unit_survives_a_move(make, device):
    plain, made = pair(text(make(make.pictures(23, (1, 6, 5)))), device)
    check(plain, made, 2)
    made.move_to(HOST)
    made.move_to(device)
    check(plain, made, 3)


def test_another_thread_goes_on_in_a_unit(make, device):
    plain, made = pair(text(make(make.pictures(23, (1, 6, 5)))), device)
    for _ in range(4):
        check(plain, made, 1)
        thread = threading.Thread(target=made.run_forward)
        thread.start()
        thread.join()
        plain.run_forward()


def test_a_snapshot_in_the_midst_of_a_unit(make, device, tmp_path):
    ip = 'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }'
    loss = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }'
    items = [make.datum(values, label % 10) for label, values in enumerate(make.pictures(23))]
    net = read_net(text(make(items), transform="mirror: true scale: 0.01") + ip + loss)
    param = caffe_pb2.SolverParameter(
        net_param=net, base_lr=0.1, lr_policy="fixed", snapshot_prefix=str(tmp_path / "s"), momentum=0.9
    )
    solver = get_solver(param, seed=3, device=device)
    solver.step(4)
    path = solver.snapshot()
    solver.step(5)
    again = get_solver(param, seed=9, device=device)
    again.step(2)
    again.restore(path)
    again.step(5)
    assert again.net.layers[0].position == solver.net.layers[0].position == 36
    for mine, theirs in zip(again.net.learnable, solver.net.learnable, strict=True):
        assert np.array_equal(mine.blob.cpu_data(), theirs.blob.cpu_data())


@pytest.mark.parametrize("ahead", [1, 4])
def test_what_is_wrong_is_told_with_its_batch_and_the_rest_is_used(make, device, ahead, together):
    """A damaged record and one of floats, in different units and batches; then whole units again."""
    items = list(make.pictures(600))
    items[21] = b"\xff"
    items[150] = np.random.default_rng(3).normal(size=(1, 4, 5)).astype(np.float32)
    plain, made = pair(text(make(items), batch=2, extra=f"prefetch: {ahead}", transform="mirror: true"), device)
    check(plain, made, 10)
    for _ in range(2):
        with pytest.raises(NetError, match="record b'00000021'"):
            made.forward()
        assert made.layers[0].position == 20
    for net in (plain, made):
        net.layers[0].load_state_dict({"position": 22})
    check(plain, made, 100)
    device.synchronize()
    before = device.statistics.snapshot()
    for _ in range(2 * together):
        made.run_forward()
    device.synchronize()
    assert (device.statistics - before).htod_copies <= 3


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("ahead", [0, 4])
def test_a_damaged_record_stops_the_pass_that_takes_it(make, device, ahead):
    items = list(make.pictures(23))
    path = make([*items[:19], b"\xff", *items[19:]])
    plain, made = pair(text(path, extra=f"prefetch: {ahead}"), device)
    check(plain, made, 4)
    for _ in range(3):
        with pytest.raises(NetError, match=r"^net\.prototxt: layer 'images' \(Data\), source: record b'00000019'"):
            made.forward()
        assert made.layers[0].position == 16
    for one in (plain, made):
        one.layers[0].load_state_dict({"position": 20})
    check(plain, made, 4)


@pytest.mark.parametrize("ahead", [0, 4])
def test_damaged_records_are_left_out_where_that_is_asked_for(make, device, ahead):
    items = list(make.pictures(10))
    path = make([*items[:2], b"\xff", b"\xfe", *items[4:]])
    plain, made = pair(text(path, extra=f"prefetch: {ahead}", transform="mirror: true"), device, skip_damaged=True)
    check(plain, made, 9)


def test_running_out_of_memory_takes_no_record(make):
    from cuda_emulation import AVAILABLE, EmulatedCuda

    if not AVAILABLE:
        pytest.skip("needs g++ on x86-64")
    small = EmulatedCuda(10)
    plain, made = pair(text(make(make.pictures(10))), small)
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory):
            made.forward()
        assert made.layers[0].position == 0 and small.statistics.htod_copies == 0
    small.capacity = 1 << 20
    check(plain, made, 3)


def test_a_later_layer_that_fails_takes_the_batch_back(make, device):
    more = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "flat" bottom: "label" top: "loss" }'
    flat = 'layer { name: "flat" type: "Flatten" bottom: "data" top: "flat" }'
    _, made = pair(text(make(make.pictures(10))) + flat + more, device)
    first = made.forward()["loss"].copy()
    calls = []

    def fail(index):
        calls.append(index)
        if index == 1:
            raise RuntimeError("stop")

    made.layers[0].load_state_dict({"position": 0})
    made.before_forward(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            made.forward()
        assert made.layers[0].position == 0
    made._callbacks["before_forward"].clear()
    assert np.array_equal(made.forward()["loss"], first)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("memory", ["keep", "train"])
@pytest.mark.parametrize("ahead", [0, 4])
def test_train_and_test_nets_share_the_buffers_of_single_batches(make, device, together, ahead, memory):
    message = text(
        make(make.pictures(30, (2, 8, 8))), batch=6, transform="crop_size: 5 mirror: true", extra=f"prefetch: {ahead}"
    )
    plain = build_nets(read_net(message), device=HOST, seed=3, test_batches=[2])
    made = build_nets(read_net(message), device=device, seed=3, test_batches=[2], memory=memory)
    shared = not ahead or together == 1  # else each net comes back for the rest of what it has sent
    assert ("images/bytes" in made.reports[0].shared) == (shared and memory == "keep")
    for _ in range(6):
        check(plain.train, made.train, 1)
        check(plain.tests[0], made.tests[0], 2)
    view, other = (net.internals["images/bytes"].data_view for net in (made.train, made.tests[0]))
    assert (view.memory is other.memory) == shared and view.nbytes > other.nbytes
    assert purposes_of(made.train)[view.memory] == "input buffers"
    assert shared <= (view.memory.gpu_capacity == view.nbytes)


def test_planned_nets_have_buffers_that_no_other_array_has(make, device, together):
    """The next batch is sent to them while a pass still runs."""
    message = text(make(make.pictures(30, (2, 8, 8))), batch=6, transform="crop_size: 5 mirror: true")
    message += 'layer { name: "sum" type: "Reduction" bottom: "data" top: "sum" }'
    made = build_nets(read_net(message), device=device, seed=3, test_batches=[2], memory="train")
    for net in (made.train, *made.tests):
        net.run_forward()
        assert not isinstance(net.internals["images/bytes"].data_view.memory, Slot)
        assert isinstance(net.blobs["data"].data_view.memory, Slot)


def test_what_is_held_follows_from_a_stated_shape(make, tmp_path, device, together):
    mean = mean_file(tmp_path / "mean.binaryproto", (2, 8, 9))
    transform = f'crop_size: 5 mean_file: "{mean}"'
    made = pair(text(make(make.pictures(9, (2, 8, 9))), transform=transform), device)[1]
    stated = transform.replace(str(mean), "nowhere")
    known = Net(read_net(text("nowhere", transform=stated)), TRAIN, device=device, input_shapes={"data": (2, 8, 9)})
    assert [need.nbytes for need in known.needs()] == [need.nbytes for need in made.needs()]
    held = device.statistics.bytes_held
    for _ in range(6):
        made.forward()
    packed = held_bytes(4, together, 2 * 5 * 5)
    assert device.statistics.bytes_held - held == 4 * 2 * 5 * 5 * 4 + 4 * 4 + packed + 2 * 8 * 9 * 4


@pytest.mark.parametrize("ahead", [0, 4])
def test_only_bytes_travel(make, device, together, ahead):
    """In a copy for each unit of batches, which are single ones where none is to be made ahead."""
    message = text(
        make(make.pictures(20, (3, 8, 8))), transform="mirror: true mean_value: 4", extra=f"prefetch: {ahead}"
    )
    _, made = pair(message, device)
    unit = together if ahead else 1
    for _ in range(unit):
        made.run_forward()
    device.synchronize()
    before = device.statistics.snapshot()
    for _ in range(2 * unit):
        made.run_forward()
    device.synchronize()
    change = device.statistics - before
    assert (change.htod_copies, change.htod_bytes) == (2, 2 * packed_bytes(4 * unit, 3 * 8 * 8))
    assert change.dtoh_copies == change.allocator_calls == change.memsets == 0


def test_a_unit_is_sent_while_the_one_before_is_used(make, device, together):
    _, made = pair(text(make(make.pictures(20, (3, 8, 8)))), device)
    before = device.statistics.htod_copies
    for done in range(4 * together):
        made.run_forward()
        units, rest = divmod(done, together)
        ahead = together > 1 and 2 * rest >= together
        assert device.statistics.htod_copies - before == units + 1 + ahead


def test_units_are_small(make, device, monkeypatch, together):
    monkeypatch.setattr(feed, "_UNIT_BYTES", 2 * packed_bytes(4, 3 * 8 * 8))
    _, made = pair(text(make(make.pictures(20, (3, 8, 8)))), device)
    assert made.internals["images/bytes"].nbytes == held_bytes(4, min(together, 2), 3 * 8 * 8)
    monkeypatch.setattr(feed, "_UNIT_BYTES", 100)
    _, made = pair(text(make(make.pictures(20, (3, 8, 8)), "other")), device)
    assert made.internals["images/bytes"].nbytes == packed_bytes(4, 3 * 8 * 8)


def test_nets_that_move(make, device):
    plain, made = pair(text(make(make.pictures(20)), transform="mirror: true mean_value: 4"), HOST)
    for place in (device, HOST, device):
        check(plain, made, 4)
        made.move_to(place)
        check(plain, made, 4)
        assert on_bytes(made) == [place is device]
        assert ("images/bytes" in made.internals) == (place is device)


def test_buffers_are_few_and_not_written_while_they_are_read(make, device, monkeypatch):
    from blobmem.data import prefetch_line

    _, made = pair(text(make(make.pictures(40, (1, 16, 16))), extra="prefetch: 10", batch=8), device)
    size = made.internals["images/bytes"].nbytes
    monkeypatch.setattr(prefetch_line, "MOST_BYTES", 5 * size)
    for number in range(40):  # the emulated device finds a buffer that changes too soon
        made.run_forward()
        if number % 3 == 0:
            time.sleep(0.002)
        assert made.layers[0].buffered <= 5 * size
    assert made.layers[0].buffered >= 2 * size
