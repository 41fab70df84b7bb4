// What every kernel source shares; nothing here includes another header. T is the type of the net's numbers: float, or
// double where DOUBLE is defined (T itself must not be a macro: the compiler's own headers use that name).

#ifdef DOUBLE
typedef double T;
#else
typedef float T;
#endif

typedef long long i64;
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Dims { i64 at[8]; };  // up to eight numbers by value: shapes, strides, offsets

// The elements this thread looks after, of n, all of the grid together.
#define FOR(i, n) for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)

// Sixteen bytes at a time.
struct __align__(16) Pack { T at[16 / sizeof(T)]; };
#define PACK ((int)(16 / sizeof(T)))

// W elements, loaded and stored at once; the addresses are multiples of as much.
template <int W> struct __align__(W * sizeof(T)) Lot { T at[W]; };

template <int W> __device__ __forceinline__ Lot<W> load(const T *x, i64 at) { return *(const Lot<W> *)(x + at); }
template <int W> __device__ __forceinline__ void store(T *x, i64 at, Lot<W> lot) { *(Lot<W> *)(x + at) = lot; }

// The same of two arrays.
template <int W> struct Lots { Lot<W> a, b; };

template <int W> __device__ __forceinline__ Lots<W> load(const T *x, const T *y, i64 at) {
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
template <class F> __device__ __forceinline__ void map1(const T *x, T *y, i64 n, F f) {
  i64 packs = aligned(x) && aligned(y) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Pack a = ((const Pack *)x)[i];
#pragma unroll
    for (int j = 0; j < PACK; j++) a.at[j] = f(a.at[j]);
    ((Pack *)y)[i] = a;
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) y[packs * PACK + i] = f(x[packs * PACK + i]);
}

// z[i] = f(x[i], y[i]); z may be x or y.
template <class F> __device__ __forceinline__ void map2(const T *x, const T *y, T *z, i64 n, F f) {
  i64 packs = aligned(x) && aligned(y) && aligned(z) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Pack a = ((const Pack *)x)[i], b = ((const Pack *)y)[i];
#pragma unroll
    for (int j = 0; j < PACK; j++) a.at[j] = f(a.at[j], b.at[j]);
    ((Pack *)z)[i] = a;
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) z[packs * PACK + i] = f(x[packs * PACK + i], y[packs * PACK + i]);
}

// w[i] = f(x[i], y[i], z[i]); w may be any of them.
template <class F> __device__ __forceinline__ void map3(const T *x, const T *y, const T *z, T *w, i64 n, F f) {
  i64 packs = aligned(x) && aligned(y) && aligned(z) && aligned(w) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Pack a = ((const Pack *)x)[i], b = ((const Pack *)y)[i], c = ((const Pack *)z)[i];
#pragma unroll
    for (int j = 0; j < PACK; j++) a.at[j] = f(a.at[j], b.at[j], c.at[j]);
    ((Pack *)w)[i] = a;
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

// A bad value found by a kernel: the first one is kept, with its index, and the host raises it when it next waits.
__device__ __forceinline__ void report(i64 *fault, i64 code, i64 index, double value) {
  if (atomicCAS((u64 *)fault, 0ull, (u64)code) == 0) {
    fault[1] = index;
    ((double *)fault)[2] = value;
  }
}
