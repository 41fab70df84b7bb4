// Moments of channels for batch normalisation: of parts, a block each, and joined. What takes them, a `To`, is a
// MomentParts that has finish(c, all) besides.
// Needs common.cuh, channels.cuh, moments.cuh, columns.cuh and batch_norm.cuh.

// What becomes of a channel's statistics; `inverse` is what makes the deviation 1.
struct Kept {
  T *mean, *rest, *inv_std, *running_mean, *running_var, *factor;
  double count, eps, fraction;
  __device__ __forceinline__ double inverse(Statistics all) const { return 1 / sqrt(all.spread / count + eps); }
  __device__ __forceinline__ void keep(i64 c, Statistics all) const {
    Normalizer f(all.mean, inverse(all));
    mean[c] = f.mean;
    rest[c] = f.rest;
    inv_std[c] = f.scale;
    running_mean[c] = (T)(running_mean[c] * fraction + all.mean);
    running_var[c] = (T)(running_var[c] * fraction + all.spread / (count > 2 ? count - 1 : 1));
    if (c == 0) factor[0] = factor[0] * (T)fraction + 1;
  }
};

// The moments of parts of channels, as planes of means, spreads and counts.
struct MomentParts {
  double *parts;
  i64 channels, splits;
  double count;  // of a channel
  __device__ __forceinline__ void keep_part(i64 c, i64 s, double count, Statistics all) const {
    i64 at = s * channels + c, plane = splits * channels;
    parts[at] = all.mean;
    parts[at + plane] = all.spread;
    parts[at + 2 * plane] = count;
  }
  // What the part at a place adds to the sums of `joined`, with distances from the channel's first part's mean: it being far
  // off is part of the spread, so that the difference at the end cannot lose much.
  __device__ __forceinline__ void add(i64 at, double first, double (&sums)[2]) const {
    i64 plane = splits * channels;
    double far = parts[at] - first, count = parts[at + 2 * plane];
    sums[0] += count * far;
    sums[1] += parts[at + plane] + count * far * far;
  }
  __device__ __forceinline__ Statistics joined(double first, const double (&sums)[2]) const {
    double middle = sums[0] / count, spread = sums[1] - sums[0] * middle;
    return Statistics{first + middle, spread > 0 ? spread : 0};
  }
};

template <class To>
__device__ __forceinline__ void put_moments(const To &to, i64 c, i64 s, double count, Statistics all) {
  if (to.splits == 1)
    to.finish(c, all);
  else
    to.keep_part(c, s, count, all);
}

template <int W, class To>
__device__ __forceinline__ void moments(const D *x, To to, i64 outer, i64 inner, double *shared) {
  i64 s = quotient(blockIdx.x, to.channels), c = blockIdx.x - s * to.channels;
  Part part(outer * (inner / W), s, to.splits);
  double count = (double)(part.stop - part.first) * W;
  Moments seen = moments_of<W>(x, to.channels, inner, c, part, threadIdx.x, blockDim.x);
  Statistics all = block_statistics(seen, count, shared);
  if (threadIdx.x == 0) put_moments(to, c, s, count, all);
}

template <class To> __device__ __forceinline__ void all_moments(const D *x, To to, i64 outer, i64 inner) {
  __shared__ double shared[32];
  if (whole_packs(inner))
    moments<PACK>(x, to, outer, inner, shared);
  else
    moments<1>(x, to, outer, inner, shared);
}

template <int W, class To>
__device__ __forceinline__ void column_moments(const D *x, To to, i64 outer, int width, double *shared) {
  ColumnBlock<W> block(blockIdx.x, outer, to.channels, to.splits, width);
  ColumnMoments<W> seen;
  block.template each<4>([=](i64 at) { return load<W>(x, at); }, [&](const Lot<W>(&rows)[4]) { seen.add(rows); },
                         [&](const Lot<W> &row) {
                           Lot<W> rows[1] = {row};
                           seen.add(rows);
                         });
  double mean[W], spread[W];
#pragma unroll
  for (int k = 0; k < W; k++) mean[k] = (double)seen.count * seen.mean[k];
  block.sum(mean, shared);
#pragma unroll
  for (int k = 0; k < W; k++) {
    mean[k] /= block.rows;
    double from = seen.mean[k] - mean[k];
    spread[k] = seen.spread[k] + seen.count * from * from;
  }
  block.sum(spread, shared);
  if (block.row == 0 && block.inside) {
#pragma unroll
    for (int k = 0; k < W; k++) put_moments(to, block.c + k, block.split, block.rows, Statistics{mean[k], spread[k]});
  }
}

template <class To> __device__ __forceinline__ void all_column_moments(const D *x, To to, i64 outer, int width) {
  __shared__ double shared[COLUMN_THREADS * LOT];
  if (to.channels % LOT == 0)
    column_moments<LOT>(x, to, outer, width, shared);
  else
    column_moments<1>(x, to, outer, width, shared);
}

// The moments of all of a channel, from those of its parts.
template <class To> __device__ __forceinline__ void join_moments(To to) {
  __shared__ double shared[16 * ABREAST];
  i64 c = (i64)blockIdx.x * ABREAST + threadIdx.x % ABREAST;
  double first = c < to.channels ? to.parts[c] : 0, sums[2];
  sum_parts(c, to.channels, to.splits, sums, shared, [&](i64 at, double(&sums)[2]) { to.add(at, first, sums); });
  if (threadIdx.x < ABREAST && c < to.channels) to.finish(c, to.joined(first, sums));
}
