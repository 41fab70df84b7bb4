// Packs on their way to shared memory while other things are done, where there are such copies. Needs common.cuh.

#if !defined(EMULATED) && __CUDA_ARCH__ >= 800
#define COPIES_BESIDE
#endif

// Zeros if it is not `inside`, where `from` has to be in memory all the same.
__device__ __forceinline__ void copy_pack(Pack *to, const Pack *from, bool inside) {
#ifdef COPIES_BESIDE
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
#else
  *to = inside ? *from : Pack{};
#endif
}

// What was copied since such an end goes together.
__device__ __forceinline__ void end_copies() {
#ifdef COPIES_BESIDE
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until a thread's own copies are there, but for those before the last so many ends.
template <int ENDS> __device__ __forceinline__ void wait_for_copies() {
#ifdef COPIES_BESIDE
  asm volatile("cp.async.wait_group %0;" ::"n"(ENDS) : "memory");
#endif
}

// All of them.
__device__ __forceinline__ void wait_for_copies() {
#ifdef COPIES_BESIDE
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
