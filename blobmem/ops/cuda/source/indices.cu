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

// Rows that share an index are added up in the order of their places, by keys that have the item above and the place below:
// keys are sorted, a block adds up the rows of each CHUNK of them, and what an item has in several chunks is joined.
#define RUN 2048  // keys that a block sorts, at most
#define CHUNK 64
#define NO_ITEM 0xffffffffu

__device__ __forceinline__ u32 item_at(u64 key) { return (u32)(key >> 32); }
__device__ __forceinline__ u32 place_at(u64 key) { return (u32)key; }

// The keys of n indices, sorted in runs of `run`, a power of two, by as many blocks of half as many threads.
template <class I>
__device__ __forceinline__ void sort_runs(const I *index, u64 *keys, i64 n, i64 items, int run, i64 *fault, i64 code) {
  __shared__ u64 sorted[RUN];
  i64 first = (i64)blockIdx.x * run;
  for (int k = threadIdx.x; k < run; k += blockDim.x) {
    i64 place = first + k, item = place < n ? item_of(index[place], items) : -1;
    if (place < n && item < 0) report(fault, code, place, (double)index[place]);
    sorted[k] = (u64)(item < 0 ? NO_ITEM : (u32)item) << 32 | (u32)place;
  }
  for (int size = 2; size <= run; size *= 2)  // bitonic: runs of `size` rise and fall by turns
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      int low = 2 * threadIdx.x - (threadIdx.x & (step - 1)), high = low + step;
      u64 a = sorted[low], b = sorted[high];
      if ((a > b) == ((low & size) == 0)) {
        sorted[low] = b;
        sorted[high] = a;
      }
    }
  __syncthreads();
  for (int k = threadIdx.x; k < run && first + k < n; k += blockDim.x) keys[first + k] = sorted[k];
}

extern "C" __global__ void sort_places(const T *index, u64 *keys, i64 n, i64 items, int run, i64 *fault, i64 code) {
  sort_runs(index, keys, n, items, run, fault, code);
}

extern "C" __global__ void sort_places_int32(const int *index, u64 *keys, i64 n, i64 items, int run, i64 *fault, i64 code) {
  sort_runs(index, keys, n, items, run, fault, code);
}

// How many of the sorted keys from `start` to before `stop` are below a key.
__device__ __forceinline__ i64 below(const u64 *keys, i64 start, i64 stop, u64 key) {
  i64 low = start;
  while (low < stop) {
    i64 middle = (low + stop) / 2;
    if (keys[middle] < key) low = middle + 1;
    else stop = middle;
  }
  return low - start;
}

// Runs of `run` keys, of which no two are alike, become runs of twice as many.
extern "C" __global__ void merge_runs(const u64 *from, u64 *to, i64 n, i64 run) {
  FOR(i, n) {
    i64 own = i / run * run, other = own ^ run, start = other < n ? other : n, stop = other + run < n ? other + run : n;
    to[i - own + (own < other ? own : other) + below(from, start, stop, from[i])] = from[i];
  }
}

// Block k adds up the rows of the k-th chunk of keys; blocks along y have columns of their own. Of an item that is in
// other chunks, too, it leaves the sum in `parts` (chunks, 2, size): first that of the item that is in an earlier one.
extern "C" __global__ void sum_chunks(const D *dy, const u64 *keys, D *dx, T *parts, i64 n, i64 size, int accumulate) {
  __shared__ u64 shared[CHUNK + 2];
  i64 first = (i64)blockIdx.x * CHUNK;
  int count = (int)(n - first < CHUNK ? n - first : CHUNK);
  for (int k = threadIdx.x; k < count + 2; k += blockDim.x) {
    i64 at = first + k - 1;
    shared[k] = at < 0 || at >= n ? (u64)NO_ITEM << 32 : keys[at];
  }
  __syncthreads();
  const u64 *own = shared + 1;
  u32 before = item_at(own[-1]), after = item_at(own[count]);
  for (i64 j = (i64)blockIdx.y * blockDim.x + threadIdx.x; j < size; j += (i64)gridDim.y * blockDim.x) {
    T total = 0;
    for (int start = 0; start < count; start += 8) {
      T v[8];
#pragma unroll
      for (int k = 0; k < 8; k++) v[k] = start + k < count ? (T)dy[place_at(own[start + k]) * size + j] : (T)0;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        if (start + k >= count) break;
        u32 item = item_at(own[start + k]);
        total += v[k];
        if (start + k + 1 < count && item_at(own[start + k + 1]) == item) continue;
        T *part = parts + (i64)blockIdx.x * 2 * size + j;
        D *sum = dx + item * size + j;
        if (item == before) part[0] = total;
        else if (item == after && start + k + 1 == count) part[size] = total;
        else if (item != NO_ITEM) *sum = accumulate ? *sum + total : total;
        total = 0;
      }
    }
  }
}

// Block k adds up what `sum_chunks` has left of the item that begins in the k-th chunk and goes on, if there is one.
extern "C" __global__ void join_chunks(const u64 *keys, D *dx, const T *parts, i64 n, i64 size, int accumulate) {
  i64 chunk = blockIdx.x, first = chunk * CHUNK, end = first + CHUNK;
  if (end >= n) return;
  u32 item = item_at(keys[end]);
  if (item == NO_ITEM || item_at(keys[end - 1]) != item || (first > 0 && item_at(keys[first - 1]) == item)) return;
  i64 last = (end + below(keys, end, n, (u64)(item + 1) << 32) - 1) / CHUNK;
  for (i64 j = (i64)blockIdx.y * blockDim.x + threadIdx.x; j < size; j += (i64)gridDim.y * blockDim.x) {
    T total = parts[(2 * chunk + 1) * size + j];
#pragma unroll 8
    for (i64 k = chunk + 1; k <= last; k++) total += parts[2 * k * size + j];
    D *sum = dx + item * size + j;
    *sum = accumulate ? *sum + total : total;
  }
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
