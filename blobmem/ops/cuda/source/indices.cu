#include "common.cuh"

// The item that an index stands for; -1 for one that is no whole number from 0 to below `items`.
template <class I> __device__ __forceinline__ i64 item_of(I index, i64 items) {
  double value = (double)index;
  return value >= 0 && value < (double)items && value == floor(value) ? (i64)index : -1;
}

// Elements of `A`: one number, or a pack of them.
template <class A, class I, class F>
__device__ __forceinline__ void gather_units(const A *x, const I *index, const A *bias, A *y, i64 rows, i64 width,
                                             i64 items, i64 *fault, i64 code, F sum) {
  FOR(i, rows * width) {
    i64 n = quotient(i, width), j = i - n * width, item = item_of(index[n], items);
    if (item < 0) {
      if (j == 0) report(fault, code, n, (double)index[n]);
      A none = {};
      y[i] = none;
    } else {
      A value = x[item * width + j];
      y[i] = bias ? sum(value, bias[j]) : value;
    }
  }
}

template <class I>
__device__ __forceinline__ void gather_rows(const D *x, const I *index, const D *bias, D *y, i64 rows, i64 size,
                                            i64 items, i64 *fault, i64 code) {
  if (size % PACK == 0 && aligned(x) && aligned(bias) && aligned(y)) {
    gather_units((const Pack *)x, index, (const Pack *)bias, (Pack *)y, rows, size / PACK, items, fault, code,
                 [](Pack a, Pack b) {
                   for (int k = 0; k < PACK; k++) a.at[k] += b.at[k];
                   return a;
                 });
  } else {
    gather_units(x, index, bias, y, rows, size, items, fault, code, [](T a, T b) { return a + b; });
  }
}

extern "C" __global__ void gather(const D *x, const T *index, const D *bias, D *y, i64 rows, i64 size, i64 items,
                                  i64 *fault, i64 code) {
  gather_rows(x, index, bias, y, rows, size, items, fault, code);
}

extern "C" __global__ void gather_int32(const D *x, const int *index, const D *bias, D *y, i64 rows, i64 size,
                                        i64 items, i64 *fault, i64 code) {
  gather_rows(x, index, bias, y, rows, size, items, fault, code);
}

#define EARLIER 2048  // more than the threads of a block

// Block n looks after the item of the n-th index if that is the first to name it: it adds up the rows of all that do,
// in order. Blocks along y have columns of their own.
template <class I>
__device__ __forceinline__ void scatter_rows(const D *dy, const I *index, D *dx, i64 rows, i64 size, i64 items,
                                             i64 *fault, i64 code) {
  __shared__ int sums[32];
  __shared__ int same[1024];
  i64 n = blockIdx.x, item = item_of(index[n], items);
  if (item < 0) {
    if (threadIdx.x == 0 && blockIdx.y == 0) report(fault, code, n, (double)index[n]);
    return;
  }
  i64 first_column = (i64)blockIdx.y * blockDim.x + threadIdx.x, stride = (i64)gridDim.y * blockDim.x;
  for (i64 start = 0; start < rows; start += blockDim.x) {
    i64 m = start + threadIdx.x;
    bool match = m < rows && item_of(index[m], items) == item;
    int found = block_sum(!match ? 0 : m < n ? EARLIER : 1, sums);
    if (found >= EARLIER) return;
    if (found == 0) continue;
    same[threadIdx.x] = match;
    __syncthreads();
    for (int k = 0; k < blockDim.x; k++) {
      if (!same[k]) continue;
      const D *from = dy + (start + k) * size;
      for (i64 j = first_column; j < size; j += stride) dx[item * size + j] += from[j];
    }
    __syncthreads();
  }
}

extern "C" __global__ void scatter(const D *dy, const T *index, D *dx, i64 rows, i64 size, i64 items, i64 *fault,
                                   i64 code) {
  scatter_rows(dy, index, dx, rows, size, items, fault, code);
}

extern "C" __global__ void scatter_int32(const D *dy, const int *index, D *dx, i64 rows, i64 size, i64 items,
                                         i64 *fault, i64 code) {
  scatter_rows(dy, index, dx, rows, size, items, fault, code);
}

// indices = where x is not 0, in order, then zeros; one block.
extern "C" __global__ void nonzero(const D *x, i64 n, int *indices, i64 room) {
  __shared__ int ends[1024];
  i64 count = 0;
  for (i64 start = 0; start < n && count < room; start += blockDim.x) {
    i64 i = start + threadIdx.x;
    bool chosen = i < n && x[i] != 0;
    ends[threadIdx.x] = chosen;
    __syncthreads();
    for (int step = 1; step < blockDim.x; step *= 2) {
      int before = threadIdx.x >= step ? ends[threadIdx.x - step] : 0;
      __syncthreads();
      ends[threadIdx.x] += before;
      __syncthreads();
    }
    i64 place = count + ends[threadIdx.x] - 1;
    if (chosen && place < room) indices[place] = (int)i;
    count += ends[blockDim.x - 1];
    __syncthreads();
  }
  for (i64 i = count + threadIdx.x; i < room; i += blockDim.x) indices[i] = 0;
}
