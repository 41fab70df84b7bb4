#include "common.cuh"

// Without a slope nothing is multiplied, as in neuron.cu.
__device__ __forceinline__ T leaky(T v, T slope) { return v > 0 ? v : slope == 0 && v <= 0 ? (T)0 : v * slope; }
__device__ __forceinline__ T passed(T y, T dy, T slope) { return y > 0 ? dy : slope == 0 ? (T)0 : dy * slope; }

// y = relu(a + b); y may be a or b.
extern "C" __global__ void sum_relu(const T *a, const T *b, T *y, i64 n, T slope) {
  map2(a, b, y, n, [=](T u, T v) { return leaky(u + v, slope); });
}

// dy, da and db all become g where y is positive, slope * g elsewhere; g is `one`, plus `two` if that is not null. da and
// db may be null; arrays may be the same.
extern "C" __global__ void sum_relu_gradient(const T *y, const T *one, const T *two, T *dy, T *da, T *db, i64 n,
                                             T slope) {
  bool whole = aligned(y) && aligned(one) && aligned(two) && aligned(dy) && aligned(da) && aligned(db);
  i64 packs = whole ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Pack v = ((const Pack *)y)[i], g = ((const Pack *)one)[i];
    if (two) {
      Pack more = ((const Pack *)two)[i];
#pragma unroll
      for (int j = 0; j < PACK; j++) g.at[j] += more.at[j];
    }
#pragma unroll
    for (int j = 0; j < PACK; j++) g.at[j] = passed(v.at[j], g.at[j], slope);
    ((Pack *)dy)[i] = g;
    if (da) ((Pack *)da)[i] = g;
    if (db) ((Pack *)db)[i] = g;
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
