// Enough of CUDA C++ to run our kernels on a CPU, block after block, each thread of a block a fiber that gives way at
// barriers and warp exchanges. The blocks of a cluster run as one. Compiled together with one kernel source by
// cuda_emulation.py; with FIBERS defined, and no source, what runs the threads, which each library has a copy of.

// None of the system's headers: reading them would take half the time of compiling a source.
extern "C" {
void *memcpy(void *, const void *, unsigned long);
void *memset(void *, int, unsigned long);
void *aligned_alloc(unsigned long, unsigned long);
int madvise(void *, unsigned long, int);
void abort();
int puts(const char *);
}

#define OF_ONE(name)                                              \
  inline float name(float a) { return __builtin_##name##f(a); }   \
  inline double name(double a) { return __builtin_##name(a); }
#define OF_TWO(name)                                                          \
  inline float name(float a, float b) { return __builtin_##name##f(a, b); }   \
  inline double name(double a, double b) { return __builtin_##name(a, b); }
OF_ONE(ceil) OF_ONE(cos) OF_ONE(erf) OF_ONE(exp) OF_ONE(expm1) OF_ONE(fabs) OF_ONE(floor) OF_ONE(log) OF_ONE(log1p)
OF_ONE(rint) OF_ONE(round) OF_ONE(sin) OF_ONE(sqrt) OF_ONE(tanh) OF_ONE(trunc)
OF_TWO(fmax) OF_TWO(fmin) OF_TWO(fmod) OF_TWO(pow)
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline int abs(int a) { return a < 0 ? -a : a; }
inline long long abs(long long a) { return a < 0 ? -a : a; }
inline float abs(float a) { return __builtin_fabsf(a); }
inline double abs(double a) { return __builtin_fabs(a); }
template <class A> inline bool isfinite(A a) { return __builtin_isfinite(a); }
template <class A> inline bool isinf(A a) { return __builtin_isinf(a); }
template <class A> inline bool isnan(A a) { return __builtin_isnan(a); }

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct Triple { unsigned x, y, z; };
#pragma GCC visibility push(hidden)
inline Triple threadIdx, blockIdx, blockDim, gridDim;
#pragma GCC visibility pop

#define EMULATED
#ifdef FLOAT16  // what common.cuh has two instructions for: a number of two bytes as a float, and back
inline float opened(unsigned short bits) { _Float16 half; memcpy(&half, &bits, 2); return half; }
inline unsigned short closed(float v) { _Float16 half = v; unsigned short bits; memcpy(&bits, &half, 2); return bits; }
#endif

template <class A> inline A max(A a, A b) { return a > b ? a : b; }
template <class A> inline A min(A a, A b) { return a < b ? a : b; }
inline float rsqrt(float a) { return 1.0f / sqrt(a); }
inline double rsqrt(double a) { return 1.0 / sqrt(a); }
inline float rsqrtf(float a) { return rsqrt(a); }
template <class A> inline A __ldg(const A *p) { return *p; }
inline int __float_as_int(float a) { int b; memcpy(&b, &a, 4); return b; }
inline unsigned __float_as_uint(float a) { unsigned b; memcpy(&b, &a, 4); return b; }
inline float __int_as_float(int a) { float b; memcpy(&b, &a, 4); return b; }
inline float __uint_as_float(unsigned a) { float b; memcpy(&b, &a, 4); return b; }
inline long long __double_as_longlong(double a) { long long b; memcpy(&b, &a, 8); return b; }
inline double __longlong_as_double(long long a) { double b; memcpy(&b, &a, 8); return b; }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __clz(int a) { return a ? __builtin_clz(a) : 32; }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class A> inline A atomicAdd(A *p, A v) { A old = *p; *p = old + v; return old; }
template <class A> inline A atomicMax(A *p, A v) { A old = *p; if (v > old) *p = v; return old; }
template <class A> inline A atomicMin(A *p, A v) { A old = *p; if (v < old) *p = v; return old; }
template <class A> inline A atomicExch(A *p, A v) { A old = *p; *p = v; return old; }
template <class A> inline A atomicOr(A *p, A v) { A old = *p; *p = old | v; return old; }
template <class A> inline A atomicCAS(A *p, A expected, A v) { A old = *p; if (old == expected) *p = v; return old; }
inline void __threadfence() {}
inline void __trap() { puts("__trap"); abort(); }

// Fibers

#pragma GCC visibility push(hidden)

enum { MOST = 4096, WARP = 32 };
enum Wait : unsigned char { NEW, RUNS, AT_BLOCK, AT_WARP, DONE };
inline unsigned current, live;
inline unsigned long long slots[2][MOST];
inline unsigned exchanges[MOST];  // that the thread has taken part in

// Meanwhile others run, which may write what is shared.
void pause_as(Wait wait);

int run_grid(void (*kernel)(void *), void *arguments, const unsigned *grid, const unsigned *block, unsigned cluster,
             char **stacks);

#pragma GCC visibility pop
#pragma GCC push_options
#pragma GCC optimize("O2")

inline void __syncthreads() { pause_as(AT_BLOCK); }
inline void __syncwarp(unsigned = 0xffffffffu) { pause_as(AT_WARP); }

// Put down a value for the others of the warp, and wait for theirs; the number of the exchange. Slots are used by turns:
// when one is written again, all have passed a later exchange and so have read it.
template <class A> inline unsigned put(A value) {
  unsigned turn = exchanges[current]++;
  memcpy(&slots[turn & 1][current], &value, sizeof(A));
  pause_as(AT_WARP);
  return turn;
}
inline bool took_part(unsigned thread, unsigned turn) { return thread < live && exchanges[thread] > turn; }

template <class A> inline A exchange(A value, int source) {
  unsigned turn = put(value), from = (current & ~31u) + source;
  A result = value;
  if (source >= 0 && source < WARP && took_part(from, turn)) memcpy(&result, &slots[turn & 1][from], sizeof(A));
  return result;
}

template <class A> inline A __shfl_xor_sync(unsigned, A v, int mask, int = 32) { return exchange(v, (int)(current & 31) ^ mask); }
template <class A> inline A __shfl_sync(unsigned, A v, int lane, int = 32) { return exchange(v, lane & 31); }
template <class A> inline A __shfl_down_sync(unsigned, A v, int by, int = 32) { int s = (int)(current & 31) + by; return exchange(v, s < 32 ? s : -1); }
template <class A> inline A __shfl_up_sync(unsigned, A v, int by, int = 32) { return exchange(v, (int)(current & 31) - by); }
inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned turn = put((unsigned long long)(predicate != 0)), first = current & ~31u, bits = 0;
  for (unsigned i = 0; i < WARP; i++)
    if (took_part(first + i, turn) && slots[turn & 1][first + i]) bits |= 1u << i;
  return bits;
}
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, !p) == 0; }

#pragma GCC pop_options

struct Pointer { void *at; template <class A> operator A *() const { return (A *)at; } };

#ifdef FIBERS

// Stacks begin 320 bytes further in each page than the one before: else all of a block would share a few cache lines.
enum { STACK = (64 << 10) + 320, PAGES = 2 << 20 };
static char *stacks;
static void *saved[MOST], *scheduler;
static Wait state[MOST];
static Triple places[MOST];
static unsigned stop, stacks_in_use;  // `stop` is where the warp that runs ends
static unsigned of_block, first_block;  // threads of a block; of the blocks that run, which is the first
static unsigned counts[DONE];  // of its threads that came to wait when it last ran, by for what
static void (*entry)(void *);
static void *entry_arguments;

// Put down where to go on, and go on at `to`: a jump, as a return would never be to where the processor expects.
// The compiler keeps nothing in registers meanwhile, nor below the stack's end (-mno-red-zone).
#define SWITCH(from, to)                                                                                              \
  {                                                                                                                   \
    void **put = from, *other = to;                                                                                   \
    asm volatile("leaq 1f(%%rip),%%rax\npushq %%rbp\npushq %%rax\nmovq %%rsp,(%0)\nmovq %1,%%rsp\n"                   \
                 "popq %%rax\npopq %%rbp\njmpq *%%rax\n1:"                                                            \
                 : "+D"(put), "+S"(other)::"rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", \
                 "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",      \
                 "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");                                        \
  }

static void begin();

static void *new_stack() {
  void **top = (void **)(stacks + (unsigned long)++stacks_in_use * STACK - 64);  // a multiple of 16, as at a call
  top[-1] = top[-2] = nullptr;
  top[-3] = (void *)begin;
  return &top[-3];
}

// The next thread of the warp that can run becomes the current one; false if there is none.
static bool next() {
  for (unsigned t = current + 1; t < stop; t++)
    if (state[t] <= RUNS) {
      current = t;
      threadIdx = places[t];
      return true;
    }
  return false;
}

void pause_as(Wait wait) {
  void **mine = &saved[current];
  state[current] = wait;
  counts[wait]++;
  SWITCH(mine, !next() ? scheduler : state[current] == NEW ? new_stack() : saved[current]);
}

// Threads that never wait run on one stack, one after another.
static void begin() {
  void *nowhere;
  do {
    entry(entry_arguments);
    state[current] = DONE;
  } while (next() && state[current] == NEW);
  SWITCH(&nowhere, state[current] == RUNS ? saved[current] : scheduler);
}

// Run the threads of a warp until none can go on by itself; false if some wait for the warp, and others for the block.
static bool run_warp(unsigned first) {
  do {
    if (counts[AT_WARP] == stop - first) memset(state + first, RUNS, stop - first);
    else for (unsigned t = first; t < stop; t++) if (state[t] == AT_WARP) state[t] = RUNS;
    counts[AT_WARP] = counts[AT_BLOCK] = 0;
    current = first - 1;
    if (next()) SWITCH(&scheduler, state[current] == NEW ? new_stack() : saved[current]);
  } while (counts[AT_WARP] && !counts[AT_BLOCK]);
  return !counts[AT_WARP];
}

// Whether every thread came to its end.
static bool run_block() {
  stacks_in_use = counts[AT_WARP] = 0;
  memset(state, NEW, live);
  memset(exchanges, 0, live * sizeof(unsigned));
  for (bool waiting = true; waiting;) {
    waiting = false;
    for (unsigned first = 0; first < live; first += WARP) {
      stop = first + WARP < live ? first + WARP : live;
      blockIdx.x = first_block + first / of_block;
      if (!run_warp(first)) return false;
      waiting = waiting || counts[AT_BLOCK];
    }
    for (unsigned t = 0; t < live; t++) if (state[t] == AT_BLOCK) state[t] = RUNS;
  }
  return true;
}

// The libraries, which run one at a time, have their stacks in the same memory: the first to run finds some.
int run_grid(void (*kernel)(void *), void *arguments, const unsigned *grid, const unsigned *block, unsigned cluster,
             char **kept) {
  blockDim = {block[0], block[1], block[2]};
  gridDim = {grid[0], grid[1], grid[2]};
  of_block = block[0] * block[1] * block[2];
  live = of_block * cluster;
  if (of_block > 1024 || (cluster > 1 && (live > MOST || of_block % WARP))) return 2;  // a warp is of one block
  if (!*kept) {
    unsigned long size = ((unsigned long)MOST * STACK + PAGES - 1) / PAGES * PAGES;
    *kept = (char *)aligned_alloc(PAGES, size);
    madvise(*kept, size, 14);  // MADV_HUGEPAGE
  }
  stacks = *kept;
  for (unsigned t = 0; t < live; t++) {
    unsigned i = t % of_block;
    places[t] = {i % block[0], i / block[0] % block[1], i / block[0] / block[1]};
  }
  entry = kernel;
  entry_arguments = arguments;
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (first_block = 0; first_block < grid[0]; first_block += cluster) {
        blockIdx = {first_block, y, z};
        if (!run_block()) return 1;
      }
  return 0;
}

#endif
