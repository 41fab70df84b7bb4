#include "common.cuh"

// dx (outer, inner) = the sum of dy (outer, tiles, inner) over the tiles, in double precision; n = outer * inner.
extern "C" __global__ void sum_tiles(const T *dy, T *dx, i64 n, i64 tiles, i64 inner) {
  FOR(i, n) {
    const T *from = dy + i / inner * tiles * inner + i % inner;
    double sum = 0;
    for (i64 t = 0; t < tiles; t++) sum += from[t * inner];
    dx[i] = (T)sum;
  }
}

// The same for many tiles of few elements: a warp for each sum.
extern "C" __global__ void sum_by_warps(const T *dy, T *dx, i64 n, i64 tiles, i64 inner) {
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (i >= n) return;
  const T *from = dy + i / inner * tiles * inner + i % inner;
  double sum = 0;
  for (i64 t = threadIdx.x & 31; t < tiles; t += 32) sum += from[t * inner];
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if ((threadIdx.x & 31) == 0) dx[i] = (T)sum;
}
