// More shared memory than the 48 KiB that the arrays of a kernel may take: of a kernel that says WITH_SHARED(bytes) before its
// bounds each launch has so much, from `name` of SHARED(type, name) on. All GPUs that copy beside (copies.cuh) have 99 KiB.

#ifdef EMULATED
#define SHARED(type, name) __shared__ type name[(227 << 10) / sizeof(type)]
#else
#define SHARED(type, name) extern __shared__ __align__(1024) type name[]
#endif
#define WITH_SHARED(bytes)
