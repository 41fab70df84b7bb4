#include "common.cuh"
#include "conv_first.cuh"
#include "copies.cuh"
#include "mma.cuh"

// Convolutions of images of three channels, from planes to channels last, as products of matrices on tensor cores. In shared
// memory a pixel is four numbers, of which the last is zero, and a line of a kernel is one tap more, whose weights are zero,
// in front of the others: so what the products take lies at multiples of a pixel, or two.

#define CHUNK 112  // numbers of a line of y that a block makes at a time
#ifdef HALVES
#define WORDS 2  // of a pixel
#else
#define WORDS 4
#endif

// TAPS x TAPS taps, STRIDE pixels apart, padded by half of them: a line of pixels in shared memory begins four in front of
// those below the first number of y, the taps of this one (and the one of zeros) BASE pixels behind that.
template <int TAPS, int STRIDE, int ACROSS = CHUNK> struct Kind {
  enum {
    PAD = TAPS / 2,
    BASE = 3 - PAD,
    PITCH = ACROSS * STRIDE + 8,         // pixels of a line in shared memory
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

// Of LINES lines of an image, from line `top` on, PITCH pixels of each from pixel `left` on, a multiple of 4 as the image's
// width is, with zeros around the image: COUNT runs of four of this thread's, from its run `first` on.
template <int LINES, int PITCH, int COUNT> struct Pixels {
  Four found[COUNT][3];

  __device__ __forceinline__ void load(const D *image, const Sizes &s, int top, int left, int first) {
    bool packed = ((u64)image & (4 * sizeof(D) - 1)) == 0;
    int plane = s.height * s.width;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
      int i = first + k * blockDim.x, u = top + i / (PITCH / 4), v = left + i % (PITCH / 4) * 4;
      bool inside = i < LINES * PITCH / 4 && u >= 0 && u < s.height && v >= 0 && v < s.width;
#pragma unroll
      for (int c = 0; c < 3; c++) {
        const D *from = image + (i64)c * plane + u * s.width + v;
        found[k][c] = Four{};
        if (inside && packed) found[k][c] = *(const Four *)from;
        if (inside && !packed)
          for (int j = 0; j < 4; j++) found[k][c].at[j] = from[j];
      }
    }
  }

  // In `shifted`, unless that is null, each pixel is one place later.
  __device__ __forceinline__ void store(u32 *to, u32 *shifted, int first) const {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
      int i = first + k * blockDim.x;
      u32 words[4 * WORDS];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        D pixel[3] = {found[k][0].at[j], found[k][1].at[j], found[k][2].at[j]};
        put_pixel(words + j * WORDS, pixel);
      }
      if (i >= LINES * PITCH / 4) continue;
#pragma unroll
      for (int j = 0; j < WORDS; j++) ((Quad *)to)[i * WORDS + j] = *(const Quad *)(words + j * 4);
      if (shifted)
#pragma unroll
        for (int j = 0; j < 4 * WORDS; j++) shifted[i * 4 * WORDS + WORDS + j] = words[j];
    }
  }
};

// The weights of RUN channels from m0 on, in the order in which lanes take them: for each product, eight words of each of
// RUN / 8 times eight columns, four words of a lane next to each other.
template <int TAPS, int STRIDE>
__device__ __forceinline__ void fetch_weights(u32 *to, const D *w, int m0, bool turned) {
  typedef Kind<TAPS, STRIDE> K;
  for (int i = threadIdx.x; i < TAPS * K::STEPS * RUN * 8; i += blockDim.x) {
    int lane = i / 4 % 32, step = i / (RUN * 8), word = i / 128 % (RUN / 16) * 4 + i % 4, column = word / 2;
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

// y = x convolved with w, plus b unless that is null, and with `relu` max(0, .) of that. If it KEEPS them, `kept` gets numbers
// before that, and y is made of them times gamma, plus beta, unless those are null. w is (channels of y, 3, taps), or if
// `turned` (channels of y, taps, 3). A block takes a band of lines in one chunk after the other; its second number says which
// channels of y. A warp makes sixteen numbers of both lines.
template <int TAPS, int STRIDE, bool KEEPS>
__device__ __forceinline__ void convolve(const D *x, const D *w, const D *b, D *kept, const D *gamma, const D *beta, D *y,
                                         i64 images, const Dims &dims, bool turned, bool relu) {
  typedef Kind<TAPS, STRIDE> K;
  __shared__ Quad pixels[K::SEEN * K::PITCH * WORDS / 4], weights[TAPS * K::STEPS * RUN * 2];
  __shared__ T bias[RUN];
  __shared__ Lot<PACK> factors[2][RUN / PACK];
  Sizes s(dims);
  int lane = threadIdx.x & 31, i = lane / 4, j = lane % 4, m0 = blockIdx.y * RUN;
  int bands = (s.high + K::BAND - 1) / K::BAND, chunks = (s.across + CHUNK - 1) / CHUNK;
  fetch_weights<TAPS, STRIDE>(weights[0].at, w, m0, turned);
  for (int m = threadIdx.x; m < RUN; m += blockDim.x) {
    bias[m] = b ? (T)b[m0 + m] : (T)0;
    if (!KEEPS) continue;
    factors[0][m / PACK].at[m % PACK] = gamma ? (T)gamma[m0 + m] : (T)1;
    factors[1][m / PACK].at[m % PACK] = beta ? (T)beta[m0 + m] : (T)0;
  }
#pragma unroll 1
  for (i64 unit = blockIdx.x; unit < images * bands * chunks; unit += gridDim.x) {
    i64 band = quotient(unit, chunks), image = quotient(band, bands);
    int p0 = (int)(band - image * bands) * K::BAND, q0 = (int)(unit - band * chunks) * CHUNK;
    __syncthreads();
    for (int first = threadIdx.x; first < K::SEEN * K::PITCH / 4; first += 3 * blockDim.x) {
      Pixels<K::SEEN, K::PITCH, 3> some;
      some.load(s.image(x, image), s, p0 * STRIDE - K::PAD, q0 * STRIDE - 4, first);
      some.store(pixels[0].at, nullptr, first);
    }
    __syncthreads();
#pragma unroll 1
    for (int q = (threadIdx.x >> 5) * 16; q < CHUNK && q0 + q < s.across; q += blockDim.x / 2) {
      enum { TILES = RUN / 8 };
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
      for (int n = 0; n < RUN / PACK; n++) {
        int pack = n / 4, p = p0 + n / 2 % 2, at = q0 + q + i + n % 2 * 8;
        Lot<PACK> lot;
#pragma unroll
        for (int k = 0; k < PACK; k++) lot.at[k] = found[n / 2 % 2][pack * (PACK / 2) + k / 2][n % 2 * 2 + k % 2];
        int m = pack * 4 * PACK + j * PACK;
        i64 to = ((image * s.high + p) * s.across + at) * s.channels + m0 + m;
        bool inside = p < s.high && at < s.across;
        if (KEEPS) {
          Lot<PACK> times = factors[0][m / PACK], plus = factors[1][m / PACK];
          if (inside) store<PACK>(kept, to, lot);
#pragma unroll
          for (int k = 0; k < PACK; k++) lot.at[k] = fma(as_held(lot.at[k]), times.at[k], plus.at[k]);
        }
#pragma unroll
        for (int k = 0; k < PACK; k++) lot.at[k] = relu && lot.at[k] <= 0 ? (T)0 : lot.at[k];
        if (inside) store<PACK>(y, to, lot);
      }
    }
  }
}

#define APART (RUN + 8)  // from a number's channels of dy to the next one's: what is read at a time is in other banks
#ifdef HALVES
#define SOME 112  // numbers of a line of dy that a block takes at a time
#else
#define SOME 56
#endif

// RUN channels of SOME numbers of dy, of which there are `count`, on their way to shared memory, which has zeros for the
// others; they are there once `wait_for_copies` returns.
__device__ __forceinline__ void copy_gradients(Pack *to, const D *dy, int channels, int count) {
  enum { PACKS = RUN / PACK };
  for (int i = threadIdx.x; i < SOME * PACKS; i += blockDim.x) {
    Pack *at = to + i / PACKS * (APART / PACK) + i % PACKS;
    const D *from = dy + (i64)min(i / PACKS, count - 1) * channels + i % PACKS * PACK;
    copy_pack(at, (const Pack *)from, i / PACKS < count);
  }
}

// Where a part of a line of y begins.
struct Place {
  i64 image, line;
  int p, q, count;
  __device__ __forceinline__ Place(i64 unit, const Sizes &s) {
    int chunks = (s.across + SOME - 1) / SOME;
    line = quotient(unit, chunks), image = quotient(line, s.high);
    p = (int)(line - image * s.high), q = (int)(unit - line * chunks) * SOME, count = min(SOME, s.across - q);
  }
};

// Gradients for the weights: a block sums up a part of the lines of dy of all images, for the channels that its second number
// says. With several parts each is written to `partial`; a single one (+)= dw. ACROSS warps share the pairs of taps, those
// beside them the channels, ROWS times 16 each. While some of a line is multiplied the next is on its way.
template <int TAPS, int STRIDE, int ACROSS, int ROWS>
__device__ __forceinline__ void weigh(const D *x, const D *dy, D *dw, T *partial, i64 images, const Dims &dims, int parts,
                                      bool accumulate) {
  typedef Kind<TAPS, STRIDE, SOME> K;
  enum { OWN = TAPS * K::PAIRS / ACROSS, PIXELS = TAPS * K::PITCH * WORDS, THREADS = ACROSS * (RUN / 16 / ROWS) * 32 };
  enum { COPIES = WORDS == 2 && STRIDE == 1 ? 2 : 1, BESIDE = PIXELS + 28 };  // in other banks than the first
  enum { PACKS = SOME * APART / PACK };
  __shared__ Quad pixels[COPIES > 1 ? (BESIDE + PIXELS + 4) / 4 : PIXELS / 4];
  __shared__ Pack gradients[2 * PACKS];
  Sizes s(dims);
  int lane = threadIdx.x & 31, i = lane / 4, j = lane % 4, warp = threadIdx.x >> 5;
  int m0 = blockIdx.y * RUN, own = warp / ACROSS * ROWS * 16;
  u32 *words = pixels[0].at, *shifted = COPIES > 1 ? words + BESIDE : nullptr;
  int places[OWN];  // of pairs of taps, in pixels
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    int pair = warp % ACROSS * OWN + n;
    places[n] = pair / K::PAIRS * K::PITCH + pair % K::PAIRS * 2 + K::BASE;
  }
  T found[ROWS][OWN][4] = {};
  Pixels<TAPS, K::PITCH, (TAPS * K::PITCH / 4 + THREADS - 1) / THREADS> coming;
  auto ask = [&](i64 unit, Pack *to) {
    Place at(unit, s);
    copy_gradients(to, dy + (at.line * s.across + at.q) * s.channels + m0, s.channels, at.count);
    coming.load(s.image(x, at.image), s, at.p * STRIDE - K::PAD, at.q * STRIDE - 4, threadIdx.x);
  };
  i64 units = images * s.high * ((s.across + SOME - 1) / SOME), stop = units * (blockIdx.x + 1) / parts;
  i64 unit = units * blockIdx.x / parts;
  Pack *now = gradients, *next = gradients + PACKS;
  if (unit < stop) ask(unit, now);
#pragma unroll 1
  for (; unit < stop; unit++) {
    coming.store(words, shifted, threadIdx.x);
    wait_for_copies();
    __syncthreads();
    if (unit + 1 < stop) ask(unit + 1, next);
    int count = Place(unit, s).count;
#pragma unroll 1
    for (int q = 0; q < count; q += 16 * 2 / WORDS) {
      u32 a[ROWS][4], b[OWN + OWN % 2][2];
#ifdef HALVES
      const u16 *rows = (const u16 *)now + (q + lane % 8 + lane / 16 * 8) * APART + own + lane / 8 % 2 * 8;
#pragma unroll
      for (int n = 0; n < ROWS; n++) gather_columns(a[n], rows + n * 16);
      int pixel = (q + lane % 8 + lane / 8 % 2 * 8) * STRIDE;
      const u16 *numbers = (const u16 *)(COPIES > 1 && pixel % 2 ? shifted + WORDS : words) + pixel * 4;
#pragma unroll
      for (int n = 0; n < OWN; n += 2)
        gather_columns(b[n], numbers + places[lane < 16 || n + 1 == OWN ? n : n + 1] * 4);
#else
      const T *rows = (const T *)now + (q + j) * APART + own + i;
      const u32 *numbers = words + (q + j) * STRIDE * WORDS + i;
#pragma unroll
      for (int n = 0; n < ROWS * 4; n++)
        a[n / 4][n % 4] = __float_as_uint(centred(rows[n / 4 * 16 + n % 2 * 8 + n % 4 / 2 * 4 * APART]));
#pragma unroll
      for (int n = 0; n < OWN * 2; n++) b[n / 2][n % 2] = numbers[(places[n / 2] + n % 2 * 4 * STRIDE) * WORDS];
#endif
#pragma unroll
      for (int n = 0; n < ROWS * OWN; n++) multiply_words(found[n / OWN][n % OWN], a[n / OWN], b[n % OWN]);
    }
    Pack *before = now;
    now = next, next = before;
    __syncthreads();
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
  convolve<3, 1, false>(x, w, b, nullptr, nullptr, nullptr, y, images, dims, turned, relu);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    convolve_3_kept(const D *x, const D *w, const D *b, D *kept, const D *gamma, const D *beta, D *y, i64 images, Dims dims,
                    int turned, int relu) {
  convolve<3, 1, true>(x, w, b, kept, gamma, beta, y, images, dims, turned, relu);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    weigh_3(const D *x, const D *dy, D *dw, T *partial, i64 images, Dims dims, int parts, int accumulate) {
  weigh<3, 1, 2, 2>(x, dy, dw, partial, images, dims, parts, accumulate);
}

// Of halves; those of floats, for which there is too little shared memory, are in conv_first.cu.
extern "C" __global__ void __launch_bounds__(128, 4)
    convolve_7(const D *x, const D *w, const D *b, D *y, i64 images, Dims dims, int turned, int relu) {
#ifdef HALVES
  convolve<7, 2, false>(x, w, b, nullptr, nullptr, nullptr, y, images, dims, turned, relu);
#endif
}

extern "C" __global__ void __launch_bounds__(128, 4)
    convolve_7_kept(const D *x, const D *w, const D *b, D *kept, const D *gamma, const D *beta, D *y, i64 images, Dims dims,
                    int turned, int relu) {
#ifdef HALVES
  convolve<7, 2, true>(x, w, b, kept, gamma, beta, y, images, dims, turned, relu);
#endif
}

extern "C" __global__ void __launch_bounds__(256, 2)
    weigh_7(const D *x, const D *dy, D *dw, T *partial, i64 images, Dims dims, int parts, int accumulate) {
#ifdef HALVES
  weigh<7, 2, 4, 2>(x, dy, dw, partial, images, dims, parts, accumulate);
#endif
}
