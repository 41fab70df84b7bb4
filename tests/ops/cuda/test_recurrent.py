"""RNN, LSTM and one step of an LSTM on the CUDA device against the host's."""

from collections import Counter

import numpy as np
import pytest

from blobmem.ops.cuda import channels, recurrent_plan
from blobmem.ops.cuda.cublas import WORKSPACE
from blobmem.ops.registry import ArraySpec, table

# steps, streams, units, inputs, static inputs (0: none)
SIZES = {"tiny": (5, 2, 4, 3, 0), "one-step": (1, 3, 5, 2, 4), "one-stream": (9, 1, 33, 6, 3),
         "many-steps": (40, 4, 20, 7, 5), "some-streams": (4, 31, 37, 5, 2), "many-streams": (2, 300, 17, 4, 0),
         "wide": (3, 4, 200, 8, 6), "full": (4, 2, 256, 3, 0), "wider": (2, 3, 257, 4, 2)}  # fmt: skip
RUNS = (5, 3, 12, 4, 3)  # with runs of two steps, or of one: see `short_runs`


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def size(request):
    return request.param


@pytest.fixture(params=[6, 1], ids=["runs-of-two", "runs-of-one"])
def short_runs(request, monkeypatch):
    monkeypatch.setattr(recurrent_plan, "_ROWS_AT_ONCE", request.param)


class Case:
    """Random operands of a layer with `gates` functions per unit."""

    def __init__(self, rng, size, gates, dtype):
        self.steps, self.streams, self.units, inputs, statics = size
        rows = gates * self.units

        def values(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(dtype)

        def near(*shape):
            return values(*shape, scale=shape[-1] ** -0.5)

        self.x, self.w_x, self.b = values(self.steps, self.streams, inputs), near(rows, inputs), values(rows)
        self.static = values(self.streams, statics) if statics else None
        self.w_static = near(rows, statics) if statics else None
        self.w_h, self.w_o, self.b_o = near(rows, self.units), near(self.units, self.units), values(self.units)
        self.cont = (rng.random((self.steps, self.streams)) > 0.2).astype(dtype)
        self.cont[self.steps // 2] *= 0.5  # not only 0 and 1
        self.h_0, self.c_0 = values(self.streams, self.units), values(self.streams, self.units)
        self.dy = values(self.steps, self.streams, self.units)
        self.dh_last, self.dc_last = values(self.streams, self.units), values(self.streams, self.units)

    def room(self, *shape):
        return np.full(shape, np.nan, self.x.dtype)

    def inputs(self):
        return [self.x, self.cont, self.static]

    def lstm_forward(self, keep=True):
        t, n, d = self.steps, self.streams, self.units
        kept = [self.room(t, n, 4 * d), self.room(t + 1, n, d), self.room(n, d)] if keep else [None] * 3
        states = [self.h_0, self.c_0, self.room(t, n, d), self.room(n, d), self.room(n, d)]
        return [*self.inputs(), self.w_x, self.b, self.w_static, self.w_h, *states, *kept]

    def lstm_backward(self, kept, wanted=None, last=True):
        after = [self.dh_last, self.dc_last] if last else [None, None]
        given = [self.static, self.h_0, self.c_0, self.w_x, self.b, self.w_static, self.w_h]
        gradients = self.gradients([self.x, *given], wanted)
        return [*self.inputs(), self.w_x, self.w_static, self.w_h, *kept, self.dy, *after, *gradients]

    def rnn_forward(self, keep=True):
        t, n, d = self.steps, self.streams, self.units
        outputs = [self.room(t, n, d), self.room(n, d), self.room(t + 1, n, d) if keep else None]
        parameters = [self.w_x, self.b, self.w_static, self.w_h, self.w_o, self.b_o]
        return [*self.inputs(), *parameters, self.h_0, *outputs]

    def rnn_backward(self, hiddens, wanted=None, last=True):
        after = self.dh_last if last else None
        given = [self.static, self.h_0, self.w_x, self.b, self.w_static, self.w_h, self.w_o, self.b_o]
        gradients = self.gradients([self.x, *given], wanted)
        parameters = [self.w_x, self.w_static, self.w_h, self.w_o, self.b_o]
        return [*self.inputs(), *parameters, hiddens, self.dy, after, *gradients]

    def gradients(self, arrays, wanted):
        return [
            None if array is None or wanted not in (None, i) else self.room(*array.shape)
            for i, array in enumerate(arrays)
        ]


def with_parameters_filled(rng, operands, first):
    """Operands whose gradients from `first` on have something to add to."""
    filled = [None if a is None else rng.standard_normal(a.shape).astype(a.dtype) for a in operands[first:]]
    return [*operands[:first], *filled]


# -------------------------------------------------------------------- LSTM


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "forget"])
def test_lstm_forward(cuda, rng, size, keep, dtype):
    cuda.compare("lstm_forward", *Case(rng, size, 4, dtype).lstm_forward(keep))


def test_lstm_backward(cuda, rng, size, dtype):
    case = Case(rng, size, 4, dtype)
    operands = case.lstm_backward(cuda.run("lstm_forward", *case.lstm_forward())[-3:])
    cuda.compare("lstm_backward", *operands, accumulate=False)
    cuda.compare("lstm_backward", *with_parameters_filled(rng, operands, -4), accumulate=True)


def test_lstm_gradients_that_nobody_wants_or_gives(cuda, rng, dtype):
    case = Case(rng, SIZES["one-stream"], 4, dtype)
    kept = cuda.run("lstm_forward", *case.lstm_forward())[-3:]
    for wanted in range(8):
        cuda.compare("lstm_backward", *case.lstm_backward(kept, wanted, last=False), accumulate=False)


def test_lstm_in_runs(cuda, rng, short_runs, dtype):
    case = Case(rng, RUNS, 4, dtype)
    kept = cuda.compare("lstm_forward", *case.lstm_forward())[-3:]
    cuda.compare("lstm_forward", *case.lstm_forward(keep=False))
    operands = case.lstm_backward(kept)
    cuda.compare("lstm_backward", *operands, accumulate=False)
    cuda.compare("lstm_backward", *with_parameters_filled(rng, operands, -4), accumulate=True)


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "forget"])
def test_lstm_states_may_stay_in_one_place(cuda, rng, keep, dtype):
    case = Case(rng, RUNS, 4, dtype)
    operands = case.lstm_forward(keep)
    apart = cuda.run("lstm_forward", *operands)
    operands[10], operands[11] = operands[7], operands[8]
    together = cuda.run("lstm_forward", *operands)
    for i in (9, 10, 11):
        assert apart[i].tobytes() == together[i].tobytes()


# -------------------------------------------------------------------- RNN


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "forget"])
def test_rnn_forward(cuda, rng, size, keep, dtype):
    cuda.compare("rnn_forward", *Case(rng, size, 1, dtype).rnn_forward(keep))


def test_rnn_backward(cuda, rng, size, dtype):
    case = Case(rng, size, 1, dtype)
    operands = case.rnn_backward(cuda.run("rnn_forward", *case.rnn_forward())[-1])
    cuda.compare("rnn_backward", *operands, accumulate=False)
    cuda.compare("rnn_backward", *with_parameters_filled(rng, operands, -6), accumulate=True)


def test_rnn_gradients_that_nobody_wants_or_gives(cuda, rng, dtype):
    case = Case(rng, SIZES["one-stream"], 1, dtype)
    hiddens = cuda.run("rnn_forward", *case.rnn_forward())[-1]
    for wanted in range(9):
        cuda.compare("rnn_backward", *case.rnn_backward(hiddens, wanted, last=False), accumulate=False)


def test_rnn_in_runs(cuda, rng, short_runs, dtype):
    case = Case(rng, RUNS, 1, dtype)
    hiddens = cuda.compare("rnn_forward", *case.rnn_forward())[-1]
    cuda.compare("rnn_forward", *case.rnn_forward(keep=False))
    operands = case.rnn_backward(hiddens)
    cuda.compare("rnn_backward", *operands, accumulate=False)
    cuda.compare("rnn_backward", *with_parameters_filled(rng, operands, -6), accumulate=True)


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "forget"])
def test_rnn_state_may_stay_in_one_place(cuda, rng, keep, dtype):
    operands = Case(rng, RUNS, 1, dtype).rnn_forward(keep)
    apart = cuda.run("rnn_forward", *operands)
    operands[11] = operands[9]
    together = cuda.run("rnn_forward", *operands)
    for i in (10, 11):
        assert apart[i].tobytes() == together[i].tobytes()


# -------------------------------------------------------------------- one step by itself


@pytest.mark.parametrize("units", [1, 40, 1003])
def test_lstm_unit(cuda, rng, units, dtype):
    before, dc, dh = rng.standard_normal((3, 3, units)).astype(dtype)
    sums, cont = 2 * rng.standard_normal((3, 4 * units)).astype(dtype), np.array([1, 0, 0.5], dtype)
    small, large = np.full((3, units), np.nan, dtype), np.full((3, 4 * units), np.nan, dtype)
    cuda.compare("lstm_unit_forward", before, sums, cont, small, small.copy())
    for wanted in ((small, large), (small, None), (None, large)):
        cuda.compare("lstm_unit_backward", before, sums, cont, dc, dh, *wanted)


def test_functions_far_out(cuda, dtype):
    x = np.array([-np.inf, -1e30, -1000, 1000, 1e30, np.inf, np.nan], dtype)
    sums = np.full((1, 28), 100, dtype)
    sums[0, 21:] = x
    room = np.zeros((1, 7), dtype)
    c = cuda.run("lstm_unit_forward", np.zeros_like(room), sums, np.ones(1, dtype), room, room.copy())[3]
    np.testing.assert_array_equal(c[0], [-1, -1, -1, 1, 1, 1, np.nan])
    sums[0, :7], sums[0, 21:] = x, 100
    c = cuda.run("lstm_unit_forward", np.zeros_like(room), sums, np.ones(1, dtype), room, room.copy())[3]
    np.testing.assert_allclose(c[0], [0, 0, 0, 1, 1, 1, np.nan], atol=1e-30)


# -------------------------------------------------------------------- launches, memory, nothing at all


@pytest.fixture
def launches(cuda, rng):
    """A function that gives the kernels of an LSTM of so many steps, streams and units, forward and backward."""
    if not hasattr(cuda.device, "launches"):
        pytest.skip("the device counts no launches")

    def of(steps, streams, units, dtype=np.float32):
        case = Case(rng, (steps, streams, units, 3, 2), 4, dtype)
        del cuda.device.launches[:]
        kept = cuda.run("lstm_forward", *case.lstm_forward())[-3:]
        cuda.run("lstm_backward", *case.lstm_backward(kept), accumulate=False)
        return Counter(cuda.device.launches)

    return of


def test_a_step_is_one_product_and_one_kernel(cuda, launches):
    """Nothing but these grows with the steps, where GPUs have no clusters."""
    cuda.device.clusters = False
    assert launches(30, 2, 8) - launches(10, 2, 8) == {"lstm_step": 20, "lstm_step_gradient": 20}


def test_in_clusters_all_steps_are_one_kernel(launches):
    assert launches(30, 2, 8) == launches(10, 2, 8)
    assert launches(3, 2, 8)["lstm_steps"] == launches(3, 2, 8)["lstm_steps_gradient"] == 1


@pytest.mark.parametrize(
    ("streams", "units", "dtype"),
    [(257, 8, "float32"), (129, 65, "float32"), (1, 257, "float32"), (129, 8, "float16"), (1, 8, "float64")],
)
def test_of_what_is_too_large_for_clusters_each_step_is_a_kernel(launches, streams, units, dtype):
    found = launches(2, streams, units, dtype)
    assert found["lstm_step"] == found["lstm_step_gradient"] == 2 and not found["lstm_steps"]


@pytest.mark.parametrize("name, specs", [("lstm_forward", 15), ("rnn_forward", 13)])
def test_scratch_does_not_grow_with_the_steps(cuda, name, specs):
    def bytes_for(steps):
        output = 9 if name == "lstm_forward" else 10
        operands = [None] * specs
        operands[output] = ArraySpec((steps, 8, 256), np.dtype(np.float32))
        return table("cuda")[name].workspace_bytes(*operands, device=cuda.device)

    assert bytes_for(2800) == bytes_for(256) > bytes_for(100) > WORKSPACE


def test_sums_of_columns_fit_where_products_work():
    """`recurrent_inputs` relies on it."""
    sizes = [2**i + j for i in range(0, 24, 1) for j in (0, 1)]
    assert max(channels.workspace_bytes((r, c, 1)) for r in sizes for c in sizes if r * c < 2**34) <= WORKSPACE


@pytest.mark.parametrize("accumulate", [False, True])
def test_no_streams_at_all(cuda, rng, accumulate):
    case = Case(rng, (3, 0, 5, 2, 4), 4, np.float32)
    kept = cuda.compare("lstm_forward", *case.lstm_forward())[-3:]
    operands = with_parameters_filled(rng, case.lstm_backward(kept), -4)
    cuda.compare("lstm_backward", *operands, accumulate=accumulate)
    case = Case(rng, (3, 0, 5, 2, 4), 1, np.float32)
    hiddens = cuda.compare("rnn_forward", *case.rnn_forward())[-1]
    operands = with_parameters_filled(rng, case.rnn_backward(hiddens), -6)
    cuda.compare("rnn_backward", *operands, accumulate=accumulate)
    state, gates, cont = np.ones((0, 5), np.float32), np.ones((0, 20), np.float32), np.ones(0, np.float32)
    cuda.compare("lstm_unit_forward", state, gates, cont, state.copy(), state.copy())
    cuda.compare("lstm_unit_backward", state, gates, cont, state, state, state.copy(), gates.copy())
