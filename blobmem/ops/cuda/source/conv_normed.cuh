// Tiles of products of pixels and weights on tensor cores, and what becomes of them.
// Needs common.cuh, copies.cuh, mma.cuh and warpgroups.cuh.

#define THREADS 256  // of a block: warps have 16 pixels each
#define HIGH 128     // pixels of a block
#define ACROSS 64    // channels of y that a block makes at a time
#define TILES 8      // of eight channels
#define CHUNK 64     // bytes of a line of what is multiplied at a time
#define PACKS (CHUNK / 16)
#define WEIGHTS (ACROSS * PACKS)  // packs of the weights of such lines
#define GROUP (4 * PACK)  // channels of y of which a lane has a pack of neighbours
#define GROUPS (TILES * 8 / GROUP)

// Of a line of a chunk the packs lie so that those of eight lines in one place are in different banks.
__device__ __forceinline__ int place(int line, int pack) { return line * PACKS + (pack ^ (line >> 1 & (PACKS - 1))); }

// Which of a block's channels line `line` of the weights is of: line 8 t + c is of channel c / 2 * PACK + 2 t + c % 2 of a group,
// so that a lane finds its neighbours.
__device__ __forceinline__ int channel_of(int line) {
  return line / GROUP * GROUP + line % 8 / 2 * PACK + line % GROUP / 8 * 2 + line % 2;
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

// Packs of an array that a lane has of two lines, of the channels that a block makes at a time.
struct Packs {
  Pack of[2][GROUPS];
  __device__ __forceinline__ Packs(const D *from, const i64 (&at)[2], const bool (&inside)[2]) {
#pragma unroll
    for (int n = 0; n < 2 * GROUPS; n++)
      if (inside[n / GROUPS]) of[n / GROUPS][n % GROUPS] = *(const Pack *)(from + at[n / GROUPS] + n % GROUPS * GROUP);
  }
};
struct NoPacks {
  __device__ __forceinline__ NoPacks(const D *from, const i64 (&at)[2], const bool (&inside)[2]) {}
};

// What products are added to, of a lane's channels: `end` says, by the factors of these.
template <class E> __device__ __forceinline__ void begin_with(T (&found)[TILES][4], const E &end, const Lot<PACK> *factors) {
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    Lot<PACK> lot = end.begin(factors + 4 * group, group);
#pragma unroll
    for (int n = 0; n < 2 * PACK; n++) found[group * (PACK / 2) + n / 4][n % 4] = lot.at[n / 4 * 2 + n % 2];
  }
}

// What became of them, of two lines, each at a place of its own.
template <class E>
__device__ __forceinline__ void put_all(const T (&found)[TILES][4], E &end, const Lot<PACK> *factors, int packs,
                                        const typename E::Beside &beside, const i64 (&at)[2], const bool (&inside)[2]) {
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    typename E::Factors own(factors + 4 * group, packs);
#pragma unroll
    for (int line = 0; line < 2; line++) {
      Lot<PACK> lot;
#pragma unroll
      for (int k = 0; k < PACK; k++) lot.at[k] = found[group * (PACK / 2) + k / 2][line * 2 + k % 2];
      end.put(lot, own, beside, group, line, at[line] + group * GROUP, inside[line]);
    }
  }
  end.next();
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
    return value + (T)beside.of[line][group].at[k];
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

