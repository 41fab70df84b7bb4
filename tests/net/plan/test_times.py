"""What a pass takes by its calls' times: copies beside the computing, and whoever waits for them."""

from itertools import pairwise

import numpy as np
import pytest
from plan_nets import DATA, conv, iterate, loss, made

from blobmem import SimulatedDevice
from blobmem.memory.blob import Blob
from blobmem.net.plan import levels, times
from blobmem.net.plan.arena import Layout
from blobmem.net.plan.liveness import Lifetime, Lifetimes
from blobmem.net.plan.places import Draft
from blobmem.net.plan.times import Reckoned, Times, reckon
from blobmem.net.schedule import Unit
from blobmem.ops.call import call, overwrite, read, write

KIB = 1024
HOME = object()


class Told(Times):
    """Of a device on which a call takes what its attribute says."""

    def ms(self, call):
        return call.attributes["ms"]


def array(name):
    return Blob((KIB // 4,), device=SimulatedDevice(), name=name)


def draft_of(calls, places):
    """A draft of a pass of these calls; `places` has for arrays their first and last call and their offset."""
    arena = [Lifetime(blob.data_view.memory, KIB, first, last) for blob, first, last, _ in places]
    units = [Unit(at, at + 1, [each], 0, False) for at, each in enumerate(calls)]
    drawn = Draft([units], {}, {}, Lifetimes(arena, {}, {}, {}))
    drawn.layout = Layout([at for *_, at in places], 3 * KIB)
    return drawn


def reckoned(calls, places, slow=()):
    """When calls begin; those in `slow` copy while the link is busy the other way."""
    found = reckon(draft_of(calls, places), Told(SimulatedDevice()))
    assert isinstance(found, Reckoned) and found.ms == found.end.max()
    took = [times.LINK / times.BOTH if at in slow else 1.0 for at in range(len(calls))]
    np.testing.assert_allclose(found.end - found.begin, np.multiply(took, [each.attributes["ms"] for each in calls]))
    return found.begin.tolist()


def test_copies_run_beside_calls_and_whoever_uses_the_bytes_waits():
    a, b, c, back = map(array, "abcd")
    calls = [
        call("make", overwrite(a), ms=1.0),
        call("evict", read(a), home=HOME, ms=4.0),
        call("make", overwrite(b), ms=1.0),  # elsewhere: beside the copy
        call("make", overwrite(c), ms=1.0),  # where a was
        call("fetch", overwrite(back), home=HOME, ms=2.0),  # where b was
        call("use", read(c), ms=1.0),
        call("use", read(back), ms=1.0),
    ]
    places = [(a, 0, 1, 0), (b, 2, 2, KIB), (c, 3, 5, 0), (back, 4, 6, KIB)]
    assert reckoned(calls, places) == [0, 1, 1, 5, 6, 6, 8]
    found = reckon(draft_of(calls, places), Told(SimulatedDevice()), bytes_free=True)
    assert found.begin.tolist() == [0, 1, 1, 2, 5, 3, 7], "as if all bytes were free, but for what was copied away"


def test_a_copy_back_waits_for_the_copy_away_of_its_bytes_and_of_what_was_there():
    a, b, back = map(array, "abc")
    other = object()
    calls = [
        call("make", overwrite(a), ms=1.0),
        call("make", overwrite(b), ms=1.0),
        call("evict", read(a), home=HOME, ms=1.0),
        call("evict", read(b), home=other, ms=5.0),  # behind that of a
        call("fetch", overwrite(back), home=HOME, ms=1.0),  # where b was
        call("use", read(back), ms=1.0),
    ]
    assert reckoned(calls, [(a, 0, 2, 0), (b, 1, 3, KIB), (back, 4, 5, KIB)]) == [0, 1, 2, 3, 8, 9]
    assert reckoned(calls, [(a, 0, 2, 0), (b, 1, 3, KIB), (back, 4, 5, 2 * KIB)], slow=[4])[4] == 3
    calls[2].attributes["ms"] = 9.0
    assert reckoned(calls, [(a, 0, 2, 0), (b, 1, 3, KIB), (back, 4, 5, 2 * KIB)], slow=[4])[4] == 11


def test_a_copy_is_slower_while_one_the_other_way_is_under_way(monkeypatch):
    monkeypatch.setattr(times, "BOTH", times.LINK / 2)
    a, b = map(array, "ab")
    calls = [call("make", overwrite(a), ms=1.0), call("evict", read(a), home=object(), ms=4.0),
             call("fetch", overwrite(b), home=HOME, ms=5.0)]  # fmt: skip
    drawn = draft_of(calls, [(a, 0, 1, 0), (b, 2, 2, KIB)])
    found = reckon(drawn, Told(SimulatedDevice()))
    assert found.begin.tolist() == [0, 1, 1] and found.end.tolist() == [1, 5, 8], "2 of its 5 ms in 4, then 3"
    calls[2].attributes["ms"] = 1.0
    assert reckon(drawn, Told(SimulatedDevice())).end.tolist() == [1, 5, 3]


def test_backward_begins_when_all_of_forward_has_ended():
    """As it is queued behind all streams of that."""
    a, b = map(array, "ab")
    calls = [call("make", overwrite(a), ms=1.0), call("evict", read(a), home=object(), ms=4.0),
             call("fetch", overwrite(b), home=HOME, ms=1.0), call("make", overwrite(a), ms=1.0)]  # fmt: skip
    drawn = draft_of(calls, [(a, 0, 1, 0), (b, 2, 2, KIB)])
    for turn, wanted in ((4, [0, 1, 1, 1]), (3, [0, 1, 1, 5]), (2, [0, 1, 5, 5])):
        drawn.units = [[*drawn.units[0][:turn]], [*drawn.units[0][turn:]]]
        assert reckon(drawn, Told(SimulatedDevice()), bytes_free=True).begin.tolist() == wanted
        drawn.units = [[*drawn.units[0], *drawn.units[1]]]


def test_one_that_takes_over_bytes_in_place_waits_for_their_copy():
    a, b = map(array, "ab")
    calls = [call("make", overwrite(a), ms=1.0), call("evict", read(a), home=HOME, ms=3.0),
             call("relu", read(a), overwrite(b), ms=1.0)]  # fmt: skip
    assert reckoned(calls, [(a, 0, 2, 0), (b, 2, 2, 0)]) == [0, 1, 4]


def test_a_net_that_was_planned_is_reckoned_as_its_draft_was(monkeypatch):
    drafts, real = [], levels.fit

    def fit(net, usual):
        result = real(net, usual)
        drafts.append(reckon(result.places, Times(net.device)))
        return result

    monkeypatch.setattr(levels, "fit", fit)
    text = DATA + "".join(conv(after, before, outputs=9) for before, after in pairwise(["data", *"abcdef"])) + loss("f")
    capacity = None
    for _ in range(2):
        net = made(text, SimulatedDevice(capacity), "train")
        iterate(net)
        capacity = net.device.statistics.peak_bytes - 1
        found, drawn = net.reckoned(), drafts.pop()
        np.testing.assert_array_equal(found.end, drawn.end)
        assert found.ms == drawn.ms > 0 and len(found.begin) == sum(len(one.units()) for one in net.compiled())
    assert net._fetched


def test_bytes_products_and_what_does_not_run_in_each_step(monkeypatch):
    monkeypatch.setattr(times, "QUEUED", 0.25)
    one = Times(SimulatedDevice())
    big = Blob((64, 256, 56, 56))
    relu = call("relu_forward", read(big), overwrite(big), slope=0.0)
    moved = 2 * big.nbytes / times.MEMORY * 1e3
    assert one.ms(relu) == pytest.approx(moved + times.START)
    assert one.ms(call("update", write(big))) == pytest.approx(moved + times.START), "read and written"
    assert one.ms(call("fill", overwrite(big), once=True, value=0.0)) == one.ms(call(print, read(big))) == 0
    second = read(Blob((int(times.LINK) // 4,)))
    assert one.copy_ms(int(times.LINK)) == one.ms(call("evict", second, home=HOME)) == 1250
    weights, top = Blob((512, 256, 3, 3)), Blob((64, 512, 56, 56))
    window = {"stride": (1, 1), "pad": (1, 1), "dilation": (1, 1), "group": 1}
    flops = 2 * top.count * 256 * 9
    forward = call("conv_forward", read(big), read(weights), None, overwrite(top), **window)
    assert one.ms(forward) == pytest.approx(flops / 40e12 * 1e3 + times.START)
    factors, other = [read(Blob((512,))) for _ in range(4)], Blob(top.shape)
    given = read(big), read(weights), None, read(other), overwrite(top), None, *factors
    beside = (2 * weights.nbytes + other.nbytes) / times.MEMORY * 1e3 + times.START
    joined = call("conv_batch_norm_given", *given, relu=True, **window)
    assert one.ms(joined) == pytest.approx(one.ms(forward) + beside), "as it takes by itself, weights and a sum beside"
    x, w, y = Blob((4096, 512)), Blob((8192, 512)), Blob((4096, 8192))
    product = call("inner_product_forward", read(x), read(w), None, overwrite(y), transpose=False)
    assert one.ms(product) == pytest.approx(2 * 4096 * 512 * 8192 / 40e12 * 1e3 + times.START)
