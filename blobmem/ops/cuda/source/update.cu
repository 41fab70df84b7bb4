#include "common.cuh"

// A step reads the gradient once and goes over the parameter and its history in place. The gradient's own array stays.

// Many parameters in one launch, by value. For each of `count` entries: its first block, ascending from 0; then the
// sizes, none of them 0; then the addresses of its arrays, `width` for each. All arguments together may take 4096 bytes.
struct Table { i64 at[500]; };

// What a block does: `n` elements from `start` on of one entry's arrays, at most `chunk`, which is a multiple of PACK.
struct Part { int entry; i64 start, n; };

__device__ __forceinline__ Part part_of(const Table &table, int count, int chunk) {
  int low = 0, high = count;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (table.at[middle] <= (i64)blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  i64 start = ((i64)blockIdx.x - table.at[low]) * chunk, left = table.at[count + low] - start;
  return Part{low, start, left < chunk ? left : chunk};
}

// The block's part of one of the arrays.
__device__ __forceinline__ T *array_of(const Table &table, int count, int width, Part part, int place) {
  return (T *)table.at[2 * count + part.entry * width + place] + part.start;
}

// scale * diff + decay * pull; the pull is the value itself, or with `l1` its sign.
struct Gradient {
  T decay, scale;
  int l1;
  __device__ __forceinline__ T operator()(T diff, T value) const {
    T sign = value > 0 ? (T)1 : value < 0 ? (T)-1 : (T)0;
    return diff * scale + decay * (l1 ? sign : value);
  }
};

// step(gradient, value, past) changes the value and H values of its history. An entry: diff, data, H of history.
template <int H, class F>
__device__ __forceinline__ void update(const Table &table, int count, int chunk, Gradient of, F step) {
  Part part = part_of(table, count, chunk);
  const T *diff = array_of(table, count, 2 + H, part, 0);
  T *data = array_of(table, count, 2 + H, part, 1), *history[H];
  bool packed = aligned(diff) && aligned(data);
#pragma unroll
  for (int k = 0; k < H; k++) {
    history[k] = array_of(table, count, 2 + H, part, 2 + k);
    packed = packed && aligned(history[k]);
  }
  int n = (int)part.n, packs = packed ? n / PACK : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    Lot<PACK> d = load<PACK>(diff, i * PACK), v = load<PACK>(data, i * PACK), h[H];
#pragma unroll
    for (int k = 0; k < H; k++) h[k] = load<PACK>(history[k], i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) {
      T past[H];
#pragma unroll
      for (int k = 0; k < H; k++) past[k] = h[k].at[j];
      step(of(d.at[j], v.at[j]), v.at[j], past);
#pragma unroll
      for (int k = 0; k < H; k++) h[k].at[j] = past[k];
    }
    store<PACK>(data, i * PACK, v);
#pragma unroll
    for (int k = 0; k < H; k++) store<PACK>(history[k], i * PACK, h[k]);
  }
#pragma unroll 1
  for (int i = packs * PACK + threadIdx.x; i < n; i += blockDim.x) {
    T past[H];
#pragma unroll
    for (int k = 0; k < H; k++) past[k] = history[k][i];
    step(of(diff[i], data[i]), data[i], past);
#pragma unroll
    for (int k = 0; k < H; k++) history[k][i] = past[k];
  }
}

extern "C" __global__ void sgd(Table table, int count, int chunk, int l1, T decay, T scale, T rate, T momentum) {
  update<1>(table, count, chunk, Gradient{decay, scale, l1}, [=](T g, T &value, T *past) {
    T &h = past[0];
    h = momentum * h + rate * g;
    value -= h;
  });
}

extern "C" __global__ void nesterov(Table table, int count, int chunk, int l1, T decay, T scale, T rate, T momentum) {
  update<1>(table, count, chunk, Gradient{decay, scale, l1}, [=](T g, T &value, T *past) {
    T &h = past[0], before = h;
    h = momentum * before + rate * g;
    value -= (1 + momentum) * h - momentum * before;
  });
}

extern "C" __global__ void adagrad(Table table, int count, int chunk, int l1, T decay, T scale, T rate, T delta) {
  update<1>(table, count, chunk, Gradient{decay, scale, l1}, [=](T g, T &value, T *past) {
    T &h = past[0];
    h += g * g;
    value -= rate * (g / (sqrt(h) + delta));
  });
}

extern "C" __global__ void rmsprop(Table table, int count, int chunk, int l1, T decay, T scale, T rate, T rms_decay,
                                   T delta) {
  update<1>(table, count, chunk, Gradient{decay, scale, l1}, [=](T g, T &value, T *past) {
    T &h = past[0];
    h = rms_decay * h + (1 - rms_decay) * (g * g);
    value -= rate * (g / (sqrt(h) + delta));
  });
}

extern "C" __global__ void adadelta(Table table, int count, int chunk, int l1, T decay, T scale, T rate, T momentum,
                                    T delta) {
  update<2>(table, count, chunk, Gradient{decay, scale, l1}, [=](T g, T &value, T *past) {
    T &square = past[0], &move = past[1];
    square = momentum * square + (1 - momentum) * (g * g);
    T step = g * sqrt((move + delta) / (square + delta));
    move = momentum * move + (1 - momentum) * (step * step);
    value -= rate * step;
  });
}

extern "C" __global__ void adam(Table table, int count, int chunk, int l1, T decay, T scale, T rate, T momentum,
                                T momentum2, T delta) {
  update<2>(table, count, chunk, Gradient{decay, scale, l1}, [=](T g, T &value, T *past) {
    T &mean = past[0], &square = past[1];
    mean = momentum * mean + (1 - momentum) * g;
    square = momentum2 * square + (1 - momentum2) * (g * g);
    value -= rate * (mean / (sqrt(square) + delta));
  });
}

// Adds to the one of the two outputs that is there.
__device__ __forceinline__ void add_to(double *wide, float *narrow, double value) {
  if (wide)
    *wide += value;
  else
    *narrow = (float)(*narrow + value);
}

// The sums of squares of blocks' parts, or without `parts`, for a single block, added to the output.
extern "C" __global__ void sumsq(Table table, int count, int chunk, double *parts, double *wide, float *narrow) {
  __shared__ double shared[32];
  Part part = part_of(table, count, chunk);
  const T *x = array_of(table, count, 1, part, 0);
  int n = (int)part.n, packs = aligned(x) ? n / PACK : 0;
  double total = 0;
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    Lot<PACK> a = load<PACK>(x, i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) total += (double)a.at[j] * (double)a.at[j];
  }
  for (int i = packs * PACK + threadIdx.x; i < n; i += blockDim.x) {
    double v = x[i];
    total += v * v;
  }
  total = block_sum(total, shared);
  if (threadIdx.x) return;
  if (parts)
    parts[blockIdx.x] = total;
  else
    add_to(wide, narrow, total);
}

// One block: adds up the parts.
extern "C" __global__ void add_parts(const double *parts, i64 count, double *wide, float *narrow) {
  __shared__ double shared[32];
  double total = 0;
  FOR(i, count) total += parts[i];
  total = block_sum(total, shared);
  if (threadIdx.x == 0) add_to(wide, narrow, total);
}
