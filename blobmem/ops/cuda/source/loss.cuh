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

// y = softmax of x in the row at `row`, within `strips`; y may be x.
template <class Y>
__device__ __forceinline__ void softmax_strip(const D *x, Y *y, bool inside, i64 row, int classes, i64 inner, int slice,
                                              int slices, T *shared) {
  if (!inside) classes = 0;
  T most = inside ? x[row] : (T)0;
  for (int c = slice; c < classes; c += slices) most = max_of(x[row + c * inner], most);
  most = strip_max(most, shared, slices);
  T sum = 0;
  for (int c = slice; c < classes; c += slices) sum += exp(x[row + c * inner] - most);
  sum = strip_sum(sum, shared, slices);
  for (int c = slice; c < classes; c += slices) y[row + c * inner] = exp(x[row + c * inner] - most) / sum;
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
