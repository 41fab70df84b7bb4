#include "common.cuh"
#include "conv_first.cuh"
#include "mma.cuh"

// The convolution of 7 x 7 taps, two pixels apart and padded by three, that large images of three channels meet first, of
// floats: from planes to channels last, as products of matrices on tensor cores (others: conv_pixels.cu). One of the matrices
// are runs of eight numbers of a line of the image, as they lie in shared memory, which meet the seven taps of a line of a
// kernel and a zero.

#define TAPS 7
#define LINES (3 * TAPS)  // of taps, of a kernel
#ifdef DOUBLE
#define SHARED 6144  // numbers in shared memory
#define CHUNK 24  // numbers of a line of dy that a block takes at a time
#else
#define SHARED 12288
#define CHUNK 56
#endif

// Shared memory gets `count` runs of four numbers: run i what get(i) gives goes to to + put(i). Several are on their way at
// once.
template <class G, class P> __device__ __forceinline__ void fetch(T *to, int count, G get, P put) {
  enum { GROUP = 5 };
  for (int first = threadIdx.x; first < count; first += GROUP * blockDim.x) {
    Lot<4> fours[GROUP];
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      int i = first + k * blockDim.x;
      fours[k] = get(i < count ? i : first);
    }
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      int i = first + k * blockDim.x;
#pragma unroll
      for (int j = 0; j < 4; j++) fours[k].at[j] = centred(fours[k].at[j]);
      if (i < count) store<4>(to, put(i), fours[k]);
    }
  }
}

// HIGH lines of each channel of an image, from line `top` on, `pitch` numbers of each from number `left` on, a multiple of
// 4 as `pitch` is; zeros around the image.
template <int HIGH>
__device__ __forceinline__ void fetch_lines(T *to, const D *image, const Sizes &s, int pitch, int top, int left) {
  bool packed = aligned(image);
  int fours = pitch / 4;
  auto get = [&](int i) -> Lot<4> {
    int line = (u32)i / (u32)fours, c = line / HIGH, u = top + line - c * HIGH, v = left + (i - line * fours) * 4;
    Lot<4> four = {};
    if (u >= 0 && u < s.height && v >= 0 && v < s.width) {
      const D *from = image + ((i64)c * s.height + u) * s.width + v;
      if (packed) return load<4>(from, 0);
#pragma unroll
      for (int j = 0; j < 4; j++) four.at[j] = from[j];
    }
    return four;
  };
  fetch(to, 3 * HIGH * fours, get, [](int i) { return i * 4; });
}

// y = x convolved with w, plus b unless that is null, and with `relu` max(0, .) of that. If it KEEPS them, `kept` gets numbers
// before that, and y is made of them times gamma, plus beta, unless those are null. w is (channels of y, 3, taps), or if
// `turned` (channels of y, taps, 3). Blocks take a band of lines after the other, and the channels of y by their second
// number. A warp makes 16 channels of two lines, whose weights it has.
#define BAND 4
#define SEEN (2 * (BAND - 1) + TAPS)  // lines of x for a band
template <bool KEEPS>
__device__ __forceinline__ void convolve(const D *x, const D *w, const D *b, D *kept, const D *gamma, const D *beta, D *y,
                                         i64 images, const Dims &dims, bool turned, bool relu) {
  __shared__ Lot<4> shared[SHARED / 4];
  T *room = shared[0].at;
  Sizes s(dims);
  int i = (threadIdx.x & 31) / 4, j = threadIdx.x & 3, warp = threadIdx.x >> 5, half = warp / 4 * 2;
  int m0 = blockIdx.y * RUN + warp % 4 * 16;
  T taps[LINES][2][2];  // of channels that let a lane find four neighbours
#pragma unroll
  for (int line = 0; line < LINES; line++)
#pragma unroll
    for (int n = 0; n < 4; n++) {
      int tap = line % TAPS * TAPS + j + n % 2 * 4, c = line / TAPS, m = m0 + i / 2 * 4 + n / 2 * 2 + i % 2;
      int at = turned ? tap * 3 + c : c * TAPS * TAPS + tap;
      taps[line][n / 2][n % 2] = j + n % 2 * 4 < TAPS ? centred(w[m * LINES * TAPS + at]) : (T)0;
    }
  int bands = (s.high + BAND - 1) / BAND, pitch = (s.across + 15) / 16 * 32 + 8;  // of a line of x in shared memory
  for (i64 unit = blockIdx.x; unit < images * bands; unit += gridDim.x) {
    i64 image = quotient(unit, bands);
    int p0 = (int)(unit - image * bands) * BAND + half;
    __syncthreads();
    fetch_lines<SEEN>(room, s.image(x, image), s, pitch, (p0 - half) * 2 - 3, -4);
    __syncthreads();
#pragma unroll 1
    for (int q0 = 0; q0 < s.across; q0 += 16) {
      T found[2][2][4];
#pragma unroll
      for (int n = 0; n < 16; n++) found[n / 8][n / 4 % 2][n % 4] = b ? (T)b[m0 + j * 4 + n / 4 % 2 * 2 + n % 2] : (T)0;
      const T *line = room + half * 2 * pitch + (q0 + i) * 2 + j + 1;
#pragma unroll
      for (int c = 0; c < 3; c++, line += (SEEN - TAPS - 2) * pitch)
#pragma unroll
        for (int u = 0; u < TAPS + 2; u++, line += pitch) {
          T a[4] = {line[0], line[16], line[4], line[20]};
#pragma unroll
          for (int n = 0; n < 2; n++) {
            if (u < TAPS) multiply(found[0][n], a, taps[c * TAPS + u][n]);
            if (u >= 2) multiply(found[1][n], a, taps[c * TAPS + u - 2][n]);
          }
        }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        int p = p0 + n / 2, q = q0 + i + n % 2 * 8, e = n % 2 * 2;
        const T(&of)[2][4] = found[n / 2];
        Lot<4> four = {of[0][e], of[0][e + 1], of[1][e], of[1][e + 1]};
        i64 to = ((image * s.high + p) * s.across + q) * s.channels + m0 + j * 4;
        bool inside = p < s.high && q < s.across;
        if (KEEPS) {
          if (inside) store<4>(kept, to, four);
#pragma unroll
          for (int k = 0; k < 4; k++) {
            int m = m0 + j * 4 + k;
            four.at[k] = fma(as_held(four.at[k]), gamma ? (T)gamma[m] : (T)1, beta ? (T)beta[m] : (T)0);
          }
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (relu && four.at[k] <= 0) four.at[k] = 0;
        if (inside) store<4>(y, to, four);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convolve_first(const D *x, const D *w, const D *b, D *y, i64 images, Dims dims, int turned, int relu) {
  convolve<false>(x, w, b, nullptr, nullptr, nullptr, y, images, dims, turned, relu);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convolve_first_kept(const D *x, const D *w, const D *b, D *kept, const D *gamma, const D *beta, D *y, i64 images,
                        Dims dims, int turned, int relu) {
  convolve<true>(x, w, b, kept, gamma, beta, y, images, dims, turned, relu);
}

// Gradients for the weights: a block sums up a part of the lines of dy of all images, for the channels that its second number
// says. With several parts each is written to `partial`; a single one (+)= dw. A warp finds the taps of 32 channels of y and
// one of x.
#define PITCH (2 * CHUNK + 8)
#define APART (RUN + 8)  // from a number's channels of dy to the next one's: lanes that read at a time find other banks
extern "C" __global__ void __launch_bounds__(192, 3)
    weigh_first(const D *x, const D *dy, D *dw, T *partial, i64 images, Dims dims, int parts, int accumulate) {
  __shared__ Lot<4> shared[(CHUNK * APART + LINES * PITCH) / 4];
  T *gradients = shared[0].at, *pixels = gradients + CHUNK * APART;
  Sizes s(dims);
  int i = (threadIdx.x & 31) / 4, j = threadIdx.x & 3, warp = threadIdx.x >> 5, m0 = blockIdx.y * RUN;
  int half = warp % 2 * 32, c = warp / 2, chunks = (s.across + CHUNK - 1) / CHUNK;
  i64 units = images * s.high * chunks, stop = units * (blockIdx.x + 1) / parts;
  T found[TAPS][2][4] = {};
#pragma unroll 1
  for (i64 unit = units * blockIdx.x / parts; unit < stop; unit++) {
    i64 line = quotient(unit, chunks), image = quotient(line, s.high);
    int q0 = (int)(unit - line * chunks) * CHUNK, p = (int)(line - image * s.high), count = min(CHUNK, s.across - q0);
    const D *from = dy + (line * s.across + q0) * s.channels + m0;
    __syncthreads();
    auto get = [&](int k) -> Lot<4> {
      Lot<4> none = {};
      return k / (RUN / 4) < count ? load<4>(from, (i64)(k / (RUN / 4)) * s.channels + k % (RUN / 4) * 4) : none;
    };
    fetch(gradients, CHUNK * RUN / 4, get, [](int k) { return k / (RUN / 4) * APART + k % (RUN / 4) * 4; });
    fetch_lines<TAPS>(pixels, s.image(x, image), s, PITCH, p * 2 - 3, q0 * 2 - 4);
    __syncthreads();
#pragma unroll 1
    for (int q = 0; q < count; q += 8) {
      const T *at = gradients + (q + j) * APART + half + i, *numbers = pixels + c * TAPS * PITCH + (q + j) * 2 + i + 1;
      T a[2][4];
#pragma unroll
      for (int n = 0; n < 8; n++) a[n / 4][n % 4] = at[n / 4 * 16 + n % 2 * 8 + n % 4 / 2 * 4 * APART];
#pragma unroll
      for (int r = 0; r < TAPS; r++) {
        T b[2] = {numbers[r * PITCH], numbers[r * PITCH + 8]};
        multiply(found[r][0], a[0], b);
        multiply(found[r][1], a[1], b);
      }
    }
  }
  if (partial) partial += (i64)blockIdx.x * s.channels * LINES * TAPS;
#pragma unroll
  for (int n = 0; n < TAPS * 8; n++) {
    int m = m0 + half + n / 4 % 2 * 16 + n % 4 / 2 * 8 + i, tap = j * 2 + n % 2, at = (m * LINES + c * TAPS + n / 8) * TAPS + tap;
    T v = found[n / 8][n / 4 % 2][n % 4];
    if (tap < TAPS && partial) partial[at] = v;
    if (tap < TAPS && !partial) dw[at] = (accumulate ? (T)dw[at] : (T)0) + v;
  }
}
