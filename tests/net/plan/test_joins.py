"""What is joined of what others have joined, of the parts of that: the same bits, in few parts, and only of what is
still there."""

import numpy as np
from plan_nets import DATA, POOL, assert_same, conv, iterate, layer, loss, made, whole

from blobmem import SimulatedDevice
from blobmem.devices import HOST
from blobmem.memory.blob import Blob
from blobmem.net.plan.choice import ANEW
from blobmem.net.plan.joins import PARTS, joined
from blobmem.ops.call import call, overwrite, read, write
from blobmem.ops.registry import table

BLOCKS = 12
GROWING = DATA.replace("dim: 6 dim: 5", "dim: 16 dim: 16") + "".join(
    layer("Pooling", f"p{at}", f"x{at - 1}" if at else "data", f"p{at}", POOL)
    + conv(f"c{at}", f"p{at}", outputs=2)
    + layer("Concat", f"x{at}", f"{f'x{at - 1}' if at else 'data'} c{at}", f"x{at}")
    for at in range(BLOCKS)
)  # fmt: skip
"""Each block adds channels to all that came before."""


def array(*shape):
    return Blob(shape, device=HOST)


def join(*operands, axis=1):
    *parts, result = operands
    return call("concat_forward", *map(read, parts), overwrite(result), axis=axis)


def run(calls):
    for each in calls:
        operands = [operand.blob.mutable_cpu_data().reshape(operand.op_shape) for operand in each.present()]
        table("host")[each.op](*operands, **each.attributes)


def free(calls):
    return {operand.memory for each in calls for operand in each.present()}


def chain(number):
    """Arrays, of which one is the first and the others are joined to it one by one."""
    parts = [array(2, 3, 4) for _ in range(number + 1)]
    for at, each in enumerate(parts):
        each.mutable_cpu_data()[...] = np.random.default_rng(at).standard_normal(each.shape, np.float32)
    wholes = [parts[0], *(array(2, 3 * (at + 2), 4) for at in range(number))]
    return parts, wholes, [join(wholes[at], parts[at + 1], wholes[at + 1]) for at in range(number)]


def test_joins_read_parts_and_come_to_the_same():
    _, wholes, calls = chain(20)
    run(calls)
    before = [each.cpu_data().copy() for each in wholes]
    found = joined(calls, free(calls))
    for each in wholes[1:]:
        each.mutable_cpu_data()[...] = 0
    run(found)
    for each, was in zip(wholes, before, strict=True):
        np.testing.assert_array_equal(each.cpu_data(), was)
    assert max(len(each.operands) - 1 for each in found) == PARTS
    read_of = [each.operand(0).blob for each in found]
    # what comes before is read where parts are too many
    assert [wholes.index(each) for each in dict.fromkeys(read_of)] == [0, PARTS - 1, 2 * (PARTS - 1)]


def test_what_has_changed_or_is_seen_is_not_read_in_parts():
    parts, wholes, calls = chain(3)
    changing = call("relu_forward", write(parts[1]), write(parts[1]), negative_slope=0.0)
    found = joined([calls[0], changing, *calls[1:]], free(calls))
    assert found[2] is calls[1], "a part is another one by then"
    found = joined(calls, free(calls) - {wholes[1].data_view.memory})
    assert found[1] is calls[1], "somebody else may write there"
    other = [calls[0], join(wholes[1], array(2, 6, 1), array(2, 6, 5), axis=2)]
    assert joined(other, free(other))[1] is other[1], "along another axis"


def limited(part):
    """The net without a limit, what it gives then, and it in a part of the memory that it takes for that."""
    text, device = GROWING + loss(f"x{BLOCKS - 1}"), SimulatedDevice()
    kept = made(text, device, "train")
    trace = iterate(kept)
    return kept, trace, made(text, SimulatedDevice(int(part * device.statistics.peak_bytes)), "train")


def joins(calls):
    return [each for each in calls if each.op == "concat_forward"]


def test_a_net_that_has_no_room_reads_parts_with_the_same_bits():
    kept, trace, net = limited(0.8)
    assert_same(trace, iterate(net))
    most = [max(len(each.operands) - 1 for each in joins(each.compiled()[0].calls)) for each in (kept, net)]
    assert most == [2, PARTS]


def test_of_what_is_joined_the_parts_are_held():
    """So that each can be made anew without those before it, and without convolutions but those of parts that are read
    once: the last of as many as go into one call."""
    *_, net = limited(0.8)
    net.compiled()
    every = whole(net)
    once = {f"c{at}" for at in range(BLOCKS) if at % (PARTS - 1) == PARTS - 2 or at >= BLOCKS - 2}
    wanted = {memory for memory, array in every.arrays.items() if ANEW in array.start}
    runs = set().union(*(every.chain(memory, wanted)[0] for memory in wanted))
    written = {memory.name for at in runs for memory in every.again.uses.forward[at].written_memories()}
    assert {memory.name for memory in every.held} >= {f"c{at}" for at in range(BLOCKS)} - once
    assert {name for name in written if name[0] == "c"} <= once
