"""Small nets of images, for tests of what a plan makes of their passes, and what these tests ask of them."""

import random

import numpy as np
from hypothesis import strategies as st

from blobmem import TRAIN, Net, SharedBlobError
from blobmem.net.compilation import Compilation
from blobmem.net.plan import Again, Uses
from blobmem.net.plan.again import Less, Round
from blobmem.net.plan.choice import Pass
from blobmem.net.plan.evict import candidates
from blobmem.net.plan.liveness import lifetimes
from blobmem.net.plan.places import Draft, draft
from blobmem.net.plan.times import Times
from blobmem.net.schedule import Unit
from blobmem.ops.call import memories
from blobmem.ops.registry import table

DATA = """
name: "normalised" force_backward: true
layer { name: "data" type: "DummyData" top: "data" top: "t" dummy_data_param {
  data_filler { type: "gaussian" } data_filler { type: "gaussian" }
  shape { dim: 3 dim: 2 dim: 6 dim: 5 } shape { dim: 3 dim: 4 } } }
"""


def layer(kind, name, bottom, top, options=""):
    ends = "".join(f' bottom: "{each}"' for each in bottom.split()) + f' top: "{top}"'
    return f'layer {{ name: "{name}" type: "{kind}"{ends} {options} }}\n'


def conv(name, bottom, top=None, outputs=4):
    filler = 'weight_filler { type: "xavier" }'
    return layer("Convolution", name, bottom, top or name,
                 f"convolution_param {{ num_output: {outputs} kernel_size: 3 pad: 1 {filler} }}")  # fmt: skip


def loss(bottom):
    options = 'inner_product_param { num_output: 4 weight_filler { type: "xavier" } }'
    return layer("InnerProduct", "ip", bottom, "ip", options) + layer("EuclideanLoss", "loss", "ip t", "loss")


SCALE = "scale_param { bias_term: true }"


def norm(name, scale=SCALE, relu=True):
    """Batch norm, a scale with these options, if there are any, and a ReLU, in place."""
    text = layer("BatchNorm", f"{name}n", name, name)
    text += layer("Scale", f"{name}s", name, name, scale) if scale else ""
    return text + (layer("ReLU", f"{name}r", name, name) if relu else "")


POOL = "pooling_param { kernel_size: 3 stride: 1 pad: 1 }"
KINDS = {
    "conv": ("Convolution", "convolution_param { num_output: 2 kernel_size: 1 weight_filler { type: 'xavier' } }"),
    "norm": ("BatchNorm", ""), "scale": ("Scale", SCALE), "relu": ("ReLU", ""), "sum": ("Eltwise", ""),
    "drop": ("Dropout", ""), "join": ("Concat", ""), "pool": ("Pooling", POOL),
    "lrn": ("LRN", "lrn_param { local_size: 3 }"), "flat": ("Flatten", ""),
}  # fmt: skip

SPREAD = DATA.replace('"gaussian"', '"gaussian" std: 2')


@st.composite
def nets_at_random(draw, data=SPREAD, kinds=KINDS, layers=(4, 14), axis=0, shape="dim: 2 dim: 6 dim: 5"):
    """Branches of images of one size, summed, joined and parted again along an axis, pooled and normalised, in place or
    not. `data` are the images, of that shape; `layers` is how many there may be of these kinds, from and to."""
    text, blobs, seen = data, ["data"], {"data"}
    places = [*kinds, *(f"{kind} in place" for kind in ("norm", "scale", "relu", "drop"))]
    for index in range(draw(st.integers(*layers))):
        kind, one, other = draw(st.sampled_from(places)), draw(st.sampled_from(blobs)), draw(st.sampled_from(blobs))
        name, plain = f"l{index}", kind.removesuffix(" in place")
        top = one if kind != plain and one not in seen else name
        bottoms = [one, other] if kind in ("sum", "join", "max", "prod") else [one]
        if kind == "join":  # and back to the items, or channels, that all have
            text += layer("Concat", name, " ".join(bottoms), f"{name}j", f"concat_param {{ axis: {axis} }}")
            text += layer("Slice", f"{name}s", f"{name}j", name, f"slice_param {{ axis: {axis} }}").replace(
                f'top: "{name}"', f'top: "{name}" top: "{name}r"'
            )
        elif kind == "flat":  # another shape of the same bytes
            text += layer("Flatten", f"{name}f", one, f"{name}f")
            text += layer("Reshape", name, f"{name}f", name, f"reshape_param {{ shape {{ dim: 0 {shape} }} }}")
        else:
            text += layer(kinds[plain][0], name, " ".join(bottoms), top, kinds[plain][1])
        seen |= {*bottoms} - {top}
        blobs += [top] * (top not in blobs)
    return text + loss(blobs[-1])


def made(text, device, memory, **options):
    return Net(text, TRAIN, device=device, seed=3, memory=memory, **options)


def iterate(net):
    """A training iteration by hand; its loss, and all gradients and parameters."""
    net.clear_param_diffs()
    trace = [net.run_forward()]
    net.run_backward()
    for entry in net.learnable:
        trace += [entry.blob.cpu_diff().copy(), entry.blob.cpu_data().copy()]
        entry.blob.data[...] -= 0.1 * entry.blob.cpu_diff()
    return trace


def assert_same(one, other):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def remade(net):
    """Names of the arrays that backward makes anew."""
    net.compiled()
    return [name for name in net.internals if name.endswith("/recomputed")]


def lives_on(net, name):
    """Whether a blob's data are read by any call of backward."""
    memory = net.blobs[name].data_view.memory
    return any(view.memory is memory for call in net.compiled()[1].calls for view in call.reads)


def run_layer_by_layer(net):
    """An iteration, each layer asked for by itself."""
    net.clear_param_diffs()
    for index in range(len(net.nodes)):
        net.run_forward(index, index)
    for index in reversed(range(len(net.nodes))):
        net.run_backward(index, index)


def ask_at_random(seed, net, kept, names):
    """Passes over parts of a net, in ways of these names: the numbers of its twin that keeps all, or a refusal."""
    rng, positions, refused, answered = random.Random(seed), range(len(net.nodes)), 0, 0
    for _ in range(60):
        way = rng.choice(names)
        low, high = sorted(rng.choices(positions, k=2))
        ways = {
            "forward": lambda net: net.run_forward(),
            "start": lambda net, low=low: net.run_forward(low),
            "between": lambda net, low=low, high=high: net.run_forward(low, high),
            "backward": lambda net: net.run_backward(),
            "down from": lambda net, high=high: net.run_backward(high),
            "down to": lambda net, low=low, high=high: net.run_backward(high, low),
            "layer by layer": lambda net: [net.run_forward(at, at) for at in positions],
        }
        try:
            result = ways[way](net)
        except SharedBlobError:
            refused += 1
            continue
        answered += 1
        assert result == ways[way](kept)
        for one, other in zip(net.learnable, kept.learnable, strict=True):
            np.testing.assert_array_equal(one.blob.cpu_diff(), other.blob.cpu_diff())
    assert refused > 5 and answered > 5


def scaled_chain(blocks):
    """Convolutions and what LRN makes of each, of which backward reads all: the last is "l" and its number."""
    return "".join(
        conv(f"c{at}", f"l{at - 1}" if at else "data") + layer("LRN", f"l{at}", f"c{at}", f"l{at}")
        for at in range(blocks)
    )


BLOCKS = 16
CHAIN = DATA.replace("dim: 6 dim: 5", "dim: 32 dim: 32") + "".join(
    conv(f"c{at}", f"p{at - 1}" if at else "data") + layer("Pooling", f"p{at}", f"c{at}", f"p{at}", f"{POOL[:-1]} pool: AVE }}")
    for at in range(BLOCKS)
)  # fmt: skip
"""Convolutions that read what a pool made, of which each is made of the one before alone."""
BRIDGED = DATA.replace("dim: 6 dim: 5", "dim: 32 dim: 32") + conv("s", "data") + "".join(
    layer("Pooling", f"p{at}", f"x{at - 1}" if at else "s", f"p{at}", f"{POOL[:-1]} pool: AVE }}")
    + conv(f"c{at}", f"p{at}")
    + layer("Eltwise", f"x{at}", f"{f'x{at - 1}' if at else 's'} c{at}", f"x{at}")
    for at in range(BLOCKS)
)  # fmt: skip
"""Convolutions, each of a pool of the sum so far, which backward does not read."""


def drafted(net, anew, held=()):
    """The net's calls with these made anew, and what they become."""
    calls = net._made(Less(anew, held), 1)
    return calls, draft(net, calls.schedules, calls.kept)


def whole(net):
    """The net's pass, of which some is to be done without."""
    calls, drawn = drafted(net, ())
    passes, ops = (calls.forward, calls.backward), table("host")
    free = net._free({*memories([*calls.forward, *calls.backward])})
    again = Again(Uses(*passes, ops), free, ops)
    return Pass(again, drawn, candidates(*passes, drawn, free, ops), Times(net.device))


def draft_of(*passes):
    """A draft of calls that run one by one."""
    units = [[Unit(at, at + 1, [each], 0, False) for at, each in enumerate(calls)] for calls in passes]
    return Draft(units, {}, {}, lifetimes([each.calls for calls in units for each in calls]))


def rounds_at_random(rng, again, wanted):
    """Rounds in which some of these are made anew more than once, and some that are not needed yet."""
    read, gone, rounds = again.uses.read, {*wanted}, []
    for at in sorted({at for memory in wanted for at in read.get(memory, ())}):
        gone |= {memory for memory in wanted if rng.random() < 0.5}
        needed = [memory for memory in wanted if memory in gone and at in read.get(memory, ())]
        if needed:
            made = {*needed, *(memory for memory in sorted(gone, key=wanted.index) if rng.random() < 0.2)}
            rounds.append(Round(needed[0], read[needed[0]].index(at), made, {*gone}))
            gone -= made
    return rounds


class Choosing:
    """Lets nets make a part of what they could anew, at random, once or in rounds."""

    def __init__(self, patch, seed, part, rounds=False):
        self.recompute, self.random, self.part, self.again = Compilation._recompute, random.Random(seed), part, []
        self.rounds = rounds
        patch.setattr(Compilation, "_recompute", lambda net, *calls: self(net, *calls))

    def __call__(self, net, emitted, less):
        if net.memory == "keep" or less is not None:
            return self.recompute(net, emitted, less)
        again = emitted.again
        wanted = [memory for memory in again.offers if self.random.random() < self.part]
        self.again.append([memory.name for memory in wanted])
        held = [memory for memory in again.bridges() if self.random.random() < self.part]
        less = Less(wanted, held)
        if self.rounds:
            less = Less((), held, rounds_at_random(self.random, again, [*wanted, *held]))
        return self.recompute(net, emitted, less)
