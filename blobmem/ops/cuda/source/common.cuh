// What every kernel source shares; nothing here includes another header. D is what arrays of the net's numbers are made
// of, T what is reckoned with: both float, or double where DOUBLE is defined. Of a net in half precision (FLOAT16, BFLOAT16)
// D is two bytes, made a float when it is read and rounded to the nearest, ties to even, when it is written (HALVES is then
// defined); T is float, and so are arrays of statistics, labels, indices and losses. (T must not be a macro: the compiler's
// own headers use it.)

typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(FLOAT16) || defined(BFLOAT16)
#define HALVES
typedef float T;

#if defined(BFLOAT16)  // the upper half of a float
__device__ __forceinline__ float opened(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ u16 closed(float v) {
#if __CUDA_ARCH__ >= 800
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
#else
  u32 bits = __float_as_uint(v);
  return (u16)(v != v ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
#endif
}
#elif !defined(EMULATED)
__device__ __forceinline__ float opened(u16 bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
__device__ __forceinline__ u16 closed(float v) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
#endif

// The second above the first.
__device__ __forceinline__ u32 closed_pair(float a, float b) {
#if defined(EMULATED) || __CUDA_ARCH__ < 800
  return closed(a) | (u32)closed(b) << 16;
#else
  u32 bits;
#ifdef BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
#endif
  return bits;
#endif
}

// No constructor takes a float: where either could become the other, the compiler could not choose.
struct D {
  u16 bits;
  __device__ __forceinline__ operator float() const { return opened(bits); }
  __device__ __forceinline__ D &operator=(float v) { return bits = closed(v), *this; }
  __device__ __forceinline__ D &operator+=(float v) { return *this = *this + v; }
  __device__ __forceinline__ D &operator-=(float v) { return *this = *this - v; }
};
#elif defined(DOUBLE)
typedef double T;
typedef double D;
#else
typedef float T;
typedef float D;
#endif

// The number as arrays hold it.
__device__ __forceinline__ T as_held(T v) {
  D held;
  held = v;
  return held;
}

// How many blocks a multiprocessor should have at a time, of a kernel that with so many of floats uses all registers: a pack
// of halves is twice as many numbers.
#ifdef HALVES
#define CROWD(blocks) ((blocks) / 2)
#else
#define CROWD(blocks) (blocks)
#endif

struct Dims { i64 at[8]; };  // up to eight numbers by value: shapes, strides, offsets

// The elements this thread looks after, of n, all of the grid together.
#define FOR(i, n) for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)

// Sixteen bytes of an array, to be moved as they are.
struct __align__(16) Pack { D at[16 / sizeof(D)]; };
#define PACK ((int)(16 / sizeof(D)))

// So many numbers at a time takes a thread that has factors, or sums, for each of their channels. As many halves as floats:
// of a pack of them there would be registers for half as many threads.
#ifdef HALVES
#define LOT (PACK / 2)
#else
#define LOT PACK
#endif

// W numbers, loaded and stored at once, whatever arrays hold them as; the addresses are multiples of as many.
template <int W> struct __align__(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Lot { T at[W]; };

template <int W> __device__ __forceinline__ Lot<W> load(const T *x, i64 at) { return *(const Lot<W> *)(x + at); }
template <int W> __device__ __forceinline__ void store(T *x, i64 at, Lot<W> lot) { *(Lot<W> *)(x + at) = lot; }

#ifdef HALVES
template <int W> struct __align__(W * sizeof(D)) Closed { D at[W]; };

template <int W> __device__ __forceinline__ Lot<W> load(const D *x, i64 at) {
  Closed<W> closed = *(const Closed<W> *)(x + at);
  Lot<W> lot;
#pragma unroll
  for (int j = 0; j < W; j++) lot.at[j] = closed.at[j];
  return lot;
}
template <int W> __device__ __forceinline__ void store(D *x, i64 at, Lot<W> lot) {
  Closed<W> closed;
#pragma unroll
  for (int j = 0; j < W; j++) closed.at[j] = lot.at[j];
  *(Closed<W> *)(x + at) = closed;
}
#ifndef EMULATED
// Of a pack the compiler makes up to eight stores where there is much else to do, which take three times as long.
template <> __device__ __forceinline__ void store<PACK>(D *x, i64 at, Lot<PACK> lot) {
  u32 words[PACK / 2];
#pragma unroll
  for (int j = 0; j < PACK / 2; j++) words[j] = closed_pair(lot.at[2 * j], lot.at[2 * j + 1]);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(x + at)), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
#endif
#endif

// The same of two arrays.
template <int W> struct Lots { Lot<W> a, b; };

template <int W, class X, class Y> __device__ __forceinline__ Lots<W> load(const X *x, const Y *y, i64 at) {
  return Lots<W>{load<W>(x, at), load<W>(y, at)};
}

__device__ __forceinline__ T max_of(T a, T b) { return a > b ? a : b; }
__device__ __forceinline__ T min_of(T a, T b) { return a < b ? a : b; }

// ReLU. Without a slope nothing is multiplied, as in neuron.cu.
__device__ __forceinline__ T leaky(T v, T slope) { return v > 0 ? v : slope == 0 && v <= 0 ? (T)0 : v * slope; }

// 1 / (1 + exp(-x)); nothing overflows.
__device__ __forceinline__ T sigmoid_of(T x) { return (T)0.5 + (T)0.5 * tanh((T)0.5 * x); }

// a / b of numbers that are not negative; in 32 bits, which takes a fraction of the time, where both fit.
__device__ __forceinline__ i64 quotient(i64 a, i64 b) {
  return ((u64)a | (u64)b) >> 32 ? a / b : (i64)((u32)a / (u32)b);
}

__device__ __forceinline__ bool aligned(const void *p) { return ((u64)p & 15) == 0; }

// No loop is unrolled in these maps: loads cannot move before the stores of another round, and counting the rounds ahead
// costs each thread a division, while most have one or a few.

// y[i] = f(x[i]) for i < n, in packs; x and y may be the same array.
template <class X, class Y, class F> __device__ __forceinline__ void map1(const X *x, Y *y, i64 n, F f) {
  i64 packs = aligned(x) && aligned(y) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Lot<PACK> a = load<PACK>(x, i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) a.at[j] = f(a.at[j]);
    store<PACK>(y, i * PACK, a);
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) y[packs * PACK + i] = f(x[packs * PACK + i]);
}

// z[i] = f(x[i], y[i]); z may be x or y.
template <class X, class Y, class Z, class F>
__device__ __forceinline__ void map2(const X *x, const Y *y, Z *z, i64 n, F f) {
  i64 packs = aligned(x) && aligned(y) && aligned(z) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Lot<PACK> a = load<PACK>(x, i * PACK), b = load<PACK>(y, i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) a.at[j] = f(a.at[j], b.at[j]);
    store<PACK>(z, i * PACK, a);
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) z[packs * PACK + i] = f(x[packs * PACK + i], y[packs * PACK + i]);
}

// w[i] = f(x[i], y[i], z[i]); w may be any of them.
template <class F>
__device__ __forceinline__ void map3(const D *x, const D *y, const D *z, D *w, i64 n, F f) {
  i64 packs = aligned(x) && aligned(y) && aligned(z) && aligned(w) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Lot<PACK> a = load<PACK>(x, i * PACK), b = load<PACK>(y, i * PACK), c = load<PACK>(z, i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) a.at[j] = f(a.at[j], b.at[j], c.at[j]);
    store<PACK>(w, i * PACK, a);
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) {
    i64 k = packs * PACK + i;
    w[k] = f(x[k], y[k], z[k]);
  }
}

// Reductions over a block of at most 1024 threads, a multiple of 32; every thread gets the result. The order is fixed,
// so the same numbers give the same bits. All threads of the block call them; `shared` is one array of 32 per call site
// in flight, and may be used again after the call.
template <class A, class F> __device__ __forceinline__ A block_reduce(A value, A *shared, F f) {
  for (int step = 16; step > 0; step >>= 1) value = f(value, (A)__shfl_xor_sync(0xffffffffu, value, step));
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = shared[0];
  for (int i = 1; i < warps; i++) value = f(value, shared[i]);
  return value;
}

template <class A> __device__ __forceinline__ A block_sum(A value, A *shared) {
  return block_reduce(value, shared, [](A a, A b) { return a + b; });
}

template <class A> __device__ __forceinline__ A block_max(A value, A *shared) {
  return block_reduce(value, shared, [](A a, A b) { return a > b ? a : b; });
}

// Words from a counter: Philox4x32-10 (Salmon et al. 2011), the same numbers as on the host. The key is two words of key
// and the counter's last two; element e takes word e % 4 of block e / 4.
struct Words { u32 at[4]; };

__device__ __forceinline__ Words philox(u32 k0, u32 k1, u32 c2, u32 c3, u64 block) {
  u32 c0 = (u32)block, c1 = (u32)(block >> 32);
  for (int round = 0; round < 10; round++) {
    u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
    c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
    c1 = (u32)p1;
    c3 = (u32)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  Words words = {{c0, c1, c2, c3}};
  return words;
}

// A bad value found by a kernel: the first one is kept, with its index, and the host raises it when it next waits. The
// last word is the address of a flag in the device's memory, set until then.
__device__ __forceinline__ void report(i64 *fault, i64 code, i64 index, double value) {
  if (atomicCAS((u64 *)fault, 0ull, (u64)code) == 0) {
    fault[1] = index;
    ((double *)fault)[2] = value;
    *(volatile i64 *)fault[3] = 1;
  }
}
