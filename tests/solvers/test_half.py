"""Training in half precision: float32 masters, the scale of losses, updates left out, snapshots, bytes."""

import numpy as np
import pytest
from cuda_devices import EMULATED, EXACT_GPU
from update_formulas import OPTIONS, fields

from blobmem import dtypes, get_solver
from blobmem.footprint import footprint
from blobmem.memory.blob import Blob
from blobmem.net import captured

HALVES = pytest.mark.parametrize("dtype", dtypes.HALVES)

NET = """
layer { name: "d" type: "Input" top: "x" top: "t" input_param { shape { dim: 8 dim: 3 } shape { dim: 8 } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "y" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
        inner_product_param { num_output: 16 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "y" top: "n" }
layer { name: "r" type: "ReLU" bottom: "n" top: "n" }
layer { name: "b" type: "InnerProduct" bottom: "n" top: "z"
        inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "z" bottom: "t" top: "loss" }
"""
SGD = fields("SGD")


make_device = None


@pytest.fixture(params=[EMULATED, EXACT_GPU], autouse=True)
def kind_of_device(request, monkeypatch):
    monkeypatch.setitem(globals(), "make_device", request.param)


def solver(tmp_path, dtype, options=SGD, device=None, rate=0.05, **others):
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    text = f'net: "{path}" base_lr: {rate} lr_policy: "fixed" random_seed: 3 snapshot_prefix: "{tmp_path}/s" {options}'
    made = get_solver(text, device=device or make_device(), dtype=dtype, **others)
    x = np.random.default_rng(0).normal(size=(8, 3))
    made.net.blobs["x"].data[...], made.net.blobs["t"].data[...] = x, np.argmax(x, 1)
    return made


def bits(made):
    own = [entry.blob for entry in made.net.learnable] + list(made.updater._own())
    return [blob.cpu_data().tobytes() for blob in own]


def weights(made):
    return made.net.params["b"][0].cpu_data().astype(np.float64)


@pytest.mark.parametrize("memory", ["keep", "train"])
@pytest.mark.parametrize("kind", OPTIONS)
@HALVES
def test_training_is_that_of_float32(tmp_path, dtype, kind, memory):
    options = f"{fields(kind)} weight_decay: 0.01" + (" iter_size: 2 clip_gradients: 0.8" if memory == "keep" else "")
    rate = {"SGD": 0.05, "Nesterov": 0.05, "AdaDelta": 0.5}.get(kind, 0.01)
    half, full = (solver(tmp_path, each, options, rate=rate, memory=memory) for each in (dtype, "float32"))
    before = weights(full)
    for made in (half, full):
        made.step(10)
    moved = np.abs(weights(full) - before).max()
    assert moved > 0.03
    # a parameter is off by its rounding, and by what the roundings of ten passes made of its way
    assert np.abs(weights(half) - weights(full)).max() < (0.05 if dtype == "float16" else 0.3) * moved
    assert half.smoothed_loss == pytest.approx(full.smoothed_loss, rel=0.02 if dtype == "float16" else 0.1)
    assert half.updater.steps_left_out == 0


@HALVES
def test_many_small_steps_add_up(tmp_path, dtype):
    made = solver(tmp_path, dtype, 'type: "SGD"', rate=0.00001)
    blob = made.net.params["b"][0]
    blob.data[...] = 1
    for _ in range(400):  # each is far below the distance of 1 to the next half
        blob.diff[...] = made.updater.loss_scale
        made.apply_update()
    assert blob.cpu_data().astype(np.float32) == pytest.approx(np.full(blob.shape, 0.996), abs=0.004)
    master = made.updater.masters_of()[blob.data_view.memory]
    assert master.values() == pytest.approx(np.full(blob.shape, 0.996), abs=1e-5)


@HALVES
def test_what_a_script_writes_is_where_the_master_begins(tmp_path, dtype):
    made = solver(tmp_path, dtype)
    made.step(2)
    blob = made.net.params["b"][0]
    kept = blob.cpu_data()[1].copy()
    master = made.updater.masters_of()[blob.data_view.memory]
    unrounded = master.values()[1]
    blob.data[0] = 0.75
    blob.clear_diff()
    for history in made.updater.history:
        history[0].data[...] = 0
    made.updater.run(0)
    assert (master.values()[0] == 0.75).all()
    assert np.array_equal(master.values()[1], unrounded) and np.array_equal(blob.cpu_data()[1], kept)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("layer", ["a", "b"])
def test_an_update_with_gradients_beyond_float16_is_left_out(tmp_path, bad, layer):
    made = solver(tmp_path, "float16")
    made.step(2)
    before, scale = bits(made)[:-1], made.updater.loss_scale
    assert scale == 2**15
    made.net.params[layer][0].diff.flat[-1] = bad
    made.apply_update()
    assert bits(made)[:-1] == before
    assert (made.updater.loss_scale, made.updater.steps_left_out) == (scale / 2, 1)
    made.step(1)
    assert bits(made)[:-1] != before and made.updater.steps_left_out == 1


def test_the_scale_grows_after_many_good_steps_and_shrinks_until_gradients_fit(tmp_path):
    made = solver(tmp_path, "float16")
    made.updater.load_scaling([2.0**15, 1998, 0, 0])
    made.step(1)
    assert made.updater.loss_scale == 2**15
    made.step(1)
    assert made.updater.scaling_state() == [2.0**16, 0, 0, 0]
    made.updater.load_scaling([2.0**24, 0, 0, 0])
    made.step(12)
    left_out = made.updater.steps_left_out
    assert 0 < left_out < 12 and made.updater.loss_scale == 2.0 ** (24 - left_out)


def test_gradients_are_scaled_before_the_update_and_not_in_it(tmp_path):
    half, full = (solver(tmp_path, each) for each in ("float16", "float32"))
    for made in (half, full):
        made.net.run_forward()
        made.net.run_backward()
    expected = full.net.params["b"][0].cpu_diff() * half.updater.loss_scale
    assert half.net.params["b"][0].cpu_diff() == pytest.approx(
        expected, rel=0.02, abs=0.01 * float(np.abs(expected).max())
    )


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
@HALVES
def test_a_restored_run_goes_on_to_the_bit(tmp_path, dtype, form):
    options = f"{SGD} weight_decay: 0.01 snapshot_format: {form}"
    made = solver(tmp_path, dtype, options)
    if dtype == "float16":
        made.updater.load_scaling([2.0**13, 7, 0, 1])
    made.step(3)
    path = made.snapshot()
    at_snapshot = bits(made)
    made.step(3)
    again = solver(tmp_path, dtype, options)
    again.restore(path)
    assert bits(again) == at_snapshot
    again.step(3)
    assert bits(again) == bits(made) and again.updater.loss_scale == made.updater.loss_scale
    full = solver(tmp_path, "float32", options)
    full.restore(path)  # whose parameters were not rounded
    masters = again.updater.masters_of()
    assert full.net.params["b"][0].shape and len(masters) == 4
    again.restore(path)
    assert np.array_equal(
        full.net.params["b"][0].cpu_data(), masters[again.net.params["b"][0].data_view.memory].values()
    )


@HALVES
def test_updates_in_backward_are_for_gradients_that_all_fit(tmp_path, dtype):
    made = solver(tmp_path, dtype, memory="train")
    made.step(1)
    assert made.net.updates_in_backward == (dtype == "bfloat16")


def test_captured_is_what_eager_is(tmp_path, monkeypatch):
    monkeypatch.setattr(captured, "LEAST", 1)
    monkeypatch.setattr(captured, "_RUNS", 1)
    eager = make_device()
    eager.graphs = False
    one, other = (solver(tmp_path, "float16", device=each) for each in (make_device(), eager))
    for made in (one, other):
        made.updater.load_scaling([2.0**22, 0, 0, 0])  # so that some steps are left out
        made.step(8)
    assert bits(one) == bits(other) and one.updater.steps_left_out
    assert {*one.net.why_eager(backward=True).values()} == {""}


@pytest.mark.parametrize("scheme", ["blobs", "planned"])
@HALVES
def test_footprint(tmp_path, dtype, scheme):
    made = solver(tmp_path, dtype)
    for name in ("half", "full"):
        (tmp_path / name).mkdir()
    text = f'net: "{tmp_path}/net.prototxt" base_lr: 0.05 lr_policy: "fixed" {SGD}'
    found = footprint(text, dtype=dtype, schemes=[scheme], measured=True)[scheme]
    assert found.measured == found.predicted
    learned = sum(entry.blob.count for entry in made.net.learnable if entry.lr_mult)
    expected = 8 * learned + 16 if dtype == "float16" else 6 * learned  # history, and of masters the lower halves
    assert found.train.purposes["solver state"] == expected


def test_the_scale_moves_with_the_net(tmp_path):
    made = solver(tmp_path, "float16")
    made.step(1)
    before = bits(made)
    made.net.move_to(make_device())
    made.step(1)
    assert bits(made) != before and made.updater.steps_left_out == 0
    assert all(isinstance(blob, Blob) and blob.device is made.net.device for blob in made.updater._own())
