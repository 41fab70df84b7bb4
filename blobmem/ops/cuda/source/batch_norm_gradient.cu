#include "common.cuh"
#include "channel_maps.cuh"
#include "channels.cuh"
#include "columns.cuh"
#include "batch_norm.cuh"
#include "batch_norm_sums.cuh"

struct Backward : SumParts {
  Factors *factors;
  const T *inv_std;
  Totals totals;
  double count;
  __device__ __forceinline__ Factors made(i64 c, double plain, double along) const {
    return Factors{(T)(plain / count), (T)(along / count), shift.times(c) * inv_std[c], 0};
  }
  __device__ __forceinline__ void finish(i64 c, double plain, double along) const {
    factors[c] = made(c, plain, along);
    totals.keep(c, plain, along);
  }
  // For `map_joined`; the first blocks keep the sums.
  template <class B> __device__ __forceinline__ Factors join(const B &block, double *shared) const {
    i64 c = block.joined();
    double sums[2];
    block.join(splits, sums, shared, [&](i64 at, double(&sums)[2]) { add(at, sums); });
    if (block.split == 0 && block.joins()) totals.keep(c, sums[0], sums[1]);
    return c < channels ? made(c, sums[0], sums[1]) : Factors{};
  }
};

#define BACKWARD                                                                                    \
  Backward to = {{parts, channels, splits, {gamma, beta, relu}}, (Factors *)factors, inv_std,       \
                 {dgamma, dbeta, accumulate}, (double)outer * inner}

// The gradient of y is that of a sum of it and another array, with a ReLU behind, whose top two others read. It is made
// of their gradients, `one` and `two`, written to g and, unless that is null, to `total`, and counts as it is written.
template <int W> struct Pair { i64 at; Lots<W> both; Lot<W> top, xhat; };

struct Summed {
  enum { GROUP = 2, ROWS = 2 };
  template <int W> using Loaded = Pair<W>;
  const D *xhat, *top, *one, *two;
  D *total, *g;
  T slope;
  template <int W> __device__ __forceinline__ Pair<W> load(i64 at) const {
    return Pair<W>{at, ::load<W>(one, two, at), ::load<W>(top, at), ::load<W>(xhat, at)};
  }
  template <int W> __device__ __forceinline__ Lots<W> take(const Pair<W> &found) const {
    Lots<W> lots = {found.both.a, found.xhat};
#pragma unroll
    for (int k = 0; k < W; k++) {
      T all = lots.a.at[k] + found.both.b.at[k];
      D kept;
      kept = found.top.at[k] > 0 ? all : slope == 0 ? (T)0 : all * slope;
      lots.a.at[k] = kept;
    }
    store<W>(g, found.at, lots.a);
    if (total) store<W>(total, found.at, lots.a);
    return lots;
  }
};

extern "C" __global__ void __launch_bounds__(256)
    backward_sums(const D *xhat, const D *dy, const T *inv_std, const D *gamma, const D *beta, D *dgamma, D *dbeta,
                  double *parts, void *factors, i64 outer, i64 channels, i64 inner, i64 splits, int relu,
                  int accumulate) {
  BACKWARD;
  all_sums(Given{xhat, dy}, to, outer, inner);
}

extern "C" __global__ void __launch_bounds__(256)
    summed_backward_sums(const D *xhat, const D *top, const D *one, const D *two, D *total, D *g, T slope,
                         const T *inv_std, const D *gamma, const D *beta, D *dgamma, D *dbeta, double *parts,
                         void *factors, i64 outer, i64 channels, i64 inner, i64 splits, int relu, int accumulate) {
  BACKWARD;
  to.shift.relu = 0;  // as given: known to the compiler, it saves registers
  all_sums(Summed{xhat, top, one, two, total, g, slope}, to, outer, inner);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    backward_sums_columns(const D *xhat, const D *dy, const T *inv_std, const D *gamma, const D *beta, D *dgamma,
                          D *dbeta, double *parts, void *factors, i64 outer, i64 channels, i64 inner, i64 splits,
                          int relu, int accumulate, int width) {
  BACKWARD;
  all_column_sums(Given{xhat, dy}, to, outer, width);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    summed_backward_sums_columns(const D *xhat, const D *top, const D *one, const D *two, D *total, D *g, T slope,
                                 const T *inv_std, const D *gamma, const D *beta, D *dgamma, D *dbeta, double *parts,
                                 void *factors, i64 outer, i64 channels, i64 inner, i64 splits, int relu,
                                 int accumulate, int width) {
  BACKWARD;
  to.shift.relu = 0;  // as given: known to the compiler, it saves registers
  all_column_sums(Summed{xhat, top, one, two, total, g, slope}, to, outer, width);
}

extern "C" __global__ void __launch_bounds__(512)
    backward_finish(const T *inv_std, const D *gamma, const D *beta, D *dgamma, D *dbeta, double *parts, void *factors,
                    i64 outer, i64 channels, i64 inner, i64 splits, int relu, int accumulate) {
  BACKWARD;
  join_sums(to);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    backward_map(const D *xhat, const D *dy, D *dx, const void *factors, const D *gamma, const D *beta, i64 n,
                 i64 channels, i64 inner, int relu) {
  Gradient map = {xhat, dy, dx, (const Factors *)factors, {gamma, beta, relu}, 0};
  map_channels(map, n, channels, inner, aligned(xhat) && aligned(dy) && aligned(dx), true);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    backward_map_joined(const D *xhat, const D *dy, D *dx, i64 chunks, int width, const T *inv_std, const D *gamma,
                        const D *beta, D *dgamma, D *dbeta, double *parts, void *factors, i64 outer, i64 channels,
                        i64 inner, i64 splits, int relu, int accumulate) {
  BACKWARD;
  map_joined(to, outer, chunks, width, [=](const Factors *found, i64 first) {
    return Gradient{xhat, dy, dx, found, {gamma, beta, relu}, first};
  });
}
