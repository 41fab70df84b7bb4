#include "common.cuh"

// Gradients of a batch norm of y = w x, from sums over x and over the gradient g of what it makes: products (outputs, inputs)
// of g and x, squares (inputs, inputs) of x and x, sum_g (outputs) and sum_x (inputs), of `count` numbers a channel. The
// formulas are in net/plan/sources.py.

// A block's threads are some rows of `width`, a power of two: each row has a share of the terms of as many sums, which `joined`
// adds up for the first of them.
#define ROWS_OF(width) int width = 1024; while (width > 32 && width / 2 >= inputs) width /= 2; \
  int lane = threadIdx.x & (width - 1), row = threadIdx.x / width, rows = blockDim.x / width

__device__ __forceinline__ T joined(T value, T *shared, int lane, int row, int rows, int width) {
  __syncthreads();
  shared[threadIdx.x] = value;
  __syncthreads();
  if (row == 0)
    for (int i = 1; i < rows; i++) value += shared[i * width + lane];
  return value;
}

// Of each output, a block: what its weights, gamma and beta get, the weights of_g by which g goes into the gradient of x,
// and in `factors` (2, outputs) by what its weights go into that of x itself, and into what all of it gets.
extern "C" __global__ void __launch_bounds__(1024)
    weights_from_sums(const D *products, const D *squares, const D *sum_g, const D *sum_x, const D *w, const T *inv_std,
                      const D *gamma, D *dw, D *dgamma, D *dbeta, D *of_g, T *factors, i64 outputs, i64 inputs,
                      double count, int accumulate) {
  __shared__ double sums[32];
  __shared__ T shared[1024];
  ROWS_OF(width);
  i64 c = blockIdx.x, begin = c * inputs;
  double total = sum_g[c], along = 0;
  auto centred = [=](i64 k) { return (double)products[begin + k] - total * ((double)sum_x[k] / count); };
  for (i64 k = threadIdx.x; k < inputs; k += blockDim.x) along += (double)w[begin + k] * centred(k);
  along = block_sum(along, sums) * (double)inv_std[c];
  double times = (double)inv_std[c] * (gamma ? (double)gamma[c] : 1.0), back = along * (double)inv_std[c] / count;
  for (i64 first = 0; first < inputs; first += width) {
    i64 k = first + lane;
    T mean = k < inputs ? (T)((double)sum_x[k] / count) : (T)0, over = 0;
    if (k < inputs) {
#pragma unroll 4
      for (i64 j = row; j < inputs; j += rows)
        over += (T)w[begin + j] * fma(-(T)sum_x[j], mean, (T)squares[j * inputs + k]);
    }
    over = joined(over, shared, lane, row, rows, width);
    if (row == 0 && k < inputs) {
      T gradient = (T)(times * (centred(k) - back * (double)over));
      dw[begin + k] = accumulate ? dw[begin + k] + gradient : gradient;
      of_g[begin + k] = (T)times * w[begin + k];
    }
  }
  if (threadIdx.x == 0) {
    if (dgamma) dgamma[c] = accumulate ? dgamma[c] + (T)along : (T)along;
    if (dbeta) dbeta[c] = accumulate ? dbeta[c] + (T)total : (T)total;
    factors[c] = (T)(-times * back);
    factors[outputs + c] = (T)(-times * total / count);
  }
}

// Of each input, a block: the weights of_x by which x goes into its own gradient, and the shift that all of it gets.
extern "C" __global__ void __launch_bounds__(1024)
    source_from_factors(const D *w, const T *factors, const D *sum_x, D *of_x, D *shift, i64 outputs, i64 inputs,
                        double count) {
  __shared__ double sums[32];
  __shared__ T shared[1024];
  ROWS_OF(width);
  i64 k = blockIdx.x;
  double plus = 0;
  for (i64 c = threadIdx.x; c < outputs; c += blockDim.x) plus += (double)w[c * inputs + k] * (double)factors[outputs + c];
  for (i64 first = 0; first < inputs; first += width) {
    i64 j = first + lane;
    T into = 0;
    if (j < inputs) {
#pragma unroll 4
      for (i64 c = row; c < outputs; c += rows) into += w[c * inputs + k] * factors[c] * w[c * inputs + j];
    }
    into = joined(into, shared, lane, row, rows, width);
    if (row == 0 && j < inputs) {
      of_x[k * inputs + j] = into;
      plus -= (double)into * ((double)sum_x[j] / count);
    }
  }
  plus = block_sum(plus, sums);
  if (threadIdx.x == 0) shift[k] = (T)plus;
}
