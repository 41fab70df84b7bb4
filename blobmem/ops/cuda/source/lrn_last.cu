// Local response normalisation across channels that come last. A block takes whole rows of channels, so that what the
// windows of a row sum is computed once, in shared memory, and all is read before anything is written.
#include "common.cuh"
#include "channels.cuh"
#include "lrn.cuh"

#define TILE 2048  // elements that a block takes at most; lrn.py knows
#define BLOCK 256

#define USUAL 2  // channels on either side in most nets, for which the windows are in registers
#define ANY -1   // so many as an argument says

// The sums over HALF channels on either side, for W of them from c on: element `at` of the tile.
template <int HALF, int W>
__device__ __forceinline__ Lot<W> around(const T *tile, int at, int c, int channels, int half) {
  Lot<W> sums = {};
  if constexpr (HALF == ANY) {
#pragma unroll
    for (int i = 0; i < W; i++)
      for (int j = -half; j <= half; j++)
        if (c + i + j >= 0 && c + i + j < channels) sums.at[i] += tile[at + i + j];
  } else {
    enum { SIDE = (HALF + W - 1) / W };
    T window[(2 * SIDE + 1) * W];
#pragma unroll
    for (int i = -SIDE; i <= SIDE; i++) {
      bool inside = c + i * W >= 0 && c + i * W < channels;
      Lot<W> lot = {};
      if (inside) lot = load<W>(tile, at + i * W);
#pragma unroll
      for (int j = 0; j < W; j++) window[(i + SIDE) * W + j] = lot.at[j];
    }
#pragma unroll
    for (int i = 0; i < W; i++)
#pragma unroll
      for (int j = -HALF; j <= HALF; j++) sums.at[i] += window[SIDE * W + i + j];
  }
  return sums;
}

// put(lot number, offset in the tile) for this thread's lots of W elements, of `count` in all.
template <int W, class P> __device__ __forceinline__ void each_lot(int count, P put) {
#pragma unroll
  for (int i = 0; i < TILE / BLOCK / W; i++) {
    int at = (i * BLOCK + threadIdx.x) * W;
    if (at < count) put(i, at);
  }
}

template <int HALF, int W>
__device__ __forceinline__ void normalise(const D *x, D *y, D *scale, int count, int channels, int half, T k, T factor,
                                          T beta, T *tile) {
  Lot<W> values[TILE / BLOCK / W];
  each_lot<W>(count, [&](int i, int at) { values[i] = load<W>(x, at); });
  each_lot<W>(count, [&](int i, int at) {
    Lot<W> squares;
#pragma unroll
    for (int j = 0; j < W; j++) squares.at[j] = values[i].at[j] * values[i].at[j];
    store<W>(tile, at, squares);
  });
  __syncthreads();
  each_lot<W>(count, [&](int i, int at) {
    Lot<W> sums = around<HALF, W>(tile, at, at % channels, channels, half);
#pragma unroll
    for (int j = 0; j < W; j++) {
      sums.at[j] = k + factor * sums.at[j];
      values[i].at[j] *= power(sums.at[j], beta);
    }
    if (scale) store<W>(scale, at, sums);
    store<W>(y, at, values[i]);
  });
}

template <int HALF, int W>
__device__ __forceinline__ void gradient(const D *x, const D *y, const D *scale, const D *dy, D *dx, int count,
                                         int channels, int half, T factor, T beta, T *tile) {
  Lot<W> values[TILE / BLOCK / W], leads[TILE / BLOCK / W];
  each_lot<W>(count, [&](int i, int at) {
    Lot<W> outs = load<W>(y, at), scales = load<W>(scale, at), ratios;
    leads[i] = load<W>(dy, at);
    values[i] = load<W>(x, at);
#pragma unroll
    for (int j = 0; j < W; j++) {
      ratios.at[j] = leads[i].at[j] * outs.at[j] / scales.at[j];
      leads[i].at[j] *= power(scales.at[j], beta);
    }
    store<W>(tile, at, ratios);
  });
  __syncthreads();
  each_lot<W>(count, [&](int i, int at) {
    Lot<W> sums = around<HALF, W>(tile, at, at % channels, channels, half);
#pragma unroll
    for (int j = 0; j < W; j++) leads[i].at[j] -= factor * values[i].at[j] * sums.at[j];
    store<W>(dx, at, leads[i]);
  });
}

// f<HALF, W>(arguments); each pair takes long to compile.
#define CHOSEN(f, arguments)                     \
  if (packs && half == USUAL) f<USUAL, PACK> arguments; \
  else if (packs) f<ANY, PACK> arguments;        \
  else f<ANY, 1> arguments

// Blocks of BLOCK threads; n elements, of which a block takes `part`, which are whole rows.
extern "C" __global__ void lrn_last(const D *x, D *y, D *scale, i64 n, int channels, int part, int half, T k, T factor,
                                    T beta) {
  __shared__ Lot<4> tile[TILE / 4];
  i64 first = (i64)blockIdx.x * part;
  int count = (int)(n - first < part ? n - first : part);
  x += first;
  y += first;
  if (scale) scale += first;
  bool packs = whole_packs(channels) && aligned(x) && aligned(y) && aligned(scale);
  CHOSEN(normalise, (x, y, scale, count, channels, half, k, factor, beta, (T *)tile));
}

// dx may be dy.
extern "C" __global__ void lrn_last_gradient(const D *x, const D *y, const D *scale, const D *dy, D *dx, i64 n,
                                             int channels, int part, int half, T factor, T beta) {
  __shared__ Lot<4> tile[TILE / 4];
  i64 first = (i64)blockIdx.x * part;
  int count = (int)(n - first < part ? n - first : part);
  x += first;
  y += first;
  scale += first;
  dy += first;
  dx += first;
  bool packs = whole_packs(channels) && aligned(x) && aligned(y) && aligned(scale) && aligned(dy) && aligned(dx);
  CHOSEN(gradient, (x, y, scale, dy, dx, count, channels, half, factor, beta, (T *)tile));
}
