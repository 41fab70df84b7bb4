#include "loss.cuh"

extern "C" __global__ void hinge_loss(const D *x, const T *label, T *loss, double *parts, i64 batch, int classes,
                                      int slices, int squared, double divisor, i64 *fault, i64 code) {
  __shared__ double sums[32];
  double total = 0;
  strips(batch, slices, [&](i64 at, int slice) {
    if (at >= batch) return;
    int wanted = class_of(label, at, classes, slice == 0, fault, code);
    if (wanted < 0) return;
    for (int c = slice; c < classes; c += slices) {
      T v = x[at * classes + c];
      double margin = (double)(c == wanted ? 1 - v : 1 + v);
      if (!(margin <= 0)) total += squared ? margin * margin : margin;  // not a number counts
    }
  });
  put_loss(total, 0, loss, parts, divisor, sums);
}

extern "C" __global__ void hinge_gradient(const D *x, const T *label, const T *dloss, D *dx, i64 batch, int classes,
                                          int slices, int squared, double divisor, i64 *fault, i64 code) {
  T scale = (T)((double)dloss[0] / divisor);
  strips(batch, slices, [&](i64 at, int slice) {
    if (at >= batch) return;
    int wanted = class_of(label, at, classes, slice == 0, fault, code);
    for (int c = slice; c < classes; c += slices) {
      i64 k = at * classes + c;
      T sign = c == wanted ? -1 : 1, margin = 1 + sign * x[k];
      dx[k] = wanted < 0 || margin <= 0 ? (T)0 : scale * (sign * (squared ? 2 * margin : (T)1));
    }
  });
}

extern "C" __global__ void multinomial_loss(const D *prob, const T *label, T *loss, double *parts, i64 batch,
                                            int classes, double least, double divisor, i64 *fault, i64 code) {
  __shared__ double sums[32];
  double total = 0;
  FOR(i, batch) {
    int wanted = class_of(label, i, classes, true, fault, code);
    if (wanted < 0) continue;
    double p = (double)prob[i * classes + wanted];
    total -= log(p < least ? least : p);
  }
  put_loss(total, 0, loss, parts, divisor, sums);
}

extern "C" __global__ void multinomial_gradient(const D *prob, const T *label, const T *dloss, D *dprob, i64 batch,
                                                int classes, int slices, double least, double divisor, i64 *fault,
                                                i64 code) {
  T scale = (T)(-(double)dloss[0] / divisor);
  strips(batch, slices, [&](i64 at, int slice) {
    if (at >= batch) return;
    int wanted = class_of(label, at, classes, slice == 0, fault, code);
    for (int c = slice; c < classes; c += slices) {
      i64 k = at * classes + c;
      T p = c == wanted ? prob[k] : (T)1;
      dprob[k] = c == wanted ? scale / ((double)p < least ? (T)least : p) : (T)0;
    }
  });
}

// prob = softmax of x, and the sum of -gain[label] . log prob.
extern "C" __global__ void infogain_loss(const D *x, const T *label, const T *gain, T *prob, T *loss, double *parts,
                                         i64 positions, int classes, i64 inner, int slices, T ignore, double least,
                                         double divisor, i64 *fault, i64 code) {
  __shared__ T shared[THREADS];
  __shared__ double sums[32];
  double total = 0, count = 0;
  strips(positions, slices, [&](i64 at, int slice) {
    i64 row = row_of(at, classes, inner);
    softmax_strip(x + row, prob + row, at < positions, classes, inner, slice, slices, shared);
    __syncthreads();  // probabilities that are read here may be another thread's
    if (at >= positions) return;
    int wanted = class_of(label, at, classes, ignore, slice == 0, fault, code);
    if (wanted < 0) return;
    const T *gains = gain + (i64)wanted * classes;
    for (int c = slice; c < classes; c += slices) {
      if (gains[c] == 0) continue;
      double p = (double)prob[row + c * inner];
      total -= (double)gains[c] * log(p < least ? least : p);
    }
    if (slice == 0) count += 1;
  });
  put_loss(total, count, loss, parts, divisor, sums);
}

// sums[row] = the sum of the row of gain; a block for each.
extern "C" __global__ void gain_sums(const T *gain, double *sums, int classes) {
  __shared__ double shared[32];
  double sum = 0;
  for (int c = threadIdx.x; c < classes; c += blockDim.x) sum += (double)gain[(i64)blockIdx.x * classes + c];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void infogain_gradient(const T *prob, const T *label, const T *gain, const T *dloss, D *dx,
                                             const double *row_sums, const double *parts, int counts, i64 positions,
                                             int classes, i64 inner, int slices, T ignore, double divisor, i64 *fault,
                                             i64 code) {
  __shared__ double sums[32];
  T scale = (T)gradient_scale(dloss, divisor, parts, counts, sums);
  strips(positions, slices, [&](i64 at, int slice) {
    if (at >= positions) return;
    i64 row = row_of(at, classes, inner);
    int wanted = class_of(label, at, classes, ignore, slice == 0, fault, code);
    T sum = wanted < 0 ? (T)0 : (T)row_sums[wanted];
    for (int c = slice; c < classes; c += slices) {
      i64 k = row + c * inner;
      dx[k] = wanted < 0 ? (T)0 : scale * (prob[k] * sum - gain[(i64)wanted * classes + c]);
    }
  });
}
