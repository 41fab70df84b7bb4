#include "common.cuh"
#include "channel_maps.cuh"
#include "channels.cuh"
#include "columns.cuh"
#include "moments.cuh"
#include "batch_norm.cuh"
#include "batch_norm_moments.cuh"
#include "batch_norm_sums.cuh"
#include "batch_norm_gathered.cuh"
#include "copies.cuh"
#include "mma.cuh"
#include "shared.cuh"
#include "warpgroups.cuh"
#include "conv_normed.cuh"

// Convolutions of one tap, channels last, for batch norms (conv_normed_kernels.cuh): x is (pixels, inputs), w (channels, inputs).
// A block makes `parts` times ACROSS channels of one run of pixels after the other: their weights stay in shared memory, beside
// `stages` chunks of pixels.

#define ROOM 101376  // bytes of shared memory
#define AHEAD 3      // so many chunks of pixels are on their way
#define PIXELS (HIGH * PACKS)  // packs of a chunk

// The weights of a block's channels, a chunk of each after the other, on their way to shared memory, where they stay.
__device__ __forceinline__ void ask_weights(Pack *weights, const D *w, int inputs, int first, int channels) {
  int packs = inputs / PACK, chunks = packs / PACKS;
  for (int n = threadIdx.x; n < channels * packs; n += THREADS) {
    int pack = n % PACKS, line = n / PACKS % ACROSS, chunk = n / WEIGHTS % chunks, part = n / (WEIGHTS * chunks);
    const Pack *from = (const Pack *)w + (i64)(first + part * ACROSS + channel_of(line)) * packs + chunk * PACKS + pack;
    copy_pack(weights + n / WEIGHTS * WEIGHTS + place(line, pack), from, true);
  }
}

// The chunks of one run of pixels after the other, each of HIGH pixels, on their way to shared memory in turns.
struct Coming {
  enum { ONCE = THREADS / PACKS };  // lines that a block asks for at once
  const Pack *x, *from;
  Pack *begin, *end, *to;
  i64 left, step, jump, apart;  // pixels from the thread's first one on; packs to the next run, and to its next line
  int count, chunk;

  __device__ __forceinline__ Coming(const D *x, Pack *room, int stages, i64 pixels, int inputs, i64 first, i64 step)
      : x((const Pack *)x), begin(room), end(room + stages * PIXELS), step(step), count(inputs * (int)sizeof(D) / CHUNK), chunk(0) {
    int line = threadIdx.x / PACKS, packs = inputs / PACK;
    to = room + place(line, threadIdx.x % PACKS);
    left = pixels - first - line, jump = step * packs - (count - 1) * PACKS, apart = ONCE * packs;
    from = this->x + (first + line) * packs + threadIdx.x % PACKS;
  }

  __device__ __forceinline__ void ask() {
    const Pack *next = from;
#pragma unroll
    for (int n = 0; n < HIGH; n += ONCE, next += apart)
      copy_pack(to + n * PACKS, n < left ? next : x, n < left);
    end_copies();
    bool all = ++chunk == count;
    chunk = all ? 0 : chunk, left -= all ? step : 0, from += all ? jump : PACKS, to += PIXELS;
    to = to < end ? to : to - (end - begin);
  }

  // Until the chunk is there that was asked for first of those that may be missing.
  __device__ __forceinline__ void wait() const {
    wait_for_copies<AHEAD - 1>();
    show_copies();
    __syncthreads();
  }
};

// found += what a chunk has of a warp's pixels, from line `row` on, times the weights of the channels; once `end_products`
// was called.
__device__ __forceinline__ void multiply_chunk(T (*found)[4], Lines chunk, Lines weights, int row) {
#ifdef WARPGROUPS
  Lines left = chunk + (row & ~63) * PACKS;  // four warps at a time, of which each gets its own pixels
  begin_products();
#pragma unroll
  for (int step = 0; step < PACKS; step += 2) multiply_lines(found, left + step, weights + step);
#else
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < PACKS; step += 2) {
    u32 left[4], right[TILES][2];
    gather_rows(left, chunk + place(row + lane % 16, step + lane / 16));
#pragma unroll
    for (int n = 0; n < TILES; n += 2)
      gather_rows(right[n], weights + place(n * 8 + lane / 16 * 8 + lane % 8, step + lane / 8 % 2));
#ifndef HALVES
#pragma unroll
    for (int n = 0; n < 4; n++) left[n] = __float_as_uint(centred(__uint_as_float(left[n])));
#pragma unroll
    for (int n = 0; n < 2 * TILES; n++)
      right[n / 2][n % 2] = __float_as_uint(centred(__uint_as_float(right[n / 2][n % 2])));
#endif
#pragma unroll
    for (int n = 0; n < TILES; n++) multiply_words(found[n], left, right[n]);
  }
#endif
}

// What a block makes: some channels, from `first` on, of one run of pixels after the other.
struct Block {
  i64 pixels, m0, step;
  int channels, first, own, parts, chunks, stages, split, splits;
  Lines weights, room;
  Lot<PACK> *factors;  // of its channels
  Pack *memory, *shared;  // where weights are, and chunks of pixels

  __device__ __forceinline__ Block(Pack *memory, i64 pixels, int inputs, int channels, int parts, int stages)
      : pixels(pixels), channels(channels), own(parts * ACROSS), parts(parts), chunks(inputs * (int)sizeof(D) / CHUNK),
        stages(stages) {
    int runs = channels / own;
    first = (int)(blockIdx.x % runs) * own, split = (int)blockIdx.x / runs, splits = (int)gridDim.x / runs;
    m0 = (i64)split * HIGH, step = (i64)splits * HIGH;
    this->memory = memory, shared = memory + parts * chunks * WEIGHTS;
    weights = lines_from(memory), room = lines_from(shared), factors = (Lot<PACK> *)(shared + stages * PIXELS);
  }

  __device__ __forceinline__ void keep(int factor, int c, T value) const {
    factors[factor * (own / PACK) + c / PACK].at[c % PACK] = value;
  }
};

// Products of all pixels of a block and the weights of its channels, which `end` gets as they are made: of each lane two
// lines, so many packs of each, with what E::Beside reads of `end.beside` before they are made, and factors. They are added
// to what `end` begins with.
template <class E> __device__ __forceinline__ void make(const Block &block, Coming &coming, E &end) {
  int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16, stage = 0, packs = block.own / PACK;
  i64 down = 8 * block.channels;
  __syncthreads();  // factors are there
#pragma unroll 1
  for (i64 m0 = block.m0; m0 < block.pixels; m0 += block.step) {
    i64 left = block.pixels - m0 - row - lane / 4;
    i64 at[2] = {(m0 + row + lane / 4) * block.channels + block.first + lane % 4 * PACK};
    at[1] = at[0] + down;
    const Lot<PACK> *factors = block.factors + lane % 4;
    Lines weights = block.weights;
    bool inside[2] = {left > 0, left > 8};
    int next = stage;
#pragma unroll 1
    for (int part = 0; part < block.parts; part++, at[0] += ACROSS, at[1] += ACROSS) {
      typename E::Beside beside(end.beside, at, inside);
      T found[TILES][4];
      begin_with(found, end, factors);
      next = stage;
#pragma unroll 1
      for (int chunk = 0; chunk < block.chunks; chunk++, weights += WEIGHTS) {
        if (part == 0) {
          if (block.parts == 1) end_products();
          coming.wait();
          coming.ask();  // where all have read what they multiplied before
        }
        multiply_chunk(found, block.room + next * PIXELS, weights, row);
        next = next + 1 < block.stages ? next + 1 : 0;
      }
      end_products();
      put_all(found, end, factors, packs, beside, at, inside);
      factors += 4 * GROUPS;
    }
    stage = next;
  }
}

#define BEGIN                                                                \
  SHARED(Pack, memory);                                                      \
  Block block(memory, pixels, inputs, channels, parts, stages);              \
  ask_weights(memory, w, inputs, block.first, block.own);                    \
  Coming coming(x, block.shared, stages, pixels, inputs, block.m0, block.step); \
  _Pragma("unroll") for (int n = 0; n < AHEAD; n++) coming.ask();

#include "conv_normed_kernels.cuh"
