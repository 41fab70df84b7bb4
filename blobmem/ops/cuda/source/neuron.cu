#include "common.cuh"
#include "channel_maps.cuh"

// Without a slope nothing is multiplied: an infinity times zero would be no number.
extern "C" __global__ void relu(const D *x, D *y, i64 n, T slope) {
  if (slope == 0)
    map1(x, y, n, [](T v) { return v <= 0 ? (T)0 : v; });
  else
    map1(x, y, n, [=](T v) { return v > 0 ? v : v * slope; });
}

// x may also be the output, whose sign is the same.
extern "C" __global__ void relu_gradient(const D *x, const D *dy, D *dx, i64 n, T slope) {
  if (slope == 0)
    map2(x, dy, dx, n, [](T v, T g) { return v > 0 ? g : (T)0; });
  else
    map2(x, dy, dx, n, [=](T v, T g) { return v > 0 ? g : g * slope; });
}

extern "C" __global__ void sigmoid(const D *x, D *y, i64 n) {
  map1(x, y, n, [](T v) { return sigmoid_of(v); });
}

extern "C" __global__ void sigmoid_gradient(const D *y, const D *dy, D *dx, i64 n) {
  map2(y, dy, dx, n, [](T s, T g) { return (1 - s) * s * g; });
}

extern "C" __global__ void tangent(const D *x, D *y, i64 n) {
  map1(x, y, n, [](T v) { return tanh(v); });
}

extern "C" __global__ void tangent_gradient(const D *y, const D *dy, D *dx, i64 n) {
  map2(y, dy, dx, n, [](T t, T g) { return (1 - t * t) * g; });
}

// base ^ exponent, the common powers without a logarithm.
__device__ __forceinline__ T power_of(T base, T exponent) {
  return exponent == 0 ? (T)1 : exponent == 1 ? base : exponent == 2 ? base * base : pow(base, exponent);
}

extern "C" __global__ void power(const D *x, D *y, i64 n, T exponent, T scale, T shift) {
  map1(x, y, n, [=](T v) { return power_of(v * scale + shift, exponent); });
}

extern "C" __global__ void power_gradient(const D *x, const D *dy, D *dx, i64 n, T exponent, T scale, T shift,
                                          T factor) {
  map2(x, dy, dx, n, [=](T v, T g) { return power_of(v * scale + shift, exponent) * factor * g; });
}

// The masks of four elements: what one block of random words decides on.
struct __align__(4) Masks { u8 at[4]; };

__device__ __forceinline__ bool in_fours(const D *x, const D *y, const u8 *mask) {
  return aligned(x) && aligned(y) && ((u64)mask & 3) == 0;
}

// Those go whose 24 random bits are below the threshold.
extern "C" __global__ void dropout(const D *x, D *y, u8 *mask, i64 n, unsigned threshold, T scale, unsigned k0,
                                   unsigned k1, unsigned c2, unsigned c3) {
  bool fours = in_fours(x, y, mask);
#pragma unroll 1
  FOR(i, (n + 3) / 4) {
    Words words = philox(k0, k1, c2, c3, i);
    if (fours && 4 * i + 4 <= n) {
      Lot<4> v = load<4>(x, 4 * i);
      Masks keep;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        keep.at[j] = words.at[j] >> 8 >= threshold;
        v.at[j] = keep.at[j] ? v.at[j] * scale : (T)0;
      }
      store<4>(y, 4 * i, v);
      ((Masks *)mask)[i] = keep;
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        i64 k = 4 * i + j;
        if (k < n) {
          mask[k] = words.at[j] >> 8 >= threshold;
          y[k] = mask[k] ? x[k] * scale : (T)0;
        }
      }
    }
  }
}

extern "C" __global__ void dropout_gradient(const D *dy, const u8 *mask, D *dx, i64 n, T scale) {
  i64 fours = in_fours(dy, dx, mask) ? n / 4 : 0;
#pragma unroll 1
  FOR(i, fours) {
    Lot<4> g = load<4>(dy, 4 * i);
    Masks keep = ((const Masks *)mask)[i];
#pragma unroll
    for (int j = 0; j < 4; j++) g.at[j] *= keep.at[j] * scale;
    store<4>(dx, 4 * i, g);
  }
#pragma unroll 1
  FOR(i, n - fours * 4) {
    i64 k = fours * 4 + i;
    dx[k] = dy[k] * (mask[k] * scale);
  }
}

extern "C" __global__ void prelu(const D *x, const D *slope, D *y, i64 n, i64 channels, i64 inner) {
  map1_channels(x, y, n, channels, inner, [=](i64 c, T v) { return v > 0 ? v : v * slope[c]; });
}

extern "C" __global__ void prelu_gradient(const D *x, const D *slope, const D *dy, D *dx, i64 n, i64 channels,
                                          i64 inner) {
  map2_channels(x, dy, dx, n, channels, inner, [=](i64 c, T v, T g) { return v > 0 ? g : g * slope[c]; });
}

extern "C" __global__ void fill(D *y, i64 n, T value) {
  map1(y, y, n, [=](T) { return value; });
}

template <class From, class To> __device__ __forceinline__ void convert_as(const void *x, void *y, i64 n) {
#pragma unroll 1
  FOR(i, n) ((To *)y)[i] = ((const From *)x)[i];
}

template <class From> __device__ __forceinline__ void convert_from(const void *x, void *y, i64 n, int to) {
  switch (to) {
    case 0: return convert_as<From, u8>(x, y, n);
    case 1: return convert_as<From, int>(x, y, n);
    case 2: return convert_as<From, i64>(x, y, n);
    case 3: return convert_as<From, float>(x, y, n);
    case 4: return convert_as<From, double>(x, y, n);
    case 5: return convert_as<From, D>(x, y, n);
  }
}

// From one type to another, both by number: uint8, int32, int64, float32, float64, D.
extern "C" __global__ void convert(const void *x, void *y, i64 n, int from, int to) {
  switch (from) {
    case 0: return convert_from<u8>(x, y, n, to);
    case 1: return convert_from<int>(x, y, n, to);
    case 2: return convert_from<i64>(x, y, n, to);
    case 3: return convert_from<float>(x, y, n, to);
    case 4: return convert_from<double>(x, y, n, to);
    case 5: return convert_from<D>(x, y, n, to);
  }
}
