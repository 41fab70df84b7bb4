"""Finding, building and running plans, with a stand-in for cuDNN's frontend that computes by our own kernels."""

import contextlib
import ctypes
import math
from types import SimpleNamespace

import cuda_emulation
import numpy as np
import pytest

from blobmem import dtypes
from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError, OutOfDeviceMemory
from blobmem.ops.cuda import algorithms, conv_plans, conv_search, conv_slabs, conv_small, cudnn, layout
from blobmem.ops.cuda.algorithms import Choice
from blobmem.ops.cuda.layout import in_layout
from blobmem.ops.registry import ArraySpec, table

pytestmark = pytest.mark.skipif(not cuda_emulation.AVAILABLE, reason="needs g++ on x86-64")

NOTES = (
    "TENSOR_CORE",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "WINOGRAD_TILE_13x13",
    "WINOGRAD",
    "NONDETERMINISTIC",
)
WINDOW = {"stride": (1, 1), "pad": (1, 1), "dilation": (1, 1), "group": 1}
SHAPES = {"x": (2, 3, 5, 6), "w": (4, 3, 3, 3), "b": (4,), "y": (2, 4, 5, 6)}


class Graph:
    """Plans by name: (workspace, notes, milliseconds); None for one that cannot be built. The workspace is in bytes, or
    a function of the number of images. What a plan named "wrong" makes is off by a part in hundred."""

    def __init__(self, device, key, fused, plans):
        self.device, self.key, self.fused, self.plans = device, key, fused, list(plans.items())
        self.barred, self.current = [], None

    def validate(self):
        if not self.plans:
            raise RuntimeError("not supported")

    build_operation_graph = _prepare_variant_pack_template = lambda self: None
    create_execution_plans = lambda self, modes: None  # noqa: E731

    def deselect_numeric_notes(self, notes):
        self.barred = notes

    def get_execution_plan_count(self):
        return len(self.plans)

    def get_plan_name_at_index(self, index):
        return self.plans[index][0]

    def build_plan_at_index(self, index):
        plan = self.plans[index][1]
        if plan is None or set(plan[1]) & set(self.barred):
            raise RuntimeError("cannot be built")
        self.current = index

    def get_workspace_size_plan_at_index(self, index):
        workspace = self.plans[index][1][0]
        return workspace(self.key.x[0]) if callable(workspace) else workspace

    def get_workspace_size(self):
        return self.get_workspace_size_plan_at_index(self.current)

    def _get_variant_pack_uids_sorted(self):
        return cudnn.arrays_of(self.key, self.fused)

    def execute_plan_at_index(self, addresses, workspace, index, handle):
        self.current = index
        self._execute_with_ptrs([addresses[uid] for uid in sorted(addresses)], workspace, handle)

    def _execute_with_ptrs(self, addresses, workspace, handle):
        assert handle == 77
        key = self.key
        shapes = (in_layout(key.x, key.layout), key.w, in_layout(key.y, key.layout), (key.w[0],))
        uids = cudnn.arrays_of(key, self.fused)
        given = {
            uid: CudaArray(address, shapes[2 if uid == 5 else uid - 1], key.dtype, self.device)
            for uid, address in zip(uids, addresses, strict=True)
        }
        direction, relu, _ = key.direction.partition("+relu") if self.fused else (key.direction.split("+")[0], "", "")
        direction = direction.replace("+sum", "")
        with self.weights_in_order(given[2]) as w:
            arrays = [given[1], w, given[3], given.get(4)]
            conv_search.run_direct(key._replace(direction=direction), arrays)
            if self.plans[self.current][0] == "wrong":
                result = arrays[conv_search._RESULT.get(direction, 2)]
                memory = np.frombuffer((ctypes.c_char * result.nbytes).from_address(result.address), result.dtype)
                memory *= np.float32(0.99)
        y, other = (
            each and np.frombuffer((ctypes.c_char * each.nbytes).from_address(each.address), np.float32)
            for each in (given[3], given.get(5))
        )
        if other is not None:
            y += other
        if relu:
            if self.plans[self.current][0].startswith("eng39"):
                np.fmax(y, 0, out=y)
            else:
                np.maximum(y, 0, out=y)
        if nbytes := self.get_workspace_size():
            self.device.set_bytes(workspace, 0xFF, nbytes)

    @contextlib.contextmanager
    def weights_in_order(self, w):
        """The weights in the file's order; with the key's layout NHWC a plan has their channels last."""
        if self.key.layout == "NCHW":
            yield w
            return
        outs, channels, *taps = w.shape
        memory = np.frombuffer((ctypes.c_char * w.nbytes).from_address(w.address), w.dtype)
        memory = memory.reshape(outs, *taps, channels)
        turned = np.ascontiguousarray(np.moveaxis(memory, -1, 1))
        yield CudaArray(turned.ctypes.data, w.shape, w.dtype, self.device)
        memory[...] = np.moveaxis(turned, 1, -1)


class Gpu(cuda_emulation.EmulatedCuda):
    """An emulated device with the stand-in: `plans`, `fused_plans` and, with ReLU, `relu_plans` are what it lists.
    With `small_ms` our own small kernels are among the candidates, and take so long."""

    deterministic = False
    model = "Test GPU"
    context = SimpleNamespace  # anything that can be referred to weakly
    uncertain = False

    def __init__(self, capacity=None):
        super().__init__(capacity)
        self.plans, self.fused_plans, self.measured, self.made = {"eng0": (0, (), 1.0)}, {}, [], None
        self.relu_plans, self.mirrored_plans, self.form, self.small_ms = {}, {}, "", None

    def library(self, name, make):
        assert make is cudnn.Cudnn
        if self.made is None:
            self.made = make(self)
        return self.made

    def restart(self):
        """As another thread or process finds it."""
        self.made, self.measured = None, []

    def compute_stream(self):
        return SimpleNamespace(handle=5)

    def milliseconds(self, name):
        forms = {"": self.plans, cudnn.FUSED: self.fused_plans, cudnn.MIRRORED: self.mirrored_plans}
        plans = {form + plan: value for form, those in forms.items() for plan, value in those.items()}
        if name.startswith(conv_small.SMALL):
            return self.small_ms
        plan = plans.get(cudnn.parts_of(name)[1])
        return plan[2] if plan is not None else 2.5


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOBMEM_CACHE", str(tmp_path))
    module = SimpleNamespace(
        create_handle=lambda: 77,
        backend_version=lambda: 91900,
        set_stream=lambda handle, stream: None,
        cudnnGraphNotSupportedError=ArithmeticError,
        heur_mode=SimpleNamespace(A=0, B=1, FALLBACK=2),
        numerical_note=SimpleNamespace(**{name: name for name in NOTES}),
    )
    monkeypatch.setitem(__import__("sys").modules, "cudnn", module)
    device = Gpu()

    def build_graph(_, key, fused, handle):
        if device.form == cudnn.MIRRORED:
            return Graph(device, key, fused, device.mirrored_plans)
        fused_plans = device.relu_plans if key.direction == cudnn.RELU else device.fused_plans
        return Graph(device, key, fused, fused_plans if fused else device.plans)

    listed = cudnn.Cudnn.listed

    def listed_of(self, key, form=""):
        device.form = form
        yield from listed(self, key, form)

    monkeypatch.setattr(cudnn, "build_graph", build_graph)
    monkeypatch.setattr(cudnn.Cudnn, "listed", listed_of)

    def measure(self, candidate):
        if not self.is_right(candidate):
            return None
        device.measured.append(candidate.plan)
        self._best[0] = device.milliseconds(candidate.plan)
        return self._best[0]

    monkeypatch.setattr(conv_search.Search, "measure", measure)
    small = conv_small.plans
    monkeypatch.setattr(conv_small, "plans", lambda key: [] if device.small_ms is None else small(key)[:1])
    return device


def arrays(gpu, rng, **shapes):
    made = {}
    for name, shape in {**SHAPES, **shapes}.items():
        values = rng.normal(size=shape).astype(np.float32)
        address = gpu.allocate(values.nbytes, name)
        gpu.memcpy_htod(address, values)
        made[name] = gpu.as_array(address, shape, np.float32)
        made[name + "_values"], made[name + "_address"] = values, address
    return SimpleNamespace(**made)


def workspace(gpu, name, *operands, **attributes):
    specs = [None if operand is None else ArraySpec.of(operand) for operand in operands]
    nbytes = table("cuda")[name].workspace_bytes(*specs, device=gpu, **attributes)
    return nbytes, gpu.as_array(gpu.allocate(max(nbytes, 1), "ws"), (nbytes,), np.uint8)


def fetched(gpu, at, name):
    result = np.empty(getattr(at, name).shape, np.float32)
    gpu.memcpy_dtoh(result, getattr(at, name + "_address"))
    return result


def expected(at, gpu, **window):
    y = np.empty(at.y.shape, np.float32)
    table("host")["conv_forward"](at.x_values, at.w_values, at.b_values, y, **{**WINDOW, **window})
    return y


def forward(gpu, rng, with_bias=True, **attributes):
    """Run the op with exactly the workspace that it asks for; the bytes."""
    at = arrays(gpu, rng)
    b = at.b if with_bias else None
    nbytes, ws = workspace(gpu, "conv_forward", at.x, at.w, b, at.y, **WINDOW)
    table("cuda")["conv_forward"](at.x, at.w, b, at.y, ws=ws, **WINDOW)
    if not with_bias:
        at.b_values[...] = 0
    np.testing.assert_allclose(fetched(gpu, at, "y"), expected(at, gpu), atol=1e-5)
    return nbytes


def test_the_best_plan_runs_in_its_workspace(gpu, rng):
    gpu.plans = {
        "slow": (0, (), 2.0),
        "fast": (4096, (), 1.0),
        "broken": None,
        "large": (gpu.workspace_limit + 1, (), 0.1),
    }
    assert forward(gpu, rng, with_bias=False) == 4096
    assert gpu.measured == ["slow", "fast"]
    gpu.restart()
    assert forward(gpu, rng, with_bias=False) == 4096
    assert gpu.measured == []


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", ["forward", "forward+bias", "data", "weights"])
def test_a_plan_that_is_wrong_is_not_chosen(gpu, direction, order):
    gpu.plans = {"wrong": (64, (), 0.1), "eng0": (32, (), 1.0)}
    x, w = (ArraySpec(shape, np.dtype("float32")) for shape in (in_layout(SHAPES["x"], order), SHAPES["w"]))
    key = conv_plans.key_of(direction, gpu, x, w, **WINDOW, layout=order)
    assert conv_plans.room_of(key, gpu) == (32, 1, True)
    assert gpu.measured == ["eng0"]


def test_where_all_plans_are_wrong_our_own_kernels_run(gpu, rng):
    gpu.plans = {"wrong": (0, (), 0.1)}
    assert forward(gpu, rng) == 0
    assert gpu.measured == ["direct"]


def test_handles_are_used_again(gpu, monkeypatch):
    made = []
    monkeypatch.setattr(__import__("cudnn"), "create_handle", lambda: made.append(0) or 100 + len(made))
    cudnn._spare.clear()
    one, two = cudnn.Cudnn(gpu), cudnn.Cudnn(gpu)
    handles = {one.handle, two.handle}
    del one, two
    assert handles == {101, 102} == {cudnn.Cudnn(gpu).handle, *cudnn._spare[gpu.context]}
    cudnn._spare.clear()


def test_scratch_is_given_back(gpu):
    key = conv_plans.key_of("data", gpu, *[ArraySpec(SHAPES[n], np.dtype("float32")) for n in "xw"], **WINDOW)
    held = gpu.statistics.bytes_held
    assert conv_plans.room_of(key, gpu) == (0, 1, True)
    assert gpu.statistics.bytes_held == held and gpu.statistics.peak_bytes > held


def test_another_order_of_arrays_is_noticed(gpu):
    key = conv_plans.key_of("forward", gpu, *[ArraySpec(SHAPES[n], np.dtype("float32")) for n in "xw"], **WINDOW)
    graph = Graph(gpu, key, False, gpu.plans)
    graph.current, graph._get_variant_pack_uids_sorted = 0, lambda: [2, 1, 3]
    with pytest.raises(DeviceError, match="orders"):
        cudnn.Plan(gpu.library("cudnn", cudnn.Cudnn), graph, key, "eng0")


def test_no_room_to_search_is_an_error_and_chooses_nothing(gpu, rng):
    room, gpu.capacity = gpu.capacity, 1 << 20
    with pytest.raises(OutOfDeviceMemory):
        forward(gpu, rng)
    gpu.capacity = room
    forward(gpu, rng)
    assert gpu.measured == ["eng0"]


def test_a_search_does_with_what_the_device_may_hold(gpu):
    """By a plan with less workspace, which is kept for such room; what is too large for that is charged its limit."""
    gpu.plans, gpu.workspace_limit = {"small": (10, (), 2.0), "large": (200 << 20, (), 1.0)}, None
    x, w = (ArraySpec(SHAPES[name], np.dtype("float32")) for name in "xw")
    key, capacity = conv_plans.key_of("forward", gpu, x, w, **WINDOW), gpu.capacity
    gpu.capacity = 150 << 20
    assert conv_plans.room_of(key, gpu).nbytes == 10 and gpu.measured == ["small"]
    path = algorithms.folder() / algorithms.file_name(gpu.model, 91900, "fp32")
    assert [*algorithms.read(path)] == [key._replace(room=128 << 20).text]
    gpu.predicts = True
    assert conv_plans.room_of(key, gpu).nbytes == 10 and not gpu.uncertain
    gpu.predicts = False
    gpu.restart()
    gpu.capacity = 32 << 20
    assert conv_plans.room_of(key, gpu) == (key.most, 2, True) and not conv_plans.is_small(key, gpu)
    assert conv_plans.plan_ms(key, gpu) is None and gpu.measured == []
    gpu.capacity = capacity
    assert conv_plans.room_of(key, gpu).nbytes == 200 << 20 and gpu.measured == ["small", "large"]
    gpu.capacity = 32 << 20  # it is known now
    assert conv_plans.room_of(key, gpu).nbytes == 200 << 20


@pytest.mark.parametrize("fused_time, chosen", [(0.5, "bias+eng0"), (3.0, "eng0")])
def test_bias_in_the_plan_or_after_it(gpu, rng, fused_time, chosen):
    gpu.fused_plans = {"eng0": (512, (), fused_time)}
    assert forward(gpu, rng) == (512 if chosen == "bias+eng0" else 0)
    assert gpu.measured == ["bias+eng0", "eng0"]
    assert {plan.fused for plan in gpu.made.plans.values()} == {chosen == "bias+eng0"}


def test_without_any_plan_our_own_kernels_run(gpu, rng):
    gpu.plans = {}
    assert forward(gpu, rng) == 0
    assert gpu.measured == ["direct"]


def test_our_own_kernels_compete_for_depthwise_convolutions(gpu, rng):
    window = {**WINDOW, "group": 3}
    at = arrays(gpu, rng, w=(3, 1, 3, 3), y=(2, 3, 5, 6), b=(3,))
    gpu.plans = {"eng0": (64, (), 3.0)}
    nbytes, ws = workspace(gpu, "conv_forward", at.x, at.w, at.b, at.y, **window)
    assert nbytes == 0 and gpu.measured == ["eng0", "direct"]
    table("cuda")["conv_forward"](at.x, at.w, at.b, at.y, ws=ws, **window)
    np.testing.assert_allclose(fetched(gpu, at, "y"), expected(at, gpu, **window), atol=1e-5)


def with_relu(gpu, rng, order, wanted, with_bias=True, shapes=None, window=None):
    """Run a convolution and its ReLU, also of what is no number, in as much workspace as the convolution alone wants.

    The kernels of ours behind the plan.
    """
    shapes, window = shapes or {}, {**WINDOW, **(window or {})}
    at = arrays(gpu, rng, **shapes)
    at.x_values[1, 0, 2, 3] = np.nan
    gpu.memcpy_htod(at.x_address, at.x_values)
    b = "b" if with_bias else None
    if order == "NHWC":
        for name in ("conv_forward", "conv_relu_forward"):
            gpu.launches.clear()
            y = run_last(gpu, at, name, wanted, "x", "w", b, "y", **window)["y"]
    else:
        operands = at.x, at.w, at.b if with_bias else None, at.y
        for name in ("conv_forward", "conv_relu_forward"):
            gpu.launches.clear()
            nbytes, ws = workspace(gpu, name, *operands, **window)
            assert nbytes == wanted
            table("cuda")[name](*operands, ws=ws, **window)
        y = fetched(gpu, at, "y")
    if not with_bias:
        at.b_values[...] = 0
    theirs = np.maximum(expected(at, gpu, **window), 0)
    assert np.isnan(theirs).any() and (theirs == 0).any()
    np.testing.assert_allclose(y, theirs, atol=1e-5)
    assert not np.signbit(y[y == 0]).any()
    return {"relu", "add_bias"} & set(gpu.launches)


ORDERS = pytest.mark.parametrize("order", ["NCHW", "NHWC"])
FOUR = {"x": (2, 4, 5, 6), "w": (4, 4, 3, 3)}  # channels
TURNED = {"NCHW": 0, "NHWC": 1024}  # bytes for weights of 576 in another order, in a workspace that is not empty


@ORDERS
@pytest.mark.parametrize(
    "name, twins, kernels",
    [
        ("eng12", {"eng12": (512, (), 1.0)}, set()),
        ("eng12", {"eng11": (0, (), 1.0), "eng12": (100, (), 1.0)}, set()),
        ("eng12", {"eng11": (0, (), 1.0)}, {"relu"}),  # not listed
        ("eng12", {}, {"relu"}),  # nor is anything
        ("eng12", {"eng12": None}, {"relu"}),  # cannot be built
        ("eng12", {"eng12": (513, (), 1.0)}, {"relu"}),  # larger
        ("eng12", {"eng12": (512, ("NONDETERMINISTIC",), 1.0)}, {"relu"}),
        ("eng39_k25=0", {"eng39_k25=0": (512, (), 1.0)}, {"relu"}),  # which loses what is no number
        ("eng39", {"eng39": (512, (), 1.0)}, {"relu"}),
    ],
)
def test_relu_in_the_plan_or_after_it(gpu, rng, order, name, twins, kernels):
    gpu.deterministic = True
    gpu.fused_plans, gpu.relu_plans = {name: (512, (), 0.5)}, twins
    assert with_relu(gpu, rng, order, 512 + TURNED[order], shapes=FOUR) == kernels
    assert gpu.measured == ["bias+" + name, "eng0"]  # for the bias only
    plans = gpu.made.plans
    assert sorted(key.direction for key in plans) == ["forward+bias", cudnn.RELU]
    assert {key.direction: plan.relu for key, plan in plans.items()} == {
        "forward+bias": False, cudnn.RELU: not kernels,
    }  # fmt: skip
    assert len(algorithms.read(algorithms.folder() / algorithms.file_name(gpu.model, 91900, gpu.math))) == 1
    gpu.restart()
    assert with_relu(gpu, rng, order, 512 + TURNED[order], shapes=FOUR) == kernels
    assert gpu.measured == []


@ORDERS
@pytest.mark.parametrize("with_bias, kernels", [(True, {"add_bias"}), (False, {"relu"})])
def test_relu_with_a_bias_apart_and_without_one(gpu, rng, order, with_bias, kernels):
    gpu.fused_plans = gpu.relu_plans = {"eng0": (0, (), 3.0)}  # slower
    assert with_relu(gpu, rng, order, TURNED[order], with_bias, FOUR) == kernels


@ORDERS
def test_relu_after_our_own_kernels(gpu, rng, order):
    gpu.plans = {}
    assert with_relu(gpu, rng, order, 0, shapes=FOUR) == {"relu"}


@ORDERS
@pytest.mark.parametrize("fused", [False, True])
def test_relu_of_groups(gpu, rng, order, fused):
    gpu.fused_plans = gpu.relu_plans = {"eng0": (512, (), 0.5)} if fused else {}
    shapes, window = {"x": (2, 4, 5, 6), "w": (4, 2, 3, 3)}, {"group": 2}
    wanted = 512 * fused + (512 if order == "NHWC" else 0)
    assert with_relu(gpu, rng, order, wanted, shapes=shapes, window=window) == (set() if fused else {"add_bias"})


@pytest.mark.parametrize(
    "fused, twins, kernels", [(True, True, set()), (True, False, {"relu"}), (False, True, {"add_bias"})]
)
def test_relu_of_images_with_channels_of_zeros(gpu, rng, fused, twins, kernels):
    gpu.math = "tf32"
    gpu.fused_plans = {"eng0": (256, (), 0.5)} if fused else {}
    gpu.relu_plans = {"eng0": (256, (), 0.5)} if twins else {}
    wide = sum(map(layout.aligned, (2 * 5 * 6 * 16, 4 * 9 * 16)))
    assert with_relu(gpu, rng, "NHWC", 256 * fused + wide) == kernels


def with_sum(gpu, rng, order, relu, with_bias=True, turned=False):
    """Run a convolution, what is added and perhaps ReLU, in the workspace that the op asks for: the bytes."""
    at = arrays(gpu, rng, **FOUR, other=(2, 4, 5, 6))
    b, window = at.b if with_bias else None, {**WINDOW, "layout": order}
    if order == "NHWC":
        for name in ("x", "other", "y"):
            array = np.ascontiguousarray(np.moveaxis(getattr(at, name + "_values"), 1, -1))
            setattr(at, name, gpu.as_array(getattr(at, name + "_address"), array.shape, np.float32))
            gpu.memcpy_htod(getattr(at, name + "_address"), array)
    if turned:
        gpu.memcpy_htod(at.w_address, np.ascontiguousarray(np.moveaxis(at.w_values, 1, -1)))
        window["turned"] = True
    operands = at.x, at.w, b, at.other, at.y
    nbytes, ws = workspace(gpu, "conv_sum_forward", *operands, relu=relu, **window)
    gpu.launches.clear()
    table("cuda")["conv_sum_forward"](*operands, ws=ws, relu=relu, **window)
    at.b_values[...] *= with_bias
    y, theirs = fetched(gpu, at, "y"), np.empty(at.other_values.shape, np.float32)
    table("host")["conv_forward"](at.x_values, at.w_values, at.b_values, theirs, **WINDOW)
    theirs += at.other_values
    np.testing.assert_allclose(np.moveaxis(y, -1, 1) if order == "NHWC" else y, np.maximum(theirs, 0) if relu else theirs,
                               atol=1e-5)  # fmt: skip
    return nbytes


@ORDERS
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("milliseconds, kernels", [(0.5, set()), (3.0, {"add_sum"})])
def test_a_sum_in_the_plan_or_after_it(gpu, rng, order, relu, with_bias, milliseconds, kernels):
    gpu.fused_plans = gpu.relu_plans = {"eng7": (512, (), milliseconds)}
    assert with_sum(gpu, rng, order, relu, with_bias) == TURNED[order] + 512 * (not kernels)
    assert {"add_sum", "add_bias", "relu"} & set(gpu.launches) == kernels
    (key,) = gpu.made.plans
    assert key.direction == "forward" + "+bias" * with_bias + "+sum" + "+relu" * relu
    assert gpu.measured == ["bias+eng7", "eng0"]
    gpu.restart()
    with_sum(gpu, rng, order, relu, with_bias)
    assert gpu.measured == []


@ORDERS
def test_a_sum_after_our_own_kernels(gpu, rng, order):
    gpu.plans = {}
    assert with_sum(gpu, rng, order, True) == 0
    assert gpu.measured == ["direct"]


@pytest.mark.parametrize("direct", [False, True])
def test_weights_that_are_turned_already(gpu, rng, direct):
    """A plan takes them as they are; our own kernels, in the order of files."""
    if direct:
        gpu.plans = {}
    assert with_sum(gpu, rng, "NHWC", True, turned=True) == layout.aligned(4 * 4 * 4 * 9) * direct
    assert [name for name in gpu.launches if name.startswith("copy")] == ["copy_3"] * direct


def test_halves_choose_no_plan_that_would_lose_what_is_no_number(gpu):
    gpu.fused_plans = {"eng39_k1=0": (0, (), 0.1), "eng7": (0, (), 0.5)}
    x, w = (ArraySpec(SHAPES[name], np.dtype("float16")) for name in "xw")
    conv_plans.room_of(conv_plans.key_of("forward+bias", gpu, x, w, **WINDOW), gpu)
    assert gpu.measured == ["bias+eng7", "eng0"]


IMAGES = {"x": (6, 4, 5, 6), "w": (4, 4, 3, 3), "y": (6, 4, 5, 6)}


def large_but_fast(gpu, fused=False):
    """Plans of which the fastest needs more than is modest for three of six images."""
    fast = {"fast": (lambda images: images * gpu.workspace_limit // 6, (), 1.0)}
    gpu.plans = {"slow": (0, (), 2.0), "small": (0, ("NONDETERMINISTIC",), 3.0), **fast}
    gpu.fused_plans = fast if fused else {}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_images_are_taken_in_parts_where_all_need_too_much_workspace(gpu, rng, order, fused):
    large_but_fast(gpu, fused)
    gpu.workspace_limit = 3 * 4096
    at = arrays(gpu, rng, **IMAGES)
    chosen = "3*bias+fast" if fused else "3*fast"
    if order == "NHWC":
        got = run_last(gpu, at, "conv_forward", 4096 + 1024, "x", "w", "b", "y", **WINDOW)["y"]
    else:
        nbytes, ws = workspace(gpu, "conv_forward", at.x, at.w, at.b, at.y, **WINDOW)
        assert nbytes == 4096
        table("cuda")["conv_forward"](at.x, at.w, at.b, at.y, ws=ws, **WINDOW)
        got = fetched(gpu, at, "y")
    assert chosen in gpu.measured and {plan.parts for plan in gpu.made.plans.values()} == {3}
    np.testing.assert_allclose(got, expected(at, gpu), atol=1e-5)
    gpu.restart()
    assert workspace(gpu, "conv_forward", at.x, at.w, None, at.y, **WINDOW)[0] == 4096


@ORDERS
@pytest.mark.parametrize(
    "fused, twins, kernels", [(True, True, set()), (True, False, {"relu"}), (False, True, {"add_bias"})]
)
def test_relu_of_images_in_parts(gpu, rng, order, fused, twins, kernels):
    large_but_fast(gpu, fused)
    gpu.relu_plans = {"fast": (lambda images: images * gpu.workspace_limit // 6, (), 1.0)} if twins else {}
    gpu.workspace_limit = 3 * 4096
    assert with_relu(gpu, rng, order, 4096 + TURNED[order], shapes=IMAGES) == kernels
    assert {plan.parts for plan in gpu.made.plans.values()} == {3}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "shapes, window",
    [
        ({}, {}),
        ({"y": (2, 4, 7, 8)}, {"pad": (2, 2)}),
        ({"w": (4, 3, 3, 2), "y": (2, 4, 1, 8)}, {"pad": (0, 2), "dilation": (2, 2)}),
    ],
)
def test_a_convolution_by_way_of_a_gradient(gpu, rng, shapes, window, with_bias):
    gpu.mirrored_plans, window = {"eng0": (4096, (), 0.5)}, {**WINDOW, **window}
    at = arrays(gpu, rng, **shapes)
    b, room = at.b if with_bias else None, 4096 + layout.aligned(at.w.nbytes)
    if not with_bias:
        at.b_values[...] = 0
    for _ in range(2):
        nbytes, ws = workspace(gpu, "conv_forward", at.x, at.w, b, at.y, **window)
        assert nbytes == room
        at.y.zero()
        table("cuda")["conv_forward"](at.x, at.w, b, at.y, ws=ws, **window)
        np.testing.assert_allclose(fetched(gpu, at, "y"), expected(at, gpu, **window), atol=1e-5)
        gpu.restart()
    assert (gpu.measured, gpu.deterministic) == ([], False), "it was found in the file the second time"


@pytest.mark.parametrize("channels, outputs", [(4, 3), (20, 17)])
def test_volumes_with_channels_last_go_by_way_of_a_gradient_too(gpu, rng, channels, outputs):
    gpu.mirrored_plans, window = {"eng0": (4096, (), 0.5)}, {"stride": (1,) * 3, "dilation": (1,) * 3, "group": 1}
    at = arrays(
        gpu, rng, x=(2, channels, 3, 4, 5), w=(outputs, channels, 2, 3, 3), b=(outputs,), y=(2, outputs, 2, 4, 5)
    )
    room = 4096 + 2 * layout.aligned(at.w.nbytes)
    got = run_last(gpu, at, "conv_forward", room, "x", "w", "b", "y", **window, pad=(0, 1, 1))
    np.testing.assert_allclose(got["y"], expected(at, gpu, **window, pad=(0, 1, 1)), atol=1e-4)


def test_a_convolution_by_way_of_a_gradient_in_parts(gpu, rng):
    gpu.mirrored_plans = {"eng0": (lambda images: images * 1024, (), 0.5)}
    at = arrays(gpu, rng, **IMAGES)
    gpu.workspace_limit = 3 * (2 * 1024 + layout.aligned(at.w.nbytes))
    nbytes, ws = workspace(gpu, "conv_forward", at.x, at.w, at.b, at.y, **WINDOW)
    assert nbytes == gpu.workspace_limit // 3 and "3*mirrored+eng0" in gpu.measured
    table("cuda")["conv_forward"](at.x, at.w, at.b, at.y, ws=ws, **WINDOW)
    np.testing.assert_allclose(fetched(gpu, at, "y"), expected(at, gpu), atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "weights"}, {"direction": "data"}, {"direction": cudnn.RELU}, {"stride": (1, 2)}, {"pad": (3, 1)},
        {"layout": "NHWC"}, {"group": 2, "w": (4, 2, 3, 3)}, {"w": (4, 4, 1, 1), "pad": (0, 0)},
    ],
)  # fmt: skip
def test_what_is_no_gradient(gpu, change):
    key = conv_plans.key_of("forward", gpu, *(ArraySpec(IMAGES[n], np.dtype("float32")) for n in "xw"), **WINDOW)
    assert key.mirrored is not None and key.mirrored.y == key.x and key.mirrored.x == key.y
    assert key._replace(**change).mirrored is None


def test_plans_in_parts_take_no_places_of_others(gpu, rng):
    gpu.plans = {f"large{i}": (1000, (), 1.0) for i in range(20)} | {"small": (0, (), 2.0)}
    gpu.workspace_limit = 300
    assert forward(gpu, rng, with_bias=False) == 0
    assert gpu.measured == ["small"]


def test_parts_begin_where_cudnn_takes_arrays_to_begin(gpu, rng):
    large_but_fast(gpu)
    gpu.workspace_limit = 3 * 4096
    at = arrays(gpu, rng, **{**IMAGES, "x": (6, 1, 5, 6), "w": (4, 1, 3, 3)})  # three parts of 60 numbers: 240 bytes
    assert workspace(gpu, "conv_forward", at.x, at.w, None, at.y, **WINDOW)[0] == 4096
    at = arrays(gpu, rng, **{**IMAGES, "x": (6, 1, 5, 5), "w": (4, 1, 3, 3), "y": (6, 4, 5, 5)})  # of 50
    assert workspace(gpu, "conv_forward", at.x, at.w, None, at.y, **WINDOW)[0] == gpu.workspace_limit  # worth it


def test_without_a_plan_for_more_channels_there_may_be_one_for_those_there_are(gpu, rng, monkeypatch):
    gpu.math, gpu.plans = "tf32", {"eng0": (256, (), 1.0)}
    build = cudnn.build_graph
    monkeypatch.setattr(
        cudnn, "build_graph",
        lambda module, key, fused, handle: Graph(gpu, key, fused, {}) if key.x[1] == 4 else build(module, key, fused, handle),
    )  # fmt: skip
    at = arrays(gpu, rng)
    got = run_last(gpu, at, "conv_forward", 256 + 512, "x", "w", "b", "y", **WINDOW)
    np.testing.assert_allclose(got["y"], expected(at, gpu), atol=1e-5)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_gradients_of_parts_are_added_up(gpu, rng, order, accumulate):
    large_but_fast(gpu)
    gpu.workspace_limit = 3 * 4096
    at = arrays(gpu, rng, **IMAGES)
    theirs = at.w_values.copy()
    table("host")["conv_backward_weights"](at.x_values, at.y_values, theirs, accumulate=accumulate, **WINDOW)
    if order == "NHWC":
        run_last(gpu, at, "conv_backward_weights", 4096 + 1024, "x", "y", "w", accumulate=accumulate, **WINDOW)
    else:
        nbytes, ws = workspace(gpu, "conv_backward_weights", at.x, at.y, at.w, accumulate=accumulate, **WINDOW)
        assert nbytes == 4096 + 1024
        table("cuda")["conv_backward_weights"](at.x, at.y, at.w, ws=ws, accumulate=accumulate, **WINDOW)
    assert gpu.measured == ["slow", "small", "3*fast", "fast"]
    np.testing.assert_allclose(fetched(gpu, at, "w"), theirs, atol=1e-4)
    gpu.restart()
    gpu.predicts = True
    x, y = (ArraySpec(in_layout(array.shape, order), np.dtype(np.float32)) for array in (at.x, at.y))
    nbytes, _ = workspace(gpu, "conv_backward_weights", x, y, at.w, accumulate=accumulate, layout=order, **WINDOW)
    assert nbytes == 4096 + 1024


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradient_for_weights(gpu, rng, accumulate):
    gpu.plans = {"eng0": (1000, (), 1.0)}
    at = arrays(gpu, rng)
    nbytes, ws = workspace(gpu, "conv_backward_weights", at.x, at.y, at.w, accumulate=accumulate, **WINDOW)
    assert nbytes == 1000 + (512 if accumulate else 0)
    table("cuda")["conv_backward_weights"](at.x, at.y, at.w, ws=ws, accumulate=accumulate, **WINDOW)
    theirs = at.w_values.copy()
    table("host")["conv_backward_weights"](at.x_values, at.y_values, theirs, accumulate=accumulate, **WINDOW)
    np.testing.assert_allclose(fetched(gpu, at, "w"), theirs, atol=1e-4)


def placed(gpu, at, name, last):
    """An array that has its values, with the channels last if it is one of those."""
    if name not in last:
        return getattr(at, name)
    values = np.ascontiguousarray(np.moveaxis(getattr(at, name + "_values"), 1, -1))
    gpu.memcpy_htod(getattr(at, name + "_address"), values)
    return getattr(at, name).reshape(*values.shape)


def run_last(gpu, at, name, wanted, *names, spatial=("x", "y"), **attributes):
    """An op with the channels last on x, w, b and y (None: not there), `wanted` the bytes that it asks for; and all after
    it, as NumPy arrays with the channels first."""
    operands, order = [], "NHWC" if "x" in spatial else "NCHW to NHWC"
    for operand in names:
        operands.append(operand and placed(gpu, at, operand, spatial))
    nbytes, ws = workspace(gpu, name, *operands, layout=order, **attributes)
    assert nbytes == wanted
    table("cuda")[name](*operands, ws=ws, layout=order, **attributes)
    results = {}
    for operand, array in zip(names, operands, strict=True):
        if operand:
            result = np.empty(array.shape, np.float32)
            gpu.memcpy_dtoh(result, getattr(at, operand + "_address"))
            results[operand] = np.moveaxis(result, -1, 1) if operand in spatial else result
    return results


def check_weights(gpu, at, wanted, accumulate, spatial, atol, **window):
    """The gradient for the weights by `run_last`, against the host's."""
    theirs = at.w_values.copy()
    gpu.memcpy_htod(at.w_address, theirs)
    table("host")["conv_backward_weights"](at.x_values, at.y_values, theirs, accumulate=accumulate, **window)
    names = "x", "y", "w"
    got = run_last(gpu, at, "conv_backward_weights", wanted, *names, spatial=spatial, accumulate=accumulate, **window)
    np.testing.assert_allclose(got["w"], theirs, atol=atol)


@pytest.mark.parametrize("channels, math", [(4, "fp32"), (3, "tf32"), (3, "fp32")])
@pytest.mark.parametrize("kernel", [3, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_channels_last_turns_weights_over_in_the_workspace(gpu, rng, kernel, channels, math, fused):
    gpu.math = math
    gpu.plans, gpu.fused_plans = {"eng0": (256, (), 1.0)}, {"eng0": (256, (), 0.5)} if fused else {}
    at = arrays(gpu, rng, x=(2, channels, 5, 6), w=(4, channels, kernel, kernel))
    window = {**WINDOW, "pad": (kernel // 2,) * 2}
    turned = layout.aligned(at.w_values.nbytes) if kernel > 1 else 0
    wide = 0
    if math == "tf32":  # images and weights get channels of zeros, up to 4
        wide = sum(map(layout.aligned, (2 * 5 * 6 * 16, 4 * kernel**2 * 16)))
    got = run_last(gpu, at, "conv_forward", 256 + (wide or turned), "x", "w", "b", "y", **window)
    np.testing.assert_allclose(got["y"], expected(at, gpu, **window), atol=1e-5)
    np.testing.assert_array_equal(got["w"], at.w_values)
    theirs = np.empty_like(at.x_values)
    room = np.empty(1 << 16, np.uint8)
    table("host")["conv_backward_data"](at.y_values, at.w_values, theirs, ws=room, **window)
    got = run_last(gpu, at, "conv_backward_data", 256 + turned, "y", "w", "x", **window)
    np.testing.assert_allclose(got["x"], theirs, atol=1e-5)
    for accumulate in (False, True):
        apart = layout.aligned(at.w_values.nbytes) if turned or accumulate else 0
        check_weights(gpu, at, 256 + (wide or apart), accumulate, ("x", "y"), atol=1e-4, **window)


@pytest.mark.parametrize("plans", [{"eng0": (256, (), 1.0)}, {}], ids=["cudnn", "direct"])
@pytest.mark.parametrize("channels, math", [(3, "tf32"), (2, "tf32"), (3, "fp32")])
@pytest.mark.parametrize("plane", [(5, 6), (3, 3), (2, 2)])
def test_images_that_only_a_convolution_reads_are_turned_over_in_the_workspace(gpu, rng, channels, math, plans, plane):
    gpu.math, gpu.plans = math, plans
    at = arrays(gpu, rng, x=(2, channels, *plane), w=(4, channels, 3, 3), y=(2, 4, *plane))
    plan = sum(nbytes for nbytes, *_ in plans.values())
    parts = [at.x_values.nbytes, *([at.w_values.nbytes] if plans else [])]
    if math == "tf32" and plans:
        parts = [2 * plane[0] * plane[1] * 16, 4 * 9 * 16]
    nbytes = plan + sum(map(layout.aligned, parts))
    got = run_last(gpu, at, "conv_forward", nbytes, "x", "w", "b", "y", spatial=("y",), **WINDOW)
    np.testing.assert_allclose(got["y"], expected(at, gpu), atol=1e-5)
    np.testing.assert_array_equal(got["x"], at.x_values)
    for accumulate in (False, True):
        check_weights(gpu, at, nbytes, accumulate, ("y",), atol=1e-4, **WINDOW)


# planes of x and y, kernel, stride, pad, and of what is folded: the plane, the kernel and the channels
FOLDED = [
    ((9, 10), (5, 5), (3, 3), (2, 2), (1, 1), (6, 6), (2, 2), 12),
    ((11, 9), (4, 3), (7, 7), (3, 3), (3, 3), (6, 5), (3, 3), 36),  # 27 and 9 zeros
    ((7, 8), (8, 3), (2, 3), (1, 2), (1, 0), (9, 4), (2, 2), 8),
    ((6, 6), (3, 3), (2, 2), (2, 2), (0, 0), (3, 3), (1, 1), 12),
]


@pytest.mark.parametrize("fold", FOLDED, ids=str)
@pytest.mark.parametrize("order", ["NHWC", "NCHW to NHWC"])
@pytest.mark.parametrize("ms", [2.0, 0.5])
def test_strided_convolutions_of_few_channels_are_folded_where_that_is_faster(gpu, rng, fold, order, ms):
    """`ms` is what the convolution with channels of zeros takes, what is folded 1."""
    plane, out, kernel, stride, pad, folded, taps, channels = fold
    window = {"stride": stride, "pad": pad, "dilation": (1, 1), "group": 1}
    gpu.math, gpu.plans = "tf32", {"eng0": (256, (), 1.0)}
    at = arrays(gpu, rng, x=(2, 3, *plane), w=(4, 3, *kernel), y=(2, 4, *out))
    x, w = ArraySpec((2, *plane, 4), np.dtype("float32")), ArraySpec((4, 4, *kernel), np.dtype("float32"))
    keys = [conv_plans.key_of(d, gpu, x, w, **window, layout="NHWC").text for d in ("forward+bias", "weights")]
    path = algorithms.folder() / algorithms.file_name(gpu.model, 91900, "tf32")
    algorithms.write(path, {text: Choice("eng0", 0, 256, ms) for text in keys})
    sizes = 2 * math.prod(folded) * channels * 4, 4 * channels * math.prod(taps) * 4
    if ms < 1:
        sizes = 2 * math.prod(plane) * 16, 4 * 16 * math.prod(kernel)
    nbytes = 256 + sum(map(layout.aligned, sizes))
    spatial = ("x", "y") if order == "NHWC" else ("y",)
    got = run_last(gpu, at, "conv_forward", nbytes, "x", "w", "b", "y", spatial=spatial, **window)
    np.testing.assert_allclose(got["y"], expected(at, gpu, **window), atol=1e-4)
    got = run_last(gpu, at, "conv_relu_forward", nbytes, "x", "w", "b", "y", spatial=spatial, **window)
    np.testing.assert_allclose(got["y"], np.maximum(expected(at, gpu, **window), 0), atol=1e-4)
    gpu.memcpy_htod(at.w_address, np.ascontiguousarray(np.moveaxis(at.w_values, 1, -1)))
    names = "x", "w", "b", "y"
    got = run_last(gpu, at, "conv_forward", nbytes, *names, spatial=spatial, turned=True, **window)
    np.testing.assert_allclose(got["y"], expected(at, gpu, **window), atol=1e-4)
    for accumulate in (False, True):
        check_weights(gpu, at, nbytes, accumulate, spatial, atol=1e-3, **window)


# channels, volumes of x and y, kernel, stride, pad, and the channels that the last axis of a window comes to
VOLUMES = [
    (1, (4, 5, 6), (4, 5, 6), (5, 5, 5), (1, 1, 1), (2, 2, 2), 8),
    (1, (4, 5, 9), (2, 5, 4), (2, 1, 3), (2, 1, 2), (0, 0, 0), 4),
    (3, (4, 4, 7), (4, 4, 3), (3, 3, 3), (1, 1, 2), (1, 1, 0), 12),  # a pixel of zeros, or three
    (2, (3, 4, 5), (3, 4, 5), (1, 1, 1), (1, 1, 1), (0, 0, 0), 4),
]


@pytest.mark.parametrize("volumes", VOLUMES, ids=str)
@pytest.mark.parametrize("order", ["NHWC", "NCHW to NHWC"])
def test_volumes_of_few_channels_have_the_taps_of_an_axis_as_channels(gpu, rng, volumes, order):
    channels, volume, out, kernel, stride, pad, wide = volumes
    window = {"stride": stride, "pad": pad, "dilation": (1, 1, 1), "group": 1}
    gpu.math, gpu.plans = "tf32", {"eng0": (256, (), 1.0)}
    at = arrays(gpu, rng, x=(2, channels, *volume), w=(4, channels, *kernel), y=(2, 4, *out))
    at.x_values[0, 0, 0, 0, 0] = np.inf  # which is not multiplied by zeros
    gpu.memcpy_htod(at.x_address, at.x_values)
    sizes = 2 * math.prod(volume[:2]) * out[2] * wide * 4, 4 * math.prod(kernel[:2]) * wide * 4
    nbytes = 256 + sum(map(layout.aligned, sizes))
    spatial = ("x", "y") if order == "NHWC" else ("y",)
    got = run_last(gpu, at, "conv_forward", nbytes, "x", "w", "b", "y", spatial=spatial, **window)
    np.testing.assert_allclose(got["y"], expected(at, gpu, **window), atol=1e-4)
    assert np.isfinite(got["y"]).any()
    at.x_values[0, 0, 0, 0, 0] = 2
    gpu.memcpy_htod(at.x_address, at.x_values)
    for accumulate in (False, True):
        check_weights(gpu, at, nbytes, accumulate, spatial, atol=1e-3, **window)


@pytest.mark.parametrize("channels", [4, 3])
@pytest.mark.parametrize("order", ["NCHW", "NHWC", "NCHW to NHWC"])
def test_small_kernels_turn_nothing_over_and_widen_nothing(gpu, rng, channels, order):
    gpu.math, gpu.small_ms, atol = "tf32", 0.1, 2e-2
    at = arrays(gpu, rng, x=(2, channels, 5, 6), w=(4, channels, 3, 3))
    spatial = {"NCHW": (), "NHWC": ("x", "y")}.get(order, ("y",))
    turned = layout.aligned(at.x_values.nbytes) if order == "NCHW to NHWC" else 0

    def run(name, nbytes, *names, **attributes):
        if order == "NCHW":
            operands = [getattr(at, each) for each in names]
            wanted, ws = workspace(gpu, name, *operands, **attributes, **WINDOW)
            assert wanted == nbytes
            table("cuda")[name](*operands, ws=ws, **attributes, **WINDOW)
            return {each: fetched(gpu, at, each) for each in names}
        return run_last(gpu, at, name, nbytes, *names, spatial=spatial, **attributes, **WINDOW)

    np.testing.assert_allclose(run("conv_forward", turned, "x", "w", "b", "y")["y"], expected(at, gpu), atol=atol)
    got = run("conv_relu_forward", turned, "x", "w", "b", "y")
    np.testing.assert_allclose(got["y"], np.maximum(expected(at, gpu), 0), atol=atol)
    gpu.memcpy_htod(at.y_address, at.y_values)
    if order != "NCHW to NHWC":
        theirs = np.empty_like(at.x_values)
        table("host")["conv_backward_data"](at.y_values, at.w_values, theirs, ws=np.empty(1 << 16, np.uint8), **WINDOW)
        np.testing.assert_allclose(run("conv_backward_data", 0, "y", "w", "x")["x"], theirs, atol=atol)
        gpu.memcpy_htod(at.x_address, at.x_values)
    choices = algorithms.registry(gpu.model, 91900, "tf32")._choices
    for accumulate in (False, True):
        theirs = at.w_values.copy()
        gpu.memcpy_htod(at.w_address, theirs)
        table("host")["conv_backward_weights"](at.x_values, at.y_values, theirs, accumulate=accumulate, **WINDOW)
        x, key_order = (at.x.reshape(2, 5, 6, channels), "NHWC") if order != "NCHW" else (at.x, order)
        key = conv_plans.key_of("weights", gpu, x, at.w, **WINDOW, layout=key_order)
        partial = conv_small.plans(key)[0].workspace
        assert partial > 0
        got = run("conv_backward_weights", turned + partial, "x", "y", "w", accumulate=accumulate)
        np.testing.assert_allclose(got["w"], theirs, atol=10 * atol)
    assert all(choice.plan.startswith("small:") for choice in choices.values())
    assert all("x=2,4" in text or choice.plan in gpu.measured for text, choice in choices.items())


def test_small_kernels_want_weights_in_the_order_of_files(gpu, rng):
    gpu.math, gpu.small_ms = "tf32", 0.1
    at = arrays(gpu, rng)
    gpu.memcpy_htod(at.w_address, np.ascontiguousarray(np.moveaxis(at.w_values, 1, -1)))
    nbytes = layout.aligned(at.w_values.nbytes)
    got = run_last(gpu, at, "conv_forward", nbytes, "x", "w", "b", "y", turned=True, **WINDOW)
    np.testing.assert_allclose(got["y"], expected(at, gpu), atol=2e-2)


@pytest.mark.parametrize("small_ms", [0.9, None])
def test_small_convolutions_in_tf32_try_plans_without_tensor_cores_too(gpu, rng, small_ms):
    gpu.math, gpu.small_ms = "tf32", small_ms
    gpu.plans = {f"eng{number}": (0, ("TENSOR_CORE",), 1.0) for number in range(conv_search._MOST)}
    gpu.plans |= {"eng20": (0, (), 0.5)}
    at = arrays(gpu, rng)
    _, ws = workspace(gpu, "conv_backward_data", at.y, at.w, at.x, **WINDOW)
    table("cuda")["conv_backward_data"](at.y, at.w, at.x, ws=ws, **WINDOW)
    assert gpu.measured.count("eng20") == (small_ms is not None)
    assert gpu.measured.count("eng0") == 1


@pytest.mark.parametrize("limit, small", [(1 << 20, 1), (30, 0)])
def test_small_plans_keep_to_the_limit(gpu, limit, small):
    gpu.small_ms, gpu.workspace_limit = 0.1, limit
    x, w = (ArraySpec(SHAPES[name], np.dtype("float32")) for name in "xw")
    room = conv_plans.room_of(conv_plans.key_of("weights", gpu, x, w, **WINDOW), gpu)
    assert len(gpu.measured) == 1 + small
    assert (room.nbytes > 0) == small


def test_a_small_plan_needs_its_workspace(gpu, rng):
    gpu.small_ms = 0.1
    at = arrays(gpu, rng)
    nbytes, ws = workspace(gpu, "conv_backward_weights", at.x, at.y, at.w, accumulate=False, **WINDOW)
    with pytest.raises(DeviceError, match=f"needs {nbytes} bytes of workspace but was given {nbytes - 1}"):
        table("cuda")["conv_backward_weights"](
            at.x, at.y, at.w, ws=ws.part(0, (nbytes - 1,)), accumulate=False, **WINDOW
        )


def test_predictions_of_small_plans_turn_nothing_over(gpu):
    gpu.predicts = True
    x, w, y = (ArraySpec(shape, np.dtype("float32")) for shape in ((2, 5, 6, 4), (4, 4, 3, 3), (2, 5, 6, 4)))
    key = conv_plans.key_of("weights", gpu, x, w, **WINDOW, layout="NHWC")
    path = algorithms.folder() / algorithms.file_name(gpu.model, 91900, "fp32")
    algorithms.write(path, {key.text: Choice("small:8x1x1x1x3", 0, 1728, 1.0)})
    assert workspace(gpu, "conv_backward_weights", x, y, w, accumulate=True, layout="NHWC", **WINDOW)[0] == 1728


@pytest.mark.parametrize("name", ["small:8x4000x1x1", "small:8", "small:8x1x1xmany"])
def test_a_small_plan_that_this_version_does_not_have_is_searched_for_again(gpu, rng, name):
    at = arrays(gpu, rng)
    key = conv_plans.key_of("forward", gpu, at.x, at.w, **WINDOW)
    path = algorithms.folder() / algorithms.file_name(gpu.model, 91900, "fp32")
    algorithms.write(path, {key.text: Choice(name, 0, 0, 1.0)})
    assert forward(gpu, rng, with_bias=False) == 0
    assert gpu.measured == ["eng0"]


def test_channels_last_in_predictions(gpu, rng):
    gpu.predicts = True
    at = arrays(gpu, rng, x=(2, 4, 5, 6), w=(4, 4, 3, 3))
    x, y = (ArraySpec(np.moveaxis(a, 1, -1).shape, a.dtype) for a in (at.x_values, at.y_values))
    nbytes, _ = workspace(gpu, "conv_forward", x, at.w, None, y, layout="NHWC", **WINDOW)
    assert nbytes == gpu.workspace_limit + 1024


@pytest.mark.parametrize("dtype", dtypes.HALVES)
def test_halves_have_choices_of_their_own_and_whole_packs_of_channels(gpu, dtype):
    gpu.predicts = True
    x, w, y = (ArraySpec(shape, dtypes.of(dtype)) for shape in ((2, 5, 6, 3), SHAPES["w"], (2, 5, 6, 4)))
    keys = set()
    for gpu.math in ("fp32", "tf32"):
        keys.add(conv_plans.key_of("forward", gpu, x, w, **WINDOW, layout="NHWC"))
        nbytes, _ = workspace(gpu, "conv_forward", x, w, None, y, layout="NHWC", **WINDOW)
        wide = 2 * 5 * 6 * 8 * 2, 4 * 8 * 9 * 2  # images and weights with 8 channels
        assert nbytes == gpu.workspace_limit + sum(map(layout.aligned, wide))
    (key,) = keys
    assert (key.dtype, key.math) == (dtype, dtype)


def test_too_little_workspace_for_the_weights_is_an_error(gpu, rng):
    at = arrays(gpu, rng, x=(2, 4, 5, 6), w=(4, 4, 3, 3))
    x, y = at.x.reshape(2, 5, 6, 4), at.y.reshape(2, 5, 6, 4)
    for ws, given in ((gpu.as_array(at.b_address, (16,), np.uint8), 16), (None, 0)):
        with pytest.raises(DeviceError, match=f"weights need 576 bytes of workspace but were given {given}"):
            table("cuda")["conv_forward"](x, at.w, None, y, ws=ws, layout="NHWC", **WINDOW)


def test_deconvolution_is_the_gradient_for_the_data(gpu, rng):
    gpu.plans = {"eng0": (128, (), 1.0)}
    at = arrays(gpu, rng, b=(3,))
    nbytes, ws = workspace(gpu, "deconv_forward", at.y, at.w, at.b, at.x, **WINDOW)
    assert nbytes == 128
    table("cuda")["deconv_forward"](at.y, at.w, at.b, at.x, ws=ws, **WINDOW)
    theirs = np.empty(at.x.shape, np.float32)
    room = np.empty(1 << 16, np.uint8)
    table("host")["deconv_forward"](at.y_values, at.w_values, at.b_values, theirs, ws=room, **WINDOW)
    np.testing.assert_allclose(fetched(gpu, at, "x"), theirs, atol=1e-4)


def test_math_and_determinism_bar_plans(gpu, rng):
    gpu.plans = {
        "tf32": (0, ("TENSOR_CORE",), 0.1), "atomic": (0, ("NONDETERMINISTIC",), 0.2), "plain": (0, ("FFT",), 1.0),
    }  # fmt: skip
    at = arrays(gpu, rng)

    def chosen():
        return conv_plans._find(conv_plans.key_of("forward", gpu, at.x, at.w, **WINDOW), gpu, library)._run.__self__

    library = gpu.library("cudnn", cudnn.Cudnn)
    assert chosen().current == 1
    gpu.deterministic = True
    assert chosen().current == 2
    gpu.math, gpu.deterministic = "tf32", False
    assert chosen().current == 0


def test_another_limit_is_another_choice(gpu, rng):
    gpu.plans = {"small": (10, (), 2.0), "large": (1000, (), 1.0)}
    assert forward(gpu, rng, with_bias=False) == 1000
    gpu.workspace_limit = 300
    assert forward(gpu, rng, with_bias=False) == 10


def test_where_there_is_little_room_another_plan_runs(gpu, rng):
    """All that there is may be taken; with room for the usual plan that one stays, and nothing is timed for it."""
    gpu.plans = {"small": (10, (), 2.0), "middle": (290, (), 1.5), "large": (1000, (), 1.0)}
    gpu.fused_plans = {}
    at = arrays(gpu, rng)
    usual = [(None, 1000), (1000, 1000), (5000, 1000)]
    for op in ("conv_forward", "conv_relu_forward"):
        for room, taken in [*usual, (999, 290), (290, 290), (289, 10)]:
            nbytes, ws = workspace(gpu, op, at.x, at.w, at.b, at.y, room=room, **WINDOW)
            assert nbytes == taken, (op, room)
            table("cuda")[op](at.x, at.w, at.b, at.y, ws=ws, room=room, **WINDOW)
    for op, operands in (("conv_backward_data", (at.y, at.w, at.x)), ("conv_backward_weights", (at.x, at.y, at.w))):
        attributes = WINDOW | ({"accumulate": False} if op == "conv_backward_weights" else {})
        for room, taken in [*usual, (290, 290), (289, 10)]:
            nbytes, ws = workspace(gpu, op, *operands, room=room, **attributes)
            assert nbytes == taken, (op, room)
            table("cuda")[op](*operands, ws=ws, room=room, **attributes)
    texts = algorithms.read(algorithms.files()[-1])
    assert {text.partition("room=")[2] for text in texts} == {"", "999", "290", "289"}


SLABS = {  # shapes of x and w, then the window: pads, dilations and rows that do and do not divide well
    "three axes": ((1, 3, 8, 12, 10), (4, 3, 5, 3, 3), (2, 1, 1), (1, 1, 1), 1),
    "two axes": ((1, 4, 12, 6), (4, 2, 3, 3), (1, 1), (1, 1), 2),
    "dilated, no padding": ((1, 2, 12, 5), (3, 2, 3, 3), (0, 1), (2, 1), 1),
    "padding beyond the taps": ((1, 2, 6, 5), (3, 2, 3, 3), (3, 1), (1, 1), 1),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("case", SLABS)
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_an_image_with_little_room_is_taken_in_slabs(gpu, rng, monkeypatch, case, accumulate, order):
    """By the plan that would take too much, with no more workspace than there is, to the numbers of the whole."""
    x, w, pad, dilation, group = SLABS[case]
    window = {"stride": (1,) * len(pad), "pad": pad, "dilation": dilation, "group": group}
    last = ("x", "y") if order == "NHWC" else ()
    whole = conv_plans.key_of("forward", gpu, *(ArraySpec(each, np.dtype("float32")) for each in (x, w)), **window)
    at, sizes = arrays(gpu, rng, x=x, w=w, b=w[:1], y=whole.y), []

    def bytes_of(graph, index):
        workspace = graph.plans[index][1][0]
        if workspace:
            workspace = 4 * (math.prod(graph.key.x) + math.prod(graph.key.y))
            sizes.append(workspace)
        return workspace

    monkeypatch.setattr(Graph, "get_workspace_size_plan_at_index", bytes_of)
    monkeypatch.setattr(conv_slabs, "aligned", lambda nbytes: nbytes)
    gpu.plans = {"slow": (0, (), 40.0), "fast": (1, (), 2.0)}
    all_of_it = 4 * (math.prod(whole.x) + math.prod(whole.y))
    runs = {
        "conv_forward": (("x_values", "w_values", "b_values", "y_values"), {}),
        "conv_backward_data": (("y_values", "w_values", "x_values"), {}),
        "conv_backward_weights": (("x_values", "y_values", "w_values"), {"accumulate": accumulate}),
    }
    for op, (names, more) in runs.items():
        operands = [placed(gpu, at, name.removesuffix("_values"), last) for name in names]
        more["layout"] = order
        assert workspace(gpu, op, *operands, room=all_of_it + 4096, **window, **more)[0] >= all_of_it
        room = all_of_it - 1
        sizes.clear()
        nbytes, ws = workspace(gpu, op, *operands, room=room, **window, **more)
        assert 0 < nbytes <= room and min(sizes) < all_of_it / 2
        theirs = [getattr(at, name).copy() for name in names]
        scratch = {"ws": np.empty(1 << 16, np.uint8)} if op == "conv_backward_data" else {}
        table("cuda")[op](*operands, ws=ws, room=room, **window, **more)
        result, found = names[-1].removesuffix("_values"), np.empty(operands[-1].shape, np.float32)
        gpu.memcpy_dtoh(found, getattr(at, result + "_address"))
        del more["layout"]
        table("host")[op](*theirs, **scratch, **window, **more)
        np.testing.assert_allclose(np.moveaxis(found, -1, 1) if result in last else found, theirs[-1], atol=1e-4)
        with pytest.raises(DeviceError, match=f"needs {nbytes} bytes of workspace but was given 0"):
            table("cuda")[op](*operands, room=room, layout=order, **window, **more)
        gpu.memcpy_htod(getattr(at, result + "_address"), getattr(at, names[-1]))


def test_slabs_are_for_what_is_faster_so(gpu, rng, monkeypatch):
    """Another plan for little room stays if it is nearly as fast, of several images, and where none are small enough;
    what is known of their time counts."""
    gpu.plans = {"slow": (0, (), 5.0), "fast": (lambda images: 10_000, (), 2.0)}
    spec = ArraySpec((1, 3, 4, 6), np.dtype("float32"))
    key = conv_plans.key_of("forward", gpu, spec, ArraySpec(SHAPES["w"], spec.dtype), **WINDOW)
    assert conv_slabs.slabs_of(key, 9000, gpu) is None  # as slabs take as much
    monkeypatch.setattr(Graph, "get_workspace_size_plan_at_index", lambda self, index: (0, 250 * self.key.x[2])[index])
    monkeypatch.setattr(conv_slabs, "aligned", lambda nbytes: nbytes)
    algorithms._registry.cache_clear()
    gpu.restart()
    key = key._replace(x=(1, 3, 400, 6))
    assert conv_slabs.slabs_of(key._replace(x=(2, *key.x[1:])), 90_000, gpu) is None
    assert conv_slabs.slabs_of(key, 90_000, gpu) is None  # two of 2 ms are no less than 0.8 of 5
    gpu.plans = {"slow": (0, (), 5.1), "fast": (lambda images: 10_000, (), 2.0)}
    key = key._replace(x=(1, 3, 404, 6))
    found = conv_slabs.slabs_of(key, 90_000, gpu)
    assert found.number == 2 and found.key.x == (1, 3, 204, 6) and found.key.pad == (0, 1)
    assert conv_slabs.known_ms(key, 90_000, gpu) == 4.0
    assert conv_slabs.known_ms(key, 1 << 20, gpu) is conv_slabs.known_ms(key, None, gpu) is None


def test_a_plan_that_this_build_does_not_have_is_searched_for_again(gpu, rng):
    forward(gpu, rng, with_bias=False)
    gpu.restart()
    gpu.plans = {"eng9": (0, (), 1.0)}
    forward(gpu, rng, with_bias=False)
    assert gpu.measured == ["eng9"]
    gpu.restart()
    forward(gpu, rng, with_bias=False)
    assert gpu.measured == []


def test_too_little_workspace_is_an_error(gpu, rng):
    gpu.plans = {"eng0": (4096, (), 1.0)}
    at = arrays(gpu, rng)
    small = gpu.as_array(gpu.allocate(4095, "ws"), (4095,), np.uint8)
    for ws, given in ((small, 4095), (None, 0)):
        with pytest.raises(DeviceError, match=f"4096 bytes of workspace but was given {given}"):
            table("cuda")["conv_forward"](at.x, at.w, None, at.y, ws=ws, **WINDOW)


def test_predictions_look_in_the_files(gpu, rng, caplog):
    at = arrays(gpu, rng)
    key = conv_plans.key_of("forward+bias", gpu, at.x, at.w, **WINDOW)
    path = algorithms.folder() / algorithms.file_name(gpu.model, 91900, "fp32")
    algorithms.write(path, {key.text: Choice("eng3", 0, 12345, 1.0)})
    gpu.predicts = True
    assert workspace(gpu, "conv_forward", at.x, at.w, at.b, at.y, **WINDOW)[0] == 12345
    assert not gpu.uncertain and not caplog.records
    for _ in range(2):
        nbytes, _ = workspace(gpu, "conv_backward_weights", at.x, at.y, at.w, accumulate=True, **WINDOW)
        assert nbytes == gpu.workspace_limit + 512
    assert gpu.uncertain and len(caplog.records) == 1 and "charged its limit of 64 MiB" in caplog.text
    specs = [ArraySpec.of(operand) for operand in (at.x, at.w, at.b, at.y)]
    assert table("cuda")["conv_relu_forward"].workspace_bytes(*specs, device=gpu, **WINDOW) == 12345
    assert gpu.made is None  # cuDNN was not asked for


def test_what_is_known_of_a_plan_is_what_the_room_for_its_workspace_allows(gpu, monkeypatch):
    x, w = (ArraySpec(SHAPES[n], np.dtype("float32")) for n in "xw")
    key = conv_plans.key_of("weights", gpu, x, w, **WINDOW)
    known = {key: Choice("wide", 0, 100, 1.0), key._replace(room=99): Choice("narrow", 1, 0, 9.0)}
    monkeypatch.setattr(algorithms, "predict", lambda model, math, asked: known.get(asked))
    found = [conv_plans.chosen(key, gpu, room).plan for room in (None, 100, 99, 98)]
    assert found == ["wide", "wide", "narrow", "wide"]  # the last is not known


def test_predictions_of_what_our_own_kernels_do_are_certain(gpu):
    gpu.predicts = True
    x, w = (ArraySpec(shape, np.dtype("float32")) for shape in ((1, 1, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1)))
    window = {"stride": (1,) * 4, "pad": (0,) * 4, "dilation": (1,) * 4, "group": 1}
    assert table("cuda")["conv_forward"].workspace_bytes(x, w, None, x, device=gpu, **window) == 0
    assert not gpu.uncertain


@pytest.mark.parametrize(
    "times, best, ms, runs",
    [
        ([9, 1, 2, 3, 0.5, 4], float("inf"), 0.5, 6),
        ([9, 1.2, 1.1, 1.3, 1.3, 1.3], 1.0, 1.1, 6),
        ([8.9, 1.7, 1.6], 1.0, 1.6, 3),
        ([9.1], 1.0, 9.1, 1),
    ],
)
def test_no_time_is_spent_on_what_is_much_slower(times, best, ms, runs):
    left = list(times)
    assert conv_search.least(lambda: left.pop(0), best) == ms
    assert len(times) - len(left) == runs
