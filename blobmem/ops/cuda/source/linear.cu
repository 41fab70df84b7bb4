#include "common.cuh"
#include "channel_maps.cuh"

struct Spread {
  typedef T At;
  enum { GROUP = 4 };
  const D *b;
  D *y;
  i64 columns;
  __device__ __forceinline__ At at(i64 c) const {
    while (c >= columns) c -= columns;
    return b[c];
  }
  template <int W> __device__ __forceinline__ Lot<W> load(i64) const { return Lot<W>(); }
  template <class V> __device__ __forceinline__ void apply(At v, V &values, int j) { values.at[j] = v; }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lot<W> &v) const { ::store<W>(y, i, v); }
};

// y[r, c] = b[c]; n elements in all. So many rows are taken for one that they make whole packs.
extern "C" __global__ void spread(const D *b, D *y, i64 n, i64 columns) {
  Spread map = {b, y, columns};
  i64 channels = columns;
  while (channels % PACK != 0) channels += columns;
  map_channels(map, n, quotient(n, channels) * channels == n ? channels : columns, 1, aligned(y));
}

// y[r, c] += b[c], with ReLU if wanted; n elements in all
extern "C" __global__ void add_bias(D *y, const D *b, i64 n, i64 columns, int relu) {
  map1_channels(y, y, n, columns, 1, [=](i64 c, T v) {
    v += b[c];
    return relu && v <= 0 ? (T)0 : v;
  });
}

// y (rows, columns), n elements, = x w^T, plus b if there is one, with ReLU if wanted: a warp for each sum of `depth` products.
extern "C" __global__ void few_products(const D *x, const D *w, const D *b, D *y, i64 n, i64 columns, i64 depth, int relu) {
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, c = i % columns;
  if (i >= n) return;
  int lane = threadIdx.x & 31;
  const D *row = x + i / columns * depth, *weights = w + c * depth;
  T total = 0;
  if (depth % PACK == 0 && aligned(x) && aligned(w))
#pragma unroll 4
    for (i64 k = lane * PACK; k < depth; k += 32 * PACK) {
      Lot<PACK> u = load<PACK>(row, k), v = load<PACK>(weights, k);
#pragma unroll
      for (int j = 0; j < PACK; j++) total += u.at[j] * v.at[j];
    }
  else
#pragma unroll 4
    for (i64 k = lane; k < depth; k += 32) total += (T)row[k] * (T)weights[k];
  double sum = total;
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  T v = (T)sum + (b ? (T)b[c] : (T)0);
  if (lane == 0) y[i] = relu && v <= 0 ? (T)0 : v;
}
