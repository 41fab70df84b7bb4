#include "common.cuh"
#include "channel_maps.cuh"
#include "channels.cuh"
#include "moments.cuh"
#include "columns.cuh"
#include "batch_norm.cuh"
#include "batch_norm_moments.cuh"

struct Forward : MomentParts {
  Factors *factors;
  Kept kept;
  __device__ __forceinline__ Factors made(Statistics all) const {
    Normalizer f(all.mean, kept.inverse(all));
    return Factors{f.mean, f.rest, f.scale, 0};
  }
  __device__ __forceinline__ void finish(i64 c, Statistics all) const {
    factors[c] = made(all);
    kept.keep(c, all);
  }
  // For `map_joined`; the first blocks keep the statistics.
  template <class B> __device__ __forceinline__ Factors join(const B &block, double *shared) const {
    i64 c = block.joined();
    double first = c < channels ? parts[c] : 0, sums[2];
    block.join(splits, sums, shared, [&](i64 at, double(&sums)[2]) { add(at, first, sums); });
    Statistics all = joined(first, sums);
    if (block.split == 0 && block.joins()) kept.keep(c, all);
    return made(all);
  }
};

#define FORWARD                                                                                                    \
  Forward to = {{parts, channels, splits, (double)outer * inner},                                                  \
                (Factors *)factors,                                                                                \
                {mean, mean + channels, inv_std, running_mean, running_var, factor, (double)outer * inner, eps,    \
                 fraction}}

extern "C" __global__ void __launch_bounds__(256)
    forward_moments(const D *x, T *mean, T *inv_std, T *running_mean, T *running_var, T *factor, double *parts,
                    void *factors, i64 outer, i64 channels, i64 inner, i64 splits, double eps, double fraction) {
  FORWARD;
  all_moments(x, to, outer, inner);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    forward_moments_columns(const D *x, T *mean, T *inv_std, T *running_mean, T *running_var, T *factor, double *parts,
                            void *factors, i64 outer, i64 channels, i64 inner, i64 splits, double eps, double fraction,
                            int width) {
  FORWARD;
  all_column_moments(x, to, outer, width);
}

extern "C" __global__ void __launch_bounds__(512)
    forward_finish(T *mean, T *inv_std, T *running_mean, T *running_var, T *factor, double *parts, void *factors,
                   i64 outer, i64 channels, i64 inner, i64 splits, double eps, double fraction) {
  FORWARD;
  join_moments(to);
}

struct Normalize {
  typedef ::At At;
  enum { GROUP = 4 };
  const D *x;
  D *y, *xhat;
  const Factors *factors;  // of channels from `first` on
  Shift shift;
  i64 first;
  __device__ __forceinline__ At at(i64 c) const { return At{factors[c - first], shift.times(c), shift.plus(c)}; }
  template <int W> __device__ __forceinline__ Lots<W> load(i64 i) const {
    Lots<W> lots;
    lots.a = ::load<W>(x, i);
    return lots;
  }
  template <class V> __device__ __forceinline__ void apply(const At &at, V &v, int j) const {
    T normal = (v.a.at[j] - at.by.mean - at.by.rest) * at.by.scale, value = fma(at.gamma, normal, at.beta);
    v.a.at[j] = shift.relu && value <= 0 ? (T)0 : value;
    v.b.at[j] = normal;
  }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lots<W> &v) const {
    ::store<W>(y, i, v.a);
    if (xhat) ::store<W>(xhat, i, v.b);
  }
};

extern "C" __global__ void __launch_bounds__(256, 4)
    forward_map(const D *x, D *y, D *xhat, const void *factors, const D *gamma, const D *beta, i64 n, i64 channels,
                i64 inner, int relu) {
  Normalize map = {x, y, xhat, (const Factors *)factors, {gamma, beta, relu}, 0};
  map_channels(map, n, channels, inner, aligned(x) && aligned(y) && aligned(xhat), true);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    forward_map_joined(const D *x, D *y, D *xhat, const D *gamma, const D *beta, int relu, i64 chunks, int width, T *mean,
                       T *inv_std, T *running_mean, T *running_var, T *factor, double *parts, void *factors, i64 outer,
                       i64 channels, i64 inner, i64 splits, double eps, double fraction) {
  FORWARD;
  map_joined(to, outer, chunks, width, [=](const Factors *found, i64 first) {
    return Normalize{x, y, xhat, found, {gamma, beta, relu}, first};
  });
}

// The same by statistics that an earlier launch has left.
struct NormalizeGiven : Normalize {
  const T *mean, *rest, *inv_std;
  __device__ __forceinline__ At at(i64 c) const {
    return At{Factors{mean[c], rest[c], inv_std[c], 0}, shift.times(c), shift.plus(c)};
  }
};

extern "C" __global__ void __launch_bounds__(256, 4)
    given_map(const D *x, D *y, D *xhat, const T *mean, const T *inv_std, const D *gamma, const D *beta, i64 n,
              i64 channels, i64 inner, int relu) {
  NormalizeGiven map = {{x, y, xhat, nullptr, {gamma, beta, relu}, 0}, mean, mean + channels, inv_std};
  map_channels(map, n, channels, inner, aligned(x) && aligned(y) && aligned(xhat), true);
}

// The same and a sum: y = relu(gamma * xhat + beta + b).
template <class N> struct NormalizeSum {
  typedef ::At At;
  enum { GROUP = 2 };
  N one;
  const D *b;
  T slope;
  __device__ __forceinline__ At at(i64 c) const { return one.at(c); }
  template <int W> __device__ __forceinline__ Lots<W> load(i64 i) const { return ::load<W>(one.x, b, i); }
  template <class V> __device__ __forceinline__ void apply(const At &at, V &v, int j) const {
    T other = v.b.at[j];
    one.apply(at, v, j);
    v.a.at[j] = leaky(v.a.at[j] + other, slope);
  }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lots<W> &v) const { one.template store<W>(i, v); }
};

extern "C" __global__ void __launch_bounds__(256, 4)
    forward_sum_map(const D *x, const D *b, D *y, D *xhat, const void *factors, const D *gamma, const D *beta, i64 n,
                    i64 channels, i64 inner, T slope) {
  NormalizeSum<Normalize> map = {{x, y, xhat, (const Factors *)factors, {gamma, beta, 0}, 0}, b, slope};
  map_channels(map, n, channels, inner, aligned(x) && aligned(b) && aligned(y) && aligned(xhat), true);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    given_sum_map(const D *x, const D *b, D *y, D *xhat, const T *mean, const T *inv_std, const D *gamma,
                  const D *beta, i64 n, i64 channels, i64 inner, T slope) {
  NormalizeGiven one = {{x, y, xhat, nullptr, {gamma, beta, 0}, 0}, mean, mean + channels, inv_std};
  NormalizeSum<NormalizeGiven> map = {one, b, slope};
  map_channels(map, n, channels, inner, aligned(x) && aligned(b) && aligned(y) && aligned(xhat), true);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    forward_sum_map_joined(const D *x, const D *b, D *y, D *xhat, const D *gamma, const D *beta, T slope, i64 chunks,
                           int width, T *mean, T *inv_std, T *running_mean, T *running_var, T *factor, double *parts,
                           void *factors, i64 outer, i64 channels, i64 inner, i64 splits, double eps, double fraction) {
  FORWARD;
  map_joined(to, outer, chunks, width, [=](const Factors *found, i64 first) {
    return NormalizeSum<Normalize>{{x, y, xhat, found, {gamma, beta, 0}, first}, b, slope};
  });
}

// y = (x - mean) / sqrt(variance + eps) with the running sums over their factor (0 where that is 0), times gamma, plus
// beta, and where negative 0 with `relu`; mean, gamma and beta may be null.
struct Running {
  struct At { T mean, scale, gamma, beta; };
  enum { GROUP = 4 };
  const D *x, *gamma, *beta;
  const T *mean, *var;
  D *y;
  T weight, eps;
  int relu;
  __device__ __forceinline__ At at(i64 c) const {
    return At{mean ? mean[c] * weight : (T)0, 1 / sqrt(var[c] * weight + eps), gamma ? gamma[c] : (T)1,
              beta ? beta[c] : (T)0};
  }
  template <int W> __device__ __forceinline__ Lot<W> load(i64 i) const { return ::load<W>(x, i); }
  template <class V> __device__ __forceinline__ void apply(const At &at, V &v, int j) const {
    T value = fma(at.gamma, (v.at[j] - at.mean) * at.scale, at.beta);
    v.at[j] = relu && value <= 0 ? (T)0 : value;
  }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lot<W> &v) const { ::store<W>(y, i, v); }
};

extern "C" __global__ void __launch_bounds__(256, 4)
    batch_norm_inference(const D *x, D *y, const T *mean, const T *var, const T *factor, const D *gamma, const D *beta,
                         i64 n, i64 channels, i64 inner, double eps, int relu) {
  Running map = {x, gamma, beta, mean, var, y, factor[0] != 0 ? 1 / factor[0] : (T)0, (T)eps, relu};
  map_channels(map, n, channels, inner, aligned(x) && aligned(y));
}

// The same of a sum: total = a + b, unless that is null, and y = what becomes of it before it is rounded.
struct SumRunning {
  typedef Running::At At;
  enum { GROUP = 2 };
  Running one;
  const D *b;
  D *total;
  __device__ __forceinline__ At at(i64 c) const { return one.at(c); }
  template <int W> __device__ __forceinline__ Lots<W> load(i64 i) const { return ::load<W>(one.x, b, i); }
  template <class V> __device__ __forceinline__ void apply(const At &at, V &v, int j) const {
    v.a.at[j] = v.b.at[j] = v.a.at[j] + v.b.at[j];
    one.apply(at, v.a, j);
  }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lots<W> &v) const {
    if (total) ::store<W>(total, i, v.b);
    one.template store<W>(i, v.a);
  }
};

extern "C" __global__ void __launch_bounds__(256, 4)
    sum_inference(const D *a, const D *b, D *total, D *y, const T *mean, const T *var, const T *factor, const D *gamma,
                  const D *beta, i64 n, i64 channels, i64 inner, double eps, int relu) {
  Running one = {a, gamma, beta, mean, var, y, factor[0] != 0 ? 1 / factor[0] : (T)0, (T)eps, relu};
  SumRunning map = {one, b, total};
  map_channels(map, n, channels, inner, aligned(a) && aligned(b) && aligned(total) && aligned(y));
}
