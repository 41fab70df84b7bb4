// Batch normalisation with the scale and the ReLU that may follow. Sums of parts of channels come first, a block each;
// then, unless a channel is one part, what a channel needs is made of its parts, by a launch or by each block of the map
// for itself; then all elements are mapped, the last ones first, which may still be in the cache. Parts are kept as planes
// of (splits, channels) doubles. Arrays start at multiples of 16.
// Needs common.cuh, channel_maps.cuh and columns.cuh.

// What the map needs of a channel: y = gamma * ((x - mean - rest) * scale) + beta on the way up, dx = (g - mean - xhat *
// rest) * scale on the way down, where g is the gradient of y, 0 where the ReLU was shut.
struct __align__(16) Factors { T mean, rest, scale, unused; };

// gamma and beta may be null: 1 and 0.
struct Shift {
  const D *gamma, *beta;
  int relu;
  __device__ __forceinline__ T times(i64 c) const { return gamma ? gamma[c] : (T)1; }
  __device__ __forceinline__ T plus(i64 c) const { return beta ? beta[c] : (T)0; }
};

struct At { Factors by; T gamma, beta; };  // what maps know of a channel

// Eight channels a block, its threads in rows of eight; what add(place, sums) comes to over their parts, which each thread
// gets. A part's place is split * channels + channel.
#define ABREAST 8
template <class A>
__device__ __forceinline__ void sum_parts(i64 c, i64 channels, i64 splits, double (&sums)[2], double *shared, A add) {
  int column = threadIdx.x % ABREAST, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  sums[0] = sums[1] = 0;
  if (c < channels) {
#pragma unroll 4
    for (i64 s = threadIdx.x / ABREAST; s < splits; s += blockDim.x / ABREAST) add(s * channels + c, sums);
  }
#pragma unroll
  for (int k = 0; k < 2; k++) {
    for (int step = ABREAST; step < 32; step <<= 1) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], step);
    __syncthreads();
    if ((threadIdx.x & 31) < ABREAST) shared[warp * ABREAST + column] = sums[k];
    __syncthreads();
    sums[k] = 0;
    for (int i = 0; i < warps; i++) sums[k] += shared[i * ABREAST + column];
  }
}

// A map of whole rows by blocks that first join the parts of their channels: to.join(block, shared) gives what a thread's
// channel needs, and make(found, first) the map, which finds that of channel c at found[c - first].
template <class S, class F>
__device__ __forceinline__ void map_joined(S to, i64 outer, i64 chunks, int width, F make) {
  __shared__ double shared[COLUMN_THREADS];
  __shared__ Factors found[COLUMN_THREADS];
  ColumnBlock<LOT> block((i64)gridDim.x - 1 - blockIdx.x, outer, to.channels, chunks, width);
  Factors factors = to.join(block, shared);
  if (threadIdx.x < width * LOT) found[threadIdx.x] = factors;
  __syncthreads();
  if (!block.inside) return;
  auto map = make(found, block.group * width * LOT);
  Columns<decltype(map)> order(map, block.c);
  map_lots(map, order, block.at, block.stop * to.channels, block.step_at);
}
