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

// The scales of this thread's lots of x. Other threads may still read the tile.
template <int HALF, int W>
__device__ __forceinline__ void scale_all(const Lot<W> *x, Lot<W> *scales, int count, int channels, int half, T k,
                                          T factor, T *tile) {
  each_lot<W>(count, [&](int i, int at) {
    Lot<W> squares;
#pragma unroll
    for (int j = 0; j < W; j++) squares.at[j] = x[i].at[j] * x[i].at[j];
    store<W>(tile, at, squares);
  });
  __syncthreads();
  each_lot<W>(count, [&](int i, int at) {
    scales[i] = around<HALF, W>(tile, at, at % channels, channels, half);
#pragma unroll
    for (int j = 0; j < W; j++) scales[i].at[j] = k + factor * scales[i].at[j];
  });
}

template <int HALF, int W>
__device__ __forceinline__ void normalise(const D *x, D *y, int count, int channels, int half, T k, T factor, T beta,
                                          T *tile) {
  Lot<W> values[TILE / BLOCK / W], scales[TILE / BLOCK / W];
  each_lot<W>(count, [&](int i, int at) { values[i] = load<W>(x, at); });
  scale_all<HALF, W>(values, scales, count, channels, half, k, factor, tile);
  each_lot<W>(count, [&](int i, int at) {
#pragma unroll
    for (int j = 0; j < W; j++) values[i].at[j] *= power(scales[i].at[j], beta);
    store<W>(y, at, values[i]);
  });
}

template <int HALF, int W>
__device__ __forceinline__ void gradient(const D *x, const D *dy, D *dx, int count, int channels, int half, T k,
                                         T factor, T slope, T beta, T *tile) {
  Lot<W> values[TILE / BLOCK / W], leads[TILE / BLOCK / W], ratios[TILE / BLOCK / W];
  each_lot<W>(count, [&](int i, int at) {
    values[i] = load<W>(x, at);
    leads[i] = load<W>(dy, at);
  });
  scale_all<HALF, W>(values, ratios, count, channels, half, k, factor, tile);
  __syncthreads();
  each_lot<W>(count, [&](int i, int at) {
#pragma unroll
    for (int j = 0; j < W; j++) {
      T scale = ratios[i].at[j], raised = power(scale, beta), out = values[i].at[j] * raised;
      ratios[i].at[j] = leads[i].at[j] * out / scale;
      leads[i].at[j] *= raised;
    }
    store<W>(tile, at, ratios[i]);
  });
  __syncthreads();
  each_lot<W>(count, [&](int i, int at) {
    Lot<W> sums = around<HALF, W>(tile, at, at % channels, channels, half);
#pragma unroll
    for (int j = 0; j < W; j++) leads[i].at[j] -= slope * values[i].at[j] * sums.at[j];
    store<W>(dx, at, leads[i]);
  });
}

// f<HALF, W>(arguments); each pair takes long to compile.
#define CHOSEN(f, arguments)                     \
  if (packs && half == USUAL) f<USUAL, PACK> arguments; \
  else if (packs) f<ANY, PACK> arguments;        \
  else f<ANY, 1> arguments

// Blocks of BLOCK threads; n elements, of which a block takes `part`, which are whole rows.
extern "C" __global__ void lrn_last(const D *x, D *y, i64 n, int channels, int part, int half, T k, T factor, T beta) {
  __shared__ Lot<4> tile[TILE / 4];
  i64 first = (i64)blockIdx.x * part;
  int count = (int)(n - first < part ? n - first : part);
  x += first;
  y += first;
  bool packs = whole_packs(channels) && aligned(x) && aligned(y);
  CHOSEN(normalise, (x, y, count, channels, half, k, factor, beta, (T *)tile));
}

// dx may be dy; `slope` is 2 beta times `factor`.
extern "C" __global__ void lrn_last_gradient(const D *x, const D *dy, D *dx, i64 n, int channels, int part, int half,
                                             T k, T factor, T slope, T beta) {
  __shared__ Lot<4> tile[TILE / 4];
  i64 first = (i64)blockIdx.x * part;
  int count = (int)(n - first < part ? n - first : part);
  x += first;
  dy += first;
  dx += first;
  bool packs = whole_packs(channels) && aligned(x) && aligned(dy) && aligned(dx);
  CHOSEN(gradient, (x, dy, dx, count, channels, half, k, factor, slope, beta, (T *)tile));
}
