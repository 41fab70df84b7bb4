"""cuDNN's plans on a GPU. With `-s` it prints every plan's workspace, time and error."""

import threading
import time

import numpy as np
import pytest
from cuda_devices import TF32_GPU, make_gpu, needs_gpu

from blobmem import dtypes
from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import algorithms, conv, conv_plans, conv_search
from blobmem.ops.cuda.conv_direct import noise
from blobmem.ops.cuda.cudnn import FUSED, RELU, Cudnn, Plan
from blobmem.ops.cuda.layout import aligned, in_layout
from blobmem.ops.registry import ArraySpec, table

pytestmark = list(needs_gpu)

# x, w, stride, pad, dilation, group; small, since all plans are built and our own kernels check them in float64
LAYERS = {
    "caffenet conv1": ((8, 3, 227, 227), (96, 3, 11, 11), (4, 4), (0, 0), (1, 1), 1),
    "caffenet conv2": ((16, 96, 27, 27), (256, 48, 5, 5), (1, 1), (2, 2), (1, 1), 2),
    "resnet 1x1": ((4, 256, 56, 56), (64, 256, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "resnet 1x1/2": ((4, 256, 56, 56), (512, 256, 1, 1), (2, 2), (0, 0), (1, 1), 1),
    "vgg 3x3": ((4, 256, 28, 28), (256, 256, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "depthwise": ((16, 96, 56, 56), (96, 1, 3, 3), (1, 1), (1, 1), (1, 1), 96),
    "dilated": ((4, 32, 40, 40), (32, 32, 3, 3), (1, 1), (4, 4), (4, 4), 1),
    "1d": ((8, 32, 1000), (64, 32, 5), (2,), (2,), (1,), 1),
    "3d": ((4, 8, 12, 24, 24), (16, 8, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
}
DIRECTIONS = ("forward", "forward+bias", "data", "weights")
RESULT = {"forward": 2, "forward+bias": 2, "data": 0, "weights": 1}
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3}


@pytest.fixture(autouse=True)
def choices_of_their_own(tmp_path_factory, monkeypatch):
    """Choices are searched for here; compiled kernels stay where they are."""
    folder = tmp_path_factory.mktemp("algorithms")
    monkeypatch.setattr(algorithms, "folder", lambda: folder)


def key_for(device, layer, direction="forward", dtype=np.float32, layout="NCHW"):
    x, w, stride, pad, dilation, group = LAYERS[layer]
    specs = (ArraySpec(shape, np.dtype(dtype)) for shape in (in_layout(x, layout), w))
    return conv_plans.key_of(direction, device, *specs, stride, pad, dilation, group, layout)


def fetch(array):
    host = np.empty(array.shape, array.dtype)
    array.device.synchronize()
    array.device.memcpy_dtoh(host, array.address)
    return host


def exact(device, key, arrays):
    """The result of the same numbers by our own kernels in double precision.

    With the channels last a plan has those of the weights last, too; our own kernels have them as the file.
    """
    outs, channels, *taps = key.w
    turned = key.layout == "NHWC"
    sizes = [aligned(array.size * 8) for array in arrays]
    with device.scratch(sum(sizes)) as address:
        doubles = [
            CudaArray(address + sum(sizes[:i]), array.shape, np.float64, device) for i, array in enumerate(arrays)
        ]
        for index, (single, double) in enumerate(zip(arrays, doubles, strict=True)):
            values = fetch(single).astype(np.float64)
            if turned and index == 1:
                values = np.moveaxis(values.reshape(outs, *taps, channels), -1, 1)
            device.memcpy_htod(double.address, np.ascontiguousarray(values))
        conv_search.run_direct(key._replace(dtype="float64"), doubles)
        result = fetch(doubles[RESULT[key.direction]])
        return np.moveaxis(result, 1, -1).reshape(key.w) if turned and key.direction == "weights" else result


PROBLEMS = pytest.mark.parametrize(
    "math, layer, layout",
    [
        *(("fp32", layer, "NCHW") for layer in LAYERS),
        *(("tf32", layer, layout) for layer in ("vgg 3x3", "caffenet conv2") for layout in ("NCHW", "NHWC")),
        ("tf32", "resnet 1x1/2", "NHWC"),
    ],
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@PROBLEMS
def test_every_plan_is_close_or_found_out(layer, direction, math, layout):
    device = make_gpu(math=math)
    key = key_for(device, layer, direction, layout=layout)
    search = conv_search.Search(key, device, device.library("cudnn", Cudnn))
    theirs, errors, right = None, {}, {}
    for candidate in search.candidates():
        result = search.arrays[RESULT[direction]]
        if theirs is None:
            theirs = exact(device, key, search.arrays[:4])
        result.zero()
        right[candidate.plan] = search.is_right(candidate)
        ms = search.measure(candidate)
        errors[candidate.plan] = np.abs(fetch(result) - theirs).max() / np.abs(theirs).max()
        print(
            f"{layer:15} {direction:12} {math} {layout} {candidate.number:2} {candidate.plan:40} "
            f"{candidate.workspace / 2**20:8.2f} MiB {-1 if ms is None else ms:8.4f} ms {errors[candidate.plan]:.1e}"
        )
        assert ms is not None or not right[candidate.plan], candidate.plan
    assert any(name != algorithms.DIRECT for name in errors), "cuDNN has no plan"
    assert right == {name: error < TOLERANCE[math] for name, error in errors.items()}, errors
    assert any(right.values())


@PROBLEMS
def test_relu_in_a_plan_is_relu_after_it(layer, math, layout):
    """The same bits, and what is no number stays so."""
    device = make_gpu(math=math, deterministic=True)
    key = key_for(device, layer, "forward+bias", layout=layout)
    cudnn = device.library("cudnn", Cudnn)
    shapes = in_layout(key.x, layout), key.w, in_layout(key.y, layout), (key.w[0],)
    arrays = [device.as_array(device.allocate(4 * int(np.prod(s)), "test"), s, np.float32) for s in shapes]
    for seed, array in enumerate(arrays):
        noise(array, seed)
    nothing = np.array([np.nan], np.float32)
    for array in (arrays[0], arrays[3]):  # in some positions, and all over a channel
        device.memcpy_htod(array.address, nothing)
    results, barred = {}, set()
    for name in [name for _, name, _ in cudnn.listed(key, FUSED)]:
        plans = cudnn.build(key, name), cudnn.build(key._replace(direction=RELU), name)
        if name.startswith("bias+eng39"):
            assert plans[1] is None, name
            barred.add(name)
        elif None not in plans and plans[0].workspace <= key.limit:
            results[name] = []
            for plan in plans:
                arrays[2].zero()
                with device.scratch(max(plan.workspace, 1)) as workspace:
                    plan.run([array.address for array in arrays], workspace)
                results[name].append(fetch(arrays[2]))
            print(f"{layer:15} {math} {layout} {name:40} {[plan.workspace for plan in plans]} bytes")
    for name, (plain, relu) in results.items():
        assert np.isnan(plain).any() and (plain < 0).any()
        np.testing.assert_array_equal(relu, np.maximum(plain, 0), err_msg=name)
    assert results or barred == {name for _, name, _ in cudnn.listed(key, FUSED)}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_channels_last_has_plans(direction):
    device = make_gpu(math="tf32")
    key = key_for(device, "vgg 3x3", direction, layout="NHWC")
    cudnn = device.library("cudnn", Cudnn)
    built = [name for index, name, graph in cudnn.listed(key) if cudnn.built(graph, index)]
    assert built


def call(device, layer="vgg 3x3"):
    """A forward pass over noise: a call that queues it, and its output."""
    x_shape, w_shape, stride, pad, dilation, group = LAYERS[layer]
    key = key_for(device, layer)
    shapes = (x_shape, w_shape, (w_shape[0],), key.y)
    x, w, b, y = (device.as_array(device.allocate(4 * int(np.prod(s)), "test"), s, np.float32) for s in shapes)
    for seed, array in enumerate((x, w, b)):
        noise(array, seed)
    window = {"stride": stride, "pad": pad, "dilation": dilation, "group": group}
    op = table("cuda")["conv_forward"]
    nbytes = op.workspace_bytes(*map(ArraySpec.of, (x, w, b, y)), device=device, **window)
    ws = device.as_array(device.allocate(max(nbytes, 1), "ws"), (nbytes,), np.uint8)
    return lambda: op(x, w, b, y, ws=ws, **window), y


def test_a_choice_is_kept_and_built_again(monkeypatch):
    device = make_gpu(deterministic=True)
    run, y = call(device)
    run()
    first = fetch(y)

    def measure(*_):
        raise AssertionError("timed again")

    monkeypatch.setattr(conv_search.Search, "measure", measure)
    algorithms._registry.cache_clear()  # as a new process
    started = time.perf_counter()
    run, y = call(make_gpu(deterministic=True))
    print(f"plan found in the file and built in {(time.perf_counter() - started) * 1e3:.0f} ms")
    run()
    np.testing.assert_array_equal(fetch(y), first)


@pytest.mark.parametrize("mib, searched", [(100, False), (160, True)])
def test_a_search_keeps_to_what_the_device_may_hold(mib, searched):
    """And where that is too little for one, the convolution is charged its limit."""
    device = make_gpu(limit=mib << 20)
    x, w = (ArraySpec(shape, np.dtype("float32")) for shape in ((31, 68, 57, 55), (52, 68, 3, 3)))
    key = conv_plans.key_of("weights", device, x, w, (1, 1), (1, 1), (1, 1), 1)
    room = conv_plans.room_of(key, device)
    assert (room != (key.most, 2, True)) == searched
    assert device.statistics.peak_bytes <= mib << 20
    assert (device.statistics.peak_bytes > 0) == searched


def test_deterministic_plans_repeat():
    device = make_gpu(deterministic=True)
    for layer in ("vgg 3x3", "caffenet conv2"):
        run, y = call(device, layer)
        run()
        first = fetch(y)
        for _ in range(5):
            y.zero()
            run()
            np.testing.assert_array_equal(fetch(y), first)


def test_threads_have_streams_of_their_own():
    device, results = make_gpu(deterministic=True), {}

    def work(index):
        run, y = call(device)
        for _ in range(20):
            y.zero()
            run()
        results[index] = fetch(y)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results.values():
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("order", ["NHWC", conv.TURNS])
@pytest.mark.parametrize("cuda", [TF32_GPU], indirect=True)
def test_few_channels_are_widened_or_folded(cuda, monkeypatch, rng, folded, order):
    """To the same numbers; in tf32 some ten bits of each factor count."""
    widened = conv._widened
    monkeypatch.setattr(conv, "_widened", lambda *given: (widened(*given)[folded],))
    window = {"stride": (2, 2), "pad": (3, 3), "dilation": (1, 1), "group": 1}
    shapes = (6, 3, 224, 224), (32, 3, 7, 7), (32,), (6, 32, 112, 112)
    x, w, b, y = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    theirs, dw = np.empty_like(y), w.copy()
    table("host")["conv_forward"](x, w, b, theirs, **window)
    table("host")["conv_backward_weights"](x, y, dw, accumulate=True, **window)
    mine = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if order == "NHWC" else x
    last = np.ascontiguousarray(np.moveaxis(y, 1, -1))
    got = cuda.run("conv_forward", mine, w, b, np.zeros_like(last), layout=order, **window)[3]
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), theirs, rtol=0, atol=2e-3 * np.abs(theirs).max())
    got = cuda.run("conv_backward_weights", mine, last, w, layout=order, accumulate=True, **window)[2]
    np.testing.assert_allclose(got, dw, rtol=0, atol=2e-3 * np.abs(dw).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuda", [TF32_GPU], indirect=True)
@pytest.mark.parametrize("op", ["conv_forward", "conv_backward_data", "conv_backward_weights"])
def test_an_image_in_slabs(cuda, rng, monkeypatch, op, dtype):
    """To the numbers of the whole image; with `-s` the times of both, and of the plan that slabs replace."""
    dtype, device = dtypes.of(dtype), cuda.device
    window = {"stride": (1, 1, 1), "pad": (2, 2, 2), "dilation": (1, 1, 1), "group": 1}
    shapes = (1, 32, 32, 64, 64), (32, 32, 5, 5, 5), (32,), (1, 32, 32, 64, 64)
    x, w, b, y = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    operands = {"conv_forward": (x, w, b, y), "conv_backward_data": (y, w, x), "conv_backward_weights": (x, y, w)}[op]
    window |= {"accumulate": True} if op == "conv_backward_weights" else {}
    at, specs = {"conv_forward": 3}.get(op, 2), [ArraySpec.of(each) for each in operands]
    usual = table("cuda")[op].workspace_bytes(*specs, device=device, **window)
    theirs = cuda.run(op, *operands, **window)[at]
    if usual <= 32 << 20:
        pytest.skip("the usual plan takes little workspace")
    room, ran = usual - (8 << 20), []
    plan_run = Plan.run
    monkeypatch.setattr(Plan, "run", lambda self, *given: (ran.append(self.name), plan_run(self, *given))[1])
    assert 0 < table("cuda")[op].workspace_bytes(*specs, device=device, room=room, **window) <= room
    mine = cuda.run(op, *operands, room=room, **window)[at]
    tolerance = 2e-2 if dtypes.is_half(dtype) else 2e-3
    np.testing.assert_allclose(
        mine.astype(np.float64), theirs.astype(np.float64), rtol=0, atol=tolerance * np.abs(theirs).max()
    )
    print(op, dtype, f"{usual} bytes, {room} with little room, by {ran}")


def test_host_time_of_a_call():
    device = make_gpu()
    run, _ = call(device, "1d")
    run()
    device.synchronize()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(100):
            run()
        times.append((time.perf_counter() - started) / 100)
        device.synchronize()
    print(f"host time of a convolution with its bias: {min(times) * 1e6:.1f} us")
    assert min(times) < 100e-6
