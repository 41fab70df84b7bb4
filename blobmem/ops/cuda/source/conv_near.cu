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

// Convolutions of 3x3 taps of 64 channels, at distance one, channels last, for batch norms (conv_normed_kernels.cuh): x is
// (images, height, width, 64), w (channels, 3, 3, 64), both halves. Pixels are taken as if each line of an image ended with one
// more, and each image with one more line, of zeros: so each tap's are those of another one, so many further on. A block makes
// ACROSS channels of one run of these after the other, whose neighbours are in shared memory with it, and the weights.

#define ROOM 115712  // bytes of shared memory
#define TAPS 9
#define LINE 8  // packs of a pixel
#define STEPS 4  // products of a tap, of two packs each
#define CHUNKS (TAPS * LINE / PACKS)

// Where a pixel is, with the zeros between images.
struct Where {
  int image, y, x, lines, columns;
  __device__ __forceinline__ Where(i64 at, int height, int width) : lines(height + 1), columns(width + 1) {
    int place = at < 0 ? 0 : (int)at;
    image = place / (lines * columns), place -= image * (lines * columns);
    y = place / columns, x = place - y * columns;
    x -= at < 0 ? (int)-at : 0;  // before all images
  }
  __device__ __forceinline__ void move(int by) {
    x += by;
    while (x >= columns) {
      x -= columns;
      if (++y == lines) y = 0, image++;
    }
  }
  __device__ __forceinline__ bool inside(int images) const {
    return x >= 0 && x < columns - 1 && y < lines - 1 && image < images;
  }
  __device__ __forceinline__ i64 pixel() const { return ((i64)image * (lines - 1) + y) * (columns - 1) + x; }
};

struct Block {
  int images, channels, first, own, parts, width, height, split, splits;
  i64 all, m0, step;  // pixels with the zeros
  Lines weights;
  Lot<PACK> *factors;
  Pack *memory, *shared;  // where weights are, and pixels
  __device__ __forceinline__ Block(Pack *memory, i64 pixels, int channels, int width, int height)
      : images((int)(pixels / ((i64)width * height))), channels(channels), own(ACROSS), parts(1), width(width), height(height) {
    int runs = channels / own;
    first = (int)(blockIdx.x % runs) * own, split = (int)blockIdx.x / runs, splits = (int)gridDim.x / runs;
    all = (i64)images * (height + 1) * (width + 1), m0 = (i64)split * HIGH, step = (i64)splits * HIGH;
    weights = lines_from(memory), factors = (Lot<PACK> *)(memory + CHUNKS * WEIGHTS);
    this->memory = memory, shared = memory + CHUNKS * WEIGHTS + 6 * ACROSS / 4;
  }
  __device__ __forceinline__ void keep(int factor, int c, T value) const {
    factors[factor * (own / PACK) + c / PACK].at[c % PACK] = value;
  }
};

__device__ __forceinline__ void ask_weights(Pack *weights, const D *w, int first) {
  for (int n = threadIdx.x; n < CHUNKS * WEIGHTS; n += THREADS) {
    int pack = n % PACKS, line = n / PACKS % ACROSS, chunk = n / WEIGHTS;
    const Pack *from = (const Pack *)w + (i64)(first + channel_of(line)) * (TAPS * LINE) + chunk * PACKS + pack;
    copy_pack(weights + n / WEIGHTS * WEIGHTS + place(line, pack), from, true);
  }
}

// The pixels of a block's runs and their neighbours.
struct Coming {
  const Pack *x;
  Pack *room;
  int lines;
  __device__ __forceinline__ Coming(const D *x, const Block &block)
      : x((const Pack *)x), room(block.shared), lines(HIGH + 2 * block.width + 4) {}
  __device__ __forceinline__ void ask(const Block &block, i64 m0) const {
    int line = threadIdx.x / LINE, pack = threadIdx.x % LINE;
    Where where(m0 - block.width - 2 + line, block.height, block.width);
    for (; line < lines; line += THREADS / LINE, where.move(THREADS / LINE)) {
      bool inside = where.inside(block.images);
      copy_pack(room + line * LINE + (pack ^ (line & (LINE - 1))), inside ? x + where.pixel() * LINE + pack : x, inside);
    }
    end_copies();
  }
};

// What a tap's products take of a warp's pixels.
__device__ __forceinline__ void gather_tap(u32 (&left)[STEPS][4], const Pack *room, int line) {
  int lane = threadIdx.x & 31;
  line += lane % 16;
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    gather_rows(left[step], room + line * LINE + ((2 * step + lane / 16) ^ (line & (LINE - 1))));
}

__device__ __forceinline__ void multiply_tap(T (*found)[4], const u32 (&left)[STEPS][4], Lines weights) {
#ifdef WARPGROUPS
  begin_products();
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    multiply_lines(found, left[step], weights + step / 2 * WEIGHTS + step % 2 * 2);
  mark_products();
#else
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const Pack *from = weights + step / 2 * WEIGHTS;
    u32 right[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n += 2)
      gather_rows(right[n], from + place(n * 8 + lane / 16 * 8 + lane % 8, step % 2 * 2 + lane / 8 % 2));
#pragma unroll
    for (int n = 0; n < TILES; n++) multiply_words(found[n], left[step], right[n]);
  }
#endif
}

template <class E> __device__ __forceinline__ void make(const Block &block, Coming &coming, E &end) {
  int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16, packs = block.own / PACK;
  const Lot<PACK> *factors = block.factors + lane % 4;
#pragma unroll 1
  for (i64 m0 = block.m0; m0 < block.all; m0 += block.step) {
    i64 at[2];
    bool inside[2];
    Where where(m0 + row + lane / 4, block.height, block.width);
#pragma unroll
    for (int n = 0; n < 2; n++, where.move(8)) {
      inside[n] = where.inside(block.images);
      at[n] = where.pixel() * block.channels + block.first + lane % 4 * PACK;
    }
    wait_for_copies();
    show_copies();
    __syncthreads();
    typename E::Beside beside(end.beside, at, inside);
    T found[TILES][4];
    begin_with(found, end, factors);
    u32 left[2][STEPS][4];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
      if (tap > 1) wait_for_products<1>();  // those of the tap before the last have what they took
      gather_tap(left[tap % 2], coming.room, row + tap / 3 * (block.width + 1) + tap % 3);
      multiply_tap(found, left[tap % 2], block.weights + tap * (CHUNKS / TAPS) * WEIGHTS);
    }
    end_products();
    __syncthreads();
    if (m0 + block.step < block.all) coming.ask(block, m0 + block.step);
    put_all(found, end, factors, packs, beside, at, inside);
  }
}

#define BEGIN                                          \
  SHARED(Pack, memory);                                \
  Block block(memory, pixels, channels, width, height); \
  ask_weights(memory, w, block.first);                 \
  Coming coming(x, block);                             \
  if (block.m0 < block.all) coming.ask(block, block.m0);

#include "conv_normed_kernels.cuh"
