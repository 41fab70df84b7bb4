// Sums by channel for the gradient of batch normalisation, of parts, a block each, and joined; and its map. What takes
// sums, a `To`, is a SumParts that has finish(c, plain, along) besides.
// Needs common.cuh, channel_maps.cuh, channels.cuh, columns.cuh and batch_norm.cuh.

// The gradient that a ReLU passes on; its input is made again as it was on the way up.
__device__ __forceinline__ T passed(T dy, T xhat, T gamma, T beta, int relu) {
  return relu && !(fma(gamma, xhat, beta) > 0) ? (T)0 : dy;
}

// The sums of parts of channels, as planes of those of g and those of g * xhat.
struct SumParts {
  double *parts;
  i64 channels, splits;
  Shift shift;
  __device__ __forceinline__ void keep_part(i64 c, i64 s, double plain, double along) const {
    parts[s * channels + c] = plain;
    parts[(splits + s) * channels + c] = along;
  }
  __device__ __forceinline__ void add(i64 at, double (&sums)[2]) const {  // the part's at a place
    sums[0] += parts[at];
    sums[1] += parts[at + splits * channels];
  }
};

// The gradients of gamma and beta, either of which may be null.
struct Totals {
  D *dgamma, *dbeta;
  int accumulate;
  __device__ __forceinline__ void keep(i64 c, double plain, double along) const {
    if (dgamma) dgamma[c] = (T)along + (accumulate ? dgamma[c] : (T)0);
    if (dbeta) dbeta[c] = (T)plain + (accumulate ? dbeta[c] : (T)0);
  }
};

template <class To>
__device__ __forceinline__ void put_sums(const To &to, i64 c, i64 s, double plain, double along) {
  if (to.splits == 1)
    to.finish(c, plain, along);
  else
    to.keep_part(c, s, plain, along);
}

// What sums are taken of: the gradient of y, and xhat. GROUP loads are in flight at once where channels have runs, of
// columns ROWS.
struct Given {
  enum { GROUP = 4, ROWS = 2 * PACK / LOT };
  template <int W> using Loaded = Lots<W>;
  const D *xhat, *dy;
  template <int W> __device__ __forceinline__ Lots<W> load(i64 at) const { return ::load<W>(dy, xhat, at); }
  template <int W> __device__ __forceinline__ Lots<W> take(const Lots<W> &lots) const { return lots; }
};

template <int W, class S, class To>
__device__ __forceinline__ void sums(S source, To to, i64 outer, i64 inner, double *shared) {
  i64 s = quotient(blockIdx.x, to.channels), c = blockIdx.x - s * to.channels;
  T gamma = to.shift.times(c), beta = to.shift.plus(c), plain = 0, along = 0;
  int relu = to.shift.relu;
  for_places<W, S::GROUP>(
      to.channels, inner, c, Part(outer * (inner / W), s, to.splits), threadIdx.x, blockDim.x,
      [=](const Walk<W> &walk) { return source.template load<W>(walk.at); },
      [&](const typename S::template Loaded<W> &found) {
        Lots<W> lots = source.template take<W>(found);
        T one = 0, other = 0;
#pragma unroll
        for (int k = 0; k < W; k++) {
          T g = passed(lots.a.at[k], lots.b.at[k], gamma, beta, relu);
          one += g;
          other += g * lots.b.at[k];
        }
        plain += one;
        along += other;
      });
  double all = block_sum((double)plain, shared), all_along = block_sum((double)along, shared);
  if (threadIdx.x == 0) put_sums(to, c, s, all, all_along);
}

template <class S, class To>
__device__ __forceinline__ void all_sums(S source, To to, i64 outer, i64 inner) {
  __shared__ double shared[32];
  if (whole_packs(inner))
    sums<PACK>(source, to, outer, inner, shared);
  else
    sums<1>(source, to, outer, inner, shared);
}

template <int W, class S, class To>
__device__ __forceinline__ void column_sums(S source, To to, i64 outer, int width, double *shared) {
  ColumnBlock<W> block(blockIdx.x, outer, to.channels, to.splits, width);
  T gamma[W], beta[W], plain[W] = {}, along[W] = {};
  int relu = to.shift.relu;
#pragma unroll
  for (int k = 0; k < W; k++) {
    gamma[k] = block.inside ? to.shift.times(block.c + k) : (T)0;
    beta[k] = block.inside ? to.shift.plus(block.c + k) : (T)0;
  }
  auto put_one = [&](const typename S::template Loaded<W> &found) {
    Lots<W> lots = source.template take<W>(found);
#pragma unroll
    for (int k = 0; k < W; k++) {
      T g = passed(lots.a.at[k], lots.b.at[k], gamma[k], beta[k], relu);
      plain[k] += g;
      along[k] += g * lots.b.at[k];
    }
  };
  block.template each<S::ROWS>(
      [=](i64 at) { return source.template load<W>(at); },
      [&](const typename S::template Loaded<W>(&rows)[S::ROWS]) {
        put_one(rows[0]), put_one(rows[1]);  // by a loop they would take more registers than there are
        if (S::ROWS == 4) put_one(rows[S::ROWS - 2]), put_one(rows[S::ROWS - 1]);
      },
      put_one);
  double all[W], all_along[W];
#pragma unroll
  for (int k = 0; k < W; k++) all[k] = plain[k], all_along[k] = along[k];
  block.sum(all, shared);
  block.sum(all_along, shared);
  if (block.row == 0 && block.inside) {
#pragma unroll
    for (int k = 0; k < W; k++) put_sums(to, block.c + k, block.split, all[k], all_along[k]);
  }
}

template <class S, class To>
__device__ __forceinline__ void all_column_sums(S source, To to, i64 outer, int width) {
  __shared__ double shared[COLUMN_THREADS * LOT];
  if (to.channels % LOT == 0)
    column_sums<LOT>(source, to, outer, width, shared);
  else
    column_sums<1>(source, to, outer, width, shared);
}

template <class To> __device__ __forceinline__ void join_sums(To to) {
  __shared__ double shared[16 * ABREAST];
  i64 c = (i64)blockIdx.x * ABREAST + threadIdx.x % ABREAST;
  double joined[2];
  sum_parts(c, to.channels, to.splits, joined, shared, [&](i64 at, double(&sums)[2]) { to.add(at, sums); });
  if (threadIdx.x < ABREAST && c < to.channels) to.finish(c, joined[0], joined[1]);
}

struct Gradient {
  typedef ::At At;
  enum { GROUP = 2 };
  const D *xhat, *dy;
  D *dx;
  const Factors *factors;  // of channels from `first` on
  Shift shift;
  i64 first;
  __device__ __forceinline__ At at(i64 c) const { return At{factors[c - first], shift.times(c), shift.plus(c)}; }
  template <int W> __device__ __forceinline__ Lots<W> load(i64 i) const { return ::load<W>(dy, xhat, i); }
  template <class V> __device__ __forceinline__ void apply(const At &at, V &v, int j) const {
    T g = passed(v.a.at[j], v.b.at[j], at.gamma, at.beta, shift.relu);
    v.a.at[j] = (g - at.by.mean - v.b.at[j] * at.by.rest) * at.by.scale;
  }
  template <int W> __device__ __forceinline__ void store(i64 i, const Lots<W> &v) const { ::store<W>(dx, i, v.a); }
};
