"""Updates and sums of squares on CUDA against the host's."""

import numpy as np
import pytest
from update_formulas import HISTORIES, OPTIONS

from blobmem import dtypes
from blobmem.ops.cuda import update
from blobmem.ops.registry import table

COMMON = {"rate": 0.1, "decay": 0.05, "scale": 0.25}
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("regularization", ["L1", "L2"])
@pytest.mark.parametrize("shape", [(1,), (), (7, 5), (31, 97), (0, 3)], ids=str)
@DTYPES
def test_update(cuda, rng, kind, regularization, shape, dtype):
    diff, data, *history = (np.array(rng.normal(size=shape), dtype) for _ in range(2 + HISTORIES[kind]))
    if kind not in ("SGD", "Nesterov"):
        history = [np.abs(h, out=h) for h in history]
    if data.size > 1:
        data.flat[0] = 0  # whose sign is 0
    attributes = {"regularization": regularization, **COMMON, **OPTIONS[kind]}
    got = cuda.compare(
        f"{kind.lower()}_update", diff, data, *history, rtol=4e-6 if dtype == np.float32 else 1e-14, **attributes
    )
    np.testing.assert_array_equal(got[0], diff)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("size", [1, 5, 4099])
@pytest.mark.parametrize("dtype", dtypes.HALVES)
@pytest.mark.parametrize("scaled", [False, True])
def test_update_of_halves_is_that_of_their_masters(cuda, rng, kind, size, dtype, scaled):
    half = dtypes.of(dtype)
    diff, data = (rng.normal(size=size).astype(half) for _ in range(2))
    history = [np.abs(rng.normal(size=size)).astype(np.float32) for _ in range(HISTORIES[kind])]
    # what the parameter is the rounding of, but for the last one, which somebody wrote
    master = data.astype(np.float32) * np.float32(1 + 1e-4)
    master[master.astype(half) != data] = data.astype(np.float32)[master.astype(half) != data]
    master[-1] = data[-1]
    if dtype == "float16":
        beside = master.copy()
        beside[-1] += 1
    else:
        beside = lower(master, data)
    scaling = np.array([8, 0, 0, 0], np.float32)
    attributes = {"regularization": "L2", **COMMON, **OPTIONS[kind]}
    name, more = f"{kind.lower()}_update", [scaling] if scaled else []
    got = cuda.run(name, diff, data, *history, beside, *more, **attributes, **({"scaled": True} if scaled else {}))
    exact = diff.astype(np.float32) / np.float32(8 if scaled else 1), master.copy()
    expected = cuda.run(name, exact[0], exact[1], *[each.copy() for each in history], **attributes)
    width = 2 + len(history)
    found = got[width] if dtype == "float16" else joined(got[1], got[width])
    for one, wanted in zip((*got[2:width], found), (*expected[2:], expected[1]), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=4e-6, atol=1e-6)
    assert np.array_equal(got[1], found.astype(half))


def lower(master, data):
    """What is to be added to the bits of bfloat16 for those of their masters."""
    return (master.view(np.int32) - (data.view(np.int16).astype(np.int32) << 16)).astype(np.int16)


def joined(data, lower):
    return ((data.view(np.int16).astype(np.int32) << 16) + lower).view(np.float32)


def test_the_master_of_a_bfloat16_is_that_and_what_is_to_be_added_to_its_bits(cuda, rng):
    bfloat16 = dtypes.of("bfloat16")
    # the middle between two, rounded down and up; the largest, which is rounded to infinity; small ones; what is none
    special = np.array(
        [0x3F808000, 0xBF818000, 0x7F7FFFFF, 0x0000FFFF, 0x80000001, 0, 0x7F800000, 0x7FC00001], np.uint32
    )
    wanted = np.concatenate([special.view(np.float32), rng.normal(size=1000).astype(np.float32)])
    data = np.zeros(wanted.size, bfloat16)
    with np.errstate(invalid="ignore"):
        diff = -wanted.astype(bfloat16), -(wanted - wanted.astype(bfloat16).astype(np.float32)).astype(bfloat16)
    history, below = np.zeros(wanted.size, np.float32), np.zeros(wanted.size, np.int16)
    plain = {"rate": 1.0, "decay": 0.0, "scale": 1.0, "regularization": "L2", "momentum": 0.0}
    masters = np.zeros(wanted.size, np.float32)
    for each in diff:  # in two steps, as one gradient of halves would not do
        _, data, history, below = cuda.run("sgd_update", each, data, history, below, **plain)
        _, masters, _ = cuda.run("sgd_update", each.astype(np.float32), masters, np.zeros_like(history), **plain)
        found, nan = joined(data, below), np.isnan(masters)
        assert data[~nan].tobytes() == masters[~nan].astype(bfloat16).tobytes() and np.isnan(data[nan]).all()
        assert not below[nan].any()
        one_less = found.view(np.int32) == masters.view(np.int32) - 1
        assert ((found == masters) | nan | (one_less & (masters.view(np.uint32) & 0x1FFFF == 0x8000))).all()
        masters = np.where(nan, masters, found)
    assert (below == 32767).any() and (below == -32768).any()


@pytest.mark.parametrize("bits", [0, 0x8000])
def test_a_zero_that_was_written_meanwhile_is_none_that_would_be_no_number(cuda, bits):
    data, history = np.full(5, bits, np.uint16).view(dtypes.of("bfloat16")), np.zeros(5, np.float32)
    below = np.array([-32768, -1, 0, 1, 32767], np.int16)
    plain = {"rate": 1.0, "decay": 0.0, "scale": 1.0, "regularization": "L2", "momentum": 0.0}
    _, data, *_ = cuda.run("sgd_update", np.zeros_like(data), data, history, below, **plain)
    assert not data.astype(np.float32).any()


@pytest.mark.parametrize("dtype", [*dtypes.HALVES, "float32"])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_gradients_that_are_no_numbers_are_found(cuda, rng, dtype, bad, at):
    arrays = [rng.normal(size=n).astype(dtypes.of(dtype)) for n in (3, 0, 4099, 20_000)]
    if bad is not None:
        arrays[-1].flat[(0, 4097, -1)[at]] = bad
    (*_, scaling) = cuda.run("find_bad", *arrays, np.array([4, 3, 0, 1], np.float32))
    assert scaling.tolist() == [4, 3, bad is not None, 1]
    (*_, kept) = cuda.run("sgd_update", *(np.ones(5, np.float32) for _ in range(3)), scaling, rate=1.0, decay=0.0,
                          regularization="L2", scale=1.0, momentum=0.0, scaled=True)  # fmt: skip
    assert kept.tolist() == scaling.tolist()


STATES = [[0, 0, 0, 0], [8, 5, 0, 2], [8, 5, 1, 2], [8, 1999, 0, 0], [2.0**24, 1999, 0, 0], [2.0**-16, 0, 1, 9]]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_the_next_scale(cuda, state):
    got = cuda.compare("next_scale", np.array(state, np.float32), rtol=0)[0]
    y = np.zeros((3, 5), np.float32)
    assert (cuda.compare("fill_scaled", got, y, value=0.5)[1] == got[0] / 2).all()


def parameters(rng, kind, sizes, dtype):
    """The arrays of parameters of these sizes, for each of them."""
    return [[np.abs(rng.normal(size=n)).astype(dtype) for _ in range(2 + HISTORIES[kind])] for n in sizes]


def flat(groups):
    return [array for group in groups for array in group]


@pytest.mark.parametrize("kind", OPTIONS)
@DTYPES
def test_many_parameters_come_out_as_each_by_itself(cuda, rng, kind, dtype):
    width = 2 + HISTORIES[kind]
    sizes = [0, 1, 4096, 4097, 9001, 0, *rng.integers(1, 300, 500 // (2 + width) + 3), 12_288, 0]
    groups = parameters(rng, kind, sizes, dtype)
    attributes = {"regularization": "L2", **COMMON, **OPTIONS[kind]}
    before = len(getattr(cuda.device, "launches", ()))
    together = cuda.run(f"{kind.lower()}_update", *flat(groups), **attributes)
    if hasattr(cuda.device, "launches"):
        assert len(cuda.device.launches) - before == 2
    apart = flat(cuda.run(f"{kind.lower()}_update", *group, **attributes) for group in groups)
    assert [a.tobytes() for a in together] == [a.tobytes() for a in apart]
    assert all((new != old).all() for new, old in zip(together[1::width], flat(groups)[1::width], strict=True))


@pytest.mark.parametrize("kind", OPTIONS)
@DTYPES
def test_each_parameter_has_its_multipliers(cuda, rng, kind, dtype):
    groups = parameters(rng, kind, [5, 0, 4097, 300], dtype)
    multipliers = (1.0, 0.5, 9.0, 9.0, 2.5, 0.0, 0.0, 1.0)
    attributes = {"regularization": "L2", **COMMON, **OPTIONS[kind]}
    name = f"{kind.lower()}_update"
    together = cuda.run(name, *flat(groups), multipliers=multipliers, **attributes)
    apart = []
    for group, rate, decay in zip(groups, multipliers[::2], multipliers[1::2], strict=True):
        own = {"rate": rate * COMMON["rate"], "decay": decay * COMMON["decay"]}
        apart += cuda.compare(name, *group, rtol=4e-6 if dtype == np.float32 else 1e-14, **attributes | own)
    assert [a.tobytes() for a in together] == [a.tobytes() for a in apart]


@pytest.mark.parametrize("kind", OPTIONS)
def test_and_has_them_on_the_host(rng, kind):
    (group,) = parameters(rng, kind, [300], np.float32)
    given, expected = ([array.copy() for array in group] for _ in range(2))
    attributes, update = {"regularization": "L2", **COMMON, **OPTIONS[kind]}, table("host")[f"{kind.lower()}_update"]
    update(*given, multipliers=(2.5, 0.5), **attributes)
    update(*expected, **attributes | {"rate": 2.5 * COMMON["rate"], "decay": 0.5 * COMMON["decay"]})
    assert [a.tobytes() for a in given] == [a.tobytes() for a in expected]


def test_parameters_that_share_an_array_take_turns(cuda, rng):
    (first, data, one), (second, _, other) = parameters(rng, "SGD", [5000, 5000], np.float32)
    attributes = {"regularization": "L1", **COMMON, **OPTIONS["SGD"]}
    got = cuda.compare("sgd_update", first, data, one, rtol=4e-6, **attributes)[1]
    expected = cuda.run("sgd_update", second, got, other, **attributes)[1]
    before = len(getattr(cuda.device, "launches", ()))
    together = cuda.run("sgd_update", first, data, one, second, data, other, **attributes)
    if hasattr(cuda.device, "launches"):  # whose blocks would take turns anyway
        assert len(cuda.device.launches) - before == 2
    assert together[1].tobytes() == together[4].tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", OPTIONS)
@DTYPES
def test_arrays_at_any_address(cuda, rng, kind, dtype):
    (arrays,) = parameters(rng, kind, [4099], dtype)
    attributes = {"regularization": "L2", **COMMON, **OPTIONS[kind]}
    expected = cuda.run(f"{kind.lower()}_update", *arrays, **attributes)
    device = cuda.device
    places = [device.allocate(array.nbytes + array.itemsize, "array") for array in arrays]
    try:
        for place, array in zip(places, arrays, strict=True):
            device.memcpy_htod(place, np.concatenate([array[:1], array]))
        moved = [device.as_array(place + arrays[0].itemsize, (4099,), dtype) for place in places]
        table("cuda")[f"{kind.lower()}_update"](*moved, **attributes)
        device.synchronize()
        for place, array in zip(places, expected, strict=True):
            got = np.empty(array.size + 1, dtype)
            device.memcpy_dtoh(got, place)
            assert got[1:].tobytes() == array.tobytes()
    finally:
        for place in places:
            device.free(place)


def test_tables_are_packed_anew_only_for_other_places(cuda):
    device = cuda.device
    places = [device.allocate(64, "array") for _ in range(4)]
    try:
        given = [device.as_array(place, (7,), np.float32) for place in places]
        first = update._launches(3, given[:3])
        again = [device.as_array(place, (7,), np.float32) for place in places[:3]]
        assert update._launches(3, again) is first
        assert update._launches(3, given[1:]) != first
        assert update._launches(3, [array.part(0, (6,)) for array in given[:3]]) != first
    finally:
        for place in places:
            device.free(place)


@pytest.mark.parametrize("size", [0, 1, 5, 4096, 4097, 300_007])
@pytest.mark.parametrize("out", [np.float32, np.float64], ids=["to-float32", "to-float64"])
@DTYPES
def test_sumsq_adds(cuda, rng, size, dtype, out):
    x, total = rng.normal(size=size).astype(dtype), np.array([3], out)
    got = cuda.run("sumsq", x, total)[1]
    expected = 3 + (x.astype(np.float64) ** 2).sum()
    np.testing.assert_allclose(got, [expected], rtol=2e-7 if out == np.float32 else 1e-14)


@pytest.mark.parametrize("out", [np.float32, np.float64], ids=["to-float32", "to-float64"])
@DTYPES
def test_sumsq_of_many_arrays(cuda, rng, dtype, out):
    arrays = [rng.normal(size=n).astype(dtype) for n in (0, 5, 4097, 20_000, *rng.integers(1, 200, 250))]
    before = len(getattr(cuda.device, "launches", ()))
    first = cuda.run("sumsq", *arrays, np.array([3], out))[-1]
    if hasattr(cuda.device, "launches"):
        assert cuda.device.launches[before:] == ["sumsq", "sumsq", "add_parts"]
    expected = 3 + sum((x.astype(np.float64) ** 2).sum() for x in arrays)
    np.testing.assert_allclose(first, [expected], rtol=2e-7 if out == np.float32 else 1e-14)
    assert cuda.run("sumsq", *arrays, np.array([3], out))[-1].tobytes() == first.tobytes()


def test_sumsq_of_nothing(cuda):
    assert cuda.run("sumsq", np.zeros(0, np.float32), np.zeros((2, 0), np.float32), np.array([3.0]))[-1] == 3


def test_sumsq_of_many_does_not_drift(cuda):
    x = np.full(4096 * 1024 + 12_345, 0.1, np.float32)
    got = cuda.run("sumsq", x, np.zeros(1, np.float32))[1]
    assert got[0] == pytest.approx(x.size * float(np.float32(0.1)) ** 2, rel=2e-7)


def test_a_small_sum_of_squares_needs_no_second_launch_nor_much_room(cuda):
    class Spec:
        size = 4096

    assert table("cuda")["sumsq"].workspace_bytes(Spec, None, device=cuda.device) == 8
    Spec.size = 10**9
    assert table("cuda")["sumsq"].workspace_bytes(Spec, None, device=cuda.device) <= 8 * 1024
