#include "common.cuh"
#include "channels.cuh"
#include "planes.cuh"
#include "pool.cuh"

// K: windows of K x K, or 0 for any.
template <int K, class M>
__device__ __forceinline__ void largest_of(unsigned planes, unsigned groups, unsigned places, const D *x, D *y,
                                           void *mask, const Pool &s) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  Window window(s, place);
  bool empty = window.empty();
  int row[K ? K : 1], column[K ? K : 1], mark[K ? K : 1];  // `mark`: what the mask has for a row, before the column
#pragma unroll
  for (int i = 0; i < K; i++) {
    row[i] = window.down.clamped(i) * s.width;
    column[i] = window.across.clamped(i);
    mark[i] = s.mark<M>(window.spot(window.down.clamped(i), 0));
  }
  int first = s.mark<M>(window.spot(window.down.begin, window.across.begin));
  for (; plane < planes; plane += groups) {
    const D *from = x + s.x_plane(plane);
    T value = 0;
    int found = -1;
    if (!empty) {
      found = first;
      value = from[window.down.begin * s.width + window.across.begin];
      if (K) {
#pragma unroll
        for (int i = 0; i < K; i++)
#pragma unroll
          for (int j = 0; j < K; j++)
            if (i || j) keep_larger(from[row[i] + column[j]], mark[i] + column[j], value, found);
      } else {
        for (int h = window.down.begin; h < window.down.end; h++)
          for (int w = window.across.begin; w < window.across.end; w++)
            keep_larger(from[h * s.width + w], s.mark<M>(window.spot(h, w)), value, found);
      }
    }
    i64 to = s.y_plane(plane) + place;
    y[to] = value;
    if (mask) ((M *)mask)[to] = (M)found;
  }
}

extern "C" __global__ void largest_2(unsigned planes, unsigned groups, unsigned places, const D *x, D *y,
                                     void *mask, int bytes, Dims window, Dims sizes) {
  BY_MASK((planes, groups, places, x, y, mask, Pool(window, sizes)), largest_of, 2);
}

extern "C" __global__ void largest_3(unsigned planes, unsigned groups, unsigned places, const D *x, D *y,
                                     void *mask, int bytes, Dims window, Dims sizes) {
  BY_MASK((planes, groups, places, x, y, mask, Pool(window, sizes)), largest_of, 3);
}

extern "C" __global__ void largest_any(unsigned planes, unsigned groups, unsigned places, const D *x, D *y,
                                       void *mask, int bytes, Dims window, Dims sizes) {
  BY_MASK((planes, groups, places, x, y, mask, Pool(window, sizes)), largest_of, 0);
}

// Large windows, a warp for each: the lanes take neighbouring elements. `each(value, row, column)`.
template <class F> __device__ __forceinline__ void over_window(const D *from, const Window &window, int width, F each) {
  int wide = window.across.end - window.across.begin, tall = window.down.end - window.down.begin;
  for (int i = threadIdx.x & 31; i < wide * tall; i += 32) {
    int h = window.down.begin + i / wide, w = window.across.begin + i % wide;
    each(from[h * width + w], h, w);
  }
}

// The window of this thread's warp; false if there is none.
__device__ __forceinline__ bool warp_seat(unsigned planes, unsigned places, u32 &place, u32 &plane) {
  i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  plane = (u32)(warp / places);
  place = (u32)(warp % places);
  return warp < (i64)planes * places;
}

template <class M>
__device__ __forceinline__ void largest_by_warps(unsigned planes, unsigned places, const D *x, D *y, void *mask,
                                                 const Pool &s) {
  u32 place, plane;
  if (!warp_seat(planes, places, place, plane)) return;
  Window seen(s, place);
  T value = 0;
  int found = -1;
  if (!seen.empty()) {
    over_window(x + s.x_plane(plane), seen, s.width, [&](T v, int h, int w) {
      if (found < 0 || v > value || v != v) {
        value = v;
        found = s.mark<M>(seen.spot(h, w));
      }
    });
  }
  for (int step = 16; step > 0; step >>= 1) {
    T v = __shfl_xor_sync(0xffffffffu, value, step);
    int where = __shfl_xor_sync(0xffffffffu, found, step);
    bool nan = v != v, mine = value != value;
    bool equal = nan == mine && (nan || v == value), larger = nan == mine ? v > value : nan;
    if (where >= 0 && (found < 0 || larger || (equal && where < found))) {
      value = v;
      found = where;
    }
  }
  if ((threadIdx.x & 31) == 0) {
    i64 to = s.y_plane(plane) + place;
    y[to] = value;
    if (mask) ((M *)mask)[to] = (M)found;
  }
}

extern "C" __global__ void largest_wide(unsigned planes, unsigned places, const D *x, D *y, void *mask, int bytes,
                                        Dims window, Dims sizes) {
  Pool s(window, sizes);
  if (bytes)
    largest_by_warps<u8>(planes, places, x, y, mask, s);
  else
    largest_by_warps<int>(planes, places, x, y, mask, s);
}

template <int K>
__device__ __forceinline__ void average_of(unsigned planes, unsigned groups, unsigned places, const D *x, D *y,
                                           const Pool &s) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  Window window(s, place);
  bool empty = window.empty();
  T size = window.size();
  int row[K ? K : 1], column[K ? K : 1];
#pragma unroll
  for (int i = 0; i < K; i++) {
    row[i] = window.down.clamped(i) * s.width;
    column[i] = window.across.clamped(i);
  }
  int tall = window.down.end - window.down.begin, wide = window.across.end - window.across.begin;
  for (; plane < planes; plane += groups) {
    const D *from = x + s.x_plane(plane);
    T total = 0;
    if (!empty) {
      if (K) {
#pragma unroll
        for (int i = 0; i < K; i++)
#pragma unroll
          for (int j = 0; j < K; j++) {
            T v = from[row[i] + column[j]];
            total += i < tall && j < wide ? v : (T)0;
          }
      } else {
        for (int h = window.down.begin; h < window.down.end; h++)
          for (int w = window.across.begin; w < window.across.end; w++) total += from[h * s.width + w];
      }
    }
    y[s.y_plane(plane) + place] = total / size;
  }
}

extern "C" __global__ void average_2(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, Dims window,
                                     Dims sizes) {
  average_of<2>(planes, groups, places, x, y, Pool(window, sizes));
}

extern "C" __global__ void average_3(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, Dims window,
                                     Dims sizes) {
  average_of<3>(planes, groups, places, x, y, Pool(window, sizes));
}

extern "C" __global__ void average_any(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, Dims window,
                                       Dims sizes) {
  average_of<0>(planes, groups, places, x, y, Pool(window, sizes));
}

extern "C" __global__ void average_wide(unsigned planes, unsigned places, const D *x, D *y, Dims window, Dims sizes) {
  Pool s(window, sizes);
  u32 place, plane;
  if (!warp_seat(planes, places, place, plane)) return;
  Window seen(s, place);
  T total = 0;
  if (!seen.empty()) over_window(x + s.x_plane(plane), seen, s.width, [&](T v, int, int) { total += v; });
  for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(0xffffffffu, total, step);
  if ((threadIdx.x & 31) == 0) y[s.y_plane(plane) + place] = total / seen.size();
}

// Zeiler and Fergus 2013: the first element of the window at which the running sum reaches a random share of the whole.
extern "C" __global__ void stochastic(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, void *mask,
                                      int bytes, unsigned k0, unsigned k1, unsigned c2, unsigned c3, Dims window,
                                      Dims sizes) {
  Pool s(window, sizes);
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  Window seen(s, place);
  for (; plane < planes; plane += groups) {
    const D *from = x + s.x_plane(plane);
    i64 to = s.y_plane(plane) + place;
    double total = 0, passed = 0;
    for (int h = seen.down.begin; h < seen.down.end; h++)
      for (int w = seen.across.begin; w < seen.across.end; w++) total += from[h * s.width + w];
    u32 word = philox(k0, k1, c2, c3, (u64)to >> 2).at[to & 3];
    double wanted = total * ((word >> 8) * (1.0 / 16777216.0));
    Spot spot = seen.spot(seen.down.begin, seen.across.begin);
    bool found = false;
    for (int h = seen.down.begin; h < seen.down.end; h++)
      for (int w = seen.across.begin; w < seen.across.end; w++) {
        passed += from[h * s.width + w];
        if (!found && passed >= wanted) {
          spot = seen.spot(h, w);
          found = true;
        }
      }
    y[to] = seen.empty() ? (T)0 : from[spot.row * s.width + spot.column];
    if (!mask) continue;
    if (bytes)
      ((u8 *)mask)[to] = (u8)(seen.empty() ? -1 : s.mark<u8>(spot));
    else
      ((int *)mask)[to] = seen.empty() ? -1 : s.mark<int>(spot);
  }
}

// The value to expect of the above: the mean, each value weighted by itself; 0 where they sum to nothing.
extern "C" __global__ void expected(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, Dims window,
                                    Dims sizes) {
  Pool s(window, sizes);
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  Window seen(s, place);
  for (; plane < planes; plane += groups) {
    const D *from = x + s.x_plane(plane);
    double total = 0, squares = 0;
    for (int h = seen.down.begin; h < seen.down.end; h++)
      for (int w = seen.across.begin; w < seen.across.end; w++) {
        T v = from[h * s.width + w];
        total += v;
        squares += v * v;
      }
    y[s.y_plane(plane) + place] = total > 0 ? (T)(squares / total) : (T)0;
  }
}
