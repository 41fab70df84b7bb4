#include "loss.cuh"

extern "C" __global__ void softmax(const D *x, D *y, i64 positions, int classes, i64 inner, int slices) {
  __shared__ T shared[THREADS];
  strips(positions, slices, [&](i64 at, int slice) {
    softmax_strip(x, y, at < positions, row_of(at, classes, inner), classes, inner, slice, slices, shared);
  });
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

// prob = softmax of x, and the sum of -log prob[label].
extern "C" __global__ void softmax_loss(const D *x, const T *label, T *prob, T *loss, double *parts, i64 positions,
                                        int classes, i64 inner, int slices, T ignore, double least, double divisor,
                                        i64 *fault, i64 code) {
  __shared__ T shared[THREADS];
  __shared__ double sums[32];
  double total = 0, count = 0;
  strips(positions, slices, [&](i64 at, int slice) {
    i64 row = row_of(at, classes, inner);
    softmax_strip(x, prob, at < positions, row, classes, inner, slice, slices, shared);
    __syncthreads();  // the probability that is looked up may be another thread's
    if (slice > 0 || at >= positions) return;
    int c = class_of(label, at, classes, ignore, true, fault, code);
    if (c < 0) return;
    double p = (double)prob[row + c * inner];
    total -= log(p < least ? least : p);
    count += 1;
  });
  put_loss(total, count, loss, parts, divisor, sums);
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

extern "C" __global__ void softmax_loss_gradient(const T *prob, const T *label, const T *dloss, D *dx,
                                                 const double *parts, int counts, i64 positions, int classes, i64 inner,
                                                 int slices, T ignore, double divisor, i64 *fault, i64 code) {
  __shared__ double sums[32];
  T scale = (T)gradient_scale(dloss, divisor, parts, counts, sums);
  strips(positions, slices, [&](i64 at, int slice) {
    if (at >= positions) return;
    i64 row = row_of(at, classes, inner);
    int wanted = class_of(label, at, classes, ignore, slice == 0, fault, code);
    for (int c = slice; c < classes; c += slices) {
      i64 k = row + c * inner;
      dx[k] = wanted < 0 ? (T)0 : (prob[k] - (T)(c == wanted)) * scale;
    }
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
