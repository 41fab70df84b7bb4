#include "loss.cuh"

extern "C" __global__ void euclidean_loss(const D *a, const D *b, D *diff, T *loss, double *parts, i64 n,
                                          double divisor) {
  __shared__ double sums[32];
  double total = 0;
  map2(a, b, diff, n, [&](T v, T w) {
    T d = v - w;
    total += (double)d * (double)d;
    return d;
  });
  put_loss(total, 0, loss, parts, divisor, sums);
}

extern "C" __global__ void euclidean_gradient(const D *diff, const T *dloss, D *da, i64 n, double sign,
                                              double divisor) {
  T scale = (T)(sign * (double)dloss[0] / divisor);
  map1(diff, da, n, [=](T d) { return d * scale; });
}

extern "C" __global__ void sigmoid_cross_entropy(const D *x, const T *target, T *loss, double *parts, i64 n, T ignore,
                                                 double divisor) {
  __shared__ double sums[32];
  double total = 0, count = 0;
  FOR(i, n) {
    if (trunc(target[i]) == ignore) continue;
    double v = (double)x[i], wanted = (double)target[i];
    // log(1 + exp(v)) - v * wanted, without overflow
    total += (v < 0 ? 0 : v) - v * wanted + log1p(exp(-fabs(v)));
    count += 1;
  }
  put_loss(total, count, loss, parts, divisor, sums);
}

// parts[block] = how many targets are not to be ignored.
extern "C" __global__ void count_targets(const T *target, double *parts, i64 n, T ignore) {
  __shared__ double sums[32];
  double count = 0;
  FOR(i, n) count += trunc(target[i]) != ignore;
  count = block_sum(count, sums);
  if (threadIdx.x == 0) parts[blockIdx.x] = count;
}

extern "C" __global__ void sigmoid_cross_entropy_gradient(const D *x, const T *target, const T *dloss, D *dx,
                                                          const double *parts, int counts, i64 n, T ignore,
                                                          double divisor) {
  __shared__ double sums[32];
  T scale = (T)gradient_scale(dloss, divisor, parts, counts, sums);
  map2(x, target, dx, n, [=](T v, T wanted) {
    if (trunc(wanted) == ignore) return (T)0;
    T small = exp(-fabs(v));
    return scale * ((v < 0 ? small : (T)1) / (1 + small) - wanted);
  });
}

// The squared distance of the row at `row` in a and in b, within `strips`.
__device__ __forceinline__ double squared_distance(const D *a, const D *b, bool inside, i64 row, int values, int slice,
                                                   int slices, double *shared) {
  double sum = 0;
  if (!inside) values = 0;
  for (int j = slice; j < values; j += slices) {
    double d = (double)a[row + j] - (double)b[row + j];
    sum += d * d;
  }
  return strip_sum(sum, shared, slices);
}

extern "C" __global__ void contrastive_loss(const D *a, const D *b, const T *similar, T *loss, double *parts, i64 batch,
                                            int values, int slices, double margin, int legacy, double divisor) {
  __shared__ double shared[THREADS];
  __shared__ double sums[32];
  double total = 0;
  strips(batch, slices, [&](i64 at, int slice) {
    double squared = squared_distance(a, b, at < batch, at * values, values, slice, slices, shared);
    if (slice > 0 || at >= batch) return;
    if (trunc(similar[at]) != 0) {
      total += squared;
    } else {
      double gap = margin - (legacy ? squared : sqrt(squared));
      if (!(gap <= 0)) total += legacy ? gap : gap * gap;  // not a number counts
    }
  });
  put_loss(total, 0, loss, parts, divisor, sums);
}

extern "C" __global__ void contrastive_gradient(const D *a, const D *b, const T *similar, const T *dloss, D *da,
                                                i64 batch, int values, int slices, double margin, int legacy,
                                                double no_zero, double divisor) {
  __shared__ double shared[THREADS];
  double scale = (double)dloss[0] / divisor;
  strips(batch, slices, [&](i64 at, int slice) {
    i64 row = at * values;
    double squared = squared_distance(a, b, at < batch, row, values, slice, slices, shared), factor = 1;
    if (at >= batch) return;
    if (trunc(similar[at]) == 0) {
      double distance = sqrt(squared), gap = margin - (legacy ? squared : distance);
      factor = gap <= 0 ? 0 : legacy ? -1 : -gap / (distance + no_zero);
    }
    T by = (T)(scale * factor);
    for (int j = slice; j < values; j += slices) da[row + j] = by * (a[row + j] - b[row + j]);
  });
}
