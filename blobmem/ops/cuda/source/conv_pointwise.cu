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

// Convolutions of one tap, channels last, that are normalised as they are made: products of matrices on tensor cores, each
// number of which is written once, and what is added to it read once.

#define THREADS 256  // of a block: warps have 16 pixels each
#define HIGH 128     // pixels of a block
#define ACROSS 64    // channels of y that a block makes at a time
#define TILES 8      // of eight channels
#define CHUNK 64     // bytes of a pixel, and of the weights for a channel of y, that are multiplied at a time
#define AHEAD 3      // so many chunks of pixels are on their way
#define PACKS (CHUNK / 16)
#define PIXELS (HIGH * PACKS)     // packs of a chunk
#define WEIGHTS (ACROSS * PACKS)  // and of the weights for it
#define GROUP (4 * PACK)  // channels of y of which a lane has a pack of neighbours
#define GROUPS (TILES * 8 / GROUP)

// Of a line of a chunk the packs lie so that those of eight lines in one place are in different banks.
__device__ __forceinline__ int place(int line, int pack) { return line * PACKS + (pack ^ (line >> 1 & (PACKS - 1))); }

// The weights of a block's channels, a chunk of each after the other, on their way to shared memory, where they stay.
__device__ __forceinline__ void ask_weights(Pack *weights, const D *w, int inputs, int first, int channels) {
  int packs = inputs / PACK, chunks = packs / PACKS;
  for (int n = threadIdx.x; n < channels * packs; n += THREADS) {
    int pack = n % PACKS, line = n / PACKS % ACROSS, chunk = n / WEIGHTS % chunks, part = n / (WEIGHTS * chunks);
    // line 8 t + c is of channel c / 2 * PACK + 2 t + c % 2 of a group: so a lane finds its neighbours
    int channel = line / GROUP * GROUP + line % 8 / 2 * PACK + line % GROUP / 8 * 2 + line % 2;
    const Pack *from = (const Pack *)w + (i64)(first + part * ACROSS + channel) * packs + chunk * PACKS + pack;
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

// Four words at once, or a number after the other: of a pack the compiler may make several stores, which take three times as
// long.
__device__ __forceinline__ void put(D *to, Lot<PACK> lot) {
#if !defined(EMULATED) && !defined(HALVES) && !defined(DOUBLE)
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(lot.at[0]), "f"(lot.at[1]),
               "f"(lot.at[2]), "f"(lot.at[3])
               : "memory");
#else
  store<PACK>(to, 0, lot);
#endif
}

// The larger; what is not a number stays so.
__device__ __forceinline__ T at_least(T least, T v) {
#if defined(EMULATED) || defined(DOUBLE) || __CUDA_ARCH__ < 800
  return v < least ? least : v;
#else
  T larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(v), "f"(least));
  return larger;
#endif
}

// What a block makes: some channels, from `first` on, of one run of pixels after the other.
struct Block {
  i64 pixels, m0, step;
  int channels, first, own, parts, chunks, stages, split, splits;
  Lines weights, room;
  Lot<PACK> *factors;  // of its channels
  Pack *shared;        // where chunks of pixels are

  __device__ __forceinline__ Block(Pack *memory, i64 pixels, int inputs, int channels, int parts, int stages)
      : pixels(pixels), channels(channels), own(parts * ACROSS), parts(parts), chunks(inputs * (int)sizeof(D) / CHUNK),
        stages(stages) {
    int runs = channels / own;
    first = (int)(blockIdx.x % runs) * own, split = (int)blockIdx.x / runs, splits = (int)gridDim.x / runs;
    m0 = (i64)split * HIGH, step = (i64)splits * HIGH;
    shared = memory + parts * chunks * WEIGHTS;
    weights = lines_from(memory), room = lines_from(shared), factors = (Lot<PACK> *)(shared + stages * PIXELS);
  }

  __device__ __forceinline__ void keep(int factor, int c, T value) const {
    factors[factor * (own / PACK) + c / PACK].at[c % PACK] = value;
  }
};

// Packs of an array that a lane has of two lines, of the channels that a block makes at a time.
struct Packs {
  Pack at[2][GROUPS];
  __device__ __forceinline__ Packs(const D *from, i64 place, i64 down, const bool (&inside)[2]) {
#pragma unroll
    for (int n = 0; n < 2 * GROUPS; n++)
      if (inside[n / GROUPS]) at[n / GROUPS][n % GROUPS] = *(const Pack *)(from + place + n / GROUPS * down + n % GROUPS * GROUP);
  }
};
struct NoPacks {
  __device__ __forceinline__ NoPacks(const D *from, i64 place, i64 down, const bool (&inside)[2]) {}
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
    i64 left = block.pixels - m0 - row - lane / 4, at = (m0 + row + lane / 4) * block.channels + block.first + lane % 4 * PACK;
    const Lot<PACK> *factors = block.factors + lane % 4;
    Lines weights = block.weights;
    bool inside[2] = {left > 0, left > 8};
    int next = stage;
#pragma unroll 1
    for (int part = 0; part < block.parts; part++, at += ACROSS) {
      typename E::Beside beside(end.beside, at, down, inside);
      T found[TILES][4];
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        Lot<PACK> lot = end.begin(factors + 4 * group, group);
#pragma unroll
        for (int n = 0; n < 2 * PACK; n++) found[group * (PACK / 2) + n / 4][n % 4] = lot.at[n / 4 * 2 + n % 2];
      }
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
#pragma unroll
      for (int group = 0; group < GROUPS; group++, factors += 4) {
        typename E::Factors own(factors, packs);
#pragma unroll
        for (int line = 0; line < 2; line++) {
          Lot<PACK> lot;
#pragma unroll
          for (int k = 0; k < PACK; k++) lot.at[k] = found[group * (PACK / 2) + k / 2][line * 2 + k % 2];
          end.put(lot, own, beside, group, line, at + line * down + group * GROUP, inside[line]);
        }
      }
      end.next();
    }
    stage = next;
  }
}

template <int COUNT> struct FactorsOf {
  Lot<PACK> at[COUNT];
  __device__ __forceinline__ FactorsOf(const Lot<PACK> *factors, int packs) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) at[n] = factors[n * packs];
  }
};

__device__ __forceinline__ Lot<PACK> scaled(const Lot<PACK> &lot, const Lot<PACK> &times, const Lot<PACK> &plus) {
  Lot<PACK> result;
#pragma unroll
  for (int k = 0; k < PACK; k++) result.at[k] = fma(lot.at[k], times.at[k], plus.at[k]);
  return result;
}

template <bool WANTED, class A, class B> struct Either { typedef A Type; };
template <class A, class B> struct Either<false, A, B> { typedef B Type; };

template <bool KEPT, bool OTHER> struct Normalized {
  typedef FactorsOf<KEPT ? 4 : 2> Factors;
  typedef typename Either<OTHER, Packs, NoPacks>::Type Beside;
  const D *beside;
  D *y, *kept;
  T least;  // of y
  __device__ __forceinline__ Lot<PACK> begin(const Lot<PACK> *factors, int group) const { return Lot<PACK>{}; }
  __device__ __forceinline__ T with(T value, const NoPacks &beside, int line, int group, int k) const { return value; }
  __device__ __forceinline__ T with(T value, const Packs &beside, int line, int group, int k) const {
    return value + (T)beside.at[line][group].at[k];
  }
  __device__ __forceinline__ void put(Lot<PACK> lot, const Factors &factors, const Beside &beside, int group, int line, i64 at,
                                      bool inside) {
    lot = scaled(lot, factors.at[0], factors.at[1]);
    if (KEPT) {
      if (inside) ::put(kept + at, lot);
#pragma unroll
      for (int k = 0; k < PACK; k++) lot.at[k] = as_held(lot.at[k]);
      lot = scaled(lot, factors.at[KEPT ? 2 : 0], factors.at[KEPT ? 3 : 1]);
    }
#pragma unroll
    for (int k = 0; k < PACK; k++) lot.at[k] = at_least(least, with(lot.at[k], beside, line, group, k));
    if (inside) ::put(y + at, lot);
  }
  __device__ __forceinline__ void next() {}
};

#define BEGIN                                                                \
  SHARED(Pack, memory);                                                      \
  Block block(memory, pixels, inputs, channels, parts, stages);              \
  ask_weights(memory, w, inputs, block.first, block.own);                    \
  Coming coming(x, block.shared, stages, pixels, inputs, block.m0, block.step); \
  _Pragma("unroll") for (int n = 0; n < AHEAD; n++) coming.ask();

// In the following x is (pixels, inputs) and w (channels, inputs); b, other, gamma and beta may be null. `mean` has the lower
// parts of the means behind the upper ones; xhat = (x w + b - mean) * inv_std. A block makes `parts` times ACROSS channels of
// one run of pixels after the other: their weights stay in shared memory, beside `stages` chunks of pixels.

// y = relu(xhat * gamma + beta + other); `kept` gets xhat unless it is null: then y is made of what that holds.
extern "C" __global__ void WITH_SHARED(101376) __launch_bounds__(THREADS, 2)
    pointwise_given(const D *x, const D *w, const D *b, const D *other, D *y, D *kept, const T *mean, const T *inv_std,
                          const D *gamma, const D *beta, i64 pixels, int inputs, int channels, int parts, int stages,
                          int relu) {
  BEGIN
  for (int c = threadIdx.x; c < block.own; c += THREADS) {
    int n = block.first + c;
    T times = gamma ? (T)gamma[n] : (T)1, plus = beta ? (T)beta[n] : (T)0, scale = kept ? inv_std[n] : inv_std[n] * times;
    T shift = (b ? b[n] - mean[n] : -mean[n]) - mean[channels + n];
    block.keep(0, c, scale), block.keep(1, c, kept ? shift * scale : fma(shift, scale, plus));
    block.keep(2, c, times), block.keep(3, c, plus);
  }
  T least = relu ? (T)0 : -(T)__uint_as_float(0x7f800000u);
  if (kept && other) {
    Normalized<true, true> end = {other, y, kept, least};
    make(block, coming, end);
  } else if (kept) {
    Normalized<true, false> end = {other, y, kept, least};
    make(block, coming, end);
  } else if (other) {
    Normalized<false, true> end = {other, y, kept, least};
    make(block, coming, end);
  } else {
    Normalized<false, false> end = {other, y, kept, least};
    make(block, coming, end);
  }
}

// Of sums a block has one part of channels: what a lane has of these, so many packs, one after the other.
#define EACH (GROUPS * PACK)

// What lanes have of channels, 64 of each, in shared memory: a line of all channels from every four of them.
#define LINES (THREADS / 4)
__device__ __forceinline__ void show_lane(Pack *shared, int which, const T (&values)[EACH]) {
  T *line = (T *)shared + (which * LINES + threadIdx.x / 4) * ACROSS + threadIdx.x % 4 * PACK;
#pragma unroll
  for (int n = 0; n < EACH; n++) line[n / PACK * GROUP + n % PACK] = values[n];
}

// What a channel's lines come to, in double precision; it is that of thread % ACROSS.
template <class F> __device__ __forceinline__ double sum_of_lines(F of) {
  __shared__ double sums[THREADS];
  double sum = 0;
#pragma unroll 4
  for (int n = threadIdx.x / ACROSS; n < LINES; n += THREADS / ACROSS) sum += of(n);
  __syncthreads();
  sums[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int n = 0; n < THREADS / ACROSS; n++) sum += sums[n * ACROSS + threadIdx.x % ACROSS];
  return sum;
}

// Once all products are made, for what is summed of them to lie where pixels were.
__device__ __forceinline__ void end_pixels() {
  wait_for_copies();
  __syncthreads();
}

// y = x w + b, if it is to be written. Of each channel distances are summed from the mean of the lane's first.
template <bool WRITTEN> struct WithMoments {
  typedef FactorsOf<1> Factors;
  typedef NoPacks Beside;
  const D *beside;
  D *y;
  T count, seen, less[EACH], sums[EACH], squares[EACH];  // of the lane's; `less` is what is added for these distances
  __device__ __forceinline__ WithMoments(D *y) : beside(nullptr), y(y), count(0), seen(0) {
#pragma unroll
    for (int n = 0; n < EACH; n++) less[n] = sums[n] = squares[n] = 0;
  }
  __device__ __forceinline__ Lot<PACK> begin(const Lot<PACK> *factors, int group) const {
    Lot<PACK> lot;
#pragma unroll
    for (int k = 0; k < PACK; k++) lot.at[k] = less[group * PACK + k];
    return lot;
  }
  __device__ __forceinline__ void put(Lot<PACK> lot, const Factors &factors, const Beside &beside, int group, int line, i64 at,
                                      bool inside) {
    if (!inside) return;
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      int n = group * PACK + k;
      sums[n] += lot.at[k], squares[n] = fma(lot.at[k], lot.at[k], squares[n]);
      if (WRITTEN) lot.at[k] = lot.at[k] - less[n] + factors.at[0].at[k];
    }
    if (WRITTEN) ::put(y + at, lot);
    seen = line + 1;
  }
  __device__ __forceinline__ void next() {
    if (count == 0 && seen > 0)
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        less[n] = seen > 1 ? sums[n] * (T)-0.5 : -sums[n];
        squares[n] = max_of(squares[n] + less[n] * sums[n], (T)0), sums[n] = 0;
      }
    count += seen, seen = 0;
  }
  __device__ __forceinline__ void keep(const Block &block, const GatheredMoments &to) {
    __shared__ T counts[LINES];
    end_pixels();
    if (threadIdx.x % 4 == 0) counts[threadIdx.x / 4] = count;
    T share = count > 0 ? 1 / count : (T)0;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      T middle = sums[n] * share;
      squares[n] = max_of(squares[n] - middle * sums[n], (T)0), sums[n] = middle - less[n];
    }
    show_lane(block.shared, 0, sums), show_lane(block.shared, 1, squares);
    __syncthreads();
    const T *means = (const T *)block.shared + threadIdx.x % ACROSS, *spreads = means + LINES * ACROSS;
    double all = sum_of_lines([&](int n) { return (double)counts[n]; });
    double total = sum_of_lines([&](int n) { return (double)counts[n] * means[n * ACROSS]; });
    double mean = all > 0 ? total / all : 0;
    double spread = sum_of_lines([&](int n) {
      double far = counts[n] > 0 ? means[n * ACROSS] - mean : 0;
      return spreads[n * ACROSS] + counts[n] * far * far;
    });
    if (threadIdx.x >= ACROSS) return;
    mean += (double)block.factors[threadIdx.x / PACK].at[threadIdx.x % PACK];  // the bias
    put_moments(to, block.first + threadIdx.x, block.split, all, Statistics{mean, spread});
  }
};

// The moments of y = x w + b, which is written unless it is null, of `before` numbers of each channel and these.
extern "C" __global__ void WITH_SHARED(101376) __launch_bounds__(THREADS, 2)
    pointwise_moments(const D *x, const D *w, const D *b, D *y, double *moments, double *places, i64 pixels, int inputs,
                            int channels, int parts, int stages, double before, int kept) {
  BEGIN
  for (int c = threadIdx.x; c < block.own; c += THREADS) block.keep(0, c, b ? (T)b[block.first + c] : (T)0);
  GatheredMoments to = {{places, channels, block.splits, (double)pixels + (kept ? before : 0)}, moments, before, kept};
  if (y) {
    WithMoments<true> end(y);
    make(block, coming, end);
    end.keep(block, to);
  } else {
    WithMoments<false> end(y);
    make(block, coming, end);
    end.keep(block, to);
  }
}

// Of x w + b - mean what is added to x w, and, behind other factors, those by which a ReLU is known to be open.
__device__ __forceinline__ void keep_shift(const Block &block, const D *b, const T *mean, const T *inv_std, const Shift &shift,
                                           int place) {
  for (int c = threadIdx.x; c < block.own; c += THREADS) {
    int n = block.first + c;
    block.keep(0, c, (b ? b[n] - mean[n] : -mean[n]) - mean[block.channels + n]);
    block.keep(place, c, shift.times(n) * inv_std[n]), block.keep(place + 1, c, shift.plus(n));
  }
}

// The gradient that a ReLU passes on, of what was normalised.
template <bool RELU>
__device__ __forceinline__ T passed_by(T dy, T shifted, T times, T plus) {
  return RELU && !(fma(shifted, times, plus) > 0) ? (T)0 : dy;
}

// Sums of g, and of g * xhat, where g is dy, or 0 where a ReLU was shut; xhat is written unless it is null. inv_std times the
// latter is taken at the end.
template <bool RELU> struct WithSums {
  typedef FactorsOf<RELU ? 4 : 2> Factors;
  typedef Packs Beside;
  enum { TIMES = RELU ? 2 : 0, PLUS = RELU ? 3 : 0 };
  const D *beside;
  D *xhat;
  T plain[EACH], along[EACH];
  __device__ __forceinline__ WithSums(const D *dy, D *xhat) : beside(dy), xhat(xhat) {
#pragma unroll
    for (int n = 0; n < EACH; n++) plain[n] = along[n] = 0;
  }
  __device__ __forceinline__ Lot<PACK> begin(const Lot<PACK> *factors, int group) const { return factors[0]; }
  __device__ __forceinline__ void put(Lot<PACK> lot, const Factors &factors, const Beside &dy, int group, int line, i64 at,
                                      bool inside) {
    if (!inside) return;
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      T g = passed_by<RELU>(dy.at[line][group].at[k], lot.at[k], factors.at[TIMES].at[k], factors.at[PLUS].at[k]);
      plain[group * PACK + k] += g, along[group * PACK + k] = fma(g, lot.at[k], along[group * PACK + k]);
    }
    if (xhat) {
#pragma unroll
      for (int k = 0; k < PACK; k++) lot.at[k] *= factors.at[1].at[k];
      ::put(xhat + at, lot);
    }
  }
  __device__ __forceinline__ void next() {}
  __device__ __forceinline__ void keep(const Block &block, const GatheredSums &to, const T *inv_std) {
    end_pixels();
    show_lane(block.shared, 0, plain), show_lane(block.shared, 1, along);
    __syncthreads();
    const T *lines = (const T *)block.shared + threadIdx.x % ACROSS;
    double all = sum_of_lines([&](int n) { return (double)lines[n * ACROSS]; });
    double all_along = sum_of_lines([&](int n) { return (double)lines[(LINES + n) * ACROSS]; });
    i64 c = block.first + threadIdx.x;
    if (threadIdx.x < ACROSS) put_sums(to, c, block.split, all, all_along * inv_std[c]);
  }
};

// The sums for the gradient of batch normalisation, as `batch_norm_slices` gathers them.
extern "C" __global__ void WITH_SHARED(101376) __launch_bounds__(THREADS, 2)
    pointwise_sums(const D *x, const D *w, const D *b, const T *mean, const T *inv_std, const D *gamma, const D *beta,
                   const D *dy, D *xhat, double *sums, double *places, i64 pixels, int inputs, int channels, int parts,
                   int stages, int relu, int first, int kept) {
  BEGIN
  Shift shift = {gamma, beta, relu};
  keep_shift(block, b, mean, inv_std, shift, 2);
  for (int c = threadIdx.x; c < block.own; c += THREADS) block.keep(1, c, inv_std[block.first + c]);
  GatheredSums to = {{places, channels, block.splits, shift}, sums, first, kept};
  if (relu) {
    WithSums<true> end(dy, xhat);
    make(block, coming, end);
    end.keep(block, to, inv_std);
  } else {
    WithSums<false> end(dy, xhat);
    make(block, coming, end);
    end.keep(block, to, inv_std);
  }
}

// dx = (g - less - xhat * tilt) * scale, whose factors are those of g, of what xhat is made of, and the rest; it may be dy.
template <bool RELU> struct WithGradient {
  typedef FactorsOf<RELU ? 6 : 4> Factors;
  typedef Packs Beside;
  enum { TIMES = RELU ? 4 : 0, PLUS = RELU ? 5 : 0 };
  const D *beside;
  D *dx;
  __device__ __forceinline__ Lot<PACK> begin(const Lot<PACK> *factors, int group) const { return factors[0]; }
  __device__ __forceinline__ void put(Lot<PACK> lot, const Factors &factors, const Beside &dy, int group, int line, i64 at,
                                      bool inside) {
    if (!inside) return;
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      T g = passed_by<RELU>(dy.at[line][group].at[k], lot.at[k], factors.at[TIMES].at[k], factors.at[PLUS].at[k]);
      lot.at[k] = fma(g, factors.at[1].at[k], fma(lot.at[k], factors.at[2].at[k], factors.at[3].at[k]));
    }
    ::put(dx + at, lot);
  }
  __device__ __forceinline__ void next() {}
};

// The gradient of batch normalisation by the sums of a whole batch, whose channels have 1 / `share` numbers.
extern "C" __global__ void WITH_SHARED(101376) __launch_bounds__(THREADS, 2)
    pointwise_gradient(const D *x, const D *w, const D *b, const T *mean, const T *inv_std, const D *gamma, const D *beta,
                       const D *dy, D *dx, const double *sums, i64 pixels, int inputs, int channels, int parts, int stages,
                       double share, int relu) {
  BEGIN
  Shift shift = {gamma, beta, relu};
  keep_shift(block, b, mean, inv_std, shift, 4);
  for (int c = threadIdx.x; c < block.own; c += THREADS) {
    int n = block.first + c;
    double scale = (double)shift.times(n) * inv_std[n];
    block.keep(1, c, (T)scale);
    block.keep(2, c, (T)(-scale * inv_std[n] * sums[channels + n] * share));
    block.keep(3, c, (T)(-scale * sums[n] * share));
  }
  if (relu) {
    WithGradient<true> end = {dy, dx};
    make(block, coming, end);
  } else {
    WithGradient<false> end = {dy, dx};
    make(block, coming, end);
  }
}
