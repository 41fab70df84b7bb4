#include "common.cuh"

// A step reads the gradient once and goes over the parameter and its history in place. The gradient's own array stays.

// Many parameters in one launch, by value. For each of `count` entries: its first block, ascending from 0; then the
// sizes, none of them 0; then the addresses of its arrays, `width` words for each, of which the last one of an update
// is its multipliers. All arguments together may take 4096 bytes.
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

// The block's part of one of the arrays, which are of A.
template <class A>
__device__ __forceinline__ A *array_of(const Table &table, int count, int width, Part part, int place) {
  return (A *)table.at[2 * count + part.entry * width + place] + part.start;
}

// What losses are multiplied by, of which gradients that are halves would else lose the small ones: dynamic, as a step with
// gradients that are no numbers is left out and halves it, and many good ones double it. Zeros are the beginning.
struct Scaling { T scale, good, bad, steps_left_out; };

#define FIRST_SCALE ((T)32768)
#define LEAST_SCALE ((T)1 / 65536)
#define LARGEST_SCALE ((T)16777216)
#define GOOD_STEPS 2000

__device__ __forceinline__ T scale_of(const Scaling &scaling) { return scaling.scale > 0 ? scaling.scale : FIRST_SCALE; }

// y = value times the scale
extern "C" __global__ void fill_scaled(const Scaling *scaling, D *y, i64 n, T value) {
  FOR(i, n) y[i] = value * scale_of(*scaling);
}

// Says so if any of the gradients is no number.
extern "C" __global__ void find_bad(Table table, int count, int chunk, Scaling *scaling) {
  Part part = part_of(table, count, chunk);
  const D *diff = array_of<D>(table, count, 1, part, 0);
  int n = (int)part.n, packs = aligned(diff) ? n / PACK : 0;
  bool bad = false;
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    Lot<PACK> d = load<PACK>(diff, i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) bad = bad || !(d.at[j] - d.at[j] == 0);
  }
  for (int i = packs * PACK + threadIdx.x; i < n; i += blockDim.x) bad = bad || !((T)diff[i] - (T)diff[i] == 0);
  if (bad) scaling->bad = 1;  // whoever comes last writes the same
}

// At the end of a step.
extern "C" __global__ void next_scale(Scaling *scaling) {
  T scale = scale_of(*scaling), good = scaling->bad != 0 ? (T)0 : scaling->good + 1;
  if (scaling->bad != 0) {
    scale = scale > LEAST_SCALE ? scale / 2 : scale;
    scaling->steps_left_out += 1;
  } else if (good == GOOD_STEPS) {
    scale = scale < LARGEST_SCALE ? scale * 2 : scale;
    good = 0;
  }
  scaling->scale = scale;
  scaling->good = good;
  scaling->bad = 0;
}

// What is rounded once is said (fma) here and below, since compilers else choose anew for packs and for what is left.

// scale * diff + decay * pull; the pull is the value itself, or with `l1` its sign.
struct Gradient {
  T decay, scale;
  int l1;
  __device__ __forceinline__ T operator()(T diff, T value) const {
    T sign = value > 0 ? (T)1 : value < 0 ? (T)-1 : (T)0;
    return fma(scale, diff, decay * (l1 ? sign : value));
  }
};

// A parameter of halves has beside it what says of what it is the rounding: of a master, which is what changes.
#ifdef BFLOAT16
// The difference of the master's bits and the parameter's, which is the upper half. In the middle between two that does not
// fit where it is rounded down, and the next smaller is taken.
struct Beside { short bits; };

__device__ __forceinline__ T master_of(Beside beside, D rounded) {
  int rest = (rounded.bits & 0x7fff) == 0 && beside.bits < 0 ? 0 : beside.bits;  // of a zero that was written meanwhile
  return __uint_as_float(((u32)rounded.bits << 16) + rest);
}
__device__ __forceinline__ Beside beside_of(T master, D rounded) {
  int rest = master == master ? (int)(__float_as_uint(master) - ((u32)rounded.bits << 16)) : 0;
  return Beside{(short)(rest < 32767 ? rest : 32767)};
}
#elif defined(HALVES)
// The master itself. Where the parameter is another one, since somebody wrote it (a file, a filler), it begins with that.
struct Beside { T master; };

__device__ __forceinline__ T master_of(Beside beside, D rounded) {
  D half;
  half = beside.master;
  return (T)half != rounded ? (T)rounded : beside.master;
}
__device__ __forceinline__ Beside beside_of(T master, D rounded) { return Beside{master}; }
#endif

struct Parameter {
  D *data;
#ifdef HALVES
  Beside *beside;
  enum { MORE = 1 };
  template <int W> struct __align__(W * sizeof(Beside) < 16 ? W * sizeof(Beside) : 16) Pieces { Beside at[W]; };
  __device__ __forceinline__ bool packed() const { return aligned(data) && aligned(beside); }
  template <int W> __device__ __forceinline__ Lot<W> now(int i) const {
    Closed<W> rounded = *(const Closed<W> *)(data + i);
    Pieces<W> pieces = *(const Pieces<W> *)(beside + i);
    Lot<W> values;
#pragma unroll
    for (int j = 0; j < W; j++) values.at[j] = master_of(pieces.at[j], rounded.at[j]);
    return values;
  }
  template <int W> __device__ __forceinline__ void become(int i, Lot<W> values) const {
    Pieces<W> pieces;
#pragma unroll
    for (int j = 0; j < W; j++) {
      D rounded;
      rounded = values.at[j];
      pieces.at[j] = beside_of(values.at[j], rounded);
    }
    *(Pieces<W> *)(beside + i) = pieces;
    store<W>(data, i, values);
  }
#else
  enum { MORE = 0 };
  __device__ __forceinline__ bool packed() const { return aligned(data); }
  template <int W> __device__ __forceinline__ Lot<W> now(int i) const { return load<W>(data, i); }
  template <int W> __device__ __forceinline__ void become(int i, Lot<W> values) const { store<W>(data, i, values); }
#endif
};

__device__ __forceinline__ T running_mean(T mean, T value, T kept) { return fma(kept, mean, (1 - kept) * value); }

// step(rate, gradient, value, past) changes the value and H values of its history. An entry: diff, data, H of history, of
// halves what is beside, and two floats by which its rate and its decay are multiplied. `scaling`, if not null, says what
// gradients were multiplied by, and whether to leave the step out. `flag`, if not null, says that a bad value was reported
// (common.cuh): nothing is done then, as the host has yet to raise it, and `left_out`, if not null, counts that.
template <int H, class F>
__device__ __forceinline__ void update(const Table &table, int count, int chunk, const Scaling *scaling,
                                       const i64 *flag, i64 *left_out, double decay, T scale, int l1, double rate,
                                       F step) {
  if (flag && *flag) {
    if (left_out && blockIdx.x == 0 && threadIdx.x == 0) *left_out += 1;
    return;
  }
  if (scaling) {
    if (scaling->bad != 0) return;
    scale /= scale_of(*scaling);
  }
  enum { WIDTH = 3 + H + Parameter::MORE };
  Part part = part_of(table, count, chunk);
  i64 multipliers = table.at[2 * count + part.entry * WIDTH + WIDTH - 1];
  T own_rate = (T)(rate * __uint_as_float((u32)multipliers));
  Gradient of{(T)(decay * __uint_as_float((u32)(multipliers >> 32))), scale, l1};
  const D *diff = array_of<D>(table, count, WIDTH, part, 0);
  Parameter parameter;
  parameter.data = array_of<D>(table, count, WIDTH, part, 1);
#ifdef HALVES
  parameter.beside = array_of<Beside>(table, count, WIDTH, part, 2 + H);
#endif
  T *history[H];
  bool packed = aligned(diff) && parameter.packed();
#pragma unroll
  for (int k = 0; k < H; k++) {
    history[k] = array_of<T>(table, count, WIDTH, part, 2 + k);
    packed = packed && aligned(history[k]);
  }
  int n = (int)part.n, packs = packed ? n / PACK : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    Lot<PACK> d = load<PACK>(diff, i * PACK), v = parameter.now<PACK>(i * PACK), h[H];
#pragma unroll
    for (int k = 0; k < H; k++) h[k] = load<PACK>(history[k], i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) {
      T past[H];
#pragma unroll
      for (int k = 0; k < H; k++) past[k] = h[k].at[j];
      step(own_rate, of(d.at[j], v.at[j]), v.at[j], past);
#pragma unroll
      for (int k = 0; k < H; k++) h[k].at[j] = past[k];
    }
    parameter.become<PACK>(i * PACK, v);
#pragma unroll
    for (int k = 0; k < H; k++) store<PACK>(history[k], i * PACK, h[k]);
  }
#pragma unroll 1
  for (int i = packs * PACK + threadIdx.x; i < n; i += blockDim.x) {
    T past[H];
#pragma unroll
    for (int k = 0; k < H; k++) past[k] = history[k][i];
    Lot<1> value = parameter.now<1>(i);
    step(own_rate, of(diff[i], value.at[0]), value.at[0], past);
    parameter.become<1>(i, value);
#pragma unroll
    for (int k = 0; k < H; k++) history[k][i] = past[k];
  }
}

extern "C" __global__ void sgd(Table table, int count, int chunk, int l1, const Scaling *scaling, const i64 *flag, i64 *left_out,
                                double decay, T scale, double rate, T momentum) {
  update<1>(table, count, chunk, scaling, flag, left_out, decay, scale, l1, rate, [=](T rate, T g, T &value, T *past) {
    T &h = past[0];
    h = fma(momentum, h, rate * g);
    value -= h;
  });
}

extern "C" __global__ void nesterov(Table table, int count, int chunk, int l1, const Scaling *scaling, const i64 *flag, i64 *left_out,
                                double decay, T scale, double rate, T momentum) {
  update<1>(table, count, chunk, scaling, flag, left_out, decay, scale, l1, rate, [=](T rate, T g, T &value, T *past) {
    T &h = past[0], fading = momentum * h;
    h = fma(rate, g, fading);
    value -= fma(1 + momentum, h, -fading);
  });
}

extern "C" __global__ void adagrad(Table table, int count, int chunk, int l1, const Scaling *scaling, const i64 *flag, i64 *left_out,
                                double decay, T scale, double rate, T delta) {
  update<1>(table, count, chunk, scaling, flag, left_out, decay, scale, l1, rate, [=](T rate, T g, T &value, T *past) {
    T &h = past[0];
    h = fma(g, g, h);
    value = fma(-rate, g / (sqrt(h) + delta), value);
  });
}

extern "C" __global__ void rmsprop(Table table, int count, int chunk, int l1, const Scaling *scaling, const i64 *flag, i64 *left_out,
                                double decay, T scale, double rate, T rms_decay, T delta) {
  update<1>(table, count, chunk, scaling, flag, left_out, decay, scale, l1, rate, [=](T rate, T g, T &value, T *past) {
    T &h = past[0];
    h = running_mean(h, g * g, rms_decay);
    value = fma(-rate, g / (sqrt(h) + delta), value);
  });
}

extern "C" __global__ void adadelta(Table table, int count, int chunk, int l1, const Scaling *scaling, const i64 *flag, i64 *left_out,
                                double decay, T scale, double rate, T momentum, T delta) {
  update<2>(table, count, chunk, scaling, flag, left_out, decay, scale, l1, rate, [=](T rate, T g, T &value, T *past) {
    T &square = past[0], &move = past[1];
    square = running_mean(square, g * g, momentum);
    T step = g * sqrt((move + delta) / (square + delta));
    move = running_mean(move, step * step, momentum);
    value = fma(-rate, step, value);
  });
}

extern "C" __global__ void adam(Table table, int count, int chunk, int l1, const Scaling *scaling, const i64 *flag, i64 *left_out,
                                double decay, T scale, double rate, T momentum, T momentum2, T delta) {
  update<2>(table, count, chunk, scaling, flag, left_out, decay, scale, l1, rate, [=](T rate, T g, T &value, T *past) {
    T &mean = past[0], &square = past[1];
    mean = running_mean(mean, g, momentum);
    square = running_mean(square, g * g, momentum2);
    value = fma(-rate, mean / (sqrt(square) + delta), value);
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
  const D *x = array_of<D>(table, count, 1, part, 0);
  int n = (int)part.n, packs = aligned(x) ? n / PACK : 0;
  double total = 0;
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    Lot<PACK> a = load<PACK>(x, i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) total += (double)a.at[j] * (double)a.at[j];
  }
  for (int i = packs * PACK + threadIdx.x; i < n; i += blockDim.x) {
    double v = (T)x[i];
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
