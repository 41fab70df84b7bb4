#include "common.cuh"

// dx (outer, inner) = the sum of dy (outer, tiles, inner) over the tiles, in double precision; n = outer * inner.
extern "C" __global__ void sum_tiles(const D *dy, D *dx, i64 n, i64 tiles, i64 inner) {
  FOR(i, n) {
    const D *from = dy + i / inner * tiles * inner + i % inner;
    double sum = 0;
    for (i64 t = 0; t < tiles; t++) sum += from[t * inner];
    dx[i] = (T)sum;
  }
}

// The same for many tiles of few elements: a warp for each sum.
extern "C" __global__ void sum_by_warps(const D *dy, D *dx, i64 n, i64 tiles, i64 inner) {
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (i >= n) return;
  const D *from = dy + i / inner * tiles * inner + i % inner;
  double sum = 0;
  for (i64 t = threadIdx.x & 31; t < tiles; t += 32) sum += from[t * inner];
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if ((threadIdx.x & 31) == 0) dx[i] = (T)sum;
}

// Parts, at most 8, that lie side by side in `length` columns of the rows of `whole`, part p up to the stops[p]-th of these;
// n elements in all. Rows are `pitch` elements apart. An element is an E.
template <bool JOIN, class E>
__device__ __forceinline__ void copy_parts(E *whole, u32 n, u32 length, u32 pitch, int count, const Dims &parts,
                                           const Dims &stops) {
#pragma unroll 1
  FOR(i, n) {
    u32 row = (u32)i / length, column = (u32)i - row * length;
    i64 part = parts.at[0], start = 0, stop = stops.at[0];
#pragma unroll
    for (int p = 1; p < 8; p++)
      if (p < count && column >= stop) {
        part = parts.at[p];
        start = stop;
        stop = stops.at[p];
      }
    E *there = (E *)part + row * (stop - start) + (column - start), *here = whole + (i64)row * pitch + column;
    if (JOIN)
      *here = *there;
    else
      *there = *here;
  }
}

extern "C" __global__ void join(D *whole, unsigned n, unsigned length, unsigned pitch, int count, Dims parts, Dims stops) {
  copy_parts<true>(whole, n, length, pitch, count, parts, stops);
}

extern "C" __global__ void divide(D *whole, unsigned n, unsigned length, unsigned pitch, int count, Dims parts, Dims stops) {
  copy_parts<false>(whole, n, length, pitch, count, parts, stops);
}

// The same with 16 bytes as an element.
extern "C" __global__ void join_packs(D *whole, unsigned n, unsigned length, unsigned pitch, int count, Dims parts, Dims stops) {
  copy_parts<true>((Pack *)whole, n, length, pitch, count, parts, stops);
}

extern "C" __global__ void divide_packs(D *whole, unsigned n, unsigned length, unsigned pitch, int count, Dims parts, Dims stops) {
  copy_parts<false>((Pack *)whole, n, length, pitch, count, parts, stops);
}
