// What each place of a window sees. Shapes are of AXES axes, those that are missing 1 in front: planes of x (source),
// planes of places (out), the window's taps (kernel).
#include "common.cuh"
#include "planes.cuh"

// y[plane, tap, place] = the element that the tap sees from there, or 0. A thread's seat is a (tap, place).
template <int AXES>
__device__ __forceinline__ void unroll(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, i64 x_size,
                                       const Dims &source, const Dims &out, const Dims &kernel, const Dims &stride,
                                       const Dims &pad, const Dims &dilation) {
  u32 seat_place, plane;
  if (!seat(groups, places, seat_place, plane)) return;
  i64 at[AXES], offset = 0, step = 1;
  u32 rest = seat_place;
#pragma unroll
  for (int a = AXES - 1; a >= 0; a--) {
    u32 count = (u32)out.at[a], above = rest / count;
    at[a] = (i64)(rest - above * count) * stride.at[a] - pad.at[a];
    rest = above;
  }
  bool inside = true;
#pragma unroll
  for (int a = AXES - 1; a >= 0; a--) {
    u32 count = (u32)kernel.at[a], above = rest / count;
    at[a] += (i64)(rest - above * count) * dilation.at[a];
    rest = above;
    inside = inside && at[a] >= 0 && at[a] < source.at[a];
    offset += at[a] * step;
    step *= source.at[a];
  }
  for (; plane < planes; plane += groups) y[(i64)plane * places + seat_place] = inside ? x[plane * x_size + offset] : (T)0;
}

// dx = the sum of dy over the taps and places that see an element, tap by tap.
template <int AXES>
__device__ __forceinline__ void roll(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx, i64 y_size,
                                     unsigned taps, const Dims &source, const Dims &out, const Dims &kernel,
                                     const Dims &stride, const Dims &pad, const Dims &dilation) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  i64 at[AXES], seen = y_size / taps;
  u32 rest = place;
#pragma unroll
  for (int a = AXES - 1; a >= 0; a--) {
    u32 count = (u32)source.at[a], above = rest / count;
    at[a] = rest - above * count + pad.at[a];
    rest = above;
  }
  for (u64 first = plane; first < planes; first += (u64)TOGETHER * groups) {
    Sums sums = {};
    for (u32 tap = 0; tap < taps; tap++) {
      bool inside = true;
      i64 offset = 0, step = 1;
      rest = tap;
#pragma unroll
      for (int a = AXES - 1; a >= 0; a--) {
        u32 count = (u32)kernel.at[a], above = rest / count;
        int away = (int)(at[a] - (i64)(rest - above * count) * dilation.at[a]), by = (int)stride.at[a];
        int index = away / by;
        inside = inside && away >= 0 && index * by == away && index < out.at[a];
        offset += index * step;
        step *= out.at[a];
        rest = above;
      }
      if (inside) add_planes(sums, dy, (T)1, tap * seen + offset, y_size, planes, groups, (u32)first);
    }
    store_planes(sums, dx, place, places, planes, groups, (u32)first);
  }
}

extern "C" __global__ void unroll_2(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, i64 x_size,
                                    Dims source, Dims out, Dims kernel, Dims stride, Dims pad, Dims dilation) {
  unroll<2>(planes, groups, places, x, y, x_size, source, out, kernel, stride, pad, dilation);
}

extern "C" __global__ void unroll_8(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, i64 x_size,
                                    Dims source, Dims out, Dims kernel, Dims stride, Dims pad, Dims dilation) {
  unroll<8>(planes, groups, places, x, y, x_size, source, out, kernel, stride, pad, dilation);
}

extern "C" __global__ void roll_2(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx, i64 y_size,
                                  unsigned taps, Dims source, Dims out, Dims kernel, Dims stride, Dims pad,
                                  Dims dilation) {
  roll<2>(planes, groups, places, dy, dx, y_size, taps, source, out, kernel, stride, pad, dilation);
}

extern "C" __global__ void roll_8(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx, i64 y_size,
                                  unsigned taps, Dims source, Dims out, Dims kernel, Dims stride, Dims pad,
                                  Dims dilation) {
  roll<8>(planes, groups, places, dy, dx, y_size, taps, source, out, kernel, stride, pad, dilation);
}
