// Threads over planes of `places` elements each: a thread looks after one place of every groups-th plane, so that what
// depends on the place alone is computed once for several planes.

// This thread's place and its first plane; false for a thread too many.
__device__ __forceinline__ bool seat(unsigned groups, unsigned places, u32 &place, u32 &plane) {
  u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  plane = thread / places;
  place = thread - plane * places;
  return plane < groups;
}

// How many planes a thread sums for at a time where the terms are expensive to find.
#define TOGETHER 4

// As many sums as the thread has planes in this round.
struct Sums { T at[TOGETHER]; };

// sums += weight * x[offset] of the round's planes, `size` elements each; `plane` is the first, the others are every
// groups-th from there.
__device__ __forceinline__ void add_planes(Sums &sums, const D *x, T weight, i64 offset, i64 size, unsigned planes,
                                           unsigned groups, u32 plane) {
#pragma unroll
  for (int i = 0; i < TOGETHER; i++) {
    u64 p = plane + (u64)i * groups;
    if (p < planes) sums.at[i] += weight * x[p * size + offset];
  }
}

// dx[place] = the sums, of the round's planes.
__device__ __forceinline__ void store_planes(const Sums &sums, D *dx, u32 place, i64 size, unsigned planes,
                                             unsigned groups, u32 plane) {
#pragma unroll
  for (int i = 0; i < TOGETHER; i++) {
    u64 p = plane + (u64)i * groups;
    if (p < planes) dx[p * size + place] = sums.at[i];
  }
}
