// What the steps of an LSTM have in common; gates are (streams, 4, units): input, forget, output, candidate.

__device__ __forceinline__ T sigmoid(T x) { return (T)1 / ((T)1 + exp(-x)); }

struct Gates { T i, f, o, g; };

__device__ __forceinline__ Gates open_gates(T i, T f, T o, T g) {
  Gates gates = {sigmoid(i), sigmoid(f), sigmoid(o), tanh(g)};
  return gates;
}

// The gradients of the gates' sums, and in `before` that of the cell before, from those of cell and hidden state.
__device__ __forceinline__ Gates gates_gradient(Gates s, T keep, T cell_before, T cell, T dcell, T dhidden, T *before) {
  T squashed = tanh(cell);
  T dc = dcell + dhidden * s.o * (1 - squashed * squashed), kept = dc * keep;
  *before = kept * s.f;
  Gates gradient = {dc * s.g * (s.i * (1 - s.i)), kept * cell_before * (s.f * (1 - s.f)),
                    dhidden * squashed * (s.o * (1 - s.o)), dc * s.i * (1 - s.g * s.g)};
  return gradient;
}

__device__ __forceinline__ Gates load_gates(const D *p, i64 units) {
  Gates gates = {p[0], p[units], p[2 * units], p[3 * units]};
  return gates;
}

__device__ __forceinline__ void store_gates(Gates gates, D *p, i64 units) {
  p[0] = gates.i;
  p[units] = gates.f;
  p[2 * units] = gates.o;
  p[3 * units] = gates.g;
}

// What a stream's state is multiplied by after `step`.
__device__ __forceinline__ T keep_after(const D *cont, i64 step, i64 steps, i64 streams, i64 n) {
  return step + 1 < steps ? cont[(step + 1) * streams + n] : (T)1;
}
