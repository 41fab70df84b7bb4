// Rows of values, labels, and sums of losses.

#include "common.cuh"

#define THREADS 256  // of a block, here and in the files that include this

// Arrays (outer, length, inner) are `positions` = outer * inner rows of `length` values, `inner` apart. A row is shared
// by `slices` threads (a power of two), of which number s takes the values s, s + slices, ...; a block has THREADS /
// slices neighbouring rows at a time. All threads of a block call f(position, slice) equally often, with positions
// beyond the end too, so that f may use barriers.
template <class F> __device__ __forceinline__ void strips(i64 positions, int slices, F f) {
  int width = THREADS / slices, lane = threadIdx.x % width, slice = threadIdx.x / width;
  for (i64 first = (i64)blockIdx.x * width; first < positions; first += (i64)gridDim.x * width) f(first + lane, slice);
}

// The offset of a row's first value.
__device__ __forceinline__ i64 row_of(i64 position, i64 length, i64 inner) {
  return inner == 1 ? position * length : position + position / inner * (length - 1) * inner;
}

// What the threads of a row have together; each gets it. `shared` has THREADS elements, free again after a barrier.
template <class A, class F> __device__ __forceinline__ A strip_reduce(A value, A *shared, int slices, F f) {
  if (slices == 1) return value;
  int width = THREADS / slices;
  __syncthreads();
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int step = THREADS / 2; step >= width; step >>= 1) {
    if (threadIdx.x < step) shared[threadIdx.x] = f(shared[threadIdx.x], shared[threadIdx.x + step]);
    __syncthreads();
  }
  return shared[threadIdx.x % width];
}

template <class A> __device__ __forceinline__ A strip_sum(A value, A *shared, int slices) {
  if (slices == THREADS) return block_sum(value, shared);
  return strip_reduce(value, shared, slices, [](A a, A b) { return a + b; });
}

template <class A> __device__ __forceinline__ A strip_max(A value, A *shared, int slices) {
  if (slices == THREADS) return block_max(value, shared);
  return strip_reduce(value, shared, slices, [](A a, A b) { return a > b ? a : b; });
}

#define LOWEST ((T)(sizeof(T) == 8 ? -1.7976931348623157e308 : -3.4028234663852886e38))

// N values of the row at x from number c on, `slices` apart; -infinity beyond its end.
template <int N> __device__ __forceinline__ Lot<N> values_from(const D *x, int c, int length, i64 inner, int slices) {
  Lot<N> v;
#pragma unroll
  for (int k = 0; k < N; k++) v.at[k] = c + k * slices < length ? (T)x[(c + k * slices) * inner] : (T)__uint_as_float(0xff800000u);
  return v;
}

// Calls f.take<N>(c, the N values from number c on) until a thread has had all of its values of a row: so many are loaded
// before anything is done with them, and few where there are no more.
template <class F>
__device__ __forceinline__ void take_values(const D *x, int length, i64 inner, int slice, int slices, F &f) {
  int c = slice;
#pragma unroll 1
  for (; c + 7 * slices < length; c += 8 * slices) f.take(c, values_from<8>(x, c, length, inner, slices));
#pragma unroll 1
  for (; c < length; c += 2 * slices) f.take(c, values_from<2>(x, c, length, inner, slices));
}

// y[c] = f(x[c], c)
template <class Y, class F> struct RowMap {
  Y *y;
  int length, slices;
  i64 inner;
  F f;
  template <int N> __device__ __forceinline__ void take(int c, const Lot<N> &v) {
#pragma unroll
    for (int k = 0; k < N; k++)
      if (c + k * slices < length) y[(c + k * slices) * inner] = f(v.at[k], c + k * slices);
  }
};

// y[c] = f(x[c], c) for the values of the row at x and y, which may be one; within `strips`. Values that lie side by side
// are taken in packs, but for the few before and behind those that are aligned.
template <class Y, class F>
__device__ __forceinline__ void map_row(const D *x, Y *y, int length, i64 inner, int slice, int slices, F f) {
  int first = (int)((16 - ((u64)x & 15)) % 16 / sizeof(D)), last = first + (length - first) / PACK * PACK, step = slices * PACK;
  if (inner > 1 || length < 2 * PACK || !aligned(y + first)) {
    RowMap<Y, F> map = {y, length, slices, inner, f};
    take_values(x, length, inner, slice, slices, map);
    return;
  }
#pragma unroll 1
  for (int c = first + slice * PACK; c < last; c += 2 * step) {
    bool both = c + step < last;
    Lot<PACK> v = load<PACK>(x, c), w = load<PACK>(x, both ? c + step : c);
#pragma unroll
    for (int k = 0; k < PACK; k++) v.at[k] = f(v.at[k], c + k);
    store<PACK>(y, c, v);
    if (!both) break;
#pragma unroll
    for (int k = 0; k < PACK; k++) w.at[k] = f(w.at[k], c + step + k);
    store<PACK>(y, c + step, w);
  }
  for (int e = slice; e < length - (last - first); e += slices) {
    int c = e < first ? e : e + last - first;
    y[c] = f(x[c], c);
  }
}

// What makes probabilities of a row: the largest value, and the sum of exp(x - that).
struct Sums {
  T most, sum;
  template <int N> __device__ __forceinline__ void take(int, const Lot<N> &v) {
    T before = most;
#pragma unroll
    for (int k = 0; k < N; k++) most = max_of(v.at[k], most);
    sum *= exp(before - most);
#pragma unroll
    for (int k = 0; k < N; k++) sum += exp(v.at[k] - most);
  }
};

// That of the row at x, by one reading, within `strips`; `length` is 0 beyond the last row.
__device__ __forceinline__ Sums softmax_sums(const D *x, int length, i64 inner, int slice, int slices, T *shared) {
  Sums mine = {LOWEST, 0};
  take_values(x, length, inner, slice, slices, mine);
  T most = strip_max(mine.most, shared, slices);
  return Sums{most, strip_sum(mine.sum * exp(mine.most - most), shared, slices)};
}

// y = softmax of the row at x, which y may be, within `strips`.
template <class Y>
__device__ __forceinline__ void softmax_strip(const D *x, Y *y, bool inside, int classes, i64 inner, int slice, int slices,
                                              T *shared) {
  Sums sums = softmax_sums(x, inside ? classes : 0, inner, slice, slices, shared);
  if (inside) map_row(x, y, classes, inner, slice, slices, [=](T v, int) { return exp(v - sums.most) / sums.sum; });
}

// The class that a label stands for; -1 for one that is no class, which is reported.
__device__ __forceinline__ int class_of(const T *label, i64 at, int classes, bool reports, i64 *fault, i64 code) {
  T value = label[at];
  if (value >= 0 && value < (T)classes) return (int)value;
  if (reports) report(fault, code, at, (double)value);
  return -1;
}

// The same where a label may be one to ignore, also -1.
__device__ __forceinline__ int class_of(const T *label, i64 at, int classes, T ignore, bool reports, i64 *fault,
                                        i64 code) {
  return label[at] == ignore ? -1 : class_of(label, at, classes, reports, fault, code);
}

// A loss from what every thread has added up: by a launch of one block; otherwise the block's part of it, for `finish`.
// `divisor` is what to divide by; 0 stands for the number counted, or 1 if that is less.
__device__ __forceinline__ void put_loss(double total, double count, T *loss, double *parts, double divisor,
                                         double *shared) {
  total = block_sum(total, shared);
  count = block_sum(count, shared);
  if (threadIdx.x > 0) return;
  if (gridDim.x == 1) {
    *loss = (T)(total / (divisor > 0 ? divisor : count > 1 ? count : 1));
  } else {
    parts[2 * blockIdx.x] = total;
    parts[2 * blockIdx.x + 1] = count;
  }
}

// What a gradient is multiplied by. If `divisor` is 0, `parts` has `n` counts whose sum takes its place.
__device__ __forceinline__ double gradient_scale(const T *dloss, double divisor, const double *parts, int n,
                                                 double *shared) {
  if (divisor == 0) {
    for (int i = threadIdx.x; i < n; i += THREADS) divisor += parts[i];
    divisor = block_sum(divisor, shared);
    if (divisor < 1) divisor = 1;
  }
  return (double)dloss[0] / divisor;
}
