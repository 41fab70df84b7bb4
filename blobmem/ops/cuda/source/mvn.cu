#include "common.cuh"
#include "channels.cuh"
#include "moments.cuh"

// Rows are the channels of arrays (1, rows, size). `moments` are those of their parts, where they have several.

// What x - mean is multiplied by.
__device__ __forceinline__ double inverse(double deviation, int scaled, double eps) {
  return scaled ? 1 / (deviation + eps) : 1;
}

template <int W>
__device__ __forceinline__ void normalize_row(const D *x, D *y, const double *moments, i64 rows, i64 size, i64 splits,
                                              int scaled, double eps, double *shared) {
  i64 row = blockIdx.x / splits, s = blockIdx.x % splits;
  Statistics all = channel_statistics<W>(x, moments, 1, rows, size, splits, row, shared);
  Normalizer f(all.mean, inverse(sqrt(all.spread / size), scaled, eps));
  map_places<W, 4>(
      rows, size, row, Part(size / W, s, splits), threadIdx.x, blockDim.x, [=](i64 at) { return load<W>(x, at); },
      [=](i64 at, Lot<W> lot) {
#pragma unroll
        for (int i = 0; i < W; i++) lot.at[i] = f(lot.at[i]);
        store<W>(y, at, lot);
      });
}

extern "C" __global__ void __launch_bounds__(1024)
    mvn(const D *x, D *y, const double *moments, i64 rows, i64 size, i64 splits, int scaled, double eps) {
  __shared__ double shared[32];
  if (whole_packs(size))
    normalize_row<PACK>(x, y, moments, rows, size, splits, scaled, eps, shared);
  else
    normalize_row<1>(x, y, moments, rows, size, splits, scaled, eps, shared);
}

struct Sums { double plain, along; };  // of dy and of (x - mean) * dy

template <int W>
__device__ __forceinline__ Sums sums_of(const D *x, const D *dy, Normalizer f, i64 rows, i64 size, i64 row, Part part,
                                        double *shared) {
  T plain = 0, along = 0;
  for_places<W, W == 1 ? 4 : 2>(
      rows, size, row, part, threadIdx.x, blockDim.x, [=](const Walk<W> &walk) { return load<W>(dy, x, walk.at); },
      [&](const Lots<W> &lots) {
        T a = 0, b = 0;
#pragma unroll
        for (int i = 0; i < W; i++) {
          a += lots.a.at[i];
          b += lots.a.at[i] * f(lots.b.at[i]);
        }
        plain += a;
        along += b;
      });
  Sums sums;
  sums.plain = block_sum((double)plain, shared);
  sums.along = block_sum((double)along, shared);
  return sums;
}

template <int W>
__device__ __forceinline__ void row_gradient_sums(const D *x, const D *dy, const double *moments, double *sums,
                                                  i64 rows, i64 size, i64 splits, double *shared) {
  i64 row = blockIdx.x / splits, s = blockIdx.x % splits;
  Statistics all = channel_statistics<W>(x, moments, 1, rows, size, splits, row, shared);
  Sums part = sums_of<W>(x, dy, Normalizer(all.mean, 1), rows, size, row, Part(size / W, s, splits), shared);
  if (threadIdx.x == 0) ((Sums *)sums)[blockIdx.x] = part;
}

extern "C" __global__ void mvn_gradient_sums(const D *x, const D *dy, const double *moments, double *sums, i64 rows,
                                             i64 size, i64 splits) {
  __shared__ double shared[32];
  if (whole_packs(size))
    row_gradient_sums<PACK>(x, dy, moments, sums, rows, size, splits, shared);
  else
    row_gradient_sums<1>(x, dy, moments, sums, rows, size, splits, shared);
}

template <int W>
__device__ __forceinline__ void row_gradient(const D *x, const D *dy, D *dx, const double *moments, const double *parts,
                                             i64 rows, i64 size, i64 splits, double eps, double *shared) {
  i64 row = blockIdx.x / splits, s = blockIdx.x % splits;
  Statistics all = channel_statistics<W>(x, moments, 1, rows, size, splits, row, shared);
  Sums sums;
  if (splits > 1) {
    sums.plain = block_sum_of_pairs(parts + 2 * row * splits, splits, shared);
    sums.along = block_sum_of_pairs(parts + 2 * row * splits + 1, splits, shared);
  } else {
    sums = sums_of<W>(x, dy, Normalizer(all.mean, 1), rows, size, row, Part(size / W, 0, 1), shared);
  }
  double deviation = sqrt(all.spread / size), factor = inverse(deviation, 1, eps);
  Normalizer f(all.mean, deviation > 0 ? sums.along / size * factor / deviation : 0);
  T a = (T)(sums.plain / size), scale = (T)factor;
  map_places<W, W == 1 ? 4 : 2>(
      rows, size, row, Part(size / W, s, splits), threadIdx.x, blockDim.x, [=](i64 at) { return load<W>(dy, x, at); },
      [=](i64 at, Lots<W> lots) {
#pragma unroll
        for (int i = 0; i < W; i++) lots.a.at[i] = (lots.a.at[i] - a - f(lots.b.at[i])) * scale;
        store<W>(dx, at, lots.a);
      });
}

extern "C" __global__ void __launch_bounds__(1024)
    mvn_gradient(const D *x, const D *dy, D *dx, const double *moments, const double *sums, i64 rows, i64 size,
                 i64 splits, double eps) {
  __shared__ double shared[32];
  if (whole_packs(size))
    row_gradient<PACK>(x, dy, dx, moments, sums, rows, size, splits, eps, shared);
  else
    row_gradient<1>(x, dy, dx, moments, sums, rows, size, splits, eps, shared);
}
