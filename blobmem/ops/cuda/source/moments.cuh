// Means and variances by channel, of arrays as in channels.cuh. Needs common.cuh and channels.cuh.

// Mean and spread (the sum of squared distances from the mean) of values that come a few at a time; Chan, Golub and
// LeVeque 1979. Nothing cancels, however large the mean, and equal values have no spread at all.
struct Moments {
  T count, mean, spread;
  __device__ __forceinline__ Moments() : count(0), mean(0), spread(0) {}
  template <int N> __device__ __forceinline__ void add(const T (&values)[N]) {
    T middle = 0, around = 0;
#pragma unroll
    for (int i = 1; i < N; i++) middle += values[i] - values[0];
    middle = values[0] + middle * ((T)1 / N);
#pragma unroll
    for (int i = 0; i < N; i++) around += (values[i] - middle) * (values[i] - middle);
    T from = middle - mean, share = N / (count + N);
    mean += from * share;
    spread += around + from * from * share * count;
    count += N;
  }
};

// Mean and spread of W neighbouring channels, rows at a time; see Moments.
template <int W> struct ColumnMoments {
  T count, mean[W], spread[W];
  __device__ __forceinline__ ColumnMoments() : count(0) {
#pragma unroll
    for (int k = 0; k < W; k++) mean[k] = spread[k] = 0;
  }
  template <int N> __device__ __forceinline__ void add(const Lot<W> (&rows)[N]) {
    T share = N / (count + N);
#pragma unroll
    for (int k = 0; k < W; k++) {
      T middle = 0, around = 0, least = rows[0].at[k];
#pragma unroll
      for (int i = 1; i < N; i++) middle += rows[i].at[k] - least;
      middle = least + middle * ((T)1 / N);
#pragma unroll
      for (int i = 0; i < N; i++) around += (rows[i].at[k] - middle) * (rows[i].at[k] - middle);
      T from = middle - mean[k];
      mean[k] += from * share;
      spread[k] += around + from * from * share * count;
    }
    count += N;
  }
};

// The moments of the places that a thread looks after.
template <int W>
__device__ __forceinline__ Moments moments_of(const D *x, i64 channels, i64 inner, i64 c, Part part, int thread,
                                              int step) {
  Walk<W> walk(channels, inner, c, part.first + thread, step);
  Moments seen;
  i64 j = part.first + thread;
  for (; j + 3 * (i64)step < part.stop; j += 4 * (i64)step) {
    T values[4 * W];
#pragma unroll
    for (int i = 0; i < 4; i++, walk.next()) {
      Lot<W> lot = load<W>(x, walk.at);
#pragma unroll
      for (int k = 0; k < W; k++) values[i * W + k] = lot.at[k];
    }
    seen.add(values);
  }
  for (; j < part.stop; j += step, walk.next()) seen.add(load<W>(x, walk.at).at);
  return seen;
}

struct Statistics { double mean, spread; };  // of a channel, or a part of one

// Of `count` values, from the moments that each thread of the block has seen.
__device__ __forceinline__ Statistics block_statistics(Moments seen, double count, double *shared) {
  Statistics all;
  all.mean = block_sum((double)seen.count * seen.mean, shared) / count;
  double from = seen.mean - all.mean;
  all.spread = block_sum(seen.spread + seen.count * from * from, shared);
  return all;
}

// Of a channel of `places` times `width` values, from the statistics of its parts.
__device__ __forceinline__ Statistics join_statistics(const Statistics *parts, i64 places, int width, i64 splits,
                                                      double *shared) {
  double total = 0, spread = 0;
  for (i64 s = threadIdx.x; s < splits; s += blockDim.x) {
    Part part(places, s, splits);
    total += (double)(part.stop - part.first) * parts[s].mean;
  }
  Statistics all;
  all.mean = block_sum(total, shared) / places;
  for (i64 s = threadIdx.x; s < splits; s += blockDim.x) {
    Part part(places, s, splits);
    double from = parts[s].mean - all.mean;
    spread += parts[s].spread + (double)(part.stop - part.first) * width * from * from;
  }
  all.spread = block_sum(spread, shared);
  return all;
}

// Of a channel: from its parts where it has more than one, else from the elements, by one block.
template <int W>
__device__ __forceinline__ Statistics channel_statistics(const D *x, const double *parts, i64 outer, i64 channels,
                                                         i64 inner, i64 splits, i64 c, double *shared) {
  i64 places = outer * (inner / W);
  if (splits > 1) return join_statistics((const Statistics *)parts + c * splits, places, W, splits, shared);
  Moments seen = moments_of<W>(x, channels, inner, c, Part(places, 0, 1), threadIdx.x, blockDim.x);
  return block_statistics(seen, (double)places * W, shared);
}

// value - mean, times scale; the mean in two numbers so that little is lost where it is large.
struct Normalizer {
  T mean, rest, scale;
  __device__ __forceinline__ Normalizer(double m, double s) : mean((T)m), rest((T)(m - (T)m)), scale((T)s) {}
  __device__ __forceinline__ T operator()(T x) const { return (x - mean - rest) * scale; }
};
