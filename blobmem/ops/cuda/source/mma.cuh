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

// Tensor cores cut numbers off after ten bits: what they are to be given so that they are not too small on average.
__device__ __forceinline__ T centred(T v) {
#ifdef PLAIN
  return v;
#else
  return v * (T)1.000244140625;  // 1 + 2 ** -12: what has no more than ten bits stays as it is
#endif
}
