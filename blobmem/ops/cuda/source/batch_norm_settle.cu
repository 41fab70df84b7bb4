#include "common.cuh"
#include "channel_maps.cuh"
#include "channels.cuh"
#include "moments.cuh"
#include "columns.cuh"
#include "batch_norm.cuh"
#include "batch_norm_moments.cuh"

// What a forward pass leaves of moments. It is apart, as it is compiled for the dtype of statistics.
extern "C" __global__ void __launch_bounds__(256)
    settle(const double *moments, T *mean, T *inv_std, T *running_mean, T *running_var, T *factor, i64 channels,
           double count, double eps, double fraction) {
  Kept kept = {mean, mean + channels, inv_std, running_mean, running_var, factor, count, eps, fraction};
  FOR(c, channels) kept.keep(c, Statistics{moments[c], moments[channels + c]});
}
