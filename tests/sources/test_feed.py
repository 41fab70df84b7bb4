"""Images that travel to a CUDA device as bytes become, there, the bits that the host makes of them."""

import io
import time

import numpy as np
import PIL.Image
import pytest
from cuda_devices import EMULATED, GPU

from blobmem import TEST, TRAIN, Net, NetError, build_nets
from blobmem.devices import HOST
from blobmem.errors import OutOfDeviceMemory
from blobmem.footprint import _purposes
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import fill_blob
from blobmem.proto.text import read_net, write_binary


@pytest.fixture(params=[EMULATED, GPU])
def device(request):
    return request.param()


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


def test_records_of_different_sizes_in_one_batch(make, device):
    sizes = np.random.default_rng(2).integers(5, 12, (13, 2))
    items = [make.pictures(1, (3, *size), seed)[0] for seed, size in enumerate(sizes)]
    plain, made = pair(text(make(items), transform="crop_size: 5 mirror: true mean_value: 10"), device)
    check(plain, made, 9)
    # what travels is what is left of them
    assert made.internals["images/bytes"].nbytes == 320 + 64 + 64


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


def test_train_and_test_nets_share_the_buffers(make, device):
    message = text(make(make.pictures(30, (2, 8, 8))), batch=6, transform="crop_size: 5 mirror: true")
    plain = build_nets(read_net(message), device=HOST, seed=3, test_batches=[2])
    made = build_nets(read_net(message), device=device, seed=3, test_batches=[2])
    assert made.reports[0].shared["images/bytes"] == "images/bytes"
    for _ in range(6):
        check(plain.train, made.train, 1)
        check(plain.tests[0], made.tests[0], 2)
    view, other = (net.internals["images/bytes"].data_view for net in (made.train, made.tests[0]))
    assert view.memory is other.memory and view.nbytes > other.nbytes
    assert _purposes(made.train, [])[view.memory] == "input buffers"


def test_what_is_held_follows_from_a_stated_shape(make, tmp_path, device):
    mean = mean_file(tmp_path / "mean.binaryproto", (2, 8, 9))
    transform = f'crop_size: 5 mean_file: "{mean}"'
    made = pair(text(make(make.pictures(9, (2, 8, 9))), transform=transform), device)[1]
    stated = transform.replace(str(mean), "nowhere")
    known = Net(read_net(text("nowhere", transform=stated)), TRAIN, device=device, input_shapes={"data": (2, 8, 9)})
    assert [need.nbytes for need in known.needs()] == [need.nbytes for need in made.needs()]
    held = device.statistics.bytes_held
    for _ in range(6):
        made.forward()
    assert device.statistics.bytes_held - held == 4 * 2 * 5 * 5 * 4 + 4 * 4 + (256 + 64 + 64) + 2 * 8 * 9 * 4


def test_only_bytes_travel(make, device):
    _, made = pair(text(make(make.pictures(20, (3, 8, 8))), transform="mirror: true mean_value: 4"), device)
    for _ in range(3):
        made.run_forward()
    device.synchronize()
    before = device.statistics.snapshot()
    for _ in range(5):
        made.run_forward()
    device.synchronize()
    change = device.statistics - before
    assert (change.htod_copies, change.htod_bytes) == (5, 5 * (768 + 64 + 64))
    assert change.dtoh_copies == change.allocator_calls == 0


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
