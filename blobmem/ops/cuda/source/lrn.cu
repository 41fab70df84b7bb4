#include "common.cuh"
#include "lrn.cuh"

// Where a thread is that walks `run` channels of one position of one image.
struct Place {
  i64 at, first, stop;  // offset of channel 0; channels
  __device__ __forceinline__ Place(i64 i, i64 channels, i64 positions, i64 run) {
    i64 runs = (channels + run - 1) / run, item = i / positions;
    i64 image = item / runs;
    at = image * channels * positions + (i - item * positions);
    first = (item - image * runs) * run;
    stop = first + run < channels ? first + run : channels;
  }
};

enum { AHEAD = 4 };  // channels whose loads are in flight at once

// The HALF channels on either side and the one between are kept in registers; outside there are zeros.
template <int HALF>
__device__ __forceinline__ void across(const D *x, D *y, D *scale, Place place, i64 channels, i64 positions, T k,
                                       T factor, T beta) {
  T window[2 * HALF + 1];
#pragma unroll
  for (int i = 0; i < 2 * HALF; i++) {
    i64 c = place.first - HALF + i;
    window[i + 1] = c >= 0 && c < channels ? x[place.at + c * positions] : (T)0;
  }
  for (i64 c = place.first; c < place.stop; c += AHEAD) {
    T next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      next[i] = c + i + HALF < channels ? x[place.at + (c + i + HALF) * positions] : (T)0;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      T sum = 0;
#pragma unroll
      for (int j = 0; j < 2 * HALF; j++) {
        window[j] = window[j + 1];
        sum += window[j] * window[j];
      }
      window[2 * HALF] = next[i];
      sum = k + factor * (sum + next[i] * next[i]);
      if (c + i < place.stop) {
        i64 at = place.at + (c + i) * positions;
        if (scale) scale[at] = sum;
        y[at] = window[HALF] * power(sum, beta);
      }
    }
  }
}

// `half` channels on either side; n threads, a run of channels each.
extern "C" __global__ void lrn_across(const D *x, D *y, D *scale, i64 n, i64 channels, i64 positions, i64 run, int half,
                                      T k, T factor, T beta) {
  i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  Place place(t, channels, positions, run);
  if (half == 0) return across<0>(x, y, scale, place, channels, positions, k, factor, beta);
  if (half == 1) return across<1>(x, y, scale, place, channels, positions, k, factor, beta);
  if (half == 2) return across<2>(x, y, scale, place, channels, positions, k, factor, beta);
  if (half == 3) return across<3>(x, y, scale, place, channels, positions, k, factor, beta);
  if (half == 4) return across<4>(x, y, scale, place, channels, positions, k, factor, beta);
  for (i64 c = place.first; c < place.stop; c++) {
    i64 at = place.at + c * positions;
    T sum = 0;
    for (i64 other = c > half ? c - half : 0; other < channels && other <= c + half; other++) {
      T v = x[place.at + other * positions];
      sum += v * v;
    }
    sum = k + factor * sum;
    if (scale) scale[at] = sum;
    y[at] = x[at] * power(sum, beta);
  }
}

// What one channel adds to the gradient of its neighbours, and what its own gradient begins with.
struct Share { T ratio, lead; };

__device__ __forceinline__ Share share_of(const D *y, const D *scale, const D *dy, i64 at, T beta) {
  T g = dy[at], s = scale[at];
  Share share = {g * y[at] / s, g * power(s, beta)};
  return share;
}

// As `across`. dx may be dy where one thread walks all channels: it then writes behind all that it has yet to read.
template <int HALF>
__device__ __forceinline__ void across_gradient(const D *x, const D *y, const D *scale, const D *dy, D *dx, Place place,
                                                i64 channels, i64 positions, T factor, T beta) {
  T ratios[2 * HALF + 1], leads[HALF + 1];
  Share none = {0, 0};
#pragma unroll
  for (int i = 0; i < 2 * HALF; i++) {
    i64 c = place.first - HALF + i;
    Share share = c >= 0 && c < channels ? share_of(y, scale, dy, place.at + c * positions, beta) : none;
    ratios[i + 1] = share.ratio;
    if (i >= HALF) leads[i - HALF + 1] = share.lead;
  }
  for (i64 c = place.first; c < place.stop; c += AHEAD) {
    Share next[AHEAD];
    T values[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      i64 at = place.at + (c + i) * positions;
      next[i] = c + i + HALF < channels ? share_of(y, scale, dy, at + HALF * positions, beta) : none;
      values[i] = c + i < place.stop ? x[at] : (T)0;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      T sum = next[i].ratio;
#pragma unroll
      for (int j = 0; j < 2 * HALF; j++) {
        ratios[j] = ratios[j + 1];
        sum += ratios[j];
      }
      ratios[2 * HALF] = next[i].ratio;
#pragma unroll
      for (int j = 0; j < HALF; j++) leads[j] = leads[j + 1];
      leads[HALF] = next[i].lead;
      if (c + i < place.stop) dx[place.at + (c + i) * positions] = leads[0] - factor * values[i] * sum;
    }
  }
}

extern "C" __global__ void lrn_across_gradient(const D *x, const D *y, const D *scale, const D *dy, D *dx, i64 n,
                                               i64 channels, i64 positions, i64 run, int half, T factor, T beta) {
  i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  Place place(t, channels, positions, run);
  if (half == 0) across_gradient<0>(x, y, scale, dy, dx, place, channels, positions, factor, beta);
  if (half == 1) across_gradient<1>(x, y, scale, dy, dx, place, channels, positions, factor, beta);
  if (half == 2) across_gradient<2>(x, y, scale, dy, dx, place, channels, positions, factor, beta);
  if (half == 3) across_gradient<3>(x, y, scale, dy, dx, place, channels, positions, factor, beta);
  if (half == 4) across_gradient<4>(x, y, scale, dy, dx, place, channels, positions, factor, beta);
}

// For windows that no thread can keep: the ratios of the n elements from `first` on, then their gradient.
extern "C" __global__ void lrn_ratios(const D *y, const D *scale, const D *dy, D *ratios, i64 first, i64 n) {
  map3(y + first, scale + first, dy + first, ratios, n, [](T v, T s, T g) { return g * v / s; });
}

extern "C" __global__ void lrn_wide_gradient(const D *x, const D *scale, const D *dy, D *dx, const D *ratios, i64 first,
                                             i64 n, i64 channels, i64 positions, int half, T factor, T beta) {
  FOR(i, n) {
    i64 c = i / positions % channels, at = first + i;
    T sum = 0;
    for (i64 other = c > half ? c - half : 0; other < channels && other <= c + half; other++)
      sum += ratios[i + (other - c) * positions];
    dx[at] = dy[at] * power(scale[at], beta) - factor * x[at] * sum;
  }
}

// A window of `half` positions on either side: the part inside [0, limit), and its size clipped to the padding only.
struct Window {
  int first, stop, size;
  __device__ __forceinline__ Window(int place, int half, int limit)
      : first(place > half ? place - half : 0), stop(min(limit, place + half + 1)),
        size(min(limit + half, place + half + 1) - (place - half)) {}
};

// The window around element i of planes, and where the plane starts.
struct Square {
  i64 plane;
  Window down, along;
  __device__ __forceinline__ Square(i64 i, int height, int width, int half)
      : plane(i / ((i64)height * width) * height * width), down((int)((i - plane) / width), half, height),
        along((int)((i - plane) % width), half, width) {}
  __device__ __forceinline__ T count() const { return (T)((i64)down.size * along.size); }
};

extern "C" __global__ void lrn_within(const D *x, D *y, D *scale, i64 n, int height, int width, int half, T alpha,
                                      T beta) {
  FOR(i, n) {
    Square square(i, height, width, half);
    T sum = 0;
    for (int h = square.down.first; h < square.down.stop; h++)
      for (int w = square.along.first; w < square.along.stop; w++) {
        T v = x[square.plane + (i64)h * width + w];
        sum += v * v;
      }
    T value = 1 + alpha * sum / square.count();
    if (scale) scale[i] = value;
    y[i] = x[i] * power(value, beta);
  }
}

// The ratios of the n elements of whole planes from `first` on, then their gradient.
extern "C" __global__ void lrn_within_ratios(const D *y, const D *scale, const D *dy, D *ratios, i64 first, i64 n,
                                             int height, int width, int half) {
  FOR(i, n) {
    i64 at = first + i;
    ratios[i] = dy[at] * y[at] / (scale[at] * Square(i, height, width, half).count());
  }
}

extern "C" __global__ void lrn_within_gradient(const D *x, const D *scale, const D *dy, D *dx, const D *ratios,
                                               i64 first, i64 n, int height, int width, int half, T factor, T beta) {
  FOR(i, n) {
    Square square(i, height, width, half);
    i64 at = first + i;
    T sum = 0;
    for (int h = square.down.first; h < square.down.stop; h++)
      for (int w = square.along.first; w < square.along.stop; w++) sum += ratios[square.plane + (i64)h * width + w];
    dx[at] = dy[at] * power(scale[at], beta) - factor * x[at] * sum;
  }
}
