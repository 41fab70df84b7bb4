#include "common.cuh"
#include "channels.cuh"
#include "planes.cuh"
#include "pool.cuh"

// dx = (`fresh`: nothing, else dx) + each element's sum over the windows that see it, row by row. N: at most N x N
// windows see it, or 0 for any number. `weigh(row, column, h, w)` is what a window's value counts to element (h, w), found
// once for all planes; `term(window, weight)` what it adds to it. Where fewer see it the last is read again, all loads
// being in flight together, and not added.
template <int N, class W, class F>
__device__ __forceinline__ void gather(unsigned planes, unsigned groups, unsigned places, D *dx, int fresh, const Pool &s,
                                       W weigh, F term) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  int h = (int)(place / (u32)s.width), w = (int)(place % (u32)s.width);
  Seen down(h, s.kh, s.sh, s.ph, s.rows), across(w, s.kw, s.sw, s.pw, s.columns);
  bool any = down.count > 0 && across.count > 0;
  i64 first = (i64)down.first * s.columns + across.first;
  int row[N ? N : 1], column[N ? N : 1];
  decltype(weigh(0, 0, 0, 0)) weight[N ? N : 1][N ? N : 1];
#pragma unroll
  for (int i = 0; i < N; i++) {
    row[i] = (i < down.count ? i : down.count - 1) * s.columns;
    column[i] = i < across.count ? i : across.count - 1;
#pragma unroll
    for (int j = 0; j < N; j++) weight[i][j] = weigh(down.first + i, across.first + j, h, w);
  }
  for (; plane < planes; plane += groups) {
    i64 from = s.y_plane(plane) + first;
    T sum = 0;
    if (N) {
      if (any) {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
          for (int j = 0; j < N; j++) {
            T value = term(from + row[i] + column[j], weight[i][j]);
            sum += i < down.count && j < across.count ? value : (T)0;
          }
      }
    } else {
      for (int i = 0; i < down.count; i++)
        for (int j = 0; j < across.count; j++)
          sum += term(from + i * s.columns + j, weigh(down.first + i, across.first + j, h, w));
    }
    D *to = dx + s.x_plane(plane) + place;
    *to = fresh ? sum : *to + sum;
  }
}

template <int N, class M>
__device__ __forceinline__ void largest_gather(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                               const void *mask, D *dx, int fresh, const Pool &s) {
  auto mark = [=](int row, int column, int h, int w) { return s.mark<M>(s.spot(row, column, h, w)); };
  gather<N>(planes, groups, places, dx, fresh, s, mark, [=](i64 at, int wanted) {
    T value = dy[at];
    return ((const M *)mask)[at] == wanted ? value : (T)0;
  });
}

extern "C" __global__ void largest_gradient_1(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                              const void *mask, int bytes, D *dx, int fresh, Dims window,
                                              Dims sizes) {
  BY_MASK((planes, groups, places, dy, mask, dx, fresh, Pool(window, sizes)), largest_gather, 1);
}

extern "C" __global__ void largest_gradient_2(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                              const void *mask, int bytes, D *dx, int fresh, Dims window,
                                              Dims sizes) {
  BY_MASK((planes, groups, places, dy, mask, dx, fresh, Pool(window, sizes)), largest_gather, 2);
}

extern "C" __global__ void largest_gradient_3(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                              const void *mask, int bytes, D *dx, int fresh, Dims window,
                                              Dims sizes) {
  BY_MASK((planes, groups, places, dy, mask, dx, fresh, Pool(window, sizes)), largest_gather, 3);
}

extern "C" __global__ void largest_gradient_any(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                                const void *mask, int bytes, D *dx, int fresh, Dims window,
                                                Dims sizes) {
  BY_MASK((planes, groups, places, dy, mask, dx, fresh, Pool(window, sizes)), largest_gather, 0);
}

template <int N>
__device__ __forceinline__ void average_gather(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx,
                                               int fresh, const Pool &s) {
  auto share = [=](int row, int column, int, int) { return share_of(s, row, column); };
  gather<N>(planes, groups, places, dx, fresh, s, share, [=](i64 at, T weight) { return dy[at] * weight; });
}

extern "C" __global__ void average_gradient_1(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx,
                                              int fresh, Dims window, Dims sizes) {
  average_gather<1>(planes, groups, places, dy, dx, fresh, Pool(window, sizes));
}

extern "C" __global__ void average_gradient_2(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx,
                                              int fresh, Dims window, Dims sizes) {
  average_gather<2>(planes, groups, places, dy, dx, fresh, Pool(window, sizes));
}

extern "C" __global__ void average_gradient_3(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx,
                                              int fresh, Dims window, Dims sizes) {
  average_gather<3>(planes, groups, places, dy, dx, fresh, Pool(window, sizes));
}

extern "C" __global__ void average_gradient_any(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx,
                                                int fresh, Dims window, Dims sizes) {
  average_gather<0>(planes, groups, places, dy, dx, fresh, Pool(window, sizes));
}

// The same where windows are two apart and at most N * 2 long, by cells, of which there are `places` in a plane.
template <int N, class V, class G, class A>
__device__ __forceinline__ void gather_cells(unsigned planes, unsigned groups, unsigned places, D *dx, int fresh,
                                             const Pool &s, G get, A add) {
  u32 place, plane;
  if (!seat(groups, places, place, plane)) return;
  u32 wide = Cell<N, 2>::across(s), down = place / wide;
  Cell<N, 2> cell(s, (int)down, (int)(place - down * wide));
  bool pairs = s.width % 2 == 0 && cell.w % 2 == 0 && aligned(dx) && fresh;
  for (; plane < planes; plane += groups) {
    i64 from = s.y_plane(plane);
    D *to = dx + s.x_plane(plane);
    Lot<1> sums[2][2];
    cell.template gather<V>(s, sums, [=](int at, int row, int column) { return get(from + at, row, column); }, add);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      i64 at = (i64)(cell.h + e) * s.width + cell.w;
      if (pairs && cell.holds(s, e, 0)) {
        Lot<2> both = {{sums[e][0].at[0], sums[e][1].at[0]}};
        store<2>(to, at, both);
      } else {
#pragma unroll
        for (int f = 0; f < 2; f++)
          if (cell.holds(s, e, f)) to[at + f] = fresh ? sums[e][f].at[0] : to[at + f] + sums[e][f].at[0];
      }
    }
  }
}

template <int N, class M>
__device__ __forceinline__ void largest_cells(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                              const void *mask, D *dx, int fresh, const Pool &s) {
  gather_cells<N, Largest<1, M>>(
      planes, groups, places, dx, fresh, s,
      [=](i64 at, int, int) {
        Largest<1, M> value = {{{dy[at]}}, {{((const M *)mask)[at]}}};
        return value;
      },
      [=](Lot<1> &sum, const Largest<1, M> &value, const Spot &spot) { add_largest(sum, value, s.mark<M>(spot)); });
}

extern "C" __global__ void largest_gradient_cells_1(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                                    const void *mask, int bytes, D *dx, int fresh, Dims window,
                                                    Dims sizes) {
  BY_MASK((planes, groups, places, dy, mask, dx, fresh, Pool(window, sizes)), largest_cells, 1);
}

extern "C" __global__ void largest_gradient_cells_2(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                                    const void *mask, int bytes, D *dx, int fresh, Dims window,
                                                    Dims sizes) {
  BY_MASK((planes, groups, places, dy, mask, dx, fresh, Pool(window, sizes)), largest_cells, 2);
}

template <int N>
__device__ __forceinline__ void average_cells(unsigned planes, unsigned groups, unsigned places, const D *dy, D *dx,
                                              int fresh, const Pool &s) {
  gather_cells<N, Lot<1>>(
      planes, groups, places, dx, fresh, s,
      [=](i64 at, int row, int column) {
        Lot<1> value = {{dy[at] * share_of(s, row, column)}};
        return value;
      },
      [](Lot<1> &sum, const Lot<1> &value, const Spot &) { add_lot<1>(sum, value); });
}

extern "C" __global__ void average_gradient_cells_1(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                                    D *dx, int fresh, Dims window, Dims sizes) {
  average_cells<1>(planes, groups, places, dy, dx, fresh, Pool(window, sizes));
}

extern "C" __global__ void average_gradient_cells_2(unsigned planes, unsigned groups, unsigned places, const D *dy,
                                                    D *dx, int fresh, Dims window, Dims sizes) {
  average_cells<2>(planes, groups, places, dy, dx, fresh, Pool(window, sizes));
}
