"""Gradients that a sum passes on as they are: the same bits without copies, and copies wherever somebody could tell."""

import pytest
from cuda_devices import DEVICES, needs_compiler
from cuda_emulation import EmulatedCuda
from plan_nets import DATA, SCALE, assert_same, conv, iterate, layer, loss, made, run_layer_by_layer

from blobmem import SharedBlobError
from blobmem.devices import HOST
from blobmem.memory.blob import Blob
from blobmem.net.plan.through import through
from blobmem.ops.call import call, overwrite_diff, read, read_diff, write_diff

NORM = layer("BatchNorm", "n", "b", "b") + layer("Scale", "sc", "b", "b", SCALE)
COPY = "eltwise_sum_backward"


def summed(*middle, total="", bottoms="a b"):
    """A convolution, another of it, and the sum of both."""
    text = DATA + conv("a", "data") + conv("b", "a") + "".join(middle)
    return text + layer("Eltwise", "s", bottoms, "s", total) + conv("d", "s") + loss("d")


SUMS = {
    "alone": summed(),
    "twice the same": summed(bottoms="b b"),
    "shut": summed(layer("ReLU", "r", "b", "b")),
    "dropped": summed(layer("Dropout", "r", "b", "b")),
    "normalised": summed(NORM),
    "of sums": summed(layer("Eltwise", "o", "a b", "o"), layer("Eltwise", "q", "o b", "q"), bottoms="o q"),
}


def gradients(net):
    """The ops that go into gradients of layers, layer by layer or not."""
    return [each.op for each in net.compiled()[1].calls]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


@pytest.mark.parametrize("name", SUMS)
def test_what_a_sum_passes_on_is_not_copied(device, name):
    kept, net = (made(SUMS[name], device, memory) for memory in ("keep", "train"))
    assert_same(*([*iterate(each), *iterate(each)] for each in (kept, net)))
    assert COPY in gradients(kept) and COPY not in gradients(net)
    if name != "normalised":
        for each in (kept, net):
            run_layer_by_layer(each)
        assert_same(*([entry.blob.cpu_diff() for entry in each.learnable] for each in (kept, net)))


LEFT = {
    "another coefficient": (summed(total="eltwise_param { coeff: 2 coeff: 1 }"), {}, 1),
    "kept": (summed(), {"keep": ["b"]}, 1),
    "a sum that is kept": (summed(), {"keep": ["s"]}, 2),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_copies_are_made(device, name):
    text, options, copies = LEFT[name]
    net = made(text, device, "train", **options)
    assert_same(iterate(net), iterate(made(text, device, "keep")))
    assert gradients(net).count(COPY) == copies
    for blob in options.get("keep", ()):
        assert net.blobs[blob].cpu_diff().any()


def test_nobody_reads_a_gradient_that_is_not_there():
    net = made(summed(), HOST, "train")
    iterate(net)
    with pytest.raises(SharedBlobError, match="b"):
        net.blobs["b"].cpu_diff()


@needs_compiler
def test_a_norm_with_its_scale_takes_the_gradient_where_it_is():
    found = gradients(made(SUMS["normalised"], EmulatedCuda(), "train"))
    assert found.count("batch_norm_scale_backward") == 1 and "scale_backward_data" not in found
    found = gradients(made(SUMS["normalised"], HOST, "train"))
    assert "batch_norm_scale_backward" not in found and "scale_backward_data" in found


# -------------------------------------------------------------------- call by call


def blobs(names):
    return [Blob(4, name=name) for name in names.split()]


def passed(*calls, free):
    """The ops that are left, and names of what they do not use any more."""
    left, gone = through(calls, {blob.diff_view.memory for blob in free}, ())
    return [each.op for each in left], {memory.name for memory in gone}


def copy(dy, to):
    return call(COPY, read_diff(dy), overwrite_diff(to), coeff=1.0)


def test_a_copy_that_outlives_its_source_is_made():
    """And one that is added to, or of what somebody else reads."""
    s, b, c = blobs("s b c")
    shut = call("relu_backward", read(b), read_diff(b), overwrite_diff(c), slope=0.0)
    assert passed(copy(s, b), shut, free=(s, b)) == (["relu_backward"], {"b.diff"})
    assert (
        passed(copy(s, b), shut, free=(s,)) == passed(copy(s, b), shut, free=(b,)) == ([COPY, "relu_backward"], set())
    )
    again = call("sigmoid_backward", read(c), read_diff(c), overwrite_diff(s))
    assert passed(copy(s, b), again, shut, free=(s, b))[0] == [COPY, again.op, shut.op]
    assert passed(copy(s, b), shut, again, free=(s, b))[0] == [shut.op, again.op]
    added = call("axpy", read_diff(c), write_diff(b), alpha=1.0)
    assert passed(copy(s, b), added, shut, free=(s, b))[0][0] == COPY


def test_up_to_where_the_array_begins_anew():
    s, b, c, d = blobs("s b c d")
    shut = call("relu_backward", read(b), read_diff(b), overwrite_diff(b), slope=0.0)
    behind = call("sigmoid_backward", read(d), read_diff(b), overwrite_diff(d))
    calls, gone = through([copy(s, b), shut, behind], {each.diff_view.memory for each in (s, b)}, ())
    assert [each.op for each in calls] == [shut.op, behind.op] and not gone
    assert calls[0].operand(1).blob is s and calls[0].operand(2).blob is b
    assert calls[1].operand(1).blob is b
    twice = call(COPY, read_diff(b), overwrite_diff(c), coeff=1.0)
    calls, gone = through([copy(s, b), twice, call("sigmoid_backward", read(d), read_diff(c), overwrite_diff(d))],
                          {each.diff_view.memory for each in (s, b, c)}, ())  # fmt: skip
    assert [each.operand(1).blob for each in calls] == [s] and {memory.name for memory in gone} == {"b.diff", "c.diff"}
