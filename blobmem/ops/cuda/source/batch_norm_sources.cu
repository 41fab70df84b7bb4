#include "common.cuh"

// Gradients of a batch norm of y = w x, from sums over x and over the gradient g of what it makes: products (outputs, inputs)
// of g and x, squares (inputs, inputs) of x and x, sum_g (outputs) and sum_x (inputs), of `count` numbers a channel. The
// formulas are in net/plan/sources.py.

// Of each output, a block: what its weights, gamma and beta get, the weights of_g by which g goes into the gradient of x,
// and in `factors` (2, outputs) by what its weights go into that of x itself, and into what all of it gets.
extern "C" __global__ void __launch_bounds__(256)
    weights_from_sums(const D *products, const D *squares, const D *sum_g, const D *sum_x, const D *w, const T *inv_std,
                      const D *gamma, D *dw, D *dgamma, D *dbeta, D *of_g, T *factors, i64 outputs, i64 inputs,
                      double count, int accumulate) {
  __shared__ double shared[32];
  i64 c = blockIdx.x, row = c * inputs;
  double total = sum_g[c], along = 0;
  for (i64 k = threadIdx.x; k < inputs; k += blockDim.x)
    along += (double)w[row + k] * ((double)products[row + k] - total * ((double)sum_x[k] / count));
  along = block_sum(along, shared) * (double)inv_std[c];
  double times = (double)inv_std[c] * (gamma ? (double)gamma[c] : 1.0), back = along * (double)inv_std[c] / count;
  for (i64 k = threadIdx.x; k < inputs; k += blockDim.x) {
    T mean = (T)((double)sum_x[k] / count), over = 0;
#pragma unroll 4
    for (i64 j = 0; j < inputs; j++) over += (T)w[row + j] * fma(-(T)sum_x[j], mean, (T)squares[j * inputs + k]);
    double own = (double)products[row + k] - total * ((double)sum_x[k] / count);
    T gradient = (T)(times * (own - back * (double)over));
    dw[row + k] = accumulate ? dw[row + k] + gradient : gradient;
    of_g[row + k] = (T)times * w[row + k];
  }
  if (threadIdx.x == 0) {
    if (dgamma) dgamma[c] = accumulate ? dgamma[c] + (T)along : (T)along;
    if (dbeta) dbeta[c] = accumulate ? dbeta[c] + (T)total : (T)total;
    factors[c] = (T)(-times * back);
    factors[outputs + c] = (T)(-times * total / count);
  }
}

// Of each input, a block: the weights of_x by which x goes into its own gradient, and the shift that all of it gets.
extern "C" __global__ void __launch_bounds__(256)
    source_from_factors(const D *w, const T *factors, const D *sum_x, D *of_x, D *shift, i64 outputs, i64 inputs,
                        double count) {
  __shared__ double shared[32];
  i64 k = blockIdx.x;
  double plus = 0;
  for (i64 c = threadIdx.x; c < outputs; c += blockDim.x) plus += (double)w[c * inputs + k] * (double)factors[outputs + c];
  for (i64 j = threadIdx.x; j < inputs; j += blockDim.x) {
    T into = 0;
#pragma unroll 8
    for (i64 c = 0; c < outputs; c++) into += w[c * inputs + k] * factors[c] * w[c * inputs + j];
    of_x[k * inputs + j] = into;
    plus -= (double)into * ((double)sum_x[j] / count);
  }
  plus = block_sum(plus, shared);
  if (threadIdx.x == 0) shift[k] = (T)plus;
}
