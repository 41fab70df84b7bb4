#include "common.cuh"
#include "channel_maps.cuh"
#include "channels.cuh"
#include "moments.cuh"
#include "columns.cuh"
#include "batch_norm.cuh"
#include "batch_norm_moments.cuh"
#include "batch_norm_sums.cuh"
#include "batch_norm_gathered.cuh"

// Batch normalisation of batches that come in slices.

#define GATHERED_MOMENTS                                                                                             \
  GatheredMoments to = {{parts, channels, splits, (double)outer * inner + (kept ? before : 0)}, moments, before, kept}

extern "C" __global__ void __launch_bounds__(256)
    gathered_moments(const D *x, double *moments, double *parts, void *factors, i64 outer, i64 channels, i64 inner,
                     i64 splits, double before, int kept) {
  GATHERED_MOMENTS;
  all_moments(x, to, outer, inner);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    gathered_moments_columns(const D *x, double *moments, double *parts, void *factors, i64 outer, i64 channels,
                             i64 inner, i64 splits, double before, int kept, int width) {
  GATHERED_MOMENTS;
  all_column_moments(x, to, outer, width);
}

extern "C" __global__ void __launch_bounds__(512)
    gathered_moments_finish(double *moments, double *parts, void *factors, i64 outer, i64 channels, i64 inner,
                            i64 splits, double before, int kept) {
  GATHERED_MOMENTS;
  join_moments(to);
}

#define GATHERED_SUMS GatheredSums to = {{parts, channels, splits, {gamma, beta, relu}}, sums, first, kept}

extern "C" __global__ void __launch_bounds__(256)
    gathered_sums(const D *xhat, const D *dy, const D *gamma, const D *beta, double *sums, double *parts, void *factors,
                  i64 outer, i64 channels, i64 inner, i64 splits, int relu, int first, int kept) {
  GATHERED_SUMS;
  all_sums(Given{xhat, dy}, to, outer, inner);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    gathered_sums_columns(const D *xhat, const D *dy, const D *gamma, const D *beta, double *sums, double *parts,
                          void *factors, i64 outer, i64 channels, i64 inner, i64 splits, int relu, int first, int kept,
                          int width) {
  GATHERED_SUMS;
  all_column_sums(Given{xhat, dy}, to, outer, width);
}

extern "C" __global__ void __launch_bounds__(512)
    gathered_sums_finish(const D *gamma, const D *beta, double *sums, double *parts, void *factors, i64 outer,
                         i64 channels, i64 inner, i64 splits, int relu, int first, int kept) {
  GATHERED_SUMS;
  join_sums(to);
}

extern "C" __global__ void __launch_bounds__(256)
    gradients(const double *sums, D *dgamma, D *dbeta, i64 channels, int accumulate) {
  Totals totals = {dgamma, dbeta, accumulate};
  FOR(c, channels) totals.keep(c, sums[c], sums[channels + c]);
}

// The gradient by the sums of a whole batch, whose channels have 1 / `share` numbers.
struct GradientGiven : Gradient {
  const T *inv_std;
  const double *sums;
  double share;
  i64 channels;
  __device__ __forceinline__ At at(i64 c) const {
    T times = shift.times(c), less = (T)(sums[c] * share), tilt = (T)(sums[channels + c] * share);
    return At{Factors{less, tilt, times * inv_std[c], 0}, times, shift.plus(c)};
  }
};

extern "C" __global__ void __launch_bounds__(256, 4)
    backward_given_map(const D *xhat, const D *dy, D *dx, const T *inv_std, const D *gamma, const D *beta,
                       const double *sums, double share, i64 n, i64 channels, i64 inner, int relu) {
  GradientGiven map = {{xhat, dy, dx, nullptr, {gamma, beta, relu}, 0}, inv_std, sums, share, channels};
  map_channels(map, n, channels, inner, aligned(xhat) && aligned(dy) && aligned(dx), true);
}
