#include "common.cuh"
#include "channel_maps.cuh"

__device__ __forceinline__ T passed(T y, T dy, T slope) { return y > 0 ? dy : slope == 0 ? (T)0 : dy * slope; }

// y = relu(a + b); y may be a or b.
extern "C" __global__ void sum_relu(const D *a, const D *b, D *y, i64 n, T slope) {
  map2(a, b, y, n, [=](T u, T v) { return leaky(u + v, slope); });
}

// y = relu(a * gamma_a[c] + beta_a[c] + b * gamma_b[c] + beta_b[c]), each product rounded with what is added to it, as in
// norm.cu. Betas may be null, and so may gamma_b: b as it is, for which a negative zero is added to it.
struct ScaledSum {
  struct At { T times_a, plus_a, times_b, plus_b; };
  enum { GROUP = 2 };
  const D *a, *gamma_a, *beta_a, *b, *gamma_b, *beta_b;
  D *y;
  T slope;
  __device__ __forceinline__ At at(i64 c) const {
    return At{gamma_a[c], beta_a ? beta_a[c] : (T)0, gamma_b ? gamma_b[c] : (T)1,
              beta_b ? beta_b[c] : gamma_b ? (T)0 : -(T)0};
  }
  template <int W> __device__ __forceinline__ Lots<W> load(i64 i) const { return ::load<W>(a, b, i); }
  template <class V> __device__ __forceinline__ void apply(const At &at, V &v, int j) const {
    T one = fma(at.times_a, v.a.at[j], at.plus_a), other = fma(at.times_b, v.b.at[j], at.plus_b);
    v.a.at[j] = leaky(one + other, slope);
  }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lots<W> &v) const { ::store<W>(y, i, v.a); }
};

extern "C" __global__ void __launch_bounds__(256, 4)
    scale_sum_relu(const D *a, const D *gamma_a, const D *beta_a, const D *b, const D *gamma_b, const D *beta_b, D *y,
                   i64 n, i64 channels, i64 inner, T slope) {
  ScaledSum map = {a, gamma_a, beta_a, b, gamma_b, beta_b, y, slope};
  map_channels(map, n, channels, inner, aligned(a) && aligned(b) && aligned(y));
}

// The weights and the bias of a convolution that makes what batch norm by given statistics, and a scale, make of that with
// w and b; b, gamma and beta may be null. A block takes the `each` weights of an output.
extern "C" __global__ void normalizing_weights(const D *w, const D *b, const T *mean, const T *inv_std, const D *gamma,
                                               const D *beta, D *weights, D *bias, i64 each, i64 outputs) {
  i64 c = blockIdx.x;
  T times = gamma ? inv_std[c] * gamma[c] : inv_std[c];
  for (i64 i = threadIdx.x; i < each; i += blockDim.x) weights[c * each + i] = w[c * each + i] * times;
  if (threadIdx.x == 0) {
    T plus = (b ? b[c] - mean[c] : -mean[c]) - mean[outputs + c];
    bias[c] = fma(plus, times, beta ? (T)beta[c] : (T)0);
  }
}

// dy, da and db all become g where y is positive, slope * g elsewhere; g is `one`, plus `two` if that is not null. da and
// db may be null; arrays may be the same.
extern "C" __global__ void sum_relu_gradient(const D *y, const D *one, const D *two, D *dy, D *da, D *db, i64 n,
                                             T slope) {
  bool whole = aligned(y) && aligned(one) && aligned(two) && aligned(dy) && aligned(da) && aligned(db);
  i64 packs = whole ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Lot<PACK> v = load<PACK>(y, i * PACK), g = load<PACK>(one, i * PACK);
    if (two) {
      Lot<PACK> more = load<PACK>(two, i * PACK);
#pragma unroll
      for (int j = 0; j < PACK; j++) g.at[j] += more.at[j];
    }
#pragma unroll
    for (int j = 0; j < PACK; j++) g.at[j] = passed(v.at[j], g.at[j], slope);
    store<PACK>(dy, i * PACK, g);
    if (da) store<PACK>(da, i * PACK, g);
    if (db) store<PACK>(db, i * PACK, g);
  }
#pragma unroll 1
  FOR(k, n - packs * PACK) {
    i64 i = packs * PACK + k;
    T g = passed(y[i], two ? one[i] + two[i] : one[i], slope);
    dy[i] = g;
    if (da) da[i] = g;
    if (db) db[i] = g;
  }
}
