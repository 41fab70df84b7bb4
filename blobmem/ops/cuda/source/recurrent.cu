#include "common.cuh"
#include "recurrent.cuh"

// Arrays (streams, units), and gates (streams, 4, units): input, forget, output, candidate. Blocks lie along the units,
// grid.y along the streams, or along rows of which each is a stream in a step.
#define FOR_UNITS(n, rows, u, units) \
  for (i64 n = blockIdx.y; n < (rows); n += gridDim.y) \
    for (i64 u = (i64)blockIdx.x * blockDim.x + threadIdx.x; u < (units); u += (i64)gridDim.x * blockDim.x)

// One step forward. gates come as the products of inputs and state with their weights, and become the gates; `fixed`
// (streams, 4, units), or null, is added to them as the bias b (4, units) is. state = what the next step multiplies.
extern "C" __global__ void lstm_step(D *gates, const D *b, const D *fixed, const D *before, D *after, D *hidden, D *state, const D *cont, i64 step, i64 steps, i64 streams, i64 units) {
  FOR_UNITS(n, streams, u, units) {
    i64 at = n * units + u, gate = 4 * n * units + u;
    Gates sums = load_gates(gates + gate, units), bias = load_gates(b + u, units);
    if (fixed) {
      Gates more = load_gates(fixed + gate, units);
      bias.i += more.i;
      bias.f += more.f;
      bias.o += more.o;
      bias.g += more.g;
    }
    Gates s = open_gates(sums.i + bias.i, sums.f + bias.f, sums.o + bias.o, sums.g + bias.g);
    T cell = cont[step * streams + n] * s.f * before[at] + s.i * s.g, h = s.o * tanh(cell);
    store_gates(s, gates + gate, units);
    after[at] = cell;
    hidden[at] = h;
    state[at] = keep_after(cont, step, steps, streams, n) * h;
  }
}

// One step backward. cells, from the one before this step on; dhidden, the gradient of the hidden state as an output, and
// dnext as what the next step multiplied (null: zero); dafter (null: zero) and dbefore, which may be the same, the cell's.
extern "C" __global__ void lstm_step_gradient(const D *gates, const D *cells, const D *dhidden, const D *dnext, const D *dafter, D *dbefore, D *dgates, const D *cont, i64 step, i64 steps, i64 streams, i64 units) {
  FOR_UNITS(n, streams, u, units) {
    i64 at = n * units + u, gate = 4 * n * units + u;
    T dh = dhidden[at], before;
    if (dnext) dh += keep_after(cont, step, steps, streams, n) * dnext[at];
    Gates s = load_gates(gates + gate, units);
    Gates gradient = gates_gradient(s, cont[step * streams + n], cells[at], cells[streams * units + at],
                                    dafter ? dafter[at] : (T)0, dh, &before);
    dbefore[at] = before;
    store_gates(gradient, dgates + gate, units);
  }
}

// to[r, u] = cont[r] times the hidden state before row r's step, computed anew; gates, cells and cont are those of all
// steps, to begins with row `first` and has `rows`; start is the state before the first step.
extern "C" __global__ void lstm_received(const D *gates, const D *cells, const D *start, const D *cont, D *to, i64 first, i64 rows, i64 streams, i64 units) {
  FOR_UNITS(local, rows, u, units) {
    i64 row = first + local, before = row - streams;
    T h = row < streams ? start[row * units + u]
                        : gates[(4 * before + 2) * units + u] * tanh(cells[row * units + u]);
    to[local * units + u] = cont[row] * h;
  }
}

// A step by itself: nothing is added, nothing kept.
extern "C" __global__ void lstm_unit(const D *before, const D *gates, const D *cont, D *after, D *hidden, i64 streams, i64 units) {
  FOR_UNITS(n, streams, u, units) {
    i64 at = n * units + u;
    Gates sums = load_gates(gates + 4 * n * units + u, units), s = open_gates(sums.i, sums.f, sums.o, sums.g);
    T cell = cont[n] * s.f * before[at] + s.i * s.g;
    after[at] = cell;
    hidden[at] = s.o * tanh(cell);
  }
}

// dbefore and dgates may be null.
extern "C" __global__ void lstm_unit_gradient(const D *before, const D *gates, const D *cont, const D *dafter, const D *dhidden, D *dbefore, D *dgates, i64 streams, i64 units) {
  FOR_UNITS(n, streams, u, units) {
    i64 at = n * units + u, gate = 4 * n * units + u;
    Gates sums = load_gates(gates + gate, units), s = open_gates(sums.i, sums.f, sums.o, sums.g);
    T keep = cont[n], cell = keep * s.f * before[at] + s.i * s.g, dcell;
    Gates gradient = gates_gradient(s, keep, before[at], cell, dafter[at], dhidden[at], &dcell);
    if (dbefore) dbefore[at] = dcell;
    if (dgates) store_gates(gradient, dgates + gate, units);
  }
}

// One step of the plain layer: hidden comes as the products of inputs and state with their weights; b (units) and fixed
// (streams, units), or null, are added.
extern "C" __global__ void rnn_step(D *hidden, const D *b, const D *fixed, D *state, const D *cont, i64 step, i64 steps, i64 streams, i64 units) {
  FOR_UNITS(n, streams, u, units) {
    i64 at = n * units + u;
    T bias = fixed ? b[u] + fixed[at] : b[u], h = tanh(hidden[at] + bias);
    hidden[at] = h;
    state[at] = keep_after(cont, step, steps, streams, n) * h;
  }
}

// dhidden comes as the gradient of the hidden state as an input of the output layer, and becomes that of its sum; dnext,
// as in lstm_step_gradient.
extern "C" __global__ void rnn_step_gradient(const D *hidden, const D *dnext, D *dhidden, const D *cont, i64 step, i64 steps, i64 streams, i64 units) {
  FOR_UNITS(n, streams, u, units) {
    i64 at = n * units + u;
    T dh = dhidden[at], h = hidden[at];
    if (dnext) dh += keep_after(cont, step, steps, streams, n) * dnext[at];
    dhidden[at] = dh * (1 - h * h);
  }
}

// y[r, u] = tanh(y[r, u] + b[u])
extern "C" __global__ void rnn_output(D *y, const D *b, i64 rows, i64 units) {
  FOR_UNITS(n, rows, u, units) y[n * units + u] = tanh(y[n * units + u] + b[u]);
}

// y[r, u] = dy[r, u] times the slope of tanh at y[r, u] + b[u]
extern "C" __global__ void rnn_output_gradient(D *y, const D *b, const D *dy, i64 rows, i64 units) {
  FOR_UNITS(n, rows, u, units) {
    i64 at = n * units + u;
    T out = tanh(y[at] + b[u]);
    y[at] = dy[at] * (1 - out * out);
  }
}

// y[r, u] = factors[r] * x[r, u]; x may be y
extern "C" __global__ void scale_rows(const D *x, const D *factors, D *y, i64 rows, i64 units) {
  FOR_UNITS(n, rows, u, units) y[n * units + u] = factors[n] * x[n * units + u];
}
