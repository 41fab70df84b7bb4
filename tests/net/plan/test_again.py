"""Arrays that backward makes anew by any calls of forward: the same bits, and what is not kept for it."""

import pytest
from cuda_devices import DEVICES, needs_compiler
from cuda_emulation import EmulatedCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_nets import DATA, Choosing, ask_at_random, assert_same, conv, iterate, layer, loss, made, nets_at_random

from blobmem import SharedBlobError, SimulatedDevice
from blobmem.net.compilation import Compilation
from blobmem.net.plan.again import Less, Round

BLOCK = (
    layer("BatchNorm", "n", "c", "c") + layer("Scale", "s", "c", "c") + layer("ReLU", "r", "c", "c")
    + layer("Pooling", "p", "c", "p", "pooling_param { kernel_size: 3 stride: 1 pad: 1 }")
)  # fmt: skip
DROPPED = conv("d", "p") + layer("Dropout", "drop", "d", "d") + layer("LRN", "l", "d", "l") + conv("e", "l")
NET = DATA + conv("c", "data") + BLOCK + DROPPED + loss("e")
SHIFTED = "scale_param { bias_term: true bias_filler { value: 0.3 } }"
NORMED = (
    conv("c", "data") + layer("BatchNorm", "n", "c", "c") + layer("Scale", "s", "c", "c", SHIFTED)
    + layer("ReLU", "r", "c", "c") + conv("e", "c") + loss("e")
)  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


@pytest.mark.parametrize("rounds", [False, True], ids=["once", "rounds"])
@pytest.mark.parametrize("part, seed", [(0.4, 0), (0.4, 1), (0.7, 2), (1, 0)])
def test_the_same_bits(monkeypatch, device, part, seed, rounds):
    choosing, traces = Choosing(monkeypatch, seed, part, rounds), []
    for memory in ("keep", "train"):
        net = made(NET, device, memory)
        traces.append([*iterate(net), *iterate(net)])
    assert_same(*traces)
    if part == 1:
        assert {"n/normalized", "p", "p/mask", "d", "drop/mask", "l", "e"} <= {*choosing.again[0]}
        norms = {str(each.op) for each in net.compiled()[1].calls} & {"batch_norm_forward", "batch_norm_given"}
        assert norms == {"batch_norm_given"}


def kept_and_anew(monkeypatch, chosen, make):
    """`NORMED` where all is kept, and where what is `chosen`, for `Compilation._recompute`, is made anew: they give the
    same bits in two passes."""
    nets = [made(DATA + NORMED, make(), "keep"), made(DATA + NORMED, make(), "train")]
    with monkeypatch.context() as patch:
        traces = [[*iterate(nets[0]), *iterate(nets[0])]]
        patch.setattr(Compilation, "_recompute", chosen)
        traces.append([*iterate(nets[1]), *iterate(nets[1])])
    assert_same(*traces)
    return nets


@needs_compiler
@pytest.mark.parametrize("apart", [False, True])
def test_a_relu_behind_a_batch_norm_that_runs_again_has_its_gradient_with_the_norms(monkeypatch, apart):
    """Whether what the norm keeps and what the ReLU made are made in one go, or each by itself."""
    recompute = Compilation._recompute

    def chosen(net, emitted, less):
        by_name = {memory.name: memory for memory in emitted.again.offers}
        both = top, kept = by_name["c"], by_name["n/normalized"]
        rounds = [Round(top, 0, [top], [*both]), Round(kept, 0, [kept], [kept])]
        return recompute(net, emitted, Less((), (), rounds) if apart else Less(both))

    nets = kept_and_anew(monkeypatch, chosen, EmulatedCuda)
    ops = [[step.call.op for step in net.compiled()[1]._program()] for net in nets]
    assert [op for op in ops[1] if op in {*ops[0]}] == ops[0] and "relu_backward" not in ops[1]
    assert sum("given" in op for op in ops[1]) == 1 + apart


def test_what_is_given_up_before_it_is_read_is_not_written(monkeypatch):
    """A batch norm that runs for its top, and once more for what it keeps, which the first run leaves out."""
    recompute = Compilation._recompute

    def chosen(net, emitted, less):
        by_name = {memory.name: memory for memory in emitted.again.offers}
        top, kept = by_name["c"], by_name["n/normalized"]
        rounds = [Round(top, 0, [top, kept], [top, kept]), Round(kept, 0, [kept], [kept])]
        return recompute(net, emitted, Less((), (), rounds))

    _, net = kept_and_anew(monkeypatch, chosen, SimulatedDevice)
    again = [call for call in net.compiled()[1].calls if call.op == "batch_norm_given"]
    written = [[memory.name for memory in call.written_memories()] for call in again]
    assert len(written) == 2 and sum(names.count("n/normalized") for names in written) == 1


@given(nets_at_random(), st.integers(0, 99), st.sampled_from([0.3, 0.6, 1]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_any_net_gives_the_same_bits(text, seed, part, rounds):
    with pytest.MonkeyPatch.context() as patch:
        Choosing(patch, seed, part, rounds)
        nets = [made(text, SimulatedDevice(), memory) for memory in ("keep", "train")]
        assert_same(*([*iterate(net), *iterate(net)] for net in nets))


@pytest.mark.parametrize("rounds", [False, True], ids=["once", "rounds"])
@pytest.mark.parametrize("seed", range(3))
def test_parts_of_passes_give_the_right_numbers_or_none(monkeypatch, seed, rounds):
    Choosing(monkeypatch, seed, 0.8, rounds)
    nets = [made(NET, SimulatedDevice(), memory) for memory in ("train", "keep")]
    for net in nets:
        iterate(net)
    names = ["forward", "start", "between", "backward", "down from", "down to", "layer by layer"]
    ask_at_random(seed, *nets, names)


def test_numbers_of_two_passes_are_not_told_again(monkeypatch):
    """A dropout and what follows it in a pass of their own: the counter has moved when backward would draw."""
    Choosing(monkeypatch, 0, 1)
    net = made(NET, SimulatedDevice(), "train")
    iterate(net)
    at = net.layer_names.index("l")
    net.run_forward(last=at)
    net.run_forward(at + 1)
    with pytest.raises(SharedBlobError, match="would make '.*' anew"):
        net.run_backward()
