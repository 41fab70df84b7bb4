// What becomes of sums of parts of channels where a batch comes in slices, of those so far and these.
// Needs common.cuh, batch_norm.cuh, batch_norm_moments.cuh and batch_norm_sums.cuh.

// The means of `before` numbers of each channel, and then their spreads, are in `moments`, and become those of these and of
// the numbers at hand. Nothing is read if there were none before. If `kept`, parts of channels are of all of these numbers,
// and are joined once.
struct GatheredMoments : MomentParts {
  double *moments, before;
  int kept;
  __device__ __forceinline__ Statistics with(double mean, double spread, double others, Statistics all, double own) const {
    double far = all.mean - mean, share = own / (others + own);
    return Statistics{mean + far * share, all.spread + (spread + far * far * share * others)};
  }
  __device__ __forceinline__ void keep_part(i64 c, i64 s, double own, Statistics all) const {
    i64 at = s * channels + c, plane = splits * channels;
    double others = kept && before > 0 ? parts[at + 2 * plane] : 0;
    if (others > 0) all = with(parts[at], parts[at + plane], others, all, own);
    MomentParts::keep_part(c, s, others + own, all);
  }
  __device__ __forceinline__ void finish(i64 c, Statistics all) const {
    double *mean = moments + c, *spread = mean + channels;
    if (before > 0 && !kept) all = with(*mean, *spread, before, all, count);
    *mean = all.mean;
    *spread = all.spread;
  }
};

// `sums` of each channel's g, and then of its g * xhat, of the slices so far; if `kept`, those of its parts are of these, and
// are joined once.
struct GatheredSums : SumParts {
  double *sums;
  int first, kept;
  __device__ __forceinline__ void keep_part(i64 c, i64 s, double plain, double along) const {
    const double *before = parts + s * channels + c;
    bool goes_on = kept && !first;
    SumParts::keep_part(c, s, plain + (goes_on ? *before : 0), along + (goes_on ? before[splits * channels] : 0));
  }
  __device__ __forceinline__ void finish(i64 c, double plain, double along) const {
    bool goes_on = !first && !kept;
    sums[c] = plain + (goes_on ? sums[c] : 0);
    sums[channels + c] = along + (goes_on ? sums[channels + c] : 0);
  }
};
