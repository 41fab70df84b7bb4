// Sums by channel where channels have no runs: matrices of `outer` rows. A block of COLUMN_THREADS threads takes a part
// of the rows of `width` neighbouring lots of W channels, its threads laid out in rows of `width`, a power of two.
// Needs common.cuh and channels.cuh.

#define COLUMN_THREADS 256

template <int W> struct ColumnBlock {
  i64 c, rows;  // this thread's first channel; the rows of the block's part
  i64 first, stop, step, at, step_at;  // this thread's rows, and where its first one is
  i64 split, group;
  i64 channels;
  int column, row, width;
  bool inside;
  __device__ __forceinline__ ColumnBlock(i64 block, i64 outer, i64 channels, i64 splits, int width)
      : channels(channels), width(width) {
    i64 groups = (channels + W * width - 1) / (W * width);
    split = quotient(block, groups);
    column = threadIdx.x % width;
    row = threadIdx.x / width;
    group = block - split * groups;
    c = (group * width + column) * W;
    inside = c < channels;
    Part part(outer, split, splits);
    rows = part.stop - part.first;
    first = part.first + row;
    stop = inside ? part.stop : 0;
    step = COLUMN_THREADS / width;
    at = first * channels + c;
    step_at = step * channels;
  }

  // put(values) for groups of COUNT lots, get(offset) having been called for all of a group before; put_one for the
  // lots that are left.
  template <int COUNT, class G, class P, class Q> __device__ __forceinline__ void each(G get, P put, Q put_one) const {
    i64 i = first, from = at;
    for (; i + (COUNT - 1) * step < stop; i += COUNT * step, from += COUNT * step_at) {
      decltype(get(from)) values[COUNT];
#pragma unroll
      for (int k = 0; k < COUNT; k++) values[k] = get(from + k * step_at);
      put(values);
    }
    for (; i < stop; i += step, from += step_at) put_one(get(from));
  }

  // What the threads of one column have, in a fixed order; each gets the sum. `shared` has W * COLUMN_THREADS places.
  __device__ __forceinline__ void sum(double (&values)[W], double *shared) const {
    int across = width * W;
    for (int step = width; step < 32; step <<= 1) {
#pragma unroll
      for (int k = 0; k < W; k++) values[k] += __shfl_xor_sync(0xffffffffu, values[k], step);
    }
    __syncthreads();
    if ((threadIdx.x & 31) < width) {
#pragma unroll
      for (int k = 0; k < W; k++) shared[(threadIdx.x >> 5) * across + column * W + k] = values[k];
    }
    __syncthreads();
    double total = 0;
    if (threadIdx.x < across)
      for (int r = 0; r < COLUMN_THREADS / 32; r++) total += shared[r * across + threadIdx.x];
    __syncthreads();
    if (threadIdx.x < across) shared[threadIdx.x] = total;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < W; k++) values[k] = shared[column * W + k];
  }

  // The channel whose parts this thread sums up in `join`.
  __device__ __forceinline__ i64 joined() const { return group * width * W + threadIdx.x % (width * W); }
  // Whether it is the one that writes what becomes of them.
  __device__ __forceinline__ bool joins() const { return threadIdx.x < width * W && joined() < channels; }

  // What add(place, sums) comes to over the parts of channel `joined`, in a fixed order; each thread of that channel gets
  // it. A part's place is split * channels + channel. `shared` has COLUMN_THREADS places.
  template <class A>
  __device__ __forceinline__ void join(i64 splits, double (&sums)[2], double *shared, A add) const {
    int across = width * W;
    i64 channel = joined();
    sums[0] = sums[1] = 0;
    if (channel < channels) {
#pragma unroll 4
      for (i64 s = threadIdx.x / across; s < splits; s += COLUMN_THREADS / across) add(s * channels + channel, sums);
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
      __syncthreads();
      shared[threadIdx.x] = sums[k];
      __syncthreads();
      sums[k] = 0;
      for (int r = threadIdx.x % across; r < COLUMN_THREADS; r += across) sums[k] += shared[r];
    }
  }
};
