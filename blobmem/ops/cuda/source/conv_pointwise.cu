#include "common.cuh"
#include "copies.cuh"
#include "mma.cuh"

// Convolutions of one tap, channels last, that are normalised as they are made: products of matrices on tensor cores, each
// number of which is written once, and what is added to it read once.

#define THREADS 256  // of a block: warps have 32 pixels each, and one half of the channels
#define HIGH 128     // pixels of a block
#define ACROSS 64    // channels of y of a block
#define TILES 4      // of eight channels, of a warp
#define CHUNK 64     // bytes of a pixel, and of the weights for a channel of y, that are multiplied at a time
#define STAGES 3     // so many chunks have room in shared memory
#define PACKS (CHUNK / 16)
#define GROUP (4 * PACK)  // channels of y of which a lane has a pack of neighbours
#define GROUPS (TILES * 8 / GROUP)

// Of a line of a chunk the packs lie so that those of eight lines in one place are in different banks.
__device__ __forceinline__ int place(int line, int pack) { return line * PACKS + (pack ^ (line >> 1 & (PACKS - 1))); }

// The chunks of one run of pixels after the other, each of HIGH pixels and of the weights for ACROSS channels, on their way
// to shared memory in turns.
struct Coming {
  enum { ONCE = THREADS / PACKS };  // lines that a block asks for at once
  const Pack *x, *weights;
  i64 pixels, step, pixel;
  int count, packs, line, to, next, into;

  __device__ __forceinline__ Coming(const D *x, const D *w, i64 pixels, i64 inputs, i64 first, i64 step, int channel)
      : x((const Pack *)x), pixels(pixels), step(step), pixel(first), next(0), into(0) {
    int pack = threadIdx.x % PACKS, column = threadIdx.x / PACKS;
    // line 8 t + c of the weights is of channel c / 2 * PACK + 2 t + c % 2 of a group: so a lane finds its neighbours
    channel += column / GROUP * GROUP + column % 8 / 2 * PACK + column % GROUP / 8 * 2 + column % 2;
    count = (int)(inputs * sizeof(D) / CHUNK), packs = (int)(inputs / PACK), line = column;
    weights = (const Pack *)w + (i64)channel * packs + pack, to = place(line, pack);
  }

  __device__ __forceinline__ void ask(Pack (*chunks)[(HIGH + ACROSS) * PACKS]) {
    if (pixel < pixels) {
      Pack *stage = chunks[into] + to;
      const Pack *from = x + (pixel + line) * packs + next * PACKS + threadIdx.x % PACKS;
#pragma unroll
      for (int n = 0; n < HIGH; n += ONCE) {
        bool inside = pixel + line + n < pixels;
        copy_pack(stage + n * PACKS, inside ? from + (i64)n * packs : x, inside);
      }
#pragma unroll
      for (int n = 0; n < ACROSS; n += ONCE)
        copy_pack(stage + (HIGH + n) * PACKS, weights + (i64)n * packs + next * PACKS, true);
      if (++next == count) next = 0, pixel += step;
    }
    end_copies();
    into = into + 1 < STAGES ? into + 1 : 0;
  }

  // Until the chunk is there that was asked for first of those that may be missing.
  __device__ __forceinline__ void wait() const {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
  }
};

// found += what a chunk has of a warp's pixels, from line `row` on, times the weights of its channels, from `column` on.
__device__ __forceinline__ void multiply_chunk(T (*found)[TILES][4], const Pack *chunk, int row, int column) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < PACKS; step += 2) {
    u32 left[2][4], right[TILES][2];
#pragma unroll
    for (int n = 0; n < 2; n++) gather_rows(left[n], chunk + place(row + n * 16 + lane % 16, step + lane / 16));
#pragma unroll
    for (int n = 0; n < TILES; n += 2)
      gather_rows(right[n], chunk + place(HIGH + column + n * 8 + lane / 16 * 8 + lane % 8, step + lane / 8 % 2));
#ifndef HALVES
#pragma unroll
    for (int n = 0; n < 8; n++) {
      left[n / 4][n % 4] = __float_as_uint(centred(__uint_as_float(left[n / 4][n % 4])));
      right[n / 2][n % 2] = __float_as_uint(centred(__uint_as_float(right[n / 2][n % 2])));
    }
#endif
#pragma unroll
    for (int n = 0; n < 2 * TILES; n++) multiply_words(found[n / TILES][n % TILES], left[n / TILES], right[n % TILES]);
  }
}

// y = relu(xhat * gamma + beta + other) of xhat = (x w + b - mean) * inv_std, which `kept` gets unless it is null; then y is
// made of what that holds. x is (pixels, inputs), w (channels, inputs); b, other, gamma and beta may be null. `mean` has the
// lower parts of the means behind the upper ones. A block makes some channels of one run of pixels after the other.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    pointwise_given(const D *x, const D *w, const D *b, const D *other, D *y, D *kept, const T *mean, const T *inv_std,
                    const D *gamma, const D *beta, i64 pixels, i64 inputs, i64 channels, int relu) {
  __shared__ Pack chunks[STAGES][(HIGH + ACROSS) * PACKS];
  __shared__ Lot<PACK> factors[4][ACROSS / PACK];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = warp % 4 * 32, column = warp / 4 * (ACROSS / 2);
  int runs = (int)channels / ACROSS, n0 = (int)(blockIdx.x % runs) * ACROSS, stage = 0;
  i64 m0 = (i64)(blockIdx.x / runs) * HIGH, step = (i64)(gridDim.x / runs) * HIGH;
  Coming coming(x, w, pixels, inputs, m0, step, n0);
#pragma unroll
  for (int n = 0; n < STAGES - 1; n++) coming.ask(chunks);
  for (int c = threadIdx.x; c < ACROSS; c += THREADS) {
    int n = n0 + c;
    T times = gamma ? (T)gamma[n] : (T)1, plus = beta ? (T)beta[n] : (T)0, own = kept ? inv_std[n] : inv_std[n] * times;
    T shift = (b ? b[n] - mean[n] : -mean[n]) - mean[channels + n];
    T each[] = {own, kept ? shift * own : fma(shift, own, plus), times, plus};
#pragma unroll
    for (int k = 0; k < 4; k++) factors[k][c / PACK].at[c % PACK] = each[k];
  }
#pragma unroll 1
  for (; m0 < pixels; m0 += step) {
    int first = row + lane / 4, left = (int)(pixels - m0 < HIGH ? pixels - m0 : HIGH) - first;
    i64 at = (m0 + first) * channels + n0 + column + lane % 4 * PACK;
    Pack added[4][GROUPS];
    if (other)
#pragma unroll
      for (int n = 0; n < 4 * GROUPS; n++)
        if (n / GROUPS * 8 < left)
          added[n / GROUPS][n % GROUPS] = *(const Pack *)(other + at + n / GROUPS * 8 * channels + n % GROUPS * GROUP);
    T found[2][TILES][4] = {};
#pragma unroll 1
    for (i64 done = 0; done < inputs; done += CHUNK / sizeof(D)) {
      coming.wait();
      coming.ask(chunks);  // where all have read what they multiplied before
      multiply_chunk(found, chunks[stage], row, column);
      stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
#pragma unroll
    for (int n = 0; n < 4 * GROUPS; n++) {
      int line = n % 4, group = n / 4, c = (column + group * GROUP) / PACK + lane % 4;
      i64 to = at + line * 8 * channels + group * GROUP;
      Lot<PACK> lot, times = factors[0][c], plus = factors[1][c];
#pragma unroll
      for (int k = 0; k < PACK; k++)
        lot.at[k] = fma(found[line / 2][group * (PACK / 2) + k / 2][line % 2 * 2 + k % 2], times.at[k], plus.at[k]);
      if (kept) {
        if (line * 8 < left) store<PACK>(kept, to, lot);
        times = factors[2][c], plus = factors[3][c];
#pragma unroll
        for (int k = 0; k < PACK; k++) lot.at[k] = fma(as_held(lot.at[k]), times.at[k], plus.at[k]);
      }
#pragma unroll
      for (int k = 0; k < PACK; k++) {
        if (other) lot.at[k] += (T)added[line][group].at[k];
        if (relu) lot.at[k] = lot.at[k] <= 0 ? (T)0 : lot.at[k];
      }
      if (line * 8 < left) store<PACK>(y, to, lot);
    }
  }
}
