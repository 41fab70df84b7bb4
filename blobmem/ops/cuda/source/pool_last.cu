// Pooling of arrays (images, height, width, channels): a thread looks after W neighbouring channels, W being PACK where
// channels are whole packs and 1 elsewhere, of one place at a time.
#include "common.cuh"
#include "channels.cuh"
#include "pool.cuh"

// Item i of images of `down` x `across` x `lots`.
struct Item {
  i64 image;
  int down, across, lot;
  __device__ __forceinline__ Item(i64 i, int tall, int wide, int lots) {
    i64 place = quotient(i, lots), row = quotient(place, wide);
    lot = (int)(i - place * lots);
    across = (int)(place - row * wide);
    image = quotient(row, tall);
    down = (int)(row - image * tall);
  }
};

// put(lot, spot, inside) for R x S elements of a window from (h, w) on, the last ones again beyond its end; all loads
// are in flight together. `from` is the first of the channels in the image.
template <int R, int S, int W, class P>
__device__ __forceinline__ void over_part(const D *from, const Window &window, int h, int w, const Pool &s, P put) {
  Lot<W> lots[R][S];
#pragma unroll
  for (int i = 0; i < R; i++)
#pragma unroll
    for (int j = 0; j < S; j++) {
      int row = min(h + i, window.down.end - 1), column = min(w + j, window.across.end - 1);
      lots[i][j] = load<W>(from, (i64)(row * s.width + column) * s.channels);
    }
#pragma unroll
  for (int i = 0; i < R; i++)
#pragma unroll
    for (int j = 0; j < S; j++) {
      int row = min(h + i, window.down.end - 1), column = min(w + j, window.across.end - 1);
      put(lots[i][j], window.spot(row, column), h + i == row && w + j == column);
    }
}

// The same for a whole window, K x K or, with K 0, of any size.
template <int K, int W, class P>
__device__ __forceinline__ void over_window(const D *from, const Window &window, const Pool &s, P put) {
  if (window.empty()) return;
  if (K) {
    over_part<K ? K : 1, K ? K : 1, W>(from, window, window.down.begin, window.across.begin, s, put);
  } else {
    for (int h = window.down.begin; h < window.down.end; h++)
      for (int w = window.across.begin; w < window.across.end; w += 4) over_part<1, 4, W>(from, window, h, w, s, put);
  }
}

// each(offset in y, the window's first channels in x, window) for every W channels of every window; n elements of y.
template <int W, class E> __device__ __forceinline__ void each_window(const D *x, i64 n, const Pool &s, E each) {
  int lots = (int)s.channels / W;
  FOR(i, n / W) {
    Item item(i, s.rows, s.columns, lots);
    const D *from = x + item.image * s.height * s.width * s.channels + item.lot * W;
    each(i * W, from, Window(s, (u32)(item.down * s.columns + item.across)));
  }
}

template <bool MASKED, int K, class M, int W>
__device__ __forceinline__ void largest_of_windows(const D *x, D *y, void *mask, i64 n, const Pool &s) {
  each_window<W>(x, n, s, [=](i64 to, const D *from, const Window &window) {
    Lot<W> values = {};
    int found[W], seen = 0;
#pragma unroll
    for (int i = 0; i < W; i++) found[i] = -1;
    over_window<K, W>(from, window, s, [&](const Lot<W> &lot, const Spot &spot, bool) {
      int place = MASKED ? s.mark<M>(spot) : 0;
      bool begins = seen++ == 0;  // where all loads are in flight that is known beforehand
#pragma unroll
      for (int i = 0; i < W; i++) {
        if (begins) values.at[i] = lot.at[i], found[i] = place;
        else keep_larger(lot.at[i], place, values.at[i], found[i]);
      }
    });
    store<W>(y, to, values);
    if (!MASKED) return;
    Places<W, M> places;
#pragma unroll
    for (int i = 0; i < W; i++) places.at[i] = (M)found[i];
    *(Places<W, M> *)((M *)mask + to) = places;
  });
}

template <int K, class M, int W>
__device__ __forceinline__ void largest_last(const D *x, D *y, void *mask, i64 n, const Pool &s) {
  if (mask)
    largest_of_windows<true, K, M, W>(x, y, mask, n, s);
  else
    largest_of_windows<false, K, M, W>(x, y, mask, n, s);
}

template <int K, int W> __device__ __forceinline__ void average_last(const D *x, D *y, i64 n, const Pool &s) {
  each_window<W>(x, n, s, [=](i64 to, const D *from, const Window &window) {
    Lot<W> total = {};
    over_window<K, W>(from, window, s, [&](const Lot<W> &lot, const Spot &, bool inside) {
#pragma unroll
      for (int i = 0; i < W; i++) total.at[i] += inside ? lot.at[i] : (T)0;
    });
    T size = window.size();
#pragma unroll
    for (int i = 0; i < W; i++) total.at[i] /= size;
    store<W>(y, to, total);
  });
}

// f<..., W>(arguments).
#define BY_WIDTH(arguments, f, ...) \
  (whole_packs(s.channels) ? f<__VA_ARGS__, PACK> arguments : f<__VA_ARGS__, 1> arguments)

// f<..., the mask's type, W>(arguments).
#define BY_MASK_AND_WIDTH(arguments, f, ...) \
  (bytes ? BY_WIDTH(arguments, f, __VA_ARGS__, u8) : BY_WIDTH(arguments, f, __VA_ARGS__, int))

extern "C" __global__ void largest_2(const D *x, D *y, void *mask, int bytes, i64 n, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_MASK_AND_WIDTH((x, y, mask, n, s), largest_last, 2);
}

extern "C" __global__ void largest_3(const D *x, D *y, void *mask, int bytes, i64 n, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_MASK_AND_WIDTH((x, y, mask, n, s), largest_last, 3);
}

extern "C" __global__ void largest_any(const D *x, D *y, void *mask, int bytes, i64 n, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_MASK_AND_WIDTH((x, y, mask, n, s), largest_last, 0);
}

extern "C" __global__ void average_2(const D *x, D *y, i64 n, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_WIDTH((x, y, n, s), average_last, 2);
}

extern "C" __global__ void average_3(const D *x, D *y, i64 n, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_WIDTH((x, y, n, s), average_last, 3);
}

extern "C" __global__ void average_any(const D *x, D *y, i64 n, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_WIDTH((x, y, n, s), average_last, 0);
}

// dx = each element's sum over the windows that see it. `get(offset in y, row, column)` is a window's value, `add(sum,
// value, spot)` adds it to an element. By cells of S x S elements that N x N windows see.
template <int N, int S, int W, class V, class G, class A>
__device__ __forceinline__ void gather_cells(D *dx, i64 images, const Pool &s, G get, A add) {
  typedef Cell<N, S> Square;
  int lots = (int)s.channels / W, tall = Square::down(s), wide = Square::across(s);
  FOR(i, images * tall * wide * lots) {
    Item item(i, tall, wide, lots);
    Square cell(s, item.down, item.across);
    i64 from = item.image * s.rows * s.columns * s.channels + item.lot * W;
    D *to = dx + item.image * s.height * s.width * s.channels + item.lot * W;
    Lot<W> sums[S][S];
    cell.template gather<V>(
        s, sums, [=](int at, int row, int column) { return get(from + (i64)at * s.channels, row, column); }, add);
#pragma unroll
    for (int e = 0; e < S; e++)
#pragma unroll
      for (int f = 0; f < S; f++)
        if (cell.holds(s, e, f)) store<W>(to, (i64)((cell.h + e) * s.width + cell.w + f) * s.channels, sums[e][f]);
  }
}

// The same for any windows, by elements.
template <int W, class V, class G, class A>
__device__ __forceinline__ void gather_any(D *dx, i64 images, const Pool &s, G get, A add) {
  int lots = (int)s.channels / W;
  FOR(i, images * s.height * s.width * lots) {
    Item item(i, s.height, s.width, lots);
    Seen down(item.down, s.kh, s.sh, s.ph, s.rows), across(item.across, s.kw, s.sw, s.pw, s.columns);
    i64 from = item.image * s.rows * s.columns * s.channels + item.lot * W;
    Lot<W> sum = {};
    for (int r = down.first; r < down.first + down.count; r++)
      for (int c = across.first; c < across.first + across.count; c++)
        add(sum, get(from + (i64)(r * s.columns + c) * s.channels, r, c), s.spot(r, c, item.down, item.across));
    store<W>(dx, i * W, sum);
  }
}

template <int N, int S, int W, class V, class G, class A>
__device__ __forceinline__ void gather(D *dx, i64 images, const Pool &s, G get, A add) {
  if (N)
    gather_cells<N ? N : 1, S, W, V>(dx, images, s, get, add);
  else
    gather_any<W, V>(dx, images, s, get, add);
}

template <int N, int S, class M, int W>
__device__ __forceinline__ void largest_gather(const D *dy, const void *mask, D *dx, i64 images, const Pool &s) {
  auto get = [=](i64 at, int, int) {
    Largest<W, M> value = {load<W>(dy, at), *(const Places<W, M> *)((const M *)mask + at)};
    return value;
  };
  auto add = [=](Lot<W> &sum, const Largest<W, M> &value, const Spot &spot) {
    add_largest(sum, value, s.mark<M>(spot));
  };
  gather<N, S, W, Largest<W, M>>(dx, images, s, get, add);
}

template <int N, int S, int W>
__device__ __forceinline__ void average_gather(const D *dy, D *dx, i64 images, const Pool &s) {
  auto get = [=](i64 at, int row, int column) { return times<W>(load<W>(dy, at), share_of(s, row, column)); };
  auto add = [](Lot<W> &sum, const Lot<W> &value, const Spot &) { add_lot<W>(sum, value); };
  gather<N, S, W, Lot<W>>(dx, images, s, get, add);
}

extern "C" __global__ void __launch_bounds__(256, CROWD(6))
    largest_gradient_1_2(const D *dy, const void *mask, int bytes, D *dx, i64 images, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_MASK_AND_WIDTH((dy, mask, dx, images, s), largest_gather, 1, 2);
}

extern "C" __global__ void __launch_bounds__(256, CROWD(3))
    largest_gradient_2_2(const D *dy, const void *mask, int bytes, D *dx, i64 images, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_MASK_AND_WIDTH((dy, mask, dx, images, s), largest_gather, 2, 2);
}

extern "C" __global__ void largest_gradient_3_1(const D *dy, const void *mask, int bytes, D *dx, i64 images, Dims window,
                                                Dims sizes) {
  Pool s(window, sizes);
  BY_MASK_AND_WIDTH((dy, mask, dx, images, s), largest_gather, 3, 1);
}

extern "C" __global__ void largest_gradient_any(const D *dy, const void *mask, int bytes, D *dx, i64 images, Dims window,
                                                Dims sizes) {
  Pool s(window, sizes);
  BY_MASK_AND_WIDTH((dy, mask, dx, images, s), largest_gather, 0, 1);
}

extern "C" __global__ void average_gradient_1_2(const D *dy, D *dx, i64 images, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_WIDTH((dy, dx, images, s), average_gather, 1, 2);
}

extern "C" __global__ void average_gradient_2_2(const D *dy, D *dx, i64 images, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_WIDTH((dy, dx, images, s), average_gather, 2, 2);
}

extern "C" __global__ void average_gradient_3_1(const D *dy, D *dx, i64 images, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_WIDTH((dy, dx, images, s), average_gather, 3, 1);
}

extern "C" __global__ void average_gradient_any(const D *dy, D *dx, i64 images, Dims window, Dims sizes) {
  Pool s(window, sizes);
  BY_WIDTH((dy, dx, images, s), average_gather, 0, 1);
}
