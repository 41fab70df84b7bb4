#include "loss.cuh"

template <class Y>
__device__ __forceinline__ void softmax_rows(const D *x, Y *y, i64 positions, int classes, i64 inner, int slices) {
  __shared__ T shared[THREADS];
  strips(positions, slices, [&](i64 at, int slice) {
    i64 row = row_of(at, classes, inner);
    softmax_strip(x + row, y + row, at < positions, classes, inner, slice, slices, shared);
  });
}

extern "C" __global__ void softmax(const D *x, D *y, i64 positions, int classes, i64 inner, int slices) {
  softmax_rows(x, y, positions, classes, inner, slices);
}

// The same, as T's.
extern "C" __global__ void softmax_exact(const D *x, T *y, i64 positions, int classes, i64 inner, int slices) {
  softmax_rows(x, y, positions, classes, inner, slices);
}

extern "C" __global__ void softmax_gradient(const D *y, const D *dy, D *dx, i64 positions, int classes, i64 inner,
                                            int slices) {
  __shared__ T shared[THREADS];
  strips(positions, slices, [&](i64 at, int slice) {
    i64 row = row_of(at, classes, inner);
    int end = at < positions ? classes : 0;
    T sum = 0;
    for (int c = slice; c < end; c += slices) sum += dy[row + c * inner] * y[row + c * inner];
    sum = strip_sum(sum, shared, slices);
    for (int c = slice; c < end; c += slices) dx[row + c * inner] = (dy[row + c * inner] - sum) * y[row + c * inner];
  });
}

// The sum of -log softmax(x)[label], of `bound` at most each; sums (outer, 2, inner) = what makes probabilities of x.
extern "C" __global__ void softmax_loss(const D *x, const T *label, T *sums, T *loss, double *parts, i64 positions,
                                        int classes, i64 inner, int slices, T ignore, double bound, double divisor,
                                        i64 *fault, i64 code) {
  __shared__ T shared[THREADS];
  __shared__ double totals[32];
  double total = 0, count = 0;
  strips(positions, slices, [&](i64 at, int slice) {
    const D *row = x + row_of(at, classes, inner);
    Sums of = softmax_sums(row, at < positions ? classes : 0, inner, slice, slices, shared);
    if (slice > 0 || at >= positions) return;
    i64 pair = row_of(at, 2, inner);
    sums[pair] = of.most;
    sums[pair + inner] = of.sum;
    int c = class_of(label, at, classes, ignore, true, fault, code);
    if (c < 0) return;
    double v = log((double)of.sum) + ((double)of.most - (double)(T)row[c * inner]);
    total += v > bound ? bound : v;  // not a number stays that
    count += 1;
  });
  put_loss(total, count, loss, parts, divisor, totals);
}

// parts[block] = how many labels are classes and not to be ignored.
extern "C" __global__ void count_labels(const T *label, double *parts, i64 n, int classes, T ignore) {
  __shared__ double sums[32];
  double count = 0;
  FOR(i, n) count += class_of(label, i, classes, ignore, false, 0, 0) >= 0;
  count = block_sum(count, sums);
  if (threadIdx.x == 0) parts[blockIdx.x] = count;
}

// y = x over the sum of the counts, or 1; one block.
extern "C" __global__ void over_labels(const T *x, T *y, const double *parts, int counts) {
  __shared__ double sums[32];
  double value = gradient_scale(x, 0, parts, counts, sums);
  if (threadIdx.x == 0) y[0] = (T)value;
}

extern "C" __global__ void softmax_loss_gradient(const D *x, const T *label, const T *sums, const T *dloss, D *dx,
                                                 const double *parts, int counts, i64 positions, int classes, i64 inner,
                                                 int slices, T ignore, double divisor, i64 *fault, i64 code) {
  __shared__ double shared[32];
  T scale = (T)gradient_scale(dloss, divisor, parts, counts, shared);
  strips(positions, slices, [&](i64 at, int slice) {
    if (at >= positions) return;
    i64 row = row_of(at, classes, inner), pair = row_of(at, 2, inner);
    int wanted = class_of(label, at, classes, ignore, slice == 0, fault, code);
    T most = sums[pair], factor = scale / sums[pair + inner];
    map_row(x + row, dx + row, classes, inner, slice, slices, [=](T v, int c) {
      return wanted < 0 ? (T)0 : exp(v - most) * factor - (c == wanted ? scale : (T)0);
    });
  });
}

// A loss from the parts of `put_loss`; one block.
extern "C" __global__ void finish(const double *parts, int n, T *loss, double divisor) {
  __shared__ double sums[32];
  double total = 0, count = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    total += parts[2 * i];
    count += parts[2 * i + 1];
  }
  put_loss(total, count, loss, 0, divisor, sums);
}
