// Products of small matrices of float32 on tensor cores, a warp's; by other means where there are none (PLAIN).
// Needs common.cuh.

#if defined(EMULATED) || defined(HALVES) || defined(DOUBLE) || __CUDA_ARCH__ < 800
#define PLAIN
#endif

// found += a b, of 16 x 8 and 8 x 8 numbers. Lane 4 i + j of a warp has in a rows i, i + 8 of column j, then of column
// j + 4; in b column i of rows j, j + 4; in found columns 2 j, 2 j + 1 of row i, then of row i + 8.
#ifdef PLAIN
__device__ __noinline__ void multiply(T *found, const T *a, const T *b) {
  int lane = threadIdx.x & 31;
  for (int k = 0; k < 8; k++) {
    T row[2], column[2];
    for (int i = 0; i < 2; i++) {
      row[i] = __shfl_sync(0xffffffffu, a[k / 4 * 2 + i], (lane & ~3) + k % 4);
      column[i] = __shfl_sync(0xffffffffu, b[k / 4], (lane & 3) * 8 + i * 4 + k % 4);
    }
    for (int i = 0; i < 4; i++) found[i] += row[i / 2] * column[i % 2];
  }
}
#else
__device__ __forceinline__ void multiply(T *found, const T *a, const T *b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(found[0]), "+f"(found[1]), "+f"(found[2]), "+f"(found[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
#endif

// The same where a and b are as words: of 16 x 8 and 8 x 8 of these, each of which is a number, or of halves two neighbours.
#if !defined(HALVES)
__device__ __forceinline__ void multiply_words(T *found, const u32 *a, const u32 *b) {
  T left[4], right[2];
#pragma unroll
  for (int k = 0; k < 4; k++) left[k] = (T)__uint_as_float(a[k]);
#pragma unroll
  for (int k = 0; k < 2; k++) right[k] = (T)__uint_as_float(b[k]);
  multiply(found, left, right);
}
#elif defined(EMULATED) || __CUDA_ARCH__ < 800
__device__ __noinline__ void multiply_words(T *found, const u32 *a, const u32 *b) {
  int lane = threadIdx.x & 31;
  for (int k = 0; k < 16; k++) {
    T row[2], column[2];
    for (int i = 0; i < 2; i++) {
      u32 left = __shfl_sync(0xffffffffu, a[k / 8 * 2 + i], (lane & ~3) + k % 8 / 2);
      u32 right = __shfl_sync(0xffffffffu, b[k / 8], (lane & 3) * 8 + i * 4 + k % 8 / 2);
      row[i] = opened((u16)(left >> k % 2 * 16)), column[i] = opened((u16)(right >> k % 2 * 16));
    }
    for (int i = 0; i < 4; i++) found[i] += row[i / 2] * column[i % 2];
  }
}
#else
#ifdef BFLOAT16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif
__device__ __forceinline__ void multiply_words(T *found, const u32 *a, const u32 *b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(found[0]), "+f"(found[1]), "+f"(found[2]), "+f"(found[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#undef TYPES
#endif

// Of four matrices of 8 x 8 halves in shared memory, whose rows begin where `row` of lanes 8 k to 8 k + 7 says, at multiples of
// 16 bytes, lane 4 i + j gets in to[k] column i of rows 2 j and 2 j + 1.
#ifdef HALVES
__device__ __forceinline__ void gather_columns(u32 *to, const u16 *row) {
#if defined(EMULATED) || __CUDA_ARCH__ < 800
  int lane = threadIdx.x & 31;
  for (int k = 0; k < 4; k++) {
    to[k] = 0;
    for (int n = 0; n < 2; n++) {
      const u16 *from = (const u16 *)__shfl_sync(0xffffffffu, (u64)row, k * 8 + lane % 4 * 2 + n);
      to[k] |= (u32)from[lane / 4] << n * 16;
    }
  }
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
#endif
}
#endif

// Of four matrices of 8 rows of four words in shared memory, which begin where `row` of lanes 8 k to 8 k + 7 says, at multiples
// of 16 bytes, lane 4 i + j gets in to[k] word j of row i.
__device__ __forceinline__ void gather_rows(u32 *to, const void *row) {
#if defined(EMULATED) || __CUDA_ARCH__ < 800
  int lane = threadIdx.x & 31;
  for (int k = 0; k < 4; k++) to[k] = ((const u32 *)__shfl_sync(0xffffffffu, (u64)row, k * 8 + lane / 4))[lane % 4];
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
#endif
}

// Tensor cores cut numbers off after ten bits: what they are to be given so that they are not too small on average.
__device__ __forceinline__ T centred(T v) {
#ifdef PLAIN
  return v;
#else
  return v * (T)1.000244140625;  // 1 + 2 ** -12: what has no more than ten bits stays as it is
#endif
}
