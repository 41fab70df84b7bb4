#include "common.cuh"

// Arrays are filled once, so in double precision, as on the host. Element e takes word e % 4 of block e / 4.

// A word as a number in [0, 1).
__device__ __forceinline__ double uniform_of(u32 word) { return (word >> 8) * (1.0 / 16777216.0); }

// Two words as two independent normal numbers (Box and Muller's transformation).
__device__ __forceinline__ void gauss_of(u32 word_0, u32 word_1, double *values) {
  double radius = sqrt(-2.0 * log((word_0 + 0.5) * (1.0 / 4294967296.0)));
  double angle = word_1 * (2.0 * 3.14159265358979323846 / 4294967296.0);
  values[0] = radius * cos(angle);
  values[1] = radius * sin(angle);
}

extern "C" __global__ void uniform(D *y, i64 n, double low, double span, unsigned k0, unsigned k1, unsigned c2,
                                   unsigned c3) {
#pragma unroll 1
  FOR(i, (n + 3) / 4) {
    Words words = philox(k0, k1, c2, c3, i);
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (4 * i + j < n) y[4 * i + j] = (T)(low + span * uniform_of(words.at[j]));
  }
}

extern "C" __global__ void gauss(D *y, i64 n, double mean, double std, unsigned k0, unsigned k1, unsigned c2,
                                 unsigned c3) {
#pragma unroll 1
  FOR(i, (n + 3) / 4) {
    Words words = philox(k0, k1, c2, c3, i);
    double values[4];
    gauss_of(words.at[0], words.at[1], values);
    gauss_of(words.at[2], words.at[3], values + 2);
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (4 * i + j < n) y[4 * i + j] = (T)(mean + std * values[j]);
  }
}

// Each element stays with probability `keep`, and becomes zero otherwise.
extern "C" __global__ void clear_some(D *y, i64 n, double keep, unsigned k0, unsigned k1, unsigned c2, unsigned c3) {
#pragma unroll 1
  FOR(i, (n + 3) / 4) {
    Words words = philox(k0, k1, c2, c3, i);
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (4 * i + j < n && uniform_of(words.at[j]) >= keep) y[4 * i + j] = 0;
  }
}

// A block for each row of `size` elements, which it divides by their sum.
extern "C" __global__ void normalize_rows(D *y, i64 size) {
  __shared__ double shared[32];
  D *row = y + blockIdx.x * size;
  double total = 0;
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) total += row[i];
  total = block_sum(total, shared);
  for (i64 i = threadIdx.x; i < size; i += blockDim.x) row[i] = (T)(row[i] / total);
}

// Planes of (width, width) that interpolate linearly when a deconvolution enlarges `factor` times.
extern "C" __global__ void bilinear(D *y, i64 n, int width, double factor, double center) {
#pragma unroll 1
  FOR(i, n) {
    int column = i % width, row = i / width % width;
    y[i] = (T)((1 - fabs(row / factor - center)) * (1 - fabs(column / factor - center)));
  }
}
