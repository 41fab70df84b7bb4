#include "common.cuh"
#include "channel_maps.cuh"
#include "channels.cuh"
#include "columns.cuh"
#include "batch_norm.cuh"

// The gradient that a ReLU passes on; its input is made again as it was on the way up.
__device__ __forceinline__ T passed(T dy, T xhat, T gamma, T beta, int relu) {
  return relu && !(fma(gamma, xhat, beta) > 0) ? (T)0 : dy;
}

struct Backward {
  double *parts;
  Factors *factors;
  const T *inv_std;
  Shift shift;
  D *dgamma, *dbeta;
  int accumulate;
  double count;
  i64 channels, splits;
  __device__ __forceinline__ Factors made(i64 c, double plain, double along) const {
    return Factors{(T)(plain / count), (T)(along / count), shift.times(c) * inv_std[c], 0};
  }
  __device__ __forceinline__ void keep(i64 c, double plain, double along) const {
    if (dgamma) dgamma[c] = (T)along + (accumulate ? dgamma[c] : (T)0);
    if (dbeta) dbeta[c] = (T)plain + (accumulate ? dbeta[c] : (T)0);
  }
  __device__ __forceinline__ void finish(i64 c, double plain, double along) const {
    factors[c] = made(c, plain, along);
    keep(c, plain, along);
  }
  __device__ __forceinline__ void put(i64 c, i64 s, double plain, double along) const {
    if (splits == 1) {
      finish(c, plain, along);
      return;
    }
    parts[s * channels + c] = plain;
    parts[(splits + s) * channels + c] = along;
  }
  __device__ __forceinline__ void add(i64 at, double (&sums)[2]) const {  // the part's at a place
    sums[0] += parts[at];
    sums[1] += parts[at + splits * channels];
  }
  // For `map_joined`; the first blocks keep the sums.
  template <class B> __device__ __forceinline__ Factors join(const B &block, double *shared) const {
    i64 c = block.joined();
    double sums[2];
    block.join(splits, sums, shared, [&](i64 at, double(&sums)[2]) { add(at, sums); });
    if (block.split == 0 && block.joins()) keep(c, sums[0], sums[1]);
    return c < channels ? made(c, sums[0], sums[1]) : Factors{};
  }
};

#define BACKWARD                                                                                                \
  Backward to = {parts,      (Factors *)factors,      inv_std,  {gamma, beta, relu}, dgamma, dbeta, accumulate, \
                 (double)outer * inner, channels, splits}

// What sums are taken of: the gradient of y, and xhat. GROUP loads are in flight at once where channels have runs.
struct Given {
  enum { GROUP = 4 };
  template <int W> using Loaded = Lots<W>;
  const D *xhat, *dy;
  template <int W> __device__ __forceinline__ Lots<W> load(i64 at) const { return ::load<W>(dy, xhat, at); }
  template <int W> __device__ __forceinline__ Lots<W> take(const Lots<W> &lots) const { return lots; }
};

// The gradient of y is that of a sum of it and another array, with a ReLU behind, whose top two others read. It is made
// of their gradients, `one` and `two`, written to g and, unless that is null, to `total`, and counts as it is written.
template <int W> struct Pair { i64 at; Lots<W> both; Lot<W> top, xhat; };

struct Summed {
  enum { GROUP = 2 };
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

template <int W, class S>
__device__ __forceinline__ void sums(S source, Backward to, i64 outer, i64 inner, double *shared) {
  i64 s = quotient(blockIdx.x, to.channels), c = blockIdx.x - s * to.channels;
  T gamma = to.shift.times(c), beta = to.shift.plus(c), plain = 0, along = 0;
  int relu = to.shift.relu;
  for_places<W, S::GROUP>(
      to.channels, inner, c, Part(outer * (inner / W), s, to.splits), threadIdx.x, blockDim.x,
      [=](const Walk<W> &walk) { return source.template load<W>(walk.at); },
      [&](const typename S::template Loaded<W> &found) {
        Lots<W> lots = source.template take<W>(found);
        T one = 0, other = 0;
#pragma unroll
        for (int k = 0; k < W; k++) {
          T g = passed(lots.a.at[k], lots.b.at[k], gamma, beta, relu);
          one += g;
          other += g * lots.b.at[k];
        }
        plain += one;
        along += other;
      });
  double all = block_sum((double)plain, shared), all_along = block_sum((double)along, shared);
  if (threadIdx.x == 0) to.put(c, s, all, all_along);
}

template <class S>
__device__ __forceinline__ void all_sums(S source, Backward to, i64 outer, i64 inner) {
  __shared__ double shared[32];
  if (whole_packs(inner))
    sums<PACK>(source, to, outer, inner, shared);
  else
    sums<1>(source, to, outer, inner, shared);
}

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

template <int W, class S>
__device__ __forceinline__ void column_sums(S source, Backward to, i64 outer, int width, double *shared) {
  ColumnBlock<W> block(blockIdx.x, outer, to.channels, to.splits, width);
  T gamma[W], beta[W], plain[W] = {}, along[W] = {};
  int relu = to.shift.relu;
#pragma unroll
  for (int k = 0; k < W; k++) {
    gamma[k] = block.inside ? to.shift.times(block.c + k) : (T)0;
    beta[k] = block.inside ? to.shift.plus(block.c + k) : (T)0;
  }
  auto put_one = [&](const typename S::template Loaded<W> &found) {
    Lots<W> lots = source.template take<W>(found);
#pragma unroll
    for (int k = 0; k < W; k++) {
      T g = passed(lots.a.at[k], lots.b.at[k], gamma[k], beta[k], relu);
      plain[k] += g;
      along[k] += g * lots.b.at[k];
    }
  };
  block.template each<2>(
      [=](i64 at) { return source.template load<W>(at); },
      [&](const typename S::template Loaded<W>(&rows)[2]) { put_one(rows[0]), put_one(rows[1]); }, put_one);
  double all[W], all_along[W];
#pragma unroll
  for (int k = 0; k < W; k++) all[k] = plain[k], all_along[k] = along[k];
  block.sum(all, shared);
  block.sum(all_along, shared);
  if (block.row == 0 && block.inside) {
#pragma unroll
    for (int k = 0; k < W; k++) to.put(block.c + k, block.split, all[k], all_along[k]);
  }
}

template <class S>
__device__ __forceinline__ void all_column_sums(S source, Backward to, i64 outer, int width) {
  __shared__ double shared[COLUMN_THREADS * PACK];
  if (to.channels % PACK == 0)
    column_sums<PACK>(source, to, outer, width, shared);
  else
    column_sums<1>(source, to, outer, width, shared);
}

extern "C" __global__ void __launch_bounds__(256, CROWD(4))
    backward_sums_columns(const D *xhat, const D *dy, const T *inv_std, const D *gamma, const D *beta, D *dgamma,
                          D *dbeta, double *parts, void *factors, i64 outer, i64 channels, i64 inner, i64 splits,
                          int relu, int accumulate, int width) {
  BACKWARD;
  all_column_sums(Given{xhat, dy}, to, outer, width);
}

extern "C" __global__ void __launch_bounds__(256, CROWD(4))
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
  __shared__ double shared[16 * ABREAST];
  BACKWARD;
  i64 c = (i64)blockIdx.x * ABREAST + threadIdx.x % ABREAST;
  double joined[2];
  sum_parts(c, channels, splits, joined, shared, [&](i64 at, double(&sums)[2]) { to.add(at, sums); });
  if (threadIdx.x < ABREAST && c < channels) to.finish(c, joined[0], joined[1]);
}

struct Gradient {
  typedef ::At At;
  enum { GROUP = 2 };
  const D *xhat, *dy;
  D *dx;
  const Factors *factors;  // of channels from `first` on
  Shift shift;
  i64 first;
  __device__ __forceinline__ At at(i64 c) const { return At{factors[c - first], shift.times(c), shift.plus(c)}; }
  template <int W> __device__ __forceinline__ Lots<W> load(i64 i) const { return ::load<W>(dy, xhat, i); }
  template <class V> __device__ __forceinline__ void apply(const At &at, V &v, int j) const {
    T g = passed(v.a.at[j], v.b.at[j], at.gamma, at.beta, shift.relu);
    v.a.at[j] = (g - at.by.mean - v.b.at[j] * at.by.rest) * at.by.scale;
  }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lots<W> &v) const { ::store<W>(dx, i, v.a); }
};

extern "C" __global__ void __launch_bounds__(256, CROWD(4))
    backward_map(const D *xhat, const D *dy, D *dx, const void *factors, const D *gamma, const D *beta, i64 n,
                 i64 channels, i64 inner, int relu) {
  Gradient map = {xhat, dy, dx, (const Factors *)factors, {gamma, beta, relu}, 0};
  map_channels(map, n, channels, inner, aligned(xhat) && aligned(dy) && aligned(dx), true);
}

extern "C" __global__ void __launch_bounds__(256, CROWD(4))
    backward_map_joined(const D *xhat, const D *dy, D *dx, i64 chunks, int width, const T *inv_std, const D *gamma,
                        const D *beta, D *dgamma, D *dbeta, double *parts, void *factors, i64 outer, i64 channels,
                        i64 inner, i64 splits, int relu, int accumulate) {
  BACKWARD;
  map_joined(to, outer, chunks, width, [=](const Factors *found, i64 first) {
    return Gradient{xhat, dy, dx, found, {gamma, beta, relu}, first};
  });
}
