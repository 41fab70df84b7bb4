// Arrays copied between two layouts, given by the distance between neighbours along each axis.
#include "common.cuh"

// y[sum of index * to] = x[sum of index * from], for all indices below `size`, the last of AXES axes fastest. n < 2^31.
template <int AXES, class E>
__device__ __forceinline__ void copy_strided(const E *x, E *y, unsigned n, const Dims &size, const Dims &from,
                                             const Dims &to) {
  u32 step = gridDim.x * blockDim.x;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    u32 rest = i;
    i64 source = 0, target = 0;
#pragma unroll
    for (int axis = AXES - 1; axis > 0; axis--) {
      u32 length = (u32)size.at[axis], above = rest / length, index = rest - above * length;
      source += index * from.at[axis];
      target += index * to.at[axis];
      rest = above;
    }
    y[target + rest * to.at[0]] = x[source + rest * from.at[0]];
  }
}

// The same for two axes, `length` the size of the last.
template <class E>
__device__ __forceinline__ void copy_runs(const E *x, E *y, unsigned n, unsigned length, i64 x_run, i64 x_step, i64 y_run,
                                          i64 y_step) {
  u32 step = gridDim.x * blockDim.x;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    u32 run = i / length, index = i - run * length;
    y[run * y_run + index * y_step] = x[run * x_run + index * x_step];
  }
}

extern "C" __global__ void copy_2(const D *x, D *y, unsigned n, unsigned length, i64 x_run, i64 x_step, i64 y_run,
                                  i64 y_step) {
  copy_runs(x, y, n, length, x_run, x_step, y_run, y_step);
}

extern "C" __global__ void copy_3(const D *x, D *y, unsigned n, Dims size, Dims from, Dims to) {
  copy_strided<3>(x, y, n, size, from, to);
}

extern "C" __global__ void copy_8(const D *x, D *y, unsigned n, Dims size, Dims from, Dims to) {
  copy_strided<8>(x, y, n, size, from, to);
}

// The same with 16 bytes as an element.
extern "C" __global__ void copy_packs_2(const D *x, D *y, unsigned n, unsigned length, i64 x_run, i64 x_step, i64 y_run,
                                        i64 y_step) {
  copy_runs((const Pack *)x, (Pack *)y, n, length, x_run, x_step, y_run, y_step);
}

extern "C" __global__ void copy_packs_3(const D *x, D *y, unsigned n, Dims size, Dims from, Dims to) {
  copy_strided<3>((const Pack *)x, (Pack *)y, n, size, from, to);
}

extern "C" __global__ void copy_packs_8(const D *x, D *y, unsigned n, Dims size, Dims from, Dims to) {
  copy_strided<8>((const Pack *)x, (Pack *)y, n, size, from, to);
}

#define TILE 64

// Where x's neighbours lie along axis a and y's along axis b: y[b + a * y_row] = x[a + b * x_row], for all indices of up
// to 8 axes around. A block of 256 turns a square over, through shared memory, so that both sides are read and written
// in runs.
extern "C" __global__ void turn(const D *x, D *y, unsigned a_size, unsigned b_size, i64 x_row, i64 y_row, Dims size,
                                Dims from, Dims to) {
  __shared__ D tile[TILE][TILE + 1];
  u32 a_tiles = (a_size + TILE - 1) / TILE, b_tiles = (b_size + TILE - 1) / TILE;
  u32 rest = blockIdx.x / a_tiles, a0 = (blockIdx.x - rest * a_tiles) * TILE;
  u32 around = rest / b_tiles, b0 = (rest - around * b_tiles) * TILE;
#pragma unroll
  for (int axis = 7; axis >= 0; axis--) {
    u32 length = (u32)size.at[axis], above = around / length, index = around - above * length;
    x += index * from.at[axis];
    y += index * to.at[axis];
    around = above;
  }
  u32 along = threadIdx.x % TILE, first = threadIdx.x / TILE;
#pragma unroll
  for (u32 i = 0; i < TILE; i += 256 / TILE) {
    u32 row = first + i;
    if (a0 + along < a_size && b0 + row < b_size) tile[row][along] = x[a0 + along + (b0 + row) * x_row];
  }
  __syncthreads();
#pragma unroll
  for (u32 i = 0; i < TILE; i += 256 / TILE) {
    u32 row = first + i;
    if (b0 + along < b_size && a0 + row < a_size) y[b0 + along + (a0 + row) * y_row] = tile[along][row];
  }
}
