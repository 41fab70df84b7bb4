"""Times of calls in the files of chosen algorithms: what they depend on, and who finds them."""

import numpy as np
import pytest

from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.memory.blob import Blob
from blobmem.net.plan.times import START, Times
from blobmem.ops.call import call, overwrite, read
from blobmem.ops.cuda import algorithms, times
from blobmem.ops.cuda.algorithms import Choice

MODEL = "NVIDIA H200"


@pytest.fixture(autouse=True)
def device(tmp_path, monkeypatch):
    """A GPU that is predicted for, whose times can be added to."""
    monkeypatch.setenv("BLOBMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(algorithms, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(times, "_registry", lambda device, math: algorithms.registry(MODEL, 91900, math))
    return PredictedCuda(MODEL, "tf32")


def pool(items, channels=8, dtype="float32", **attributes):
    """A call on images, channels last."""
    x, y = (Blob((items, channels, side, side), dtype=dtype) for side in (8, 4))
    attributes = {"kernel": (2, 2), "stride": (2, 2), "pad": (0, 0), "layout": "NHWC"} | attributes
    return call(
        "ave_pool_forward", read(x, (items, 8, 8, channels)), overwrite(y, (items, 4, 4, channels)), **attributes
    )


def test_a_time_is_for_all_that_are_alike_and_of_more_items_a_little_less_than_in_proportion(device):
    assert not Times(device).is_known(pool(4))
    times.add(device, {times.key_of(pool(4), device): [0.5]})
    known = Times(device)
    assert known.is_known(pool(4)) and known.ms(pool(4)) == 0.5
    assert known.ms(pool(4, layer="another", scale=2.0)) == 0.5, "names and factors do not matter"
    assert not known.is_known(pool(16)) and known.ms(pool(16)) == pytest.approx(0.5 * 4**0.85)
    others = pool(4, 16), pool(4, kernel=(3, 3)), pool(4, layout="NCHW"), pool(4, dtype="float16"), pool(4, ceil=True)
    assert all(known.ms(other) < 0.1 for other in others), "which are reckoned"
    times.add(device, {times.key_of(pool(16), device): [4.0]})
    assert Times(device).ms(pool(12)) == pytest.approx(4.0 * 0.75**0.85), "by what is nearest"


def test_of_several_times_the_median_is_kept_with_what_was_known(device):
    key = times.key_of(pool(4), device)
    times.add(device, {key: [3.0, 1.0, 9.0]})
    assert Times(device).ms(pool(4)) == 3.0
    times.add(device, {key: [1.0, 2.0]})
    assert Times(device).ms(pool(4)) == 2.0
    text = algorithms.registry(MODEL, 91900, "tf32").path.read_text()
    assert f'"{key.text}": 2.0' in text.splitlines(), "which is all that is written"


def test_halves_are_in_a_file_of_their_own(device):
    times.add(device, {times.key_of(pool(4, dtype="float16"), device): [0.5]})
    assert algorithms.registry(MODEL, 91900, "float16").path.exists()
    assert Times(PredictedCuda(MODEL)).ms(pool(4, dtype="float16")) == 0.5
    assert Times(PredictedCuda("another", "tf32")).ms(pool(4, dtype="float16")) < 0.1


def convolution(items, channels):
    window = {"stride": (1, 1), "pad": (1, 1), "dilation": (1, 1), "group": 1, "layout": "NHWC"}
    x, w, y = Blob((items, 14, 14, channels)), Blob((32, channels, 3, 3)), Blob((items, 14, 14, 32))
    return call("conv_forward", read(x), read(w), None, overwrite(y), **window)


@pytest.mark.parametrize("channels, wide", [(16, 16), (3, 4)])
def test_a_convolution_takes_what_its_plan_took_when_it_was_chosen(device, channels, wide):
    text = f"forward x=2,{wide},14,14 w=32,{wide},3,3 stride=1,1 pad=1,1 dilation=1,1 group=1 float32 NHWC"
    chosen = {text: Choice("eng1", 0, 0, 7.0)}
    algorithms.registry(MODEL, 91900, "tf32").add(chosen)
    assert Times(device).ms(convolution(2, channels)) == pytest.approx(7.0 + START)
    assert Times(device).ms(convolution(4, channels)) < 0.1
    times.add(device, {times.key_of(convolution(2, channels), device): [5.0]})
    assert Times(device).ms(convolution(2, channels)) == 5.0
    assert np.isclose(Times(device).ms(convolution(4, channels)), 10, rtol=0.2)
