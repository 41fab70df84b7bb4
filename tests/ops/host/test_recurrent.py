"""RNN, LSTM and one step of an LSTM against plain NumPy in float64, step by step."""

import threading

import numpy as np
import pytest

from blobmem.ops.host import recurrent_plan, recurrent_turns
from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.recurrent_kernels import block_of
from blobmem.ops.host.recurrent_lstm import lstm_backward, lstm_forward
from blobmem.ops.host.recurrent_rnn import rnn_backward, rnn_forward
from blobmem.ops.host.recurrent_turns import await_step, begin_slice, end_slice, turns_size
from blobmem.ops.host.recurrent_unit import lstm_unit_backward, lstm_unit_forward
from blobmem.ops.registry import ArraySpec, table

# steps, streams, units, inputs, static inputs (0: none)
SIZES = {"tiny": (5, 2, 4, 3, 0), "one-step": (1, 3, 5, 2, 4), "one-stream": (9, 1, 33, 6, 3),
         "runs": (75, 9, 50, 20, 5), "many-streams": (2, 600, 17, 4, 0), "slices": (12, 8, 200, 30, 6),
         "deep": (3, 5, 600, 8, 0)}  # fmt: skip


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def column(values):
    return values[:, np.newaxis]


class Case:
    """Random operands of a layer with `gates` functions per unit."""

    def __init__(self, size, gates, dtype):
        self.steps, self.streams, self.units, inputs, statics = size
        rng = np.random.default_rng(sum(size) + gates)
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
        self.h_0, self.c_0 = values(self.streams, self.units), values(self.streams, self.units)
        self.dy = values(self.steps, self.streams, self.units)
        self.dh_last, self.dc_last = values(self.streams, self.units), values(self.streams, self.units)

    def wide(self):
        """The same in float64."""
        other = object.__new__(Case)
        for name, value in vars(self).items():
            setattr(other, name, value.astype(np.float64) if isinstance(value, np.ndarray) else value)
        return other

    def sums(self, t, h):
        total = self.x[t] @ self.w_x.T + self.b + column(self.cont[t]) * h @ self.w_h.T
        return total if self.static is None else total + self.static @ self.w_static.T


def call(name, operands, **attributes):
    """An op with a workspace of just the bytes it asks for, full of not-a-numbers."""
    op = table("host")[name]
    specs = [None if a is None else ArraySpec.of(a) for a in operands]
    nbytes = op.workspace_bytes(*specs, **attributes)
    raw = np.full(nbytes + 64, 0xFF, np.uint8)
    first = -raw.ctypes.data % 64
    op(*operands, ws=raw[first : first + nbytes], **attributes)


# -------------------------------------------------------------------- LSTM


def lstm_by_steps(case):
    """h, states after, gates (T, N, 4 D), cells (T + 1, N, D)."""
    h, c, hs, gates, cells = case.h_0, case.c_0, [], [], [case.c_0]
    for t in range(case.steps):
        i, f, o, g = np.split(case.sums(t, h), 4, axis=1)
        i, f, o, g = sigmoid(i), sigmoid(f), sigmoid(o), np.tanh(g)
        c = column(case.cont[t]) * f * c + i * g
        h = o * np.tanh(c)
        hs.append(h)
        gates.append(np.hstack([i, f, o, g]))
        cells.append(c)
    return np.array(hs), h, c, np.array(gates), np.array(cells)


def lstm_gradients_by_steps(case):
    """Of x, static, h_0, c_0, w_x, b, w_static, w_h."""
    hs, _, _, gates, cells = lstm_by_steps(case)
    dw_x, db, dw_h = np.zeros_like(case.w_x), np.zeros_like(case.b), np.zeros_like(case.w_h)
    dx, dfixed, dh, dc = np.zeros_like(case.x), 0, case.dh_last, case.dc_last
    for t in reversed(range(case.steps)):
        cont, squashed = column(case.cont[t]), np.tanh(cells[t + 1])
        i, f, o, g = np.split(gates[t], 4, axis=1)
        dh = dh + case.dy[t]
        dc = dc + dh * o * (1 - squashed**2)
        dsums = np.hstack([dc * g * i * (1 - i), dc * cont * cells[t] * f * (1 - f), dh * squashed * o * (1 - o),
                           dc * i * (1 - g**2)])  # fmt: skip
        dw_x, db, dfixed = dw_x + dsums.T @ case.x[t], db + dsums.sum(0), dfixed + dsums
        dw_h = dw_h + dsums.T @ (cont * (hs[t - 1] if t else case.h_0))
        dx[t], dh, dc = dsums @ case.w_x, cont * (dsums @ case.w_h), cont * f * dc
    if case.static is None:
        return dx, None, dh, dc, dw_x, db, None, dw_h
    return dx, dfixed @ case.w_static, dh, dc, dw_x, db, dfixed.T @ case.static, dw_h


def run_lstm(case, garbage, keep=True):
    t, n, d = case.steps, case.streams, case.units
    kept = [garbage(t, n, 4 * d), garbage(t + 1, n, d), garbage(n, d)] if keep else [None] * 3
    outputs = [garbage(t, n, d), garbage(n, d), garbage(n, d), *kept]
    call("lstm_forward", [case.x, case.cont, case.static, case.w_x, case.b, case.w_static, case.w_h, case.h_0,
                          case.c_0, *outputs])  # fmt: skip
    return outputs


def lstm_gradients(case, kept, outputs, accumulate=False, last=True):
    call("lstm_backward", [case.x, case.cont, case.static, case.w_x, case.w_static, case.w_h, *kept, case.dy,
                           case.dh_last if last else None, case.dc_last if last else None, *outputs],
         accumulate=accumulate)  # fmt: skip


def like(garbage, *expected):
    """Room for gradients."""
    return [None if array is None else garbage(*array.shape) for array in expected]


def compare(close, got, expected, digits=20.0):
    for one, other in zip(got, expected, strict=True):
        if other is not None:
            close(one, other, digits)


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "forget"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_lstm_forward(size, keep, dtype, close, garbage):
    case = Case(size, 4, dtype)
    h, h_last, c_last, gates, cells, start = run_lstm(case, garbage, keep)
    expected = lstm_by_steps(case.wide())
    compare(close, (h, h_last, c_last), expected[:3])
    if keep:
        compare(close, (gates, cells), expected[3:])
        np.testing.assert_array_equal(start, case.h_0)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_lstm_backward(size, dtype, close, garbage):
    case = Case(size, 4, dtype)
    kept = run_lstm(case, garbage)[3:]
    expected = lstm_gradients_by_steps(case.wide())
    parameters = like(garbage, *expected[4:])
    for times in (1, 2):  # adds to parameters' gradients, and can be done again
        bottoms = like(garbage, *expected[:4])
        lstm_gradients(case, kept, [*bottoms, *parameters], accumulate=times > 1)
        compare(close, bottoms, expected[:4])
        compare(close, parameters, [None if array is None else times * array for array in expected[4:]])


def test_lstm_gradients_that_nobody_wants_or_gives(dtype, close, garbage):
    case = Case(SIZES["runs"], 4, dtype)
    kept = run_lstm(case, garbage)[3:]
    case.dh_last[...] = 0
    case.dc_last[...] = 0
    expected = lstm_gradients_by_steps(case.wide())
    for wanted in range(8):
        got = [garbage(*array.shape) if i == wanted else None for i, array in enumerate(expected)]
        lstm_gradients(case, kept, got, last=False)
        compare(close, [got[wanted]], [expected[wanted]])


def test_lstm_states_may_stay_in_one_place(dtype, garbage):
    case = Case(SIZES["runs"], 4, dtype)
    h, h_last, c_last, *_ = run_lstm(case, garbage)
    state = case.h_0.copy(), case.c_0.copy()
    again = garbage(*h.shape)
    call("lstm_forward", [case.x, case.cont, case.static, case.w_x, case.b, case.w_static, case.w_h, *state, again,
                          *state, None, None, None])  # fmt: skip
    for one, other in zip((h, h_last, c_last), (again, *state), strict=True):
        assert one.tobytes() == other.tobytes()


# -------------------------------------------------------------------- RNN


def rnn_by_steps(case):
    """o, state after, hiddens (T + 1, N, D)."""
    hiddens, outputs = [case.h_0], []
    for t in range(case.steps):
        hiddens.append(np.tanh(case.sums(t, hiddens[-1])))
        outputs.append(np.tanh(hiddens[-1] @ case.w_o.T + case.b_o))
    return np.array(outputs), hiddens[-1], np.array(hiddens)


def rnn_gradients_by_steps(case):
    """Of x, static, h_0, w_x, b, w_static, w_h, w_o, b_o."""
    outputs, _, hiddens = rnn_by_steps(case)
    dout = case.dy * (1 - outputs**2)
    dw_x, db, dw_h = np.zeros_like(case.w_x), np.zeros_like(case.b), np.zeros_like(case.w_h)
    dx, dfixed, dh = np.zeros_like(case.x), 0, case.dh_last
    for t in reversed(range(case.steps)):
        cont = column(case.cont[t])
        dsums = (dh + dout[t] @ case.w_o) * (1 - hiddens[t + 1] ** 2)
        dw_x, db, dfixed = dw_x + dsums.T @ case.x[t], db + dsums.sum(0), dfixed + dsums
        dw_h = dw_h + dsums.T @ (cont * hiddens[t])
        dx[t], dh = dsums @ case.w_x, cont * (dsums @ case.w_h)
    dw_o, db_o = np.einsum("tni,tnj->ij", dout, hiddens[1:]), dout.sum((0, 1))
    if case.static is None:
        return dx, None, dh, dw_x, db, None, dw_h, dw_o, db_o
    return dx, dfixed @ case.w_static, dh, dw_x, db, dfixed.T @ case.static, dw_h, dw_o, db_o


def run_rnn(case, garbage, keep=True):
    t, n, d = case.steps, case.streams, case.units
    outputs = [garbage(t, n, d), garbage(n, d), garbage(t + 1, n, d) if keep else None]
    call("rnn_forward", [case.x, case.cont, case.static, case.w_x, case.b, case.w_static, case.w_h, case.w_o, case.b_o,
                         case.h_0, *outputs])  # fmt: skip
    return outputs


def rnn_gradients(case, hiddens, outputs, accumulate=False, last=True):
    call("rnn_backward", [case.x, case.cont, case.static, case.w_x, case.w_static, case.w_h, case.w_o, case.b_o,
                          hiddens, case.dy, case.dh_last if last else None, *outputs], accumulate=accumulate)  # fmt: skip


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "forget"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_rnn_forward(size, keep, dtype, close, garbage):
    case = Case(size, 1, dtype)
    got, expected = run_rnn(case, garbage, keep), rnn_by_steps(case.wide())
    compare(close, got[: 2 + keep], expected[: 2 + keep])


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_rnn_backward(size, dtype, close, garbage):
    case = Case(size, 1, dtype)
    hiddens = run_rnn(case, garbage)[2]
    expected = rnn_gradients_by_steps(case.wide())
    parameters = like(garbage, *expected[3:])
    for times in (1, 2):
        bottoms = like(garbage, *expected[:3])
        rnn_gradients(case, hiddens, [*bottoms, *parameters], accumulate=times > 1)
        compare(close, bottoms, expected[:3], 40)
        compare(close, parameters, [None if array is None else times * array for array in expected[3:]], 40)


def test_rnn_gradients_that_nobody_wants_or_gives(dtype, close, garbage):
    case = Case(SIZES["runs"], 1, dtype)
    hiddens = run_rnn(case, garbage)[2]
    case.dh_last[...] = 0
    expected = rnn_gradients_by_steps(case.wide())
    for wanted in range(9):
        got = [garbage(*array.shape) if i == wanted else None for i, array in enumerate(expected)]
        rnn_gradients(case, hiddens, got, last=False)
        compare(close, [got[wanted]], [expected[wanted]], 40)


# -------------------------------------------------------------------- one step by itself


@pytest.mark.parametrize("units", [1, 40, 1003])
def test_lstm_unit(units, dtype, close, garbage):
    rng = np.random.default_rng(units)
    before, sums = rng.standard_normal((3, units)).astype(dtype), 2 * rng.standard_normal((3, 4 * units)).astype(dtype)
    cont, dc, dh = np.array([1, 0, 0.5], dtype), *rng.standard_normal((2, 3, units)).astype(dtype)
    c, h = garbage(3, units), garbage(3, units)
    lstm_unit_forward(before, sums, cont, c, h)
    i, f, o, g = np.split(sums.astype(np.float64), 4, axis=1)
    i, f, o, g = sigmoid(i), sigmoid(f), sigmoid(o), np.tanh(g)
    cell = column(cont) * f * before + i * g
    close(c, cell)
    close(h, o * np.tanh(cell))
    whole = dc + dh * o * (1 - np.tanh(cell) ** 2)
    dbefore = whole * column(cont) * f
    dsums = np.hstack([whole * g * i * (1 - i), whole * column(cont) * before * f * (1 - f),
                       dh * np.tanh(cell) * o * (1 - o), whole * i * (1 - g**2)])  # fmt: skip
    for wanted in ((True, True), (True, False), (False, True)):
        got = [garbage(3, units) if wanted[0] else None, garbage(3, 4 * units) if wanted[1] else None]
        lstm_unit_backward(before, sums, cont, dc, dh, *got)
        for array, expected in zip(got, (dbefore, dsums), strict=True):
            if array is not None:
                close(array, expected, 2)


def test_functions_hold_their_digits_everywhere(dtype, garbage):
    small = [sign * 10.0**exponent for sign in (-1, 1) for exponent in range(-30, 3)]
    x = np.concatenate([np.linspace(-30, 30, 4001), small]).astype(dtype)
    sums = np.empty((1, 4 * x.size), dtype)
    i, f, o, g = np.split(sums, 4, axis=1)
    c, h = garbage(1, x.size), garbage(1, x.size)
    i[...], f[...], o[...], g[...] = 100, -100, 100, x  # c = tanh(x), to the last digit
    lstm_unit_forward(np.zeros_like(c), sums, np.ones(1, dtype), c, h)
    np.testing.assert_allclose(c[0], np.tanh(x.astype(np.longdouble)).astype(dtype), rtol=4 * np.finfo(dtype).eps)
    i[...], f[...] = -100, x  # c = sigmoid(x)
    lstm_unit_forward(np.ones_like(c), sums, np.ones(1, dtype), c, h)
    expected = (1 / (1 + np.exp(-np.clip(x, -80, None).astype(np.longdouble)))).astype(dtype)
    np.testing.assert_allclose(c[0], expected, rtol=4 * np.finfo(dtype).eps, atol=1e-34)


def test_functions_far_out(dtype, garbage):
    x = np.array([-np.inf, -1e30, -1000, 1000, 1e30, np.inf, np.nan], dtype)
    sums = np.tile(np.full(7, 100, dtype), (1, 4))
    sums[0, 21:] = x
    c, h = garbage(1, 7), garbage(1, 7)
    lstm_unit_forward(np.zeros_like(c), sums, np.ones(1, dtype), c, h)
    np.testing.assert_array_equal(c[0], [-1, -1, -1, 1, 1, 1, np.nan])
    sums[0, :7], sums[0, 21:] = x, 100
    lstm_unit_forward(np.zeros_like(c), sums, np.ones(1, dtype), c, h)
    np.testing.assert_allclose(c[0], [0, 0, 0, 1, 1, 1, np.nan], atol=1e-30)


# -------------------------------------------------------------------- threads and memory


@pytest.mark.parametrize("patience", [None, 0], ids=["patient", "impatient"])
def test_threads_change_no_bit(patience, dtype, garbage, threads, monkeypatch):
    """Nor do threads that leave as soon as they would have to wait."""
    if patience is not None:
        monkeypatch.setattr(recurrent_plan, "looks_in_a_microsecond", lambda: patience)
    lstm, rnn = Case((90, 8, 200, 9, 3), 4, dtype), Case((90, 8, 400, 9, 3), 1, dtype)
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        forward, plain = run_lstm(lstm, garbage), run_rnn(rnn, garbage)
        back, plain_back = (
            like(garbage, lstm.x, lstm.static, lstm.h_0, lstm.c_0, lstm.w_x, lstm.b, lstm.w_static, lstm.w_h),
            like(garbage, rnn.x, rnn.static, rnn.h_0, rnn.w_x, rnn.b, rnn.w_static, rnn.w_h, rnn.w_o, rnn.b_o),
        )
        lstm_gradients(lstm, forward[3:], back)
        rnn_gradients(rnn, plain[2], plain_back)
        results.append([*forward, *plain, *back, *plain_back])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert one.tobytes() == two.tobytes()


def test_work_is_worth_a_thread(threads):
    threads(64)
    turns = np.zeros(0, np.int64)
    few = recurrent_plan.crew(2, 16, 4, turns, np.dtype(np.float32))
    assert (few.slices, few.patience) == (1, 0)
    many = recurrent_plan.crew(8, 1024, 4, turns, np.dtype(np.float32))
    assert 16 < many.slices <= 64
    assert many.patience > 0


@pytest.mark.parametrize("units", range(1, 300, 7))
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_blocks_cover_the_units(units, count, threads):
    threads(count)
    team = recurrent_plan.crew(64, units, 4, np.zeros(0, np.int64), np.dtype(np.float32))
    width = recurrent_plan.lanes_of(4)
    blocks = [_block(i, team.blocks, units, width) for i in range(team.blocks)]
    assert [first for first, _, _ in blocks] == [0, *np.cumsum([size for _, size, _ in blocks])[:-1]]
    assert sum(size for _, size, _ in blocks) == units
    assert all(1 <= vectors <= 3 and size <= vectors * width for _, size, vectors in blocks)
    assert team.slices <= team.blocks


@kernel
def _block(which, blocks, units, width):
    return block_of(which, blocks, units, width)


def test_no_memory_that_grows(dtype, garbage, frugal):
    lstm, rnn = Case((90, 8, 60, 30, 3), 4, dtype), Case((90, 8, 100, 30, 3), 1, dtype)
    forward, plain = run_lstm(lstm, garbage), run_rnn(rnn, garbage)
    ws = np.zeros(1 << 24, np.uint8)
    ws = ws[-ws.ctypes.data % 64 :]
    frugal(lstm_forward, lstm.x, lstm.cont, lstm.static, lstm.w_x, lstm.b, lstm.w_static, lstm.w_h, lstm.h_0, lstm.c_0,
           *forward, ws=ws)  # fmt: skip
    frugal(rnn_forward, rnn.x, rnn.cont, rnn.static, rnn.w_x, rnn.b, rnn.w_static, rnn.w_h, rnn.w_o, rnn.b_o, rnn.h_0,
           *plain, ws=ws)  # fmt: skip
    back = like(garbage, lstm.x, lstm.static, lstm.h_0, lstm.c_0, lstm.w_x, lstm.b, lstm.w_static, lstm.w_h)
    frugal(lstm_backward, lstm.x, lstm.cont, lstm.static, lstm.w_x, lstm.w_static, lstm.w_h, *forward[3:], lstm.dy,
           None, None, *back, ws=ws)  # fmt: skip
    back = like(garbage, rnn.x, rnn.static, rnn.h_0, rnn.w_x, rnn.b, rnn.w_static, rnn.w_h, rnn.w_o, rnn.b_o)
    frugal(rnn_backward, rnn.x, rnn.cont, rnn.static, rnn.w_x, rnn.w_static, rnn.w_h, rnn.w_o, rnn.b_o, plain[2],
           rnn.dy, None, *back, ws=ws)  # fmt: skip


def test_scratch_does_not_grow_with_the_steps():
    def bytes_for(steps):
        shape = ArraySpec((steps, 8, 256), np.dtype(np.float32))
        return table("host")["lstm_forward"].workspace_bytes(*[None] * 9, shape, *[None] * 5)

    assert bytes_for(2800) == bytes_for(100)


def test_no_streams_at_all(dtype, garbage):
    case = Case((3, 0, 5, 2, 4), 4, dtype)
    forward = run_lstm(case, garbage)
    got = like(garbage, case.x, case.static, case.h_0, case.c_0, case.w_x, case.b, case.w_static, case.w_h)
    lstm_gradients(case, forward[3:], got)
    assert not any(array.any() for array in got)
    case = Case((3, 0, 5, 2, 4), 1, dtype)
    hiddens = run_rnn(case, garbage)[2]
    got = like(garbage, case.x, case.static, case.h_0, case.w_x, case.b, case.w_static, case.w_h, case.w_o, case.b_o)
    rnn_gradients(case, hiddens, got)
    assert not any(array.any() for array in got)


@kernel
def _walk(turns, own, slices, steps, patience, values, late):
    """A recurrence in which every slice needs all slices of the step before: `late` counts those that did not have it."""
    for step in range(steps):
        for i in range(slices):
            which = (own + i) % slices
            if not begin_slice(turns, which, step):
                continue
            for other in range(slices):
                if values[step % 2, other] != step:
                    late[which] += 1
            values[(step + 1) % 2, which] = step + 1
            end_slice(turns)
        if not await_step(turns, slices, step, patience):
            return


@pytest.mark.parametrize("patience", [0, 3, 100_000], ids=str)
@pytest.mark.parametrize("slices, workers", [(1, 1), (3, 1), (2, 2), (5, 3), (3, 6)], ids=str)
def test_turns(slices, workers, patience):
    steps = 3000
    turns, values = np.zeros(turns_size(slices), np.int64), np.zeros((2, slices), np.int64)
    late = np.zeros(slices, np.int64)
    _walk(turns, 0, slices, 0, 0, values, late)  # compiles
    rest = slices, steps, patience, values, late
    crowd = [threading.Thread(target=_walk, args=(turns, own, *rest)) for own in range(workers)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert turns[0] == slices * steps
    assert (values[steps % 2] == steps).all()
    assert not late.any()


def test_looks_are_counted():
    assert 1 < recurrent_turns.looks_in_a_microsecond() < 10_000
