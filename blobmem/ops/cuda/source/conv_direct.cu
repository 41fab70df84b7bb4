#include "common.cuh"
#include "channel_maps.cuh"

// Convolutions as plain sums, each output by one thread (or block) that gathers: any number of axes up to 6, any group
// and dilation, the same bits on every run. Sizes of axes, kernels, strides, paddings and dilations come as Dims of A
// axes, the fastest last; two axes have kernels of their own because they are what depthwise convolutions have.
// Positions inside a plane are counted in 32 bits, planes and elements in 64. Images lie channel by channel or, where
// `last` says that their channels come last, position by position; weights are always (outputs, channels, taps).

template <int A> __device__ __forceinline__ u32 volume(const Dims &size) {
  u32 total = 1;
#pragma unroll
  for (int a = 0; a < A; a++) total *= (u32)size.at[a];
  return total;
}

// The coordinates of a position.
template <int A> __device__ __forceinline__ void unfold(u32 position, const Dims &size, int *at) {
#pragma unroll
  for (int a = A - 1; a > 0; a--) {
    u32 n = (u32)size.at[a];
    at[a] = (int)(position % n);
    position /= n;
  }
  at[0] = (int)position;
}

// Where the elements of an image are, from its beginning on.
struct Image {
  i64 channel, position, size;  // distances between channels and between positions; elements
  __device__ __forceinline__ Image(i64 channels, u32 plane, int last)
      : channel(last ? 1 : plane), position(last ? channels : 1), size(channels * plane) {}
};

// What element i of images is.
struct Element {
  i64 image;
  int channel;
  u32 position;
  __device__ __forceinline__ Element(i64 i, i64 channels, u32 plane, int last) {
    i64 fast = last ? channels : plane, slow = last ? plane : channels;
    i64 row = quotient(i, fast);
    image = quotient(row, slow);
    channel = (int)(last ? i - row * fast : row - image * slow);
    position = (u32)(last ? row - image * slow : i - row * fast);
  }
};

template <int A> __device__ __forceinline__ void advance(int *at, const Dims &size) {
#pragma unroll
  for (int a = A - 1; a >= 0; a--) {
    if (++at[a] < (int)size.at[a]) return;
    at[a] = 0;
  }
}

// The source position that tap `tap` sees from output `at`, or -1 if it is in the padding.
template <int A>
__device__ __forceinline__ i64 seen(const int *at, const int *tap, const Dims &xs, const Dims &stride, const Dims &pad,
                                    const Dims &dilation) {
  i64 offset = 0;
  bool inside = true;
#pragma unroll
  for (int a = 0; a < A; a++) {
    int p = at[a] * (int)stride.at[a] - (int)pad.at[a] + tap[a] * (int)dilation.at[a];
    inside = inside && p >= 0 && p < (int)xs.at[a];
    offset = offset * xs.at[a] + p;
  }
  return inside ? offset : -1;
}

// The output position from which tap `tap` sees source `at`, or -1.
template <int A>
__device__ __forceinline__ i64 seen_from(const int *at, const int *tap, const Dims &ys, const Dims &stride,
                                         const Dims &pad, const Dims &dilation) {
  i64 offset = 0;
  bool inside = true;
#pragma unroll
  for (int a = 0; a < A; a++) {
    int p = at[a] + (int)pad.at[a] - tap[a] * (int)dilation.at[a], q = p / (int)stride.at[a];
    inside = inside && p >= 0 && q * (int)stride.at[a] == p && q < (int)ys.at[a];
    offset = offset * ys.at[a] + q;
  }
  return inside ? offset : -1;
}

// Outputs: n of them. channels and outs are those of one group; b may be null.
template <int A>
__device__ __forceinline__ void forward(const D *x, const D *w, const D *b, D *y, i64 n, int groups, int channels,
                                        int outs, int last, const Dims &xs, const Dims &ys, const Dims &ks,
                                        const Dims &stride, const Dims &pad, const Dims &dilation) {
  u32 y_plane = volume<A>(ys), taps = volume<A>(ks);
  Image layout((i64)groups * channels, volume<A>(xs), last);
  FOR(i, n) {
    Element element(i, (i64)groups * outs, y_plane, last);
    int at[A], tap[A] = {0}, m = element.channel;
    unfold<A>(element.position, ys, at);
    const D *source = x + element.image * layout.size + (i64)(m / outs) * channels * layout.channel;
    const D *weights = w + (i64)m * channels * taps;
    T total = b ? b[m] : (T)0;
    for (u32 t = 0; t < taps; t++, advance<A>(tap, ks)) {
      i64 offset = seen<A>(at, tap, xs, stride, pad, dilation);
      if (offset < 0) continue;
      const D *there = source + offset * layout.position;
      T part = 0;
      for (int c = 0; c < channels; c++) part += weights[(i64)c * taps + t] * there[c * layout.channel];
      total += part;
    }
    y[i] = total;
  }
}

// Gradients for the source, n elements of it; with b (per channel of dx) the outputs of a deconvolution of dy.
template <int A>
__device__ __forceinline__ void backward_data(const D *dy, const D *w, const D *b, D *dx, i64 n, int groups,
                                              int channels, int outs, int last, const Dims &xs, const Dims &ys,
                                              const Dims &ks, const Dims &stride, const Dims &pad,
                                              const Dims &dilation) {
  u32 x_plane = volume<A>(xs), taps = volume<A>(ks);
  Image layout((i64)groups * outs, volume<A>(ys), last);
  FOR(i, n) {
    Element element(i, (i64)groups * channels, x_plane, last);
    int at[A], tap[A] = {0}, group = element.channel / channels, c = element.channel - group * channels;
    unfold<A>(element.position, xs, at);
    const D *target = dy + element.image * layout.size + (i64)group * outs * layout.channel;
    const D *weights = w + ((i64)group * outs * channels + c) * taps;
    T total = b ? b[element.channel] : (T)0;
    for (u32 t = 0; t < taps; t++, advance<A>(tap, ks)) {
      i64 offset = seen_from<A>(at, tap, ys, stride, pad, dilation);
      if (offset < 0) continue;
      const D *there = target + offset * layout.position;
      T part = 0;
      for (int o = 0; o < outs; o++) part += weights[(i64)o * channels * taps + t] * there[o * layout.channel];
      total += part;
    }
    dx[i] = total;
  }
}

// Gradients for the weights, n of them, a block for each: short runs in T, their sum in double precision.
template <int A>
__device__ __forceinline__ void backward_weights(const D *x, const D *dy, D *dw, i64 n, i64 images, int groups,
                                                 int channels, int outs, int last, const Dims &xs, const Dims &ys,
                                                 const Dims &ks, const Dims &stride, const Dims &pad,
                                                 const Dims &dilation, int accumulate) {
  __shared__ double shared[32];
  u32 y_plane = volume<A>(ys), taps = volume<A>(ks);
  Image from((i64)groups * channels, volume<A>(xs), last), to((i64)groups * outs, y_plane, last);
  for (i64 i = blockIdx.x; i < n; i += gridDim.x) {
    int tap[A], c = (int)(i / taps % channels);
    i64 m = i / taps / channels;
    unfold<A>((u32)(i % taps), ks, tap);
    const D *source = x + (m / outs * channels + c) * from.channel, *target = dy + m * to.channel;
    double total = 0;
    for (i64 j = threadIdx.x; j < images * y_plane;) {
      T part = 0;
      for (int run = 0; run < 32 && j < images * y_plane; run++, j += blockDim.x) {
        i64 image = j / y_plane;
        u32 position = (u32)(j - image * y_plane);
        int at[A];
        unfold<A>(position, ys, at);
        i64 offset = seen<A>(at, tap, xs, stride, pad, dilation);
        if (offset >= 0)
          part += source[image * from.size + offset * from.position] * target[image * to.size + position * to.position];
      }
      total += part;
    }
    total = block_sum(total, shared);
    if (threadIdx.x == 0) dw[i] = (accumulate ? dw[i] : (T)0) + (T)total;
  }
}

extern "C" __global__ void forward_2(const D *x, const D *w, const D *b, D *y, i64 n, int groups, int channels,
                                     int outs, int last, Dims xs, Dims ys, Dims ks, Dims stride, Dims pad,
                                     Dims dilation) {
  forward<2>(x, w, b, y, n, groups, channels, outs, last, xs, ys, ks, stride, pad, dilation);
}

extern "C" __global__ void forward_6(const D *x, const D *w, const D *b, D *y, i64 n, int groups, int channels,
                                     int outs, int last, Dims xs, Dims ys, Dims ks, Dims stride, Dims pad,
                                     Dims dilation) {
  forward<6>(x, w, b, y, n, groups, channels, outs, last, xs, ys, ks, stride, pad, dilation);
}

extern "C" __global__ void backward_data_2(const D *dy, const D *w, const D *b, D *dx, i64 n, int groups, int channels,
                                           int outs, int last, Dims xs, Dims ys, Dims ks, Dims stride, Dims pad,
                                           Dims dilation) {
  backward_data<2>(dy, w, b, dx, n, groups, channels, outs, last, xs, ys, ks, stride, pad, dilation);
}

extern "C" __global__ void backward_data_6(const D *dy, const D *w, const D *b, D *dx, i64 n, int groups, int channels,
                                           int outs, int last, Dims xs, Dims ys, Dims ks, Dims stride, Dims pad,
                                           Dims dilation) {
  backward_data<6>(dy, w, b, dx, n, groups, channels, outs, last, xs, ys, ks, stride, pad, dilation);
}

extern "C" __global__ void backward_weights_2(const D *x, const D *dy, D *dw, i64 n, i64 images, int groups,
                                              int channels, int outs, int last, Dims xs, Dims ys, Dims ks, Dims stride,
                                              Dims pad, Dims dilation, int accumulate) {
  backward_weights<2>(x, dy, dw, n, images, groups, channels, outs, last, xs, ys, ks, stride, pad, dilation,
                      accumulate);
}

extern "C" __global__ void backward_weights_6(const D *x, const D *dy, D *dw, i64 n, i64 images, int groups,
                                              int channels, int outs, int last, Dims xs, Dims ys, Dims ks, Dims stride,
                                              Dims pad, Dims dilation, int accumulate) {
  backward_weights<6>(x, dy, dw, n, images, groups, channels, outs, last, xs, ys, ks, stride, pad, dilation,
                      accumulate);
}

// y (positions, OUTS) = x (positions, channels) by the weights (OUTS, channels), plus b unless it is null, with ReLU if
// wanted: W channels at a time, sums in one order.
template <int OUTS, int W>
__device__ __forceinline__ void few_outputs(const D *x, const D *w, const D *b, D *y, i64 n, i64 channels, int relu) {
  FOR(i, n) {
    T sums[OUTS] = {};
    for (i64 c = 0; c < channels; c += W) {
      Lot<W> of_x = load<W>(x, i * channels + c);
#pragma unroll
      for (int k = 0; k < OUTS; k++) {
        Lot<W> of_w = load<W>(w, k * channels + c);
#pragma unroll
        for (int j = 0; j < W; j++) sums[k] += of_x.at[j] * of_w.at[j];
      }
    }
#pragma unroll
    for (int k = 0; k < OUTS; k++) {
      T v = b ? sums[k] + (T)b[k] : sums[k];
      y[i * OUTS + k] = relu && v <= 0 ? (T)0 : v;
    }
  }
}

template <int OUTS>
__device__ __forceinline__ void few_outputs(const D *x, const D *w, const D *b, D *y, i64 n, i64 channels, int relu) {
  if (aligned(x) && aligned(w))
    few_outputs<OUTS, LOT>(x, w, b, y, n, channels, relu);
  else
    few_outputs<OUTS, 1>(x, w, b, y, n, channels, relu);
}

extern "C" __global__ void few_outputs(const D *x, const D *w, const D *b, D *y, i64 n, i64 channels, int outs,
                                       int relu) {
  if (outs == 1)
    few_outputs<1>(x, w, b, y, n, channels, relu);
  else if (outs == 2)
    few_outputs<2>(x, w, b, y, n, channels, relu);
  else if (outs == 3)
    few_outputs<3>(x, w, b, y, n, channels, relu);
  else
    few_outputs<4>(x, w, b, y, n, channels, relu);
}

// What a plan leaves to do: y += b per channel, with ReLU if wanted; dw += what the plan made.
extern "C" __global__ void add_bias(const D *b, D *y, i64 n, i64 channels, i64 plane, int relu) {
  map1_channels(y, y, n, channels, plane, [=](i64 c, T v) {
    v += b[c];
    return relu && v <= 0 ? (T)0 : v;
  });
}

// y += other, and b per channel unless it is null, with ReLU if wanted.
extern "C" __global__ void add_sum(const D *b, const D *other, D *y, i64 n, i64 channels, i64 plane, int relu) {
  map2_channels(y, other, y, n, channels, plane, [=](i64 c, T v, T more) {
    v += more;
    if (b) v += b[c];
    return relu && v <= 0 ? (T)0 : v;
  });
}

// The same of W elements from the i-th on, with other (outer, inner) for each of its tiles in y (outer, tiles, inner).
template <int W>
__device__ __forceinline__ void add_tiles(const D *b, const D *other, D *y, i64 i, i64 channels, i64 plane, i64 tiles,
                                          i64 inner, int relu) {
  Channel channel(i, channels, plane), tile(i, tiles, inner);
  i64 outer = quotient(i, tiles * inner);
  Lot<W> lot = load<W>(y, i);
#pragma unroll
  for (int j = 0; j < W; j++) {
    T v = lot.at[j] + (T)other[(outer + 1) * inner - tile.left];
    if (b) v += (T)b[channel.c];
    lot.at[j] = relu && v <= 0 ? (T)0 : v;
    channel.next(), tile.next();
    if (tile.c == 0 && tile.left == inner) outer++;
  }
  store<W>(y, i, lot);
}

// The same of `lots` of elements where one number is repeated along all channels, which come last.
__device__ __forceinline__ void add_repeated(const D *b, const D *other, D *y, i64 lots, i64 channels, int relu) {
  i64 across = channels / LOT;
  FOR(k, lots) {
    i64 position = quotient(k, across);
    T more = other[position];
    Lot<LOT> lot = load<LOT>(y, k * LOT), bias = {};
    if (b) bias = load<LOT>(b, (k - position * across) * LOT);
#pragma unroll
    for (int j = 0; j < LOT; j++) {
      T v = lot.at[j] + more + bias.at[j];
      lot.at[j] = relu && v <= 0 ? (T)0 : v;
    }
    store<LOT>(y, k * LOT, lot);
  }
}

extern "C" __global__ void add_tiles(const D *b, const D *other, D *y, i64 n, i64 channels, i64 plane, i64 tiles,
                                     i64 inner, int relu) {
  i64 lots = aligned(y) ? n / LOT : 0;
  if (plane == 1 && tiles == channels && channels % LOT == 0 && aligned(b))
    add_repeated(b, other, y, lots, channels, relu);
  else
    FOR(k, lots) add_tiles<LOT>(b, other, y, k * LOT, channels, plane, tiles, inner, relu);
  FOR(k, n - lots * LOT) add_tiles<1>(b, other, y, lots * LOT + k, channels, plane, tiles, inner, relu);
}

extern "C" __global__ void add(const D *x, D *y, i64 n) {
  map2(y, x, y, n, [](T a, T b) { return a + b; });
}

// dw (outputs, channels, taps) (+)= x, in which the channels come last; n elements.
extern "C" __global__ void take_channels_last(const D *x, D *dw, i64 n, i64 channels, i64 taps, int accumulate) {
  FOR(i, n) {
    i64 row = quotient(i, taps), out = quotient(row, channels);
    T value = x[(out * taps + i - row * taps) * channels + row - out * channels];
    dw[i] = accumulate ? dw[i] + value : value;
  }
}

// How far the first n elements of y are from x: out = the largest difference, at most 1e30 (where y is no number, too),
// and the largest of x. x is (outputs, channels, taps), y as well or, if `last`, (outputs, taps, channels). One block.
extern "C" __global__ void furthest(const D *x, const D *y, T *out, i64 n, i64 channels, i64 taps, int last) {
  __shared__ T shared[32];
  T apart = 0, largest = 0;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
    i64 row = i / taps, o = row / channels;
    T away = fabs(y[last ? (o * taps + i - row * taps) * channels + row - o * channels : i] - x[i]), size = fabs(x[i]);
    if (!(away <= (T)1e30)) away = (T)1e30;
    apart = away > apart ? away : apart;
    largest = size > largest ? size : largest;
  }
  apart = block_max(apart, shared);
  largest = block_max(largest, shared);
  if (threadIdx.x == 0) {
    out[0] = apart;
    out[1] = largest;
  }
}

// Numbers for timing: uniform in [-1, 1).
extern "C" __global__ void noise(D *y, i64 n, unsigned seed) {
  FOR(i, (n + 3) / 4) {
    Words words = philox(seed, 0, 0, 0, i);
    for (int j = 0; j < 4 && i * 4 + j < n; j++) y[i * 4 + j] = (T)words.at[j] * (T)(2.0 / 4294967296.0) - (T)1;
  }
}
