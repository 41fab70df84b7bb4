// Clusters: eight blocks along x that run at once and write into one another's shared memory, which GPUs have from compute
// capability 9.0 on. A kernel in clusters says IN_CLUSTERS before its bounds, has an array of COPIES of its shared memory,
// and is empty unless CLUSTERS is defined, which it is not for double. The emulator runs a cluster as one block that has a
// copy for each rank.

enum { RANKS = 8 };

// Counts what is sent to a place in shared memory, time after time, so that nobody waits for more than that. One thread opens
// it, before a barrier of the cluster, and says once for each time how many bytes to expect, some of which may have come.
struct Post { u64 state; };

__device__ __forceinline__ int rank_of_block() { return blockIdx.x % RANKS; }

#if defined(EMULATED)
#define CLUSTERS
#define IN_CLUSTERS
enum { COPIES = RANKS };

template <class S> S &own_copy(S *copies) { return copies[rank_of_block()]; }
template <class S> S &copy_of(S *copies, int rank) { return copies[rank]; }
inline void cluster_barrier() { __syncthreads(); }
inline void open(Post &post) {}
inline void expect(Post &post, int bytes) {}
template <int W> void send(Lot<W> lot, T *to, Post &post) { *(Lot<W> *)to = lot; }
inline void await(Post &post, int time) { __syncthreads(); }

#elif __CUDA_ARCH__ >= 900 && !defined(DOUBLE)
#define CLUSTERS
#define IN_CLUSTERS __cluster_dims__(8, 1, 1)
enum { COPIES = 1 };

template <class S> __device__ __forceinline__ S &own_copy(S *copies) { return *copies; }

// The shared memory of a block of the cluster.
template <class S> __device__ __forceinline__ S &copy_of(S *copies, int rank) {
  S *there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(copies), "r"(rank));
  return *there;
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 cluster_address(const void *p) {
  u64 address;
  asm("cvta.to.shared::cluster.u64 %0, %1;" : "=l"(address) : "l"(p));
  return (u32)address;
}

__device__ __forceinline__ void open(Post &post) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&post)) : "memory");
}

__device__ __forceinline__ void expect(Post &post, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&post)), "r"(bytes)
               : "memory");
}

// Write to a copy_of shared memory, whose post it is.
__device__ __forceinline__ void send(Lot<2> lot, T *to, Post &post) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               ::"r"(cluster_address(to)), "f"(lot.at[0]), "f"(lot.at[1]), "r"(cluster_address(&post)) : "memory");
}

__device__ __forceinline__ void send(Lot<4> lot, T *to, Post &post) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(cluster_address(to)), "f"(lot.at[0]), "f"(lot.at[1]), "f"(lot.at[2]), "f"(lot.at[3]),
               "r"(cluster_address(&post)) : "memory");
}

// Wait until all bytes of a time, 0 the first, have come; those of the time after next must not be on their way before.
__device__ __forceinline__ void await(Post &post, int time) {
  u32 come = 0;
  while (!come)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(come) : "r"(shared_address(&post)), "r"(time & 1) : "memory");
}

#else
#define IN_CLUSTERS
#endif
