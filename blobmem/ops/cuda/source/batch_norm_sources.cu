#include "common.cuh"

// Moments and gradients of a batch norm of y = w x, from sums over x and over the gradient g of what it makes: products
// (outputs, inputs) of g and x, squares (inputs, inputs) of x and x, sum_g (outputs) and sum_x (inputs), of `count` numbers a
// channel. The formulas are in net/plan/sources.py.

// A block's threads are some rows of `width`, a power of two: each row has a share of the terms of as many sums, which `joined`
// adds up for the first of them.
#define ROWS_OF(width) int width = 1024; while (width > 32 && width / 2 >= inputs) width /= 2; \
  int lane = threadIdx.x & (width - 1), row = threadIdx.x / width, rows = blockDim.x / width

#define EACH 4  // outputs, or inputs, of a block: it reads all of a matrix for them

__device__ __forceinline__ T joined(T value, T *shared, int lane, int row, int rows, int width) {
  __syncthreads();
  shared[threadIdx.x] = value;
  __syncthreads();
  if (row == 0)
    for (int i = 1; i < rows; i++) value += shared[i * width + lane];
  return value;
}

// Of each output the sum over inputs j of w times the k-th column of what is left of squares without the means: a share of it.
__device__ __forceinline__ void add_columns(T *over, const D *w, const i64 *of, const D *squares, const D *sum_x, double mean,
                                            i64 k, i64 inputs, int row, int rows) {
#pragma unroll 4
  for (i64 j = row; j < inputs; j += rows) {
    T square = fma(-(T)sum_x[j], (T)mean, (T)squares[j * inputs + k]);
#pragma unroll
    for (int e = 0; e < EACH; e++) over[e] += (T)w[of[e] * inputs + j] * square;
  }
}

// Of each output its mean, and the sum of squared distances from it.
extern "C" __global__ void __launch_bounds__(1024)
    moments_from_sums(const D *squares, const D *sum_x, const D *w, double *moments, i64 outputs, i64 inputs, double count) {
  __shared__ double sums[32];
  ROWS_OF(width);
  i64 first_of = blockIdx.x * (i64)EACH;
  i64 of[EACH];  // the outputs; behind the last it again
  double plain[EACH] = {}, spread[EACH] = {};
#pragma unroll
  for (int e = 0; e < EACH; e++) of[e] = min(first_of + e, outputs - 1);
  for (i64 k = lane; k < inputs; k += width) {
    double mean = (double)sum_x[k] / count;
    T over[EACH] = {};
    add_columns(over, w, of, squares, sum_x, mean, k, inputs, row, rows);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      double factor = w[of[e] * inputs + k];
      if (row == 0) plain[e] += factor * mean;
      spread[e] += factor * (double)over[e];
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    double mean = block_sum(plain[e], sums), all = block_sum(spread[e], sums);
    if (threadIdx.x == 0 && first_of + e < outputs) {
      moments[of[e]] = mean;
      moments[outputs + of[e]] = all > 0 ? all : 0;  // rounding may have left less
    }
  }
}

// Of each output what its weights, gamma and beta get, the weights of_g by which g goes into the gradient of x, and in
// `factors` (2, outputs) by what its weights go into that of x itself, and into what all of it gets.
extern "C" __global__ void __launch_bounds__(1024)
    weights_from_sums(const D *products, const D *squares, const D *sum_g, const D *sum_x, const D *w, const T *inv_std,
                      const D *gamma, D *dw, D *dgamma, D *dbeta, D *of_g, T *factors, i64 outputs, i64 inputs,
                      double count, int accumulate) {
  __shared__ double sums[32];
  __shared__ T shared[1024];
  ROWS_OF(width);
  i64 first_of = blockIdx.x * (i64)EACH;
  i64 of[EACH];  // the outputs; behind the last it again
  double times[EACH], back[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    i64 c = of[e] = min(first_of + e, outputs - 1);
    double total = sum_g[c], along = 0;
    for (i64 k = threadIdx.x; k < inputs; k += blockDim.x)
      along += (double)w[c * inputs + k] * ((double)products[c * inputs + k] - total * ((double)sum_x[k] / count));
    along = block_sum(along, sums) * (double)inv_std[c];
    times[e] = (double)inv_std[c] * (gamma ? (double)gamma[c] : 1.0), back[e] = along * (double)inv_std[c] / count;
    if (threadIdx.x == 0 && first_of + e < outputs) {
      if (dgamma) dgamma[c] = accumulate ? dgamma[c] + (T)along : (T)along;
      if (dbeta) dbeta[c] = accumulate ? dbeta[c] + (T)total : (T)total;
      factors[c] = (T)(-times[e] * back[e]);
      factors[outputs + c] = (T)(-times[e] * total / count);
    }
  }
  for (i64 first = 0; first < inputs; first += width) {
    i64 k = first + lane;
    double mean = k < inputs ? (double)sum_x[k] / count : 0;
    T over[EACH] = {};
    if (k < inputs) add_columns(over, w, of, squares, sum_x, mean, k, inputs, row, rows);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      T all = joined(over[e], shared, lane, row, rows, width);
      if (row == 0 && k < inputs && first_of + e < outputs) {
        i64 at = of[e] * inputs + k;
        T gradient = (T)(times[e] * ((double)products[at] - (double)sum_g[of[e]] * mean - back[e] * (double)all));
        dw[at] = accumulate ? dw[at] + gradient : gradient;
        of_g[at] = (T)times[e] * w[at];
      }
    }
  }
}

// Of each input the weights of_x by which x goes into its own gradient, and the shift that all of it gets.
extern "C" __global__ void __launch_bounds__(1024)
    source_from_factors(const D *w, const T *factors, const D *sum_x, D *of_x, D *shift, i64 outputs, i64 inputs,
                        double count) {
  __shared__ double sums[32];
  __shared__ T shared[1024];
  ROWS_OF(width);
  i64 first_of = blockIdx.x * (i64)EACH;
  i64 of[EACH];  // the inputs; behind the last it again
  double plus[EACH] = {};
#pragma unroll
  for (int e = 0; e < EACH; e++) of[e] = min(first_of + e, inputs - 1);
  for (i64 c = threadIdx.x; c < outputs; c += blockDim.x) {
#pragma unroll
    for (int e = 0; e < EACH; e++) plus[e] += (double)w[c * inputs + of[e]] * (double)factors[outputs + c];
  }
  for (i64 first = 0; first < inputs; first += width) {
    i64 j = first + lane;
    T into[EACH] = {};
    if (j < inputs) {
#pragma unroll 4
      for (i64 c = row; c < outputs; c += rows) {
        T factor = factors[c] * w[c * inputs + j];
#pragma unroll
        for (int e = 0; e < EACH; e++) into[e] += w[c * inputs + of[e]] * factor;
      }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      T all = joined(into[e], shared, lane, row, rows, width);
      if (row == 0 && j < inputs && first_of + e < inputs) {
        of_x[of[e] * inputs + j] = all;
        plus[e] -= (double)all * ((double)sum_x[j] / count);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    double all = block_sum(plus[e], sums);
    if (threadIdx.x == 0 && first_of + e < inputs) shift[of[e]] = (T)all;
  }
}
