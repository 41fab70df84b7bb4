#include "common.cuh"
#include "channels.cuh"
#include "moments.cuh"

// What is summed; channels.py numbers them in this order.
enum Kind { PLAIN, ABSOLUTE, SQUARE, PRODUCT, PRODUCT_BELOW };

template <int KIND> __device__ __forceinline__ T term(T a, T b) {
  if (KIND == PLAIN) return a;
  if (KIND == ABSOLUTE) return fabs(a);
  if (KIND == SQUARE) return a * a;
  if (KIND == PRODUCT) return a * b;
  return a > 0 ? (T)0 : a * b;
}

template <int KIND, int W>
__device__ __forceinline__ T sum_places(const D *x, const D *y, i64 channels, i64 inner, i64 c, Part part, int thread,
                                        int step) {
  T total = 0;
  for_places<W, 4>(
      channels, inner, c, part, thread, step,
      [=](const Walk<W> &walk) { return load<W>(x, KIND >= PRODUCT ? y : x, walk.at); },
      [&](const Lots<W> &lots) {
        T sum = term<KIND>(lots.a.at[0], lots.b.at[0]);
#pragma unroll
        for (int i = 1; i < W; i++) sum += term<KIND>(lots.a.at[i], lots.b.at[i]);
        total += sum;
      });
  return total;
}

// f<KIND>() for the kind that is asked for.
#define BY_KIND(kind, f)                    \
  (kind == PLAIN      ? f(PLAIN)            \
   : kind == ABSOLUTE ? f(ABSOLUTE)         \
   : kind == SQUARE   ? f(SQUARE)           \
   : kind == PRODUCT  ? f(PRODUCT)          \
                      : f(PRODUCT_BELOW))

template <int KIND>
__device__ __forceinline__ T sum_part(const D *x, const D *y, i64 outer, i64 channels, i64 inner, i64 c, i64 s,
                                      i64 splits, int thread, int step) {
  if (whole_packs(inner) && aligned(x) && aligned(y))
    return sum_places<KIND, PACK>(x, y, channels, inner, c, Part(outer * (inner / PACK), s, splits), thread, step);
  return sum_places<KIND, 1>(x, y, channels, inner, c, Part(outer * inner, s, splits), thread, step);
}

// What sums become: total[c] (+)= factor * sum. `exact`: total is of T.
struct Totals {
  void *total;
  int exact, accumulate;
  double factor;
  template <class V> __device__ __forceinline__ void put_to(V *to, double sum) const {
    *to = (T)(sum * factor) + (accumulate ? *to : (T)0);
  }
  // To its channel, if it is the whole of it, else to its place among the parts.
  __device__ __forceinline__ void put(double sum, i64 c, i64 s, i64 splits, double *parts) const {
    if (splits > 1) {
      parts[c * splits + s] = sum;
      return;
    }
#ifdef HALVES
    if (exact) return put_to((T *)total + c, sum);
#endif
    put_to((D *)total + c, sum);
  }
};

// A block for each part of each channel.
extern "C" __global__ void __launch_bounds__(1024)
    sum_channels(const D *x, const D *y, void *total, double *parts, i64 outer, i64 channels, i64 inner, i64 splits, int kind,
                 double factor, int accumulate, int exact) {
  __shared__ double shared[32];
  i64 c = blockIdx.x / splits, s = blockIdx.x % splits;
#define SUM(KIND) sum_part<KIND>(x, y, outer, channels, inner, c, s, splits, threadIdx.x, blockDim.x)
  double sum = block_sum((double)BY_KIND(kind, SUM), shared);
#undef SUM
  if (threadIdx.x == 0) Totals{total, exact, accumulate, factor}.put(sum, c, s, splits, parts);
}

// A warp for each channel, where channels are short.
extern "C" __global__ void sum_short_channels(const D *x, const D *y, void *total, i64 outer, i64 channels, i64 inner,
                                              int kind, double factor, int accumulate, int exact) {
  i64 c = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (c >= channels) return;
  int lane = threadIdx.x & 31;
#define SUM(KIND) sum_part<KIND>(x, y, outer, channels, inner, c, 0, 1, lane, 32)
  double sum = BY_KIND(kind, SUM);
#undef SUM
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) Totals{total, exact, accumulate, factor}.put(sum, c, 0, 1, nullptr);
}

// The sums of W neighbouring channels from c on, over rows [first, stop).
template <int KIND, int W>
__device__ __forceinline__ Lot<W> sum_rows(const D *x, const D *y, i64 channels, i64 c, i64 first, i64 stop, int step) {
  Lot<W> total = {};
  grouped<4>(
      first, stop, step, [=](i64 n) { return load<W>(x, KIND >= PRODUCT ? y : x, n * channels + c); },
      [&](const Lots<W> &lots) {
#pragma unroll
        for (int i = 0; i < W; i++) total.at[i] += term<KIND>(lots.a.at[i], lots.b.at[i]);
      });
  return total;
}

// Numbers of an array, or sums of those of two.
struct One {
  const D *one;
  __device__ __forceinline__ bool whole() const { return aligned(one); }
  template <int W> __device__ __forceinline__ Lot<W> at(i64 i) const { return load<W>(one, i); }
};

struct Two {
  const D *one, *two;
  __device__ __forceinline__ bool whole() const { return aligned(one) && aligned(two); }
  template <int W> __device__ __forceinline__ Lot<W> at(i64 i) const {
    Lots<W> both = load<W>(one, two, i);
#pragma unroll
    for (int k = 0; k < W; k++) both.a.at[k] += both.b.at[k];
    return both.a;
  }
};

// dx = the gradient of a ReLU, of which x is the input or the output, there; and its sums.
template <int W, class G>
__device__ __forceinline__ Lot<W> relu_rows(const D *x, G dy, D *dx, i64 channels, i64 c, i64 first, i64 stop, int step,
                                            T slope) {
  Lot<W> total = {};
  grouped<4>(
      first, stop, step,
      [=](i64 n) {
        i64 at = n * channels + c;
        return Found<Lots<W>>{at, {load<W>(x, at), dy.template at<W>(at)}};
      },
      [&](const Found<Lots<W>> &found) {
        Lot<W> lot;
#pragma unroll
        for (int i = 0; i < W; i++) {
          T g = found.value.b.at[i];
          lot.at[i] = found.value.a.at[i] > 0 ? g : slope == 0 ? (T)0 : g * slope;
          total.at[i] += lot.at[i];
        }
        store<W>(dx, found.at, lot);
      });
  return total;
}

// rows(c, first, stop, step) gives a thread's sums of W neighbouring channels.
template <int W, class F>
__device__ __forceinline__ void sum_neighbours(Totals totals, double *parts, i64 outer, i64 channels, i64 splits,
                                               double (&sums)[8 * PACK][33], F sum_of) {
  int lane = threadIdx.x % (32 / W), row = threadIdx.x / (32 / W), rows = blockDim.x / (32 / W);
  i64 groups = (channels + 31) / 32, s = quotient(blockIdx.x, groups);
  i64 first = (blockIdx.x - s * groups) * 32, c = first + lane * W;  // neighbours read what lies next to it
  Part part(outer, s, splits);
  Lot<W> lot = {};
  if (c < channels) lot = sum_of(c, part.first + row, part.stop, rows);
#pragma unroll
  for (int i = 0; i < W; i++) sums[row][lane * W + i] = lot.at[i];
  __syncthreads();
  if (threadIdx.x >= 32 || first + threadIdx.x >= channels) return;
  double sum = sums[0][threadIdx.x];
  for (int i = 1; i < rows; i++) sum += sums[i][threadIdx.x];
  totals.put(sum, first + threadIdx.x, s, splits, parts);
}

// inner is 1: a block takes 32 neighbouring channels of a part of the rows. At most 256 threads.
extern "C" __global__ void sum_columns(const D *x, const D *y, void *total, double *parts, i64 outer, i64 channels,
                                       i64 splits, int kind, double factor, int accumulate, int exact) {
  __shared__ double sums[8 * PACK][33];
#define SUM(KIND) sum_rows<KIND, WIDTH>(x, y, channels, c, first, stop, step)
#define SUMS                                                                                           \
  sum_neighbours<WIDTH>(Totals{total, exact, accumulate, factor}, parts, outer, channels, splits, sums, \
                        [=](i64 c, i64 first, i64 stop, int step) { return BY_KIND(kind, SUM); })
  if (whole_packs(channels) && aligned(x) && aligned(y)) {
    constexpr int WIDTH = PACK;
    SUMS;
  } else {
    constexpr int WIDTH = 1;
    SUMS;
  }
#undef SUMS
#undef SUM
}

template <class G>
__device__ __forceinline__ void relu_columns(const D *x, G dy, D *dx, D *total, double *parts, i64 outer, i64 channels,
                                             i64 splits, T slope, int accumulate) {
  __shared__ double sums[8 * PACK][33];
  Totals totals = {total, false, accumulate, 1};
  if (whole_packs(channels) && aligned(x) && dy.whole() && aligned(dx))
    sum_neighbours<PACK>(totals, parts, outer, channels, splits, sums,
                         [=](i64 c, i64 first, i64 stop, int step) {
                           return relu_rows<PACK>(x, dy, dx, channels, c, first, stop, step, slope);
                         });
  else
    sum_neighbours<1>(totals, parts, outer, channels, splits, sums,
                      [=](i64 c, i64 first, i64 stop, int step) {
                        return relu_rows<1>(x, dy, dx, channels, c, first, stop, step, slope);
                      });
}

// `relu_gradient` and, of its result, `sum_columns` in one pass, to the same bits. dx may be dy.
extern "C" __global__ void relu_gradient_columns(const D *x, const D *dy, D *dx, D *total, double *parts, i64 outer,
                                                 i64 channels, i64 splits, T slope, int accumulate) {
  relu_columns(x, One{dy}, dx, total, parts, outer, channels, splits, slope, accumulate);
}

// The same of the sum of two arrays, which may be dx.
extern "C" __global__ void summed_relu_gradient_columns(const D *x, const D *one, const D *two, D *dx, D *total,
                                                        double *parts, i64 outer, i64 channels, i64 splits, T slope,
                                                        int accumulate) {
  relu_columns(x, Two{one, two}, dx, total, parts, outer, channels, splits, slope, accumulate);
}

// total[c] (+)= factor * the sum of the channel's parts; a warp for each channel.
extern "C" __global__ void add_parts(const double *parts, D *total, i64 channels, i64 splits, double factor,
                                     int accumulate) {
  i64 c = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (c >= channels) return;
  int lane = threadIdx.x & 31;
  double sum = 0;
  for (i64 s = lane; s < splits; s += 32) sum += parts[c * splits + s];
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) Totals{total, false, accumulate, factor}.put(sum, c, 0, 1, nullptr);
}

template <int W>
__device__ __forceinline__ void put_moments(const D *x, double *parts, i64 outer, i64 channels, i64 inner,
                                                i64 splits, double *shared) {
  i64 c = blockIdx.x / splits, s = blockIdx.x % splits;
  Part part(outer * (inner / W), s, splits);
  Moments seen = moments_of<W>(x, channels, inner, c, part, threadIdx.x, blockDim.x);
  Statistics all = block_statistics(seen, (double)(part.stop - part.first) * W, shared);
  if (threadIdx.x == 0) ((Statistics *)parts)[blockIdx.x] = all;
}

// Mean and spread of each part of each channel, a block each.
extern "C" __global__ void part_moments(const D *x, double *parts, i64 outer, i64 channels, i64 inner,
                                              i64 splits) {
  __shared__ double shared[32];
  if (whole_packs(inner))
    put_moments<PACK>(x, parts, outer, channels, inner, splits, shared);
  else
    put_moments<1>(x, parts, outer, channels, inner, splits, shared);
}
