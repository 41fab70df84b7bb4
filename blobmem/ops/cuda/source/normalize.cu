#include "common.cuh"
#include "channel_maps.cuh"
#include "channels.cuh"

// Arrays are (images, channels, inner). `one`: there is one scale for all channels.

// By the norm of the whole image, from its sum of squares.
struct ByImage {
  const T *squares;
  const D *scale;
  i64 channels;
  double eps;
  int one;
  i64 last;
  T factor;
  __device__ __forceinline__ T operator()(i64 plane, T v) {
    if (plane != last) {
      last = plane;
      i64 image = plane / channels;
      factor = (T)(scale[one ? 0 : plane - image * channels] / sqrt(squares[image] + eps));
    }
    return v * factor;
  }
};

// norms may be null.
extern "C" __global__ void normalize_images(const D *x, const D *scale, D *y, T *norms, const T *squares, i64 images,
                                            i64 channels, i64 inner, int one, double eps) {
  if (norms) {
    FOR(n, images) norms[n] = (T)sqrt(squares[n] + eps);
  }
  ByImage f = {squares, scale, channels, eps, one, -1, 0};
  map1_channels(x, y, images * channels * inner, images * channels, inner, f);
}

// along[n] = the sum over an image of x * scale * dy, over norm ** 3, from the sums of x * dy over planes.
extern "C" __global__ void sum_planes(const T *planes, const D *scale, const T *norms, T *along, i64 channels,
                                      int one) {
  __shared__ double shared[32];
  i64 n = blockIdx.x;
  double total = 0;
  for (i64 c = threadIdx.x; c < channels; c += blockDim.x)
    total += (double)scale[one ? 0 : c] * planes[n * channels + c];
  total = block_sum(total, shared);
  double norm = norms[n];
  if (threadIdx.x == 0) along[n] = (T)(total / (norm * norm * norm));
}

struct ByImageBack {
  const T *norms, *along;
  const D *scale;
  i64 channels;
  int one;
  i64 last;
  T factor, back;
  __device__ __forceinline__ T operator()(i64 plane, T g, T v) {
    if (plane != last) {
      last = plane;
      i64 image = plane / channels;
      factor = scale[one ? 0 : plane - image * channels] / norms[image];
      back = along[image];
    }
    return factor * g - back * v;
  }
};

extern "C" __global__ void normalize_images_gradient(const D *x, const D *scale, const T *norms, const D *dy, D *dx,
                                                     const T *along, i64 images, i64 channels, i64 inner, int one) {
  ByImageBack f = {norms, along, scale, channels, one, -1, 0, 0};
  map2_channels(dy, x, dx, images * channels * inner, images * channels, inner, f);
}

// A block takes 32 positions of an image; its warps share the channels.
struct Positions {
  i64 image, position, at;
  int warp, warps;
  bool inside;
  __device__ __forceinline__ Positions(i64 channels, i64 inner) {
    i64 cuts = (inner + 31) / 32;
    image = blockIdx.x / cuts;
    position = (blockIdx.x - image * cuts) * 32 + (threadIdx.x & 31);
    at = image * channels * inner + position;
    warp = threadIdx.x >> 5;
    warps = blockDim.x >> 5;
    inside = position < inner;
  }
};

// By the norm of each position's channels; norms may be null.
extern "C" __global__ void normalize_positions(const D *x, const D *scale, D *y, T *norms, i64 channels, i64 inner,
                                               int one, double eps) {
  __shared__ double sums[32][33];
  Positions here(channels, inner);
  T squares = 0;
  if (here.inside)
    grouped<4>(
        here.warp, channels, here.warps, [=](i64 c) { return x[here.at + c * inner]; },
        [&](T v) { squares += v * v; });
  double norm = sqrt(lane_sum((double)squares, sums) + eps);
  if (!here.inside) return;
  if (norms && here.warp == 0) norms[here.image * inner + here.position] = (T)norm;
  T factor = (T)(1 / norm);
  grouped<4>(
      here.warp, channels, here.warps,
      [=](i64 c) { return Found<T>{here.at + c * inner, x[here.at + c * inner] * scale[one ? 0 : c] * factor}; },
      [=](Found<T> v) { y[v.at] = v.value; });
}

extern "C" __global__ void normalize_positions_gradient(const D *x, const D *scale, const T *norms, const D *dy, D *dx,
                                                        i64 channels, i64 inner, int one) {
  __shared__ double sums[32][33];
  Positions here(channels, inner);
  T along = 0;
  if (here.inside)
    grouped<4>(
        here.warp, channels, here.warps,
        [=](i64 c) { return x[here.at + c * inner] * dy[here.at + c * inner] * scale[one ? 0 : c]; },
        [&](T v) { along += v; });
  double total = lane_sum((double)along, sums);
  if (!here.inside) return;
  T norm = norms[here.image * inner + here.position], factor = 1 / norm, back = (T)(total / ((double)norm * norm));
  grouped<4>(
      here.warp, channels, here.warps,
      [=](i64 c) {
        i64 at = here.at + c * inner;
        return Found<T>{at, (dy[at] * scale[one ? 0 : c] - x[at] * back) * factor};
      },
      [=](Found<T> v) { dx[v.at] = v.value; });
}

template <int W>
__device__ __forceinline__ T divided_products(const D *x, const T *norms, const D *dy, i64 images, i64 channels,
                                              i64 inner, i64 splits, int each) {
  i64 c = blockIdx.x / splits, s = blockIdx.x % splits;
  T total = 0;
  Part part(images * (inner / W), s, splits);
  for_places<W, 2>(
      channels, inner, c, part, threadIdx.x, blockDim.x,
      [=](const Walk<W> &walk) {
        Lots<W> lots = load<W>(x, dy, walk.at);
        Lot<W> by;
        if (each) by = load<W>(norms, walk.outer * inner + walk.place * W);
        T sum = 0, norm = each ? (T)1 : norms[walk.outer];
#pragma unroll
        for (int i = 0; i < W; i++) sum += lots.a.at[i] * lots.b.at[i] / (each ? by.at[i] : norm);
        return sum;
      },
      [&](T sum) { total += sum; });
  return total;
}

// The sums of x * dy / norm over the parts of channels; `each`: a norm for every position.
extern "C" __global__ void scale_gradient_parts(const D *x, const T *norms, const D *dy, double *parts, i64 images,
                                                i64 channels, i64 inner, i64 splits, int each) {
  __shared__ double shared[32];
  T sum = whole_packs(inner) ? divided_products<PACK>(x, norms, dy, images, channels, inner, splits, each)
                             : divided_products<1>(x, norms, dy, images, channels, inner, splits, each);
  double total = block_sum((double)sum, shared);
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}
