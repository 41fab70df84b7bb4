// Max pooling over the cells of grids over regions. A region: image, x1, y1, x2, y2.
#include "common.cuh"

__device__ __forceinline__ bool is_number(T v) { return v - v == 0; }

// Whether a region is of an image, with ends; else it is reported.
__device__ __forceinline__ bool is_region(const T *region, i64 index, i64 images, i64 *fault, i64 code) {
  bool image = region[0] >= 0 && region[0] < (T)images;
  for (int i = 0; i < 5; i++) {
    if (is_number(region[i]) && (i || image)) continue;
    report(fault, code, index, (double)region[i]);
    return false;
  }
  return true;
}

// The nearest whole number, halves away from zero, as C rounds; what is beyond any plane comes nearer.
__device__ __forceinline__ i64 rounded(T v) {
  double value = v, far = 1073741824.0;
  value = value < -far ? -far : value > far ? far : value;
  return (i64)(value >= 0 ? floor(value + 0.5) : ceil(value - 0.5));
}

// Cell `index` of `count` over a region from `low` to `high`: where it begins and ends inside [0, limit). In T, since a
// rounding error may make the difference of a whole row.
struct Cell {
  i64 begin, end;

  __device__ __forceinline__ Cell(i64 index, i64 count, T low, T high, T scale, i64 limit) {
    i64 first = rounded(low * scale), last = rounded(high * scale);
    T size = (T)(last < first ? 1 : last - first + 1) / (T)count;
    begin = inside((i64)floor((T)index * size) + first, limit);
    end = inside((i64)ceil((T)(index + 1) * size) + first, limit);
  }

  static __device__ __forceinline__ i64 inside(i64 v, i64 limit) { return v < 0 ? 0 : v < limit ? v : limit; }
};

// y (count, channels, rows, columns), n elements; argmax is null if not wanted.
extern "C" __global__ void largest_of_cells(const D *x, const T *regions, D *y, int *argmax, i64 n, i64 images,
                                            i64 channels, i64 height, i64 width, i64 rows, i64 columns, T scale,
                                            i64 *fault, i64 code) {
  FOR(i, n) {
    i64 q = i % columns, r = i / columns % rows, plane = i / (rows * columns), k = plane / channels;
    const T *region = regions + 5 * k;
    T value = 0;
    int place = -1;
    if (is_region(region, k, images, fault, code)) {
      Cell down(r, rows, region[2], region[4], scale, height), across(q, columns, region[1], region[3], scale, width);
      const D *from = x + ((i64)region[0] * channels + plane % channels) * height * width;
      for (i64 h = down.begin; h < down.end; h++)
        for (i64 w = across.begin; w < across.end; w++) {
          T v = from[h * width + w];
          if (place < 0 || v > value || v != v) {
            value = v;
            place = (int)(h * width + w);
          }
        }
    }
    y[i] = value;
    if (argmax) argmax[i] = place;
  }
}

// dx = the sum of dy over the cells whose value came from there, in their order: a block for each plane of dx, in which
// all threads read all places, and each adds those that are its own, every 256th. No two write to one place.
extern "C" __global__ void add_to_largest(const D *dy, const T *regions, const int *argmax, D *dx, i64 count, i64 cells,
                                          i64 images, i64 channels, i64 plane_size, i64 *fault, i64 code) {
  __shared__ int places[256];
  __shared__ T values[256];
  i64 image = blockIdx.x / channels, channel = blockIdx.x % channels;
  D *to = dx + blockIdx.x * plane_size;
  for (i64 i = threadIdx.x; i < plane_size; i += blockDim.x) to[i] = 0;
  for (i64 first = 0; first < count * cells; first += blockDim.x) {
    i64 i = first + threadIdx.x, k = i / cells;
    int place = -1;
    if (i < count * cells && is_region(regions + 5 * k, k, images, fault, code) && (i64)regions[5 * k] == image) {
      i64 at = (k * channels + channel) * cells + i % cells;
      place = argmax[at];
      values[threadIdx.x] = dy[at];
    }
    places[threadIdx.x] = place;
    __syncthreads();
    for (u32 j = 0; j < blockDim.x; j++)
      if (places[j] >= 0 && (u32)places[j] % 256 == threadIdx.x) to[places[j]] += values[j];
    __syncthreads();
  }
}
