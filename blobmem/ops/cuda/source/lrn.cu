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

// Moves a window, kept in registers, on by one channel.
template <int SIZE> __device__ __forceinline__ void move(T (&window)[SIZE], T next) {
#pragma unroll
  for (int j = 0; j < SIZE - 1; j++) window[j] = window[j + 1];
  window[SIZE - 1] = next;
}

// The scale of the channel in the middle.
template <int SIZE> __device__ __forceinline__ T scale_of(const T (&window)[SIZE], T k, T factor) {
  T sum = 0;
#pragma unroll
  for (int j = 0; j < SIZE; j++) sum += window[j] * window[j];
  return k + factor * sum;
}

// The same of more channels than are kept in registers; x is at channel 0.
__device__ __forceinline__ T wide_scale(const D *x, i64 c, i64 channels, i64 positions, int half, T k, T factor) {
  T sum = 0;
  for (i64 other = c > half ? c - half : 0; other < channels && other <= c + half; other++) {
    T v = x[other * positions];
    sum += v * v;
  }
  return k + factor * sum;
}

// The HALF channels on either side and the one between are kept in registers; outside there are zeros.
template <int HALF>
__device__ __forceinline__ void across(const D *x, D *y, Place place, i64 channels, i64 positions, T k, T factor,
                                       T beta) {
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
      move(window, next[i]);
      T scale = scale_of(window, k, factor);
      if (c + i < place.stop) y[place.at + (c + i) * positions] = window[HALF] * power(scale, beta);
    }
  }
}

// `half` channels on either side; n threads, a run of channels each.
extern "C" __global__ void lrn_across(const D *x, D *y, i64 n, i64 channels, i64 positions, i64 run, int half, T k,
                                      T factor, T beta) {
  i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  Place place(t, channels, positions, run);
  if (half == 0) return across<0>(x, y, place, channels, positions, k, factor, beta);
  if (half == 1) return across<1>(x, y, place, channels, positions, k, factor, beta);
  if (half == 2) return across<2>(x, y, place, channels, positions, k, factor, beta);
  if (half == 3) return across<3>(x, y, place, channels, positions, k, factor, beta);
  if (half == 4) return across<4>(x, y, place, channels, positions, k, factor, beta);
  for (i64 c = place.first; c < place.stop; c++) {
    i64 at = place.at + c * positions;
    y[at] = x[at] * power(wide_scale(x + place.at, c, channels, positions, half, k, factor), beta);
  }
}

// What one channel adds to the gradient of its neighbours, and what its own gradient begins with.
struct Share { T ratio, lead; };

__device__ __forceinline__ Share share_of(T x, T g, T scale, T beta) {
  T factor = power(scale, beta), y = x * factor;
  Share share = {g * y / scale, g * factor};
  return share;
}

// As `across`: the scale is made anew HALF channels ahead of the gradient, from x HALF channels ahead of that.
// dx may be dy where one thread walks all channels: it then writes behind all that it has yet to read.
template <int HALF>
__device__ __forceinline__ void across_gradient(const D *x, const D *dy, D *dx, Place place, i64 channels,
                                                i64 positions, T k, T factor, T slope, T beta) {
  T window[2 * HALF + 1], ratios[2 * HALF + 1], leads[HALF + 1];
  auto has = [&](i64 c) { return c >= 0 && c < channels; };
  auto of = [&](const D *array, i64 c) { return has(c) ? array[place.at + c * positions] : (T)0; };
  // c is then in the middle of the window, and last among the ratios
  auto move_to = [&](i64 c, T next, T g) {
    move(window, next);
    Share share = {0, 0};
    if (has(c)) share = share_of(window[HALF], g, scale_of(window, k, factor), beta);
    move(ratios, share.ratio);
    move(leads, share.lead);
  };
#pragma unroll
  for (int i = 0; i < 2 * HALF; i++) window[i + 1] = of(x, place.first - 2 * HALF + i);
#pragma unroll
  for (int i = 0; i < 2 * HALF; i++) {
    i64 c = place.first - HALF + i;
    move_to(c, of(x, c + HALF), of(dy, c));
  }
  for (i64 c = place.first; c < place.stop; c += AHEAD) {
    T next[AHEAD], gs[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      next[i] = of(x, c + i + 2 * HALF);
      gs[i] = of(dy, c + i + HALF);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      move_to(c + i + HALF, next[i], gs[i]);
      T sum = ratios[2 * HALF];
#pragma unroll
      for (int j = 0; j < 2 * HALF; j++) sum += ratios[j];
      if (c + i < place.stop) dx[place.at + (c + i) * positions] = leads[0] - slope * window[0] * sum;
    }
  }
}

// `factor` as for `lrn_across`, `slope` is 2 beta times as much.
extern "C" __global__ void lrn_across_gradient(const D *x, const D *dy, D *dx, i64 n, i64 channels, i64 positions,
                                               i64 run, int half, T k, T factor, T slope, T beta) {
  i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= n) return;
  Place place(t, channels, positions, run);
  if (half == 0) across_gradient<0>(x, dy, dx, place, channels, positions, k, factor, slope, beta);
  if (half == 1) across_gradient<1>(x, dy, dx, place, channels, positions, k, factor, slope, beta);
  if (half == 2) across_gradient<2>(x, dy, dx, place, channels, positions, k, factor, slope, beta);
  if (half == 3) across_gradient<3>(x, dy, dx, place, channels, positions, k, factor, slope, beta);
  if (half == 4) across_gradient<4>(x, dy, dx, place, channels, positions, k, factor, slope, beta);
}

// For windows that no thread can keep: the ratios of the n elements from `first` on, with what their gradient begins
// with in dx, which may be dy; then their gradient.
extern "C" __global__ void lrn_wide_ratios(const D *x, const D *dy, D *dx, D *ratios, i64 first, i64 n, i64 channels,
                                           i64 positions, int half, T k, T factor, T beta) {
  FOR(i, n) {
    i64 c = i / positions % channels, at = first + i;
    T scale = wide_scale(x + at - c * positions, c, channels, positions, half, k, factor);
    Share share = share_of(x[at], dy[at], scale, beta);
    ratios[i] = share.ratio;
    dx[at] = share.lead;
  }
}

extern "C" __global__ void lrn_wide_gradient(const D *x, D *dx, const D *ratios, i64 first, i64 n, i64 channels,
                                             i64 positions, int half, T slope) {
  FOR(i, n) {
    i64 c = i / positions % channels, at = first + i;
    T sum = 0;
    for (i64 other = c > half ? c - half : 0; other < channels && other <= c + half; other++)
      sum += ratios[i + (other - c) * positions];
    dx[at] -= slope * x[at] * sum;
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

// The scale at the middle of a square of x.
__device__ __forceinline__ T scale_within(const D *x, const Square &square, int width, T alpha) {
  T sum = 0;
  for (int h = square.down.first; h < square.down.stop; h++)
    for (int w = square.along.first; w < square.along.stop; w++) {
      T v = x[square.plane + (i64)h * width + w];
      sum += v * v;
    }
  return 1 + alpha * sum / square.count();
}

extern "C" __global__ void lrn_within(const D *x, D *y, i64 n, int height, int width, int half, T alpha, T beta) {
  FOR(i, n) y[i] = x[i] * power(scale_within(x, Square(i, height, width, half), width, alpha), beta);
}

// The ratios of the n elements of whole planes from `first` on, with what their gradient begins with in dx, which may
// be dy; then their gradient.
extern "C" __global__ void lrn_within_ratios(const D *x, const D *y, const D *dy, D *dx, D *ratios, i64 first, i64 n,
                                             int height, int width, int half, T alpha, T beta) {
  FOR(i, n) {
    i64 at = first + i;
    Square square(i, height, width, half);
    T scale = scale_within(x + first, square, width, alpha), g = dy[at];
    ratios[i] = g * y[at] / (scale * square.count());
    dx[at] = g * power(scale, beta);
  }
}

extern "C" __global__ void lrn_within_gradient(const D *x, D *dx, const D *ratios, i64 first, i64 n, int height,
                                               int width, int half, T slope) {
  FOR(i, n) {
    Square square(i, height, width, half);
    i64 at = first + i;
    T sum = 0;
    for (int h = square.down.first; h < square.down.stop; h++)
      for (int w = square.along.first; w < square.along.stop; w++) sum += ratios[square.plane + (i64)h * width + w];
    dx[at] -= slope * x[at] * sum;
  }
}
