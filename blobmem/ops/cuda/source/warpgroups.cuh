// Products of matrices of halves in shared memory by four warps at a time, on GPUs of compute capability 9.0 (WARPGROUPS is
// then defined). Needs common.cuh.

#if defined(HALVES) && !defined(EMULATED) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUPS

// Lines of 64 bytes from a place on, of which pack p of line i lies in place p ^ i / 2 % 4; to add to it moves on by packs.
typedef u64 Lines;
__device__ __forceinline__ Lines lines_from(const Pack *at) {
  u64 address = (u32)__cvta_generic_to_shared(at);
  return (u64)2 << 62 | (u64)(8 * 64 >> 4) << 32 | (u64)1 << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// found += a b, of 64 lines of 16 numbers and of what has 64 lines of 16, too, which are its columns. Lane 4 i + j of warp n
// has in found[t] columns 8 t + 2 j and 8 t + 2 j + 1 of line 16 n + i, then of line 16 n + i + 8.
#ifdef BFLOAT16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif
#define MULTIPLY \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, " \
  "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define FOUR(t) "+f"(found[t][0]), "+f"(found[t][1]), "+f"(found[t][2]), "+f"(found[t][3])
#define FOUND FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
__device__ __forceinline__ void multiply_lines(T (*found)[4], Lines a, Lines b) {
  asm volatile(MULTIPLY "%32, %33, 1, 1, 1, 0, 0;" : FOUND : "l"(a), "l"(b));
}
// The same where a is in registers, as `multiply_words` has it: a warp's own lines.
__device__ __forceinline__ void multiply_lines(T (*found)[4], const u32 (&a)[4], Lines b) {
  asm volatile(MULTIPLY "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : FOUND
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef FOUND
#undef FOUR
#undef MULTIPLY
#undef TYPES
#else
typedef const Pack *Lines;
__device__ __forceinline__ Lines lines_from(const Pack *at) { return at; }
#endif

// Those so far go together; and until all are there but for the last so many marks.
__device__ __forceinline__ void mark_products() {
#ifdef WARPGROUPS
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int MARKS> __device__ __forceinline__ void wait_for_products() {
#ifdef WARPGROUPS
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(MARKS) : "memory");
#endif
}

// Until all such products are there.
__device__ __forceinline__ void end_products() {
  mark_products();
  wait_for_products<0>();
}

// Let what a thread has copied to shared memory be seen by such products, once there was a barrier.
__device__ __forceinline__ void show_copies() {
#ifdef WARPGROUPS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
