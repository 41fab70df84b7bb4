// Pooling over planes. Windows are clipped to the plane; y's planes lie one after another, but each image's begin `gap`
// elements further, the first at `at` (the levels of a pyramid share an array).
// Needs common.cuh and channels.cuh.

// W elements of a mask, loaded and stored at once. M is int, for places in their planes, or u8, for places in windows
// before these are clipped; -1, as a byte 255, is nowhere.
template <int W, class M> struct __align__(W * sizeof(M)) Places { M at[W]; };

// f<..., the mask's type>(arguments).
#define BY_MASK(arguments, f, ...) (bytes ? f<__VA_ARGS__, u8> arguments : f<__VA_ARGS__, int> arguments)

// An element of a window: where it is in the plane, and in the window.
struct Spot { int row, column, down, across; };

struct Pool {
  int kh, kw, sh, sw, ph, pw, height, width, rows, columns;
  u32 channels;
  i64 gap, at;

  // window: kernel, stride, pad; sizes: x's plane, y's plane, channels, gap, at.
  __device__ __forceinline__ Pool(const Dims &window, const Dims &sizes)
      : kh((int)window.at[0]), kw((int)window.at[1]), sh((int)window.at[2]), sw((int)window.at[3]),
        ph((int)window.at[4]), pw((int)window.at[5]), height((int)sizes.at[0]), width((int)sizes.at[1]),
        rows((int)sizes.at[2]), columns((int)sizes.at[3]), channels((u32)sizes.at[4]), gap(sizes.at[5]),
        at(sizes.at[6]) {}

  // Element (h, w) of the plane as one of the window (row, column).
  __device__ __forceinline__ Spot spot(int row, int column, int h, int w) const {
    return Spot{h, w, h - (row * sh - ph), w - (column * sw - pw)};
  }

  // What a mask of M has for a place.
  template <class M> __device__ __forceinline__ int mark(const Spot &spot) const {
    return sizeof(M) == 1 ? spot.down * kw + spot.across : spot.row * width + spot.column;
  }

  __device__ __forceinline__ i64 x_plane(u32 plane) const { return (i64)plane * height * width; }

  __device__ __forceinline__ i64 y_plane(u32 plane) const {
    i64 first = at + (i64)plane * rows * columns;
    return gap ? first + plane / channels * gap : first;
  }
};

// One axis of a window: what of it lies inside the plane, and how long it is inside plane and padding.
struct Span {
  int first, begin, end, extent;

  __device__ __forceinline__ Span(int index, int size, int stride, int pad, int limit) : first(index * stride - pad) {
    begin = first > 0 ? first : 0;
    end = first + size < limit ? first + size : limit;
    extent = (first + size < limit + pad ? first + size : limit + pad) - first;
  }

  __device__ __forceinline__ bool empty() const { return begin >= end; }

  // Element i of the clipped window, the last one again beyond it.
  __device__ __forceinline__ int clamped(int i) const { return begin + i < end ? begin + i : end - 1; }
};

struct Window {
  Span down, across;

  __device__ __forceinline__ Window(const Pool &s, u32 place)
      : down((int)(place / (u32)s.columns), s.kh, s.sh, s.ph, s.height),
        across((int)(place % (u32)s.columns), s.kw, s.sw, s.pw, s.width) {}

  __device__ __forceinline__ bool empty() const { return down.empty() || across.empty(); }

  __device__ __forceinline__ Spot spot(int h, int w) const { return Spot{h, w, h - down.first, w - across.first}; }

  __device__ __forceinline__ T size() const {
    int n = down.extent * across.extent;
    return (T)(n > 1 ? n : 1);
  }
};

// The larger of two, the first of equals; what is not a number counts as larger than any.
__device__ __forceinline__ void keep_larger(T v, int where, T &value, int &found) {
  if (v > value || v != v) {
    value = v;
    found = where;
  }
}

// The windows that see an element, along one axis.
struct Seen {
  int first, count;

  __device__ __forceinline__ Seen(int at, int size, int stride, int pad, int windows) {
    first = at + pad < size ? 0 : (at + pad - size) / stride + 1;
    int last = (at + pad) / stride;
    count = (last < windows ? last + 1 : windows) - first;
  }
};

// What a window at the border counts in averages: it divides by what of it is inside plane and padding.
__device__ __forceinline__ T share_of(const Pool &s, int row, int column) {
  int tall = s.height + 2 * s.ph - row * s.sh, wide = s.width + 2 * s.pw - column * s.sw;
  return (T)1 / (T)((tall < s.kh ? tall : s.kh) * (wide < s.kw ? wide : s.kw));
}

// S x S elements which the same N x N windows see, where windows are S apart and at most N * S long: elements from
// (h, w) on and windows from (row, column) on, some of either outside. Each window is then read once for all of them.
template <int N, int S> struct Cell {
  int h, w, row, column;

  // The cell number (down, across) of a plane.
  __device__ __forceinline__ Cell(const Pool &s, int down, int across)
      : h((down + s.ph / S) * S - s.ph), w((across + s.pw / S) * S - s.pw), row(down + s.ph / S - N + 1),
        column(across + s.pw / S - N + 1) {}

  static __device__ __forceinline__ int along(int size, int pad) { return (size - 1 + pad) / S - pad / S + 1; }
  static __device__ __forceinline__ int down(const Pool &s) { return along(s.height, s.ph); }
  static __device__ __forceinline__ int across(const Pool &s) { return along(s.width, s.pw); }

  // sums[e][f] = `add(sum, value, spot)` over the windows that see element (e, f), row by row, `value` being what
  // `get(place in y's plane, row, column)` gives for a window, zeros for one outside.
  template <class V, class R, class G, class A>
  __device__ __forceinline__ void gather(const Pool &s, R (&sums)[S][S], G get, A add) const {
    V values[N][N];
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int j = 0; j < N; j++) {
        int r = row + i, c = column + j;
        values[i][j] = V{};
        if (r >= 0 && r < s.rows && c >= 0 && c < s.columns) values[i][j] = get(r * s.columns + c, r, c);
      }
#pragma unroll
    for (int e = 0; e < S; e++)
#pragma unroll
      for (int f = 0; f < S; f++) {
        sums[e][f] = R{};
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
          for (int j = 0; j < N; j++)
            if ((N - 1 - i) * S + e < s.kh && (N - 1 - j) * S + f < s.kw)
              add(sums[e][f], values[i][j], Spot{h + e, w + f, (N - 1 - i) * S + e, (N - 1 - j) * S + f});
      }
  }

  __device__ __forceinline__ bool holds(const Pool &s, int e, int f) const {
    return h + e >= 0 && h + e < s.height && w + f >= 0 && w + f < s.width;
  }
};

// A window's gradient for W neighbouring channels, and where it goes.
template <int W, class M> struct Largest {
  Lot<W> gradient;
  Places<W, M> place;
};

template <int W, class M>
__device__ __forceinline__ void add_largest(Lot<W> &sum, const Largest<W, M> &value, int place) {
#pragma unroll
  for (int i = 0; i < W; i++) sum.at[i] += value.place.at[i] == place ? value.gradient.at[i] : (T)0;
}

template <int W> __device__ __forceinline__ void add_lot(Lot<W> &sum, const Lot<W> &value) {
#pragma unroll
  for (int i = 0; i < W; i++) sum.at[i] += value.at[i];
}

template <int W> __device__ __forceinline__ Lot<W> times(Lot<W> lot, T factor) {
#pragma unroll
  for (int i = 0; i < W; i++) lot.at[i] *= factor;
  return lot;
}
