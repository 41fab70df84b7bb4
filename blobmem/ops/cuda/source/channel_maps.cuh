// Maps whose function also gets the channel of an element, for arrays (images, channels, inner): c = i / inner % channels.
// Needs common.cuh. A thread divides when it begins and counts from there on.

struct Channel {
  i64 c, left;
  i64 channels, inner;
  __device__ __forceinline__ Channel(i64 i, i64 channels, i64 inner) : channels(channels), inner(inner) {
    i64 plane = quotient(i, inner);
    left = inner - (i - plane * inner);
    c = plane - quotient(plane, channels) * channels;
  }
  __device__ __forceinline__ void next() {
    if (--left == 0) {
      left = inner;
      if (++c == channels) c = 0;
    }
  }
};

// Where an element is in its channel, and those `step` elements further each; for short runs.
struct Place {
  u32 c, in, channels, inner, step_c, step_in;
  __device__ __forceinline__ Place(i64 i, i64 step, i64 channels, i64 inner)
      : channels((u32)channels), inner((u32)inner) {
    i64 plane = quotient(i, inner), planes = quotient(step, inner);
    in = (u32)(i - plane * inner);
    c = (u32)(plane - quotient(plane, channels) * channels);
    step_in = (u32)(step - planes * inner);
    step_c = (u32)(planes - quotient(planes, channels) * channels);
  }
  __device__ __forceinline__ void next() {
    in += step_in;
    c += step_c;
    if (in >= inner) {
      in -= inner;
      c++;
    }
    if (c >= channels) c -= channels;
  }
};

__device__ __forceinline__ bool is_short(i64 n) { return n >> 30 == 0; }

// A map says what it does by these members, `At` being what it knows of a channel (its factors, say):
//   At at(i64 c)                      for a channel
//   GROUP                             how many lots of a thread are on their way at once
//   load<W>(i64 i)                    what it reads of W elements, aligned to them where W is not 1
//   apply(At at, values, int j)       on element j of what was loaded
//   store<W>(i64 i, values)

// Lots that lie in one channel, or reach into the next one; inner is LOT or more.
template <class M> struct Runs {
  M &map;
  Place place;
  u32 last;
  typename M::At now;
  __device__ __forceinline__ Runs(M &map, i64 i, i64 step, i64 channels, i64 inner)
      : map(map), place(i, step, channels, inner), last(place.c), now(map.at(place.c)) {}
  template <class V> __device__ __forceinline__ void apply(V &values) {
    if (place.c != last) {
      last = place.c;
      now = map.at(last);
    }
    u32 left = place.inner - place.in;
    if (left >= LOT) {
#pragma unroll
      for (int j = 0; j < LOT; j++) map.apply(now, values, j);
    } else {
      typename M::At then = map.at(last + 1 == place.channels ? 0 : last + 1);
#pragma unroll
      for (int j = 0; j < LOT; j++) map.apply(j < left ? now : then, values, j);
    }
    place.next();
  }
};

// Lots of all else: runs shorter than a lot, and very long ones.
template <class M> struct Mixed {
  M &map;
  i64 i, step, channels, inner;
  __device__ __forceinline__ Mixed(M &map, i64 i, i64 step, i64 channels, i64 inner)
      : map(map), i(i), step(step), channels(channels), inner(inner) {}
  template <class V> __device__ __forceinline__ void apply(V &values) {
    Channel at(i, channels, inner);
#pragma unroll
    for (int j = 0; j < LOT; j++, at.next()) map.apply(map.at(at.c), values, j);
    i += step;
  }
};

// The lots at first, first + step, ... below stop, all offsets of elements. A store may alias a load, for all the compiler
// knows, so that it cannot arrange by itself for several loads to be on their way.
template <class M, class O>
__device__ __forceinline__ void map_lots(M &map, O &order, i64 first, i64 stop, i64 step) {
  i64 i = first;
#pragma unroll 1
  for (; i + (M::GROUP - 1) * step < stop; i += M::GROUP * step) {
    decltype(map.template load<LOT>(i)) values[M::GROUP];
#pragma unroll
    for (int k = 0; k < M::GROUP; k++) values[k] = map.template load<LOT>(i + k * step);
#pragma unroll
    for (int k = 0; k < M::GROUP; k++) {
      order.apply(values[k]);
      map.template store<LOT>(i + k * step, values[k]);
    }
  }
#pragma unroll 1
  for (; i < stop; i += step) {
    auto values = map.template load<LOT>(i);
    order.apply(values);
    map.template store<LOT>(i, values);
  }
}

// A block takes consecutive lots.
template <template <class> class Order, class M>
__device__ __forceinline__ void map_chunk(M &map, i64 block, i64 lots, i64 channels, i64 inner) {
  i64 rounds = quotient(lots + (i64)gridDim.x * blockDim.x - 1, (i64)gridDim.x * blockDim.x);
  i64 first = block * rounds * blockDim.x, stop = first + rounds * blockDim.x, step = blockDim.x;
  if (stop > lots) stop = lots;
  first += threadIdx.x;
  if (first >= stop) return;
  Order<M> order(map, first * LOT, step * LOT, channels, inner);
  map_lots(map, order, first * LOT, stop * LOT, step * LOT);
}

// Lots of neighbouring channels, always the same ones for a thread.
template <class M> struct Columns {
  M &map;
  typename M::At now[LOT];
  __device__ __forceinline__ Columns(M &map, i64 c) : map(map) {
#pragma unroll
    for (int j = 0; j < LOT; j++) now[j] = map.at(c + j);
  }
  template <class V> __device__ __forceinline__ void apply(V &values) {
#pragma unroll
    for (int j = 0; j < LOT; j++) map.apply(now[j], values, j);
  }
};

// inner is 1 and channels make whole lots: a block takes consecutive rows, or if they are long a part of them.
struct Table {
  u32 lots, groups;
  i64 rows;
  __device__ __forceinline__ Table(i64 n, i64 channels, i64 inner) : lots(0), groups(0), rows(0) {
    if (inner != 1 || channels % LOT != 0 || !is_short(channels)) return;
    lots = (u32)(channels / LOT);
    groups = (lots + blockDim.x - 1) / blockDim.x;
    rows = quotient(n, channels);
  }
  // Whether all n elements can be taken so.
  __device__ __forceinline__ bool fits(i64 n, i64 channels) const {
    return groups > 0 && groups <= gridDim.x && rows * channels == n;
  }
};

template <class M> __device__ __forceinline__ void map_columns(M &map, i64 block, Table table, i64 channels) {
  u32 width = (table.lots + table.groups - 1) / table.groups, abreast = blockDim.x / width;
  u32 row = threadIdx.x / width, chunks = gridDim.x / table.groups, chunk = (u32)block / table.groups;
  u32 lot = ((u32)block - chunk * table.groups) * width + threadIdx.x - row * width;
  i64 each = quotient(table.rows + chunks - 1, chunks), first = chunk * each + row, stop = chunk * each + each;
  if (stop > table.rows) stop = table.rows;
  if (chunk >= chunks || row >= abreast || lot >= table.lots || first >= stop) return;
  i64 c = (i64)lot * LOT;
  Columns<M> order(map, c);
  map_lots(map, order, first * channels + c, stop * channels, abreast * channels);
}

// A map over n elements, in lots if its arrays are aligned; where `backwards`, the first blocks take the last lots,
// which may still be in the cache.
template <class M>
__device__ __forceinline__ void map_channels(M &map, i64 n, i64 channels, i64 inner, bool packed,
                                             bool backwards = false) {
  i64 lots = packed ? n / LOT : 0, block = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  Table table(n, channels, inner);
  if (inner >= LOT && is_short(inner) && is_short(channels))
    map_chunk<Runs>(map, block, lots, channels, inner);
  else if (packed && table.fits(n, channels))
    map_columns(map, block, table, channels);
  else
    map_chunk<Mixed>(map, block, lots, channels, inner);
#pragma unroll 1
  FOR(k, n - lots * LOT) {
    i64 i = lots * LOT + k;
    auto one = map.template load<1>(i);
    map.apply(map.at(Channel(i, channels, inner).c), one, 0);
    map.template store<1>(i, one);
  }
}

// y[i] = f(c, x[i]), which knows nothing of a channel but its number.
template <class F> struct Map1 {
  typedef i64 At;
  enum { GROUP = 4 };
  const D *x;
  D *y;
  F f;
  __device__ __forceinline__ At at(i64 c) const { return c; }
  template <int W> __device__ __forceinline__ Lot<W> load(i64 i) const { return ::load<W>(x, i); }
  template <class V> __device__ __forceinline__ void apply(At c, V &v, int j) { v.at[j] = f(c, v.at[j]); }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lot<W> &v) const { ::store<W>(y, i, v); }
};

// z[i] = f(c, x[i], y[i])
template <class F> struct Map2 {
  typedef i64 At;
  enum { GROUP = 2 };
  const D *x, *y;
  D *z;
  F f;
  __device__ __forceinline__ At at(i64 c) const { return c; }
  template <int W> __device__ __forceinline__ Lots<W> load(i64 i) const { return ::load<W>(x, y, i); }
  template <class V> __device__ __forceinline__ void apply(At c, V &v, int j) {
    v.a.at[j] = f(c, v.a.at[j], v.b.at[j]);
  }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lots<W> &v) const { ::store<W>(z, i, v.a); }
};

// y[i] = f(c, x[i]) for i < n; y may be x.
template <class F> __device__ __forceinline__ void map1_channels(const D *x, D *y, i64 n, i64 channels, i64 inner, F f) {
  Map1<F> map = {x, y, f};
  map_channels(map, n, channels, inner, aligned(x) && aligned(y));
}

// z[i] = f(c, x[i], y[i]); z may be x or y.
template <class F>
__device__ __forceinline__ void map2_channels(const D *x, const D *y, D *z, i64 n, i64 channels, i64 inner, F f) {
  Map2<F> map = {x, y, z, f};
  map_channels(map, n, channels, inner, aligned(x) && aligned(y) && aligned(z));
}
