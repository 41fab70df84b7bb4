#include "common.cuh"
#include "mma.cuh"

// Convolutions of few channels and small planes, in two axes, without groups or dilation, as products of matrices on tensor
// cores: a block keeps a band of rows of one image and what it is to be multiplied by in shared memory as they are, and
// finds the numbers of the matrices there by a table. Images lie channel by channel or, where `last` says so, with channels
// last; weights are always (outputs, channels, taps). The order of all sums is fixed.
//
// Dims are: xs, ys (channels, height, width); window (rows and columns of the kernel, strides, paddings, and how far apart
// what is read lies, zeros between); tile as each kernel says. Blocks have whole warps, each of which finds 32 x 32 numbers;
// those of other slices of the same sums come behind. EXACT: as of float32; else of numbers rounded to tf32.

#define HALF 5632  // numbers in half of the shared memory: one half is filled while the other is used
#define PLACES 480  // in a table

#ifdef DOUBLE
#define ROOM (HALF / 2)
#else
#define ROOM HALF
#endif

// Send W numbers, one or four, to shared memory, zeros if they are not `there`: with others sent before `sent` they are
// there after `come`.
template <int W> __device__ __forceinline__ void send(T *to, const D *from, bool there) {
#ifdef PLAIN
#pragma unroll
  for (int i = 0; i < W; i++) to[i] = there ? (T)from[i] : (T)0;
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "n"(4 * W), "r"(there ? 4 * W : 0)
               : "memory");
#endif
}

__device__ __forceinline__ void sent() {
#ifndef PLAIN
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// All but what was sent last has come, for the whole block.
__device__ __forceinline__ void come() {
#ifndef PLAIN
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
  __syncthreads();
}

// Places (a, b, c), the last of which go up to nb and nc, from the `first` on in strides of `step`, without divisions.
struct Walker {
  int a, b, c, nb, nc, da, db, dc;
  __device__ __forceinline__ Walker(u32 first, u32 step, u32 nb, u32 nc)
      : a(first / nc / nb), b(first / nc % nb), c(first % nc), nb(nb), nc(nc), da(step / nc / nb), db(step / nc % nb),
        dc(step % nc) {}
  __device__ __forceinline__ void next() {
    a += da, b += db, c += dc;
    if (c >= nc) c -= nc, b++;
    if (b >= nb) b -= nb, a++;
  }
};

// Images of (channels, height, width), and where a number of one is.
struct Images {
  int channels, height, width, channel, position;
  __device__ __forceinline__ Images(const Dims &size, int last)
      : channels((int)size.at[0]), height((int)size.at[1]), width((int)size.at[2]), channel(last ? 1 : height * width),
        position(last ? channels : 1) {}
  __device__ __forceinline__ const D *at(const D *x, i64 image) const {
    return x + image * channels * height * width;
  }
};

struct Window {
  int rows, columns, down, right, top, left, apart_down, apart_right;
  __device__ __forceinline__ Window(const Dims &window)
      : rows((int)window.at[0]), columns((int)window.at[1]), down((int)window.at[2]), right((int)window.at[3]),
        top((int)window.at[4]), left((int)window.at[5]), apart_down((int)window.at[6]), apart_right((int)window.at[7]) {}
};

// Sends lines of numbers, `apart` in memory and `pitch` in shared memory, four numbers at a time if they are `packed`.
struct Lines {
  bool packed;
  int apart, pitch;
  Walker walker;
  __device__ __forceinline__ Lines(bool packed, int lines, int size, int apart, int pitch)
      : packed(packed), apart(apart), pitch(pitch),
        walker(threadIdx.x, blockDim.x, lines, packed ? size / 4 : size) {}
  // Zeros but for the first `lines` and of these the first `size` numbers.
  __device__ __forceinline__ void send(T *to, const D *from, int lines, int size) const {
#pragma unroll 1
    for (Walker at = walker; at.a == 0; at.next()) {
      int c = packed ? at.c * 4 : at.c;
      bool there = at.b < lines && c < size;
      const D *source = there ? from + at.b * apart + c : from;
      if (packed)
        ::send<4>(to + at.b * pitch + c, source, there);
      else
        ::send<1>(to + at.b * pitch + c, source, there);
    }
  }
};

// Sends `depth` channels of an image, `high` rows and `pitch` columns from `left` on, which lie apart (`window`). What is
// outside is zero. Whole rows are sent as lines.
struct Bands {
  const Images &x;
  const Window &window;
  int high, pitch, last;
  bool whole;
  Lines lines;
  __device__ __forceinline__ Bands(const D *images, const Images &x, const Window &window, int depth, int high, int pitch,
                                   int last)
      : x(x), window(window), high(high), pitch(pitch), last(last),
        whole(!last && aligned(images) && pitch == x.width && window.left == 0 && window.top == 0 && !apart(window)),
        lines(whole, depth, high * pitch, x.channel, high * pitch) {
    if (!whole) lines.walker = Walker(threadIdx.x, blockDim.x, last ? pitch : high, last ? depth : pitch);
  }
  static __device__ __forceinline__ bool apart(const Window &window) {
    return window.apart_down > 1 || window.apart_right > 1;
  }
  __device__ __forceinline__ void send(T *to, const D *image, int first, int depth, int top) const {
    if (whole) {
      lines.send(to, image + first * x.channel + top * pitch, x.channels - first, (x.height - top) * pitch);
      return;
    }
#pragma unroll 1
    for (Walker at = lines.walker; at.a < (last ? high : depth); at.next()) {
      int c = last ? at.c : at.a, row = last ? at.a : at.b, column = last ? at.b : at.c, u = top + row,
          v = column - window.left;
      bool inside = first + c < x.channels && u >= 0 && v >= 0;
      if (apart(window)) {
        inside = inside && u % window.apart_down == 0 && v % window.apart_right == 0;
        u /= window.apart_down, v /= window.apart_right;
      }
      inside = inside && u < x.height && v < x.width;
      int from = (first + c) * x.channel + (u * x.width + v) * x.position;
      ::send<1>(to + (c * high + row) * pitch + column, image + (inside ? from : 0), inside);
    }
  }
};

// What of a number tensor cores take; the rest of it is no less exact.
__device__ __forceinline__ T rounded(T v) {
#ifdef PLAIN
  return (T)__uint_as_float(__float_as_uint((float)v) & 0xffffe000u);
#else
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"((float)v));
  return __uint_as_float(bits);
#endif
}

// What tensor cores are given of a number, and if EXACT of the rest of it.
template <bool EXACT> __device__ __forceinline__ void take(T v, T &given, T &rest) {
  given = EXACT ? rounded(v) : centred(v);
  if (EXACT) rest = rounded(v - given);
}

// found (2 x 4 blocks of 16 x 8) += a b for `count` places of the table, a multiple of 8, every `slices`-th eight from `slice`
// on. `rows` and `columns` are where the lane's rows 8 apart of a and columns 8 apart of b begin, the table how far from there
// each place is. WIDE: how many eights of columns are wanted.
template <bool EXACT, int WIDE>
__device__ __forceinline__ void add_products(T (&found)[32], const int2 *table, int count, int slice, int slices,
                                             const T *const (&rows)[4], const T *const (&columns)[4]) {
#pragma unroll 2
  for (int k = slice * 8; k < count; k += slices * 8) {
    T a[2][4], b[4][2], a_rest[2][4], b_rest[4][2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int2 at = table[k + (threadIdx.x & 3) + 4 * h];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        take<EXACT>(rows[i][at.x], a[i / 2][h * 2 + i % 2], a_rest[i / 2][h * 2 + i % 2]);
        if (i < WIDE) take<EXACT>(columns[i][at.y], b[i][h], b_rest[i][h]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i % 4 < WIDE) {
        T *target = found + i * 4;
        if (EXACT) multiply(target, a[i / 4], b_rest[i % 4]), multiply(target, a_rest[i / 4], b[i % 4]);
        multiply(target, a[i / 4], b[i % 4]);
      }
  }
}

// The row and the column that a lane's number i of `found` is in.
__device__ __forceinline__ int row_of(int i) { return i / 16 * 16 + i % 4 / 2 * 8 + (threadIdx.x & 31) / 4; }
__device__ __forceinline__ int column_of(int i) { return i / 4 % 4 * 8 + (threadIdx.x & 3) * 2 + i % 2; }

// y = x convolved with w, plus b unless that is null, and with `relu` max(0, .) of that. `mirrored`: w is (channels of x,
// channels of y, taps in reverse order), as for a gradient for the data. A block for each image, band of rows and run of
// channels; tile: channels of y in the run (8 to 32), rows in a band, slices that the sums are in, how many channels of x
// are in shared memory at a time, rows and columns of x that they have there, and the numbers of a line of weights there.
__device__ __forceinline__ void convolve(const D *x, const D *w, const D *b, D *y, const Dims &xs, const Dims &ys,
                                         const Dims &windows, const Dims &tile, int mirrored, int last, int relu) {
  __shared__ Lot<4> shared[2 * ROOM / 4];
  __shared__ int2 table[PLACES];
  T *room = shared[0].at;
  Images from(xs, last), to(ys, last);
  Window window(windows);
  int run = (int)tile.at[0], rows = (int)tile.at[1], slices = (int)tile.at[2], depth = (int)tile.at[3],
      high = (int)tile.at[4], pitch = (int)tile.at[5], line = (int)tile.at[6];
  int taps = window.rows * window.columns, plane = high * pitch, weights = (depth + 1) * plane;  // after a plane of zeros
  int runs = (to.channels + run - 1) / run, bands = (to.height + rows - 1) / rows;
  int m0 = (int)(blockIdx.x % runs) * run, p0 = (int)(blockIdx.x / runs % bands) * rows, wanted = min(run, to.channels - m0);
  i64 image = blockIdx.x / runs / bands;
  int spots = (rows * to.width + 31) / 32 * 32, slice = threadIdx.x / spots, spot = threadIdx.x % spots;

  const D *pixels = from.at(x, image);
  int apart = (mirrored ? to.channels : from.channels) * taps;
  bool packed = aligned(w) && (mirrored ? apart : apart | depth * taps) % 4 == 0;
  Bands image_lines(x, from, window, depth, high, pitch, last);
  Lines weight_lines(packed, mirrored ? depth : wanted, (mirrored ? wanted : depth) * taps, apart, line);
  auto request = [&](T *half, int first) {
    image_lines.send(half, pixels, first, depth, p0 * window.down - window.top);
    int count = from.channels - first;
    weight_lines.send(half + weights, w + (mirrored ? first * apart + m0 * taps : m0 * apart + first * taps),
                      mirrored ? count : wanted, (mirrored ? wanted : count) * taps);
  };

  for (int i = threadIdx.x; i < plane; i += blockDim.x) room[depth * plane + i] = room[ROOM + depth * plane + i] = 0;
  for (int k = threadIdx.x; k < (depth * taps + 7) / 8 * 8; k += blockDim.x) {
    int c = k / taps, tap = k % taps;
    bool there = c < depth;
    table[k].x = there ? c * plane + tap / window.columns * pitch + tap % window.columns : depth * plane;
    table[k].y = !there ? 0 : mirrored ? c * line + taps - 1 - tap : k;
  }
  const T *places[4], *columns[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int position = spot / 32 * 32 + spot % 32 / 4 + 8 * i;
    if (position >= rows * to.width) position = 0;
    places[i] = room + position / to.width * window.down * pitch + position % to.width * window.right;
    columns[i] = room + weights + min(spot % 32 / 4 + 8 * i, run - 1) * (mirrored ? taps : line);
  }
  T found[32] = {};
  int other = -ROOM;  // how far away what is used next is
  for (int first = -depth; first < from.channels; first += depth, other = -other) {
    if (first + depth < from.channels) request(room + (other > 0 ? ROOM : 0), first + depth);
    sent();
    if (first < 0) continue;
    come();
    int count = (min(depth, from.channels - first) * taps + 7) / 8 * 8;
    if (run <= 24)
      add_products<false, 3>(found, table, count, slice, slices, places, columns);
    else
      add_products<false, 4>(found, table, count, slice, slices, places, columns);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) places[i] += other, columns[i] += other;
  }
  int lane = spot / 32 * 32, across = spots + 4;  // so that neighbouring lanes write to other banks
#pragma unroll
  for (int i = 0; i < 32; i++)
    if (column_of(i) < run) room[(slice * run + column_of(i)) * across + lane + row_of(i)] = found[i];
  __syncthreads();
  int positions = min(rows, to.height - p0) * to.width;
  y += image * to.channels * to.height * to.width;
#pragma unroll 1
  for (Walker at(threadIdx.x, blockDim.x, last ? positions : wanted, last ? wanted : positions); at.a == 0; at.next()) {
    int m = last ? at.c : at.b, position = last ? at.b : at.c;
    T v = b ? (T)b[m0 + m] : (T)0;
#pragma unroll 1
    for (int s = 0; s < slices; s++) v += room[(s * run + m) * across + position];
    y[(m0 + m) * to.channel + (p0 * to.width + position) * to.position] = relu && v <= 0 ? (T)0 : v;
  }
}

// dx = the gradient for the data, plus b unless that is null, and with `relu` max(0, .) of that: products of matrices find what
// each position of dy adds to each one of dx, which then adds up what is for it. A block for each image and run of channels of
// dx; tile: channels of dx in the run, slices that the sums are in, how many channels of dy are in shared memory at a time (a
// multiple of 8), and the numbers of a line of dy and of weights there. window is as for `convolve`, mirrored.
__device__ __forceinline__ void gather(const D *dy, const D *w, const D *b, D *dx, const Dims &ys, const Dims &xs,
                                       const Dims &windows, const Dims &tile, int last, int relu) {
  __shared__ Lot<4> shared[2 * ROOM / 4];
  __shared__ int2 table[PLACES];
  T *room = shared[0].at;
  Images from(ys, last), to(xs, last);
  Window window(windows);
  int run = (int)tile.at[0], slices = (int)tile.at[1], depth = (int)tile.at[2], line = (int)tile.at[3],
      weight_line = (int)tile.at[4];
  int taps = window.rows * window.columns, positions = from.height * from.width, across = run * taps;
  int runs = (to.channels + run - 1) / run, c0 = (int)(blockIdx.x % runs) * run, wanted = min(run, to.channels - c0);
  i64 image = blockIdx.x / runs;
  int tall = (positions + 31) / 32, spots = (across + 31) / 32 * 32 * tall;
  int slice = threadIdx.x / spots, spot = threadIdx.x % spots, top = spot / 32 % tall * 32, left = spot / 32 / tall * 32;

  const D *source = from.at(dy, image), *weights = w + c0 * taps;
  int apart = to.channels * taps;
  Lines lines(!last && aligned(dy) && positions % 4 == 0, last ? positions : depth, last ? depth : positions, from.channel,
              line);
  Lines weight_lines(aligned(w) && (apart | across) % 4 == 0, depth, across, apart, weight_line);
  auto request = [&](T *half, int first) {
    int count = from.channels - first;
    if (!last)
      lines.send(half, source + first * positions, count, positions);
    else
#pragma unroll 1
      for (Walker at = lines.walker; at.a == 0; at.next())
        send<1>(half + at.c * line + at.b, source + (at.c < count ? at.b * from.channels + first + at.c : 0), at.c < count);
    weight_lines.send(half + depth * line, weights + (i64)first * apart, count, wanted * taps);
  };

  for (int k = threadIdx.x; k < depth; k += blockDim.x) table[k].x = k * line, table[k].y = k * weight_line;
  const T *rows[4], *columns[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    rows[i] = room + min(top + spot % 32 / 4 + 8 * i, positions - 1);
    columns[i] = room + depth * line + min(left + spot % 32 / 4 + 8 * i, across - 1);
  }
  T found[32] = {};
  int other = -ROOM;  // how far away what is used next is
  for (int first = -depth; first < from.channels; first += depth, other = -other) {
    if (first + depth < from.channels) request(room + (other > 0 ? ROOM : 0), first + depth);
    sent();
    if (first < 0) continue;
    come();
    add_products<false, 4>(found, table, min(depth, (from.channels - first + 7) / 8 * 8), slice, slices, rows, columns);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) rows[i] += other, columns[i] += other;
  }
  int pitch = tall * 32 + 4;  // so that neighbouring lanes write to other banks
#pragma unroll
  for (int i = 0; i < 32; i++)
    if (left + column_of(i) < across) room[(slice * across + left + column_of(i)) * pitch + top + row_of(i)] = found[i];
  __syncthreads();

  int area = to.height * to.width, down = window.apart_down, right = window.apart_right;
  int above = window.rows - 1 - window.top, before = window.columns - 1 - window.left;  // the padding
  dx += image * to.channels * area;
#pragma unroll 1
  for (Walker at(threadIdx.x, blockDim.x, last ? area : wanted, last ? wanted : area); at.a == 0; at.next()) {
    int c = last ? at.c : at.b, place = last ? at.b : at.c, u = place / to.width + above, v = place % to.width + before;
    // the first row and column of the kernel that add to it, and the row and column of dy that they do it for
    int p = min(u / down, from.height - 1), q = min(v / right, from.width - 1);
    T sum = b ? (T)b[c0 + c] : (T)0;
    for (int s = 0; s < slices; s++)
      for (int row = p, i = u - p * down; i < window.rows && row >= 0; i += down, row--) {
        const T *term = room + (((s * run + c) * window.rows + i) * window.columns + v - q * right) * pitch + row * from.width;
        for (int column = q, j = v - q * right; j < window.columns && column >= 0; j += right, column--) {
          sum += term[column];
          term += right * pitch;
        }
      }
    dx[(c0 + c) * to.channel + place * to.position] = relu && sum <= 0 ? (T)0 : sum;
  }
}

// Gradients for the weights. A block for each part of the bands of rows of all images (the slowest), run of channels of
// x and run of channels of y. tile: channels of y in a run, rows in a band, slices that the sums are in, channels of x in a
// run, rows and columns of x in shared memory, the numbers of a line of dy there, parts. With several parts each is written
// to `partial`, for `add_partial`; a single one (+)= dw.
template <bool EXACT>
__device__ __forceinline__ void weights_gradient(const D *x, const D *dy, D *dw, T *partial, i64 images, const Dims &xs,
                                                 const Dims &ys, const Dims &windows, const Dims &tile, int last,
                                                 int accumulate) {
  __shared__ Lot<4> shared[2 * ROOM / 4];
  __shared__ int2 table[PLACES];
  T *room = shared[0].at;
  Images from(xs, last), to(ys, last);
  Window window(windows);
  int run = (int)tile.at[0], rows = (int)tile.at[1], slices = (int)tile.at[2], depth = (int)tile.at[3],
      high = (int)tile.at[4], pitch = (int)tile.at[5], line = (int)tile.at[6], parts = (int)tile.at[7];
  int taps = window.rows * window.columns, plane = high * pitch;
  int runs = (to.channels + run - 1) / run, depths = (from.channels + depth - 1) / depth;
  int bands = (to.height + rows - 1) / rows;
  int m0 = (int)(blockIdx.x % runs) * run, c0 = (int)(blockIdx.x / runs % depths) * depth, wanted = min(run, to.channels - m0);
  int part = (int)(blockIdx.x / runs / depths);
  int first = (int)(images * bands * part / parts), stop = (int)(images * bands * (part + 1) / parts);
  int tall = (run + 31) / 32, across = (depth * taps + 31) / 32 * 32, spots = across * tall;
  int slice = threadIdx.x / spots, spot = threadIdx.x % spots, top = spot / 32 % tall * 32, left = spot / 32 / tall * 32;
  int positions = rows * to.width, eights = (positions + 7) / 8 * 8;

  Bands bands_of(x, from, window, depth, high, pitch, last);
  Lines lines_of(!last && aligned(dy) && (to.channel | positions) % 4 == 0, last ? eights : wanted, last ? wanted : eights,
                 to.channel, line);
  auto request = [&](T *half, int unit) {
    i64 image = unit / bands;
    int p0 = unit % bands * rows, count = min(rows, to.height - p0) * to.width;
    bands_of.send(half, from.at(x, image), c0, depth, p0 * window.down - window.top);
    const D *source = to.at(dy, image) + m0 * to.channel + p0 * to.width * to.position;
    T *target = half + depth * plane;
    if (!last)
      lines_of.send(target, source, wanted, count);
    else
#pragma unroll 1
      for (Walker at = lines_of.walker; at.a == 0; at.next())
        send<1>(target + at.c * line + at.b, source + (at.b < count ? at.b * to.position + at.c : 0), at.b < count);
  };

  for (int k = threadIdx.x; k < eights; k += blockDim.x) {
    table[k].x = k;
    table[k].y = k < positions ? k / to.width * window.down * pitch + k % to.width * window.right : 0;
  }
  const T *lines[4], *columns[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int m = top + spot % 32 / 4 + 8 * i, column = min(left + spot % 32 / 4 + 8 * i, depth * taps - 1), tap = column % taps;
    lines[i] = room + depth * plane + min(m, run - 1) * line;
    columns[i] = room + column / taps * plane + tap / window.columns * pitch + tap % window.columns;
  }
  T found[32] = {};
  int other = -ROOM;  // how far away what is used next is
  for (int unit = first - 1; unit < stop; unit++, other = -other) {
    if (unit + 1 < stop) request(room + (other > 0 ? ROOM : 0), unit + 1);
    sent();
    if (unit < first) continue;
    come();
    int count = min(rows, to.height - unit % bands * rows) * to.width;
    add_products<EXACT, 4>(found, table, (count + 7) / 8 * 8, slice, slices, lines, columns);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) lines[i] += other, columns[i] += other;
  }
  across += 4;
#pragma unroll
  for (int i = 0; i < 32; i++)
    if (top + row_of(i) < run) room[(slice * run + top + row_of(i)) * across + left + column_of(i)] = found[i];
  __syncthreads();
  if (partial) partial += (i64)part * to.channels * from.channels * taps;
#pragma unroll 1
  for (Walker at(threadIdx.x, blockDim.x, wanted, min(depth, from.channels - c0) * taps); at.a == 0; at.next()) {
    T v = 0;
#pragma unroll 1
    for (int s = 0; s < slices; s++) v += room[(s * run + at.b) * across + at.c];
    int to_add = ((m0 + at.b) * from.channels + c0) * taps + at.c;
    if (partial)
      partial[to_add] = v;
    else
      dw[to_add] = (accumulate ? (T)dw[to_add] : (T)0) + v;
  }
}

extern "C" __global__ void __launch_bounds__(512)
    convolve_tf32(const D *x, const D *w, const D *b, D *y, Dims xs, Dims ys, Dims window, Dims tile, int mirrored, int last,
                  int relu) { convolve(x, w, b, y, xs, ys, window, tile, mirrored, last, relu); }

extern "C" __global__ void __launch_bounds__(512)
    gather_tf32(const D *dy, const D *w, const D *b, D *dx, Dims ys, Dims xs, Dims window, Dims tile, int last, int relu) {
  gather(dy, w, b, dx, ys, xs, window, tile, last, relu);
}

extern "C" __global__ void __launch_bounds__(512)
    weights_gradient_fp32(const D *x, const D *dy, D *dw, T *partial, i64 images, Dims xs, Dims ys, Dims window, Dims tile,
                          int last, int accumulate) {
  weights_gradient<true>(x, dy, dw, partial, images, xs, ys, window, tile, last, accumulate);
}

extern "C" __global__ void __launch_bounds__(512)
    weights_gradient_tf32(const D *x, const D *dy, D *dw, T *partial, i64 images, Dims xs, Dims ys, Dims window, Dims tile,
                          int last, int accumulate) {
  weights_gradient<false>(x, dy, dw, partial, images, xs, ys, window, tile, last, accumulate);
}

// dw, n numbers, (+)= the sum of the parts, each of which has n. 256 threads: eight take a part each, for 32 numbers.
extern "C" __global__ void add_partial(const T *partial, D *dw, i64 n, int parts, int accumulate) {
  __shared__ double sums[8][32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 i = (i64)blockIdx.x * 32 + lane;
  double sum = 0;
  if (i < n)
#pragma unroll 8
    for (int part = warp; part < parts; part += 8) sum += partial[part * n + i];
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || i >= n) return;
  for (int other = 1; other < 8; other++) sum += sums[other][lane];
  dw[i] = (accumulate ? dw[i] : (T)0) + (T)sum;
}
