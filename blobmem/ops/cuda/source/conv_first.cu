#include "common.cuh"
#include "mma.cuh"

// Convolutions of images of three channels, from planes to channels last, as products of matrices on tensor cores. In shared
// memory a pixel is four numbers, of which the last is zero, and a line of a kernel is one tap more, whose weights are zero,
// in front of the others: so what the products take lies at multiples of a pixel, or two.
//
// Dims are: sizes (height and width of x, height and width of y, channels of y). Channels of y are a multiple of RUN.

#define RUN 64  // channels of y of which a block has the gradients
#ifdef HALVES
#define WORDS 2  // of a pixel
#else
#define WORDS 4
#endif

struct Sizes {
  int height, width, high, across, channels;
  __device__ __forceinline__ Sizes(const Dims &sizes)
      : height((int)sizes.at[0]), width((int)sizes.at[1]), high((int)sizes.at[2]), across((int)sizes.at[3]),
        channels((int)sizes.at[4]) {}
  __device__ __forceinline__ const D *image(const D *x, i64 image) const { return x + image * 3 * height * width; }
};

// TAPS x TAPS taps, STRIDE pixels apart, padded by half of them: a line of pixels in shared memory begins four in front of
// those below the first number of y, the taps of this one (and the one of zeros) BASE pixels behind that.
template <int TAPS, int STRIDE> struct Kind {
  enum {
    PAD = TAPS / 2,
    BASE = 3 - PAD,
    LARGE = TAPS * WORDS > 16,           // of which shared memory has less
    MADE = LARGE ? 32 : 64,              // channels of y that a block makes
    CHUNK = LARGE ? 56 : 112,            // numbers of a line of y that it makes at a time
    PITCH = CHUNK * STRIDE + 8,          // pixels of a line in shared memory
    STEPS = (TAPS + 1) * WORDS / 8,      // products for a line of taps
    PAIRS = (TAPS + 1) / 2,
    BAND = 2,                            // lines of y that a block makes at a time
    SEEN = (BAND - 1) * STRIDE + TAPS,   // of x for these
  };
};

struct __align__(16) Quad { u32 at[4]; };
struct __align__(4 * sizeof(D)) Four { D at[4]; };

__device__ __forceinline__ void put_pixel(u32 *to, const D *numbers) {
#ifdef HALVES
  to[0] = numbers[0].bits | (u32)numbers[1].bits << 16, to[1] = numbers[2].bits;
#else
  for (int c = 0; c < 3; c++) to[c] = __float_as_uint(centred(numbers[c]));
  to[3] = 0;
#endif
}

// LINES lines of an image, from line `top` on, PITCH pixels of each from pixel `left` on, a multiple of 4 as the image's
// width is; zeros around the image. In `shifted`, unless that is null, each is one place later.
template <int LINES, int PITCH>
__device__ __forceinline__ void fetch_pixels(u32 *to, u32 *shifted, const D *image, const Sizes &s, int top, int left) {
  enum { FOURS = PITCH / 4, GROUP = 3 };
  bool packed = ((u64)image & (4 * sizeof(D) - 1)) == 0;
  int plane = s.height * s.width;
#pragma unroll 1
  for (int first = threadIdx.x; first < LINES * FOURS; first += GROUP * blockDim.x) {
    Four found[GROUP][3];
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      int i = first + k * blockDim.x, u = top + i / FOURS, v = left + i % FOURS * 4;
      bool inside = i < LINES * FOURS && u >= 0 && u < s.height && v >= 0 && v < s.width;
#pragma unroll
      for (int c = 0; c < 3; c++) {
        const D *from = image + (i64)c * plane + u * s.width + v;
        found[k][c] = Four{};
        if (inside && packed) found[k][c] = *(const Four *)from;
        if (inside && !packed)
          for (int j = 0; j < 4; j++) found[k][c].at[j] = from[j];
      }
    }
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      int i = first + k * blockDim.x;
      u32 words[4 * WORDS];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        D pixel[3] = {found[k][0].at[j], found[k][1].at[j], found[k][2].at[j]};
        put_pixel(words + j * WORDS, pixel);
      }
      if (i < LINES * FOURS) {
#pragma unroll
        for (int j = 0; j < WORDS; j++) ((Quad *)to)[i * WORDS + j] = *(const Quad *)(words + j * 4);
        if (shifted)
#pragma unroll
          for (int j = 0; j < 4 * WORDS; j++) shifted[i * 4 * WORDS + WORDS + j] = words[j];
      }
    }
  }
}

// The weights of MADE channels from m0 on, in the order in which lanes take them: for each product, eight words of each of
// MADE / 8 times eight columns, four words of a lane next to each other.
template <int TAPS, int STRIDE>
__device__ __forceinline__ void fetch_weights(u32 *to, const D *w, int m0, bool turned) {
  typedef Kind<TAPS, STRIDE> K;
  for (int i = threadIdx.x; i < TAPS * K::STEPS * K::MADE * 8; i += blockDim.x) {
    int lane = i / 4 % 32, step = i / (K::MADE * 8), word = i / 128 % (K::MADE / 16) * 4 + i % 4, column = word / 2;
    // of channels that let a lane find a pack of neighbours
    int m = m0 + column / (PACK / 2) * 4 * PACK + lane / 8 * PACK + column % (PACK / 2) * 2 + lane / 4 % 2;
    int at = step % K::STEPS * 8 + lane % 4 + word % 2 * 4, tap = at / WORDS - 1, line = step / K::STEPS;
    D numbers[3] = {};
#pragma unroll
    for (int c = 0; c < 3; c++)
      if (tap >= 0)
        numbers[c] = w[turned ? ((m * TAPS + line) * TAPS + tap) * 3 + c : ((m * 3 + c) * TAPS + line) * TAPS + tap];
    u32 words[WORDS];
    put_pixel(words, numbers);
    u32 result = 0;
#pragma unroll
    for (int k = 0; k < WORDS; k++)
      if (k == at % WORDS) result = words[k];
    to[i] = result;
  }
}

// y = x convolved with w, plus b unless that is null, and with `relu` max(0, .) of that. w is (channels of y, 3, taps), or if
// `turned` (channels of y, taps, 3). A block takes a band of lines in one chunk after the other; its second number says which
// channels of y. A warp makes sixteen numbers of both lines.
template <int TAPS, int STRIDE>
__device__ __forceinline__ void convolve(const D *x, const D *w, const D *b, D *y, i64 images, const Dims &dims,
                                         bool turned, bool relu) {
  typedef Kind<TAPS, STRIDE> K;
  __shared__ Quad pixels[K::SEEN * K::PITCH * WORDS / 4], weights[TAPS * K::STEPS * K::MADE * 2];
  __shared__ T bias[K::MADE];
  Sizes s(dims);
  int lane = threadIdx.x & 31, i = lane / 4, j = lane % 4, m0 = blockIdx.y * K::MADE;
  int bands = (s.high + K::BAND - 1) / K::BAND, chunks = (s.across + K::CHUNK - 1) / K::CHUNK;
  fetch_weights<TAPS, STRIDE>(weights[0].at, w, m0, turned);
  for (int m = threadIdx.x; m < K::MADE; m += blockDim.x) bias[m] = b ? (T)b[m0 + m] : (T)0;
#pragma unroll 1
  for (i64 unit = blockIdx.x; unit < images * bands * chunks; unit += gridDim.x) {
    i64 band = quotient(unit, chunks), image = quotient(band, bands);
    int p0 = (int)(band - image * bands) * K::BAND, q0 = (int)(unit - band * chunks) * K::CHUNK;
    __syncthreads();
    fetch_pixels<K::SEEN, K::PITCH>(pixels[0].at, nullptr, s.image(x, image), s, p0 * STRIDE - K::PAD, q0 * STRIDE - 4);
    __syncthreads();
#pragma unroll 1
    for (int q = (threadIdx.x >> 5) * 16; q < K::CHUNK && q0 + q < s.across; q += blockDim.x / 2) {
      enum { TILES = K::MADE / 8 };
      T found[2][TILES][4];
#pragma unroll
      for (int n = 0; n < TILES * 8; n++) {
        int k = n / 4 % TILES * 2 + n % 2;
        found[n / 4 / TILES][n / 4 % TILES][n % 4] = bias[k / PACK * 4 * PACK + j * PACK + k % PACK];
      }
      const u32 *from = pixels[0].at + (K::BASE + (q + i) * STRIDE) * WORDS + j;
#pragma unroll
      for (int step = 0; step < TAPS * K::STEPS; step++) {
        u32 a[2][4], taps[TILES * 2];
#pragma unroll
        for (int n = 0; n < 8; n++)
          a[n / 4][n % 4] = from[(n / 4 * STRIDE + step / K::STEPS) * K::PITCH * WORDS + step % K::STEPS * 8 +
                                 n % 2 * 8 * STRIDE * WORDS + n / 2 % 2 * 4];
#pragma unroll
        for (int n = 0; n < TILES / 2; n++) *(Quad *)(taps + n * 4) = weights[(step * TILES / 2 + n) * 32 + lane];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          multiply_words(found[0][n], a[0], taps + n * 2);
          multiply_words(found[1][n], a[1], taps + n * 2);
        }
      }
#pragma unroll
      for (int n = 0; n < K::MADE / PACK; n++) {
        int pack = n / 4, p = p0 + n / 2 % 2, at = q0 + q + i + n % 2 * 8;
        Lot<PACK> lot;
#pragma unroll
        for (int k = 0; k < PACK; k++) {
          T v = found[n / 2 % 2][pack * (PACK / 2) + k / 2][n % 2 * 2 + k % 2];
          lot.at[k] = relu && v <= 0 ? (T)0 : v;
        }
        i64 to = ((image * s.high + p) * s.across + at) * s.channels + m0 + pack * 4 * PACK + j * PACK;
        if (p < s.high && at < s.across) store<PACK>(y, to, lot);
      }
    }
  }
}

#define APART (RUN + 8)  // from a number's channels of dy to the next one's: what is read at a time is in other banks

// RUN channels of CHUNK numbers of dy, of which there are `count`; the others are zero.
template <int CHUNK>
__device__ __forceinline__ void fetch_gradients(Pack *to, const D *dy, int channels, int count) {
  enum { ACROSS = RUN / PACK, GROUP = 7 };
#pragma unroll 1
  for (int first = threadIdx.x; first < CHUNK * ACROSS; first += GROUP * blockDim.x) {
    Pack found[GROUP];
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      int i = first + k * blockDim.x;
      found[k] = Pack{};
      if (i / ACROSS < count) found[k] = *(const Pack *)(dy + (i64)(i / ACROSS) * channels + i % ACROSS * PACK);
    }
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      int i = first + k * blockDim.x;
#ifndef HALVES
#pragma unroll
      for (int n = 0; n < PACK; n++) found[k].at[n] = centred(found[k].at[n]);
#endif
      if (i < CHUNK * ACROSS) to[i / ACROSS * (APART / PACK) + i % ACROSS] = found[k];
    }
  }
}

// Gradients for the weights: a block sums up a part of the lines of dy of all images, for the channels that its second number
// says. With several parts each is written to `partial`; a single one (+)= dw. ACROSS warps share the pairs of taps, those
// beside them the channels.
template <int TAPS, int STRIDE, int ACROSS>
__device__ __forceinline__ void weigh(const D *x, const D *dy, D *dw, T *partial, i64 images, const Dims &dims, int parts,
                                      bool accumulate) {
  typedef Kind<TAPS, STRIDE> K;
  enum { ROWS = ACROSS, OWN = TAPS * K::PAIRS / ACROSS, PIXELS = TAPS * K::PITCH * WORDS };
  enum { COPIES = WORDS == 2 && STRIDE == 1 ? 2 : 1, BESIDE = PIXELS + 28 };  // in other banks than the first
  __shared__ Quad pixels[COPIES > 1 ? (BESIDE + PIXELS + 4) / 4 : PIXELS / 4];
  __shared__ Pack gradients[K::CHUNK * APART / PACK];
  Sizes s(dims);
  int lane = threadIdx.x & 31, i = lane / 4, j = lane % 4, warp = threadIdx.x >> 5;
  int m0 = blockIdx.y * RUN, own = warp / ACROSS * ROWS * 16, chunks = (s.across + K::CHUNK - 1) / K::CHUNK;
  u32 *words = pixels[0].at, *shifted = COPIES > 1 ? words + BESIDE : nullptr;
  int places[OWN];  // of pairs of taps, in pixels
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    int pair = warp % ACROSS * OWN + n;
    places[n] = pair / K::PAIRS * K::PITCH + pair % K::PAIRS * 2 + K::BASE;
  }
  T found[ROWS][OWN][4] = {};
  i64 units = images * s.high * chunks, stop = units * (blockIdx.x + 1) / parts;
#pragma unroll 1
  for (i64 unit = units * blockIdx.x / parts; unit < stop; unit++) {
    i64 line = quotient(unit, chunks), image = quotient(line, s.high);
    int q0 = (int)(unit - line * chunks) * K::CHUNK, p = (int)(line - image * s.high);
    int count = min((int)K::CHUNK, s.across - q0);
    const D *from = dy + (line * s.across + q0) * s.channels + m0;
    __syncthreads();
    fetch_gradients<K::CHUNK>(gradients, from, s.channels, count);
    fetch_pixels<TAPS, K::PITCH>(words, shifted, s.image(x, image), s, p * STRIDE - K::PAD, q0 * STRIDE - 4);
    __syncthreads();
#pragma unroll 1
    for (int q = 0; q < count; q += 16 * 2 / WORDS) {
      u32 a[ROWS][4], b[OWN + OWN % 2][2];
#ifdef HALVES
      const u16 *rows = (const u16 *)gradients + (q + lane % 8 + lane / 16 * 8) * APART + own + lane / 8 % 2 * 8;
#pragma unroll
      for (int n = 0; n < ROWS; n++) gather_columns(a[n], rows + n * 16);
      int pixel = (q + lane % 8 + lane / 8 % 2 * 8) * STRIDE;
      const u16 *numbers = (const u16 *)(COPIES > 1 && pixel % 2 ? shifted + WORDS : words) + pixel * 4;
#pragma unroll
      for (int n = 0; n < OWN; n += 2)
        gather_columns(b[n], numbers + places[lane < 16 || n + 1 == OWN ? n : n + 1] * 4);
#else
      const u32 *rows = (const u32 *)gradients + (q + j) * APART + own + i, *numbers = words + (q + j) * STRIDE * WORDS + i;
#pragma unroll
      for (int n = 0; n < ROWS * 4; n++) a[n / 4][n % 4] = rows[n / 4 * 16 + n % 2 * 8 + n % 4 / 2 * 4 * APART];
#pragma unroll
      for (int n = 0; n < OWN * 2; n++) b[n / 2][n % 2] = numbers[(places[n / 2] + n % 2 * 4 * STRIDE) * WORDS];
#endif
#pragma unroll
      for (int n = 0; n < ROWS * OWN; n++) multiply_words(found[n / OWN][n % OWN], a[n / OWN], b[n % OWN]);
    }
  }
  if (partial) partial += (i64)blockIdx.x * s.channels * 3 * TAPS * TAPS;
#pragma unroll
  for (int n = 0; n < ROWS * OWN * 4; n++) {
    int column = j * 2 + n % 2, c = column % 4, pair = warp % ACROSS * OWN + n / 4 % OWN;
    int m = m0 + own + n / 4 / OWN * 16 + n % 4 / 2 * 8 + i, tap = pair % K::PAIRS * 2 + column / 4 - 1;
    int at = ((m * 3 + c) * TAPS + pair / K::PAIRS) * TAPS + tap;
    T v = found[n / 4 / OWN][n / 4 % OWN][n % 4];
    if (tap < 0 || c == 3) continue;
    if (partial) partial[at] = v;
    else dw[at] = (accumulate ? (T)dw[at] : (T)0) + v;
  }
}

extern "C" __global__ void __launch_bounds__(128, 4)
    convolve_3(const D *x, const D *w, const D *b, D *y, i64 images, Dims dims, int turned, int relu) {
  convolve<3, 1>(x, w, b, y, images, dims, turned, relu);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    convolve_7(const D *x, const D *w, const D *b, D *y, i64 images, Dims dims, int turned, int relu) {
  convolve<7, 2>(x, w, b, y, images, dims, turned, relu);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    weigh_3(const D *x, const D *dy, D *dw, T *partial, i64 images, Dims dims, int parts, int accumulate) {
  weigh<3, 1, 2>(x, dy, dw, partial, images, dims, parts, accumulate);
}

extern "C" __global__ void __launch_bounds__(128, 3)
    weigh_7(const D *x, const D *dy, D *dw, T *partial, i64 images, Dims dims, int parts, int accumulate) {
  weigh<7, 2, 4>(x, dy, dw, partial, images, dims, parts, accumulate);
}
