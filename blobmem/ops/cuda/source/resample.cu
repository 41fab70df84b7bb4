// Planes in another size. A thread's seat is a place in the plane that it writes.
#include "common.cuh"
#include "planes.cuh"

// Where point i lies among `size` with the same ends, `scale` apart: the two beside it, and the share of the right one.
struct Between {
  int left, right;
  T share;

  __device__ __forceinline__ Between(int i, double scale, int size) {
    double at = i * scale;
    left = (int)at < size - 1 ? (int)at : size - 1;
    right = left + 1 < size ? left + 1 : size - 1;
    share = (T)(at - left);
  }

  // What it takes of the element there.
  __device__ __forceinline__ T weight(int element) const {
    return (left == element ? (T)1 - share : (T)0) + (right == element ? share : (T)0);
  }
};

// Bilinear, corners on corners of the tall x wide part of x that begins at (before, before).
extern "C" __global__ void interpolate(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, int height,
                                       int width, int columns, int before, int tall, int wide, double down,
                                       double across) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  Between v((int)(place / (u32)columns), down, tall), u((int)(place % (u32)columns), across, wide);
  i64 first = (i64)(before + v.left) * width + before, second = (i64)(before + v.right) * width + before;
  for (; plane < planes; plane += groups) {
    const D *from = x + (i64)plane * height * width;
    T above = (1 - u.share) * from[first + u.left] + u.share * from[first + u.right];
    T under = (1 - u.share) * from[second + u.left] + u.share * from[second + u.right];
    y[(i64)plane * places + place] = (1 - v.share) * above + v.share * under;
  }
}

// The points that can lie beside an element, perhaps one too many at each end.
struct Near {
  int first, end;

  __device__ __forceinline__ Near(int element, double scale, int count) {
    first = 0;
    end = count;
    if (scale > 0) {
      double low = floor((element - 1) / scale), high = ceil((element + 1) / scale);
      if (low > 0) first = low < count ? (int)low : count;
      if (high + 1 < count) end = (int)high + 1;
    }
  }
};

// The transpose of `interpolate`, gathered: dx is 0 where cut off.
extern "C" __global__ void interpolate_gradient(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx,
                                                int rows, int columns, int width, int before, int tall, int wide,
                                                double down, double across) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  int h = (int)(place / (u32)width) - before, w = (int)(place % (u32)width) - before;
  bool inside = h >= 0 && h < tall && w >= 0 && w < wide;
  Near lines(h, down, inside ? rows : 0), points(w, across, columns);
  i64 size = (i64)rows * columns;
  for (u64 first = plane; first < planes; first += (u64)TOGETHER * groups) {
    Sums sums = {};
    for (int r = lines.first; r < lines.end; r++) {
      T v = Between(r, down, tall).weight(h);
      for (int c = points.first; c < points.end; c++)
        add_planes(sums, dy, v * Between(c, across, wide).weight(w), (i64)r * columns + c, size, planes, groups,
                   (u32)first);
    }
    store_planes(sums, dx, place, places, planes, groups, (u32)first);
  }
}

// y's row r is x's row r * times / over; columns likewise.
extern "C" __global__ void nearest(unsigned planes, unsigned groups, unsigned places, const D *x, D *y, int height,
                                   int width, int columns, i64 times_h, i64 over_h, i64 times_w, i64 over_w) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  i64 from = place / (u32)columns * times_h / over_h * width + place % (u32)columns * times_w / over_w;
  for (; plane < planes; plane += groups) y[(i64)plane * places + place] = x[(i64)plane * height * width + from];
}

// The transpose of `nearest`, gathered.
extern "C" __global__ void nearest_gradient(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx,
                                            int rows, int columns, int width, i64 times_h, i64 over_h, i64 times_w,
                                            i64 over_w) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  i64 h = place / (u32)width, w = place % (u32)width;
  i64 r0 = (h * over_h + times_h - 1) / times_h, r1 = ((h + 1) * over_h + times_h - 1) / times_h;
  i64 c0 = (w * over_w + times_w - 1) / times_w, c1 = ((w + 1) * over_w + times_w - 1) / times_w;
  r1 = r1 < rows ? r1 : rows;
  c1 = c1 < columns ? c1 : columns;
  for (; plane < planes; plane += groups) {
    const D *from = dy + (i64)plane * rows * columns;
    T sum = 0;
    for (i64 r = r0; r < r1; r++)
      for (i64 c = c0; c < c1; c++) sum += from[r * columns + c];
    dx[(i64)plane * places + place] = sum;
  }
}

// A place in a plane of `size` elements, from a mask of T or of int (`whole`); -1 for none, and for what is no place.
__device__ __forceinline__ i64 place_of(const void *mask, int whole, i64 i, i64 size, i64 *fault, i64 code) {
  double value = whole ? (double)((const int *)mask)[i] : (double)((const T *)mask)[i];
  if (value >= -1 && value < size) return (i64)value;
  report(fault, code, i, value);
  return -1;
}

// As large as T: the bits of an element of y, if that is of T.
#ifdef DOUBLE
typedef u64 Mark;
#else
typedef u32 Mark;
#endif

// marks, all zeros before, keeps at each place of y 1 + the last index of x that goes there: the order of threads is all
// one.
extern "C" __global__ void mark_places(unsigned planes, unsigned groups, unsigned places, const void *mask, int whole,
                                       Mark *marks, i64 y_size, i64 *fault, i64 code) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  for (; plane < planes; plane += groups) {
    i64 to = place_of(mask, whole, (i64)plane * places + place, y_size, fault, code);
    if (to >= 0) atomicMax(marks + plane * y_size + to, (Mark)place + 1);
  }
}

// y = the elements of x that the marks, which may be in y, stand for, or 0.
extern "C" __global__ void put_marked(unsigned planes, unsigned groups, unsigned places, const Mark *marks, const D *x,
                                      D *y, i64 x_size) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  for (; plane < planes; plane += groups) {
    i64 to = (i64)plane * places + place;
    Mark mark = marks[to];
    y[to] = mark ? x[plane * x_size + (i64)mark - 1] : (T)0;
  }
}

// dx = what dy has at its place, 0 for one that has none.
extern "C" __global__ void take_places(unsigned planes, unsigned groups, unsigned places, const D *dy, const void *mask,
                                       int whole, D *dx, i64 y_size, i64 *fault, i64 code) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  for (; plane < planes; plane += groups) {
    i64 i = (i64)plane * places + place;
    i64 from = place_of(mask, whole, i, y_size, fault, code);
    dx[i] = from >= 0 ? dy[plane * y_size + from] : (T)0;
  }
}
