#include "common.cuh"

// A step reads the gradient once and goes over the parameter and its history in place. The gradient's own array stays.

// scale * diff + decay * pull; the pull is the value itself, or with `l1` its sign.
struct Gradient {
  T decay, scale;
  int l1;
  __device__ __forceinline__ T operator()(T diff, T value) const {
    T sign = value > 0 ? (T)1 : value < 0 ? (T)-1 : (T)0;
    return diff * scale + decay * (l1 ? sign : value);
  }
};

// step(gradient, value, history) changes the last two.
template <class F>
__device__ __forceinline__ void update1(const T *diff, T *data, T *history, i64 n, Gradient of, F step) {
  i64 packs = aligned(diff) && aligned(data) && aligned(history) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Pack d = ((const Pack *)diff)[i], v = ((const Pack *)data)[i], h = ((const Pack *)history)[i];
#pragma unroll
    for (int j = 0; j < PACK; j++) step(of(d.at[j], v.at[j]), v.at[j], h.at[j]);
    ((Pack *)data)[i] = v;
    ((Pack *)history)[i] = h;
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) {
    i64 k = packs * PACK + i;
    step(of(diff[k], data[k]), data[k], history[k]);
  }
}

// step(gradient, value, first, second) changes the last three.
template <class F>
__device__ __forceinline__ void update2(const T *diff, T *data, T *first, T *second, i64 n, Gradient of, F step) {
  i64 packs = aligned(diff) && aligned(data) && aligned(first) && aligned(second) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Pack d = ((const Pack *)diff)[i], v = ((const Pack *)data)[i];
    Pack a = ((const Pack *)first)[i], b = ((const Pack *)second)[i];
#pragma unroll
    for (int j = 0; j < PACK; j++) step(of(d.at[j], v.at[j]), v.at[j], a.at[j], b.at[j]);
    ((Pack *)data)[i] = v;
    ((Pack *)first)[i] = a;
    ((Pack *)second)[i] = b;
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) {
    i64 k = packs * PACK + i;
    step(of(diff[k], data[k]), data[k], first[k], second[k]);
  }
}

extern "C" __global__ void sgd(const T *diff, T *data, T *history, i64 n, int l1, T decay, T scale, T rate, T momentum) {
  update1(diff, data, history, n, Gradient{decay, scale, l1}, [=](T g, T &value, T &h) {
    h = momentum * h + rate * g;
    value -= h;
  });
}

extern "C" __global__ void nesterov(const T *diff, T *data, T *history, i64 n, int l1, T decay, T scale, T rate,
                                    T momentum) {
  update1(diff, data, history, n, Gradient{decay, scale, l1}, [=](T g, T &value, T &h) {
    T before = h;
    h = momentum * before + rate * g;
    value -= (1 + momentum) * h - momentum * before;
  });
}

extern "C" __global__ void adagrad(const T *diff, T *data, T *history, i64 n, int l1, T decay, T scale, T rate,
                                   T delta) {
  update1(diff, data, history, n, Gradient{decay, scale, l1}, [=](T g, T &value, T &h) {
    h += g * g;
    value -= rate * (g / (sqrt(h) + delta));
  });
}

extern "C" __global__ void rmsprop(const T *diff, T *data, T *history, i64 n, int l1, T decay, T scale, T rate,
                                   T rms_decay, T delta) {
  update1(diff, data, history, n, Gradient{decay, scale, l1}, [=](T g, T &value, T &h) {
    h = rms_decay * h + (1 - rms_decay) * (g * g);
    value -= rate * (g / (sqrt(h) + delta));
  });
}

extern "C" __global__ void adadelta(const T *diff, T *data, T *gradients, T *updates, i64 n, int l1, T decay, T scale,
                                    T rate, T momentum, T delta) {
  update2(diff, data, gradients, updates, n, Gradient{decay, scale, l1}, [=](T g, T &value, T &square, T &move) {
    square = momentum * square + (1 - momentum) * (g * g);
    T step = g * sqrt((move + delta) / (square + delta));
    move = momentum * move + (1 - momentum) * (step * step);
    value -= rate * step;
  });
}

extern "C" __global__ void adam(const T *diff, T *data, T *first, T *second, i64 n, int l1, T decay, T scale, T rate,
                                T momentum, T momentum2, T delta) {
  update2(diff, data, first, second, n, Gradient{decay, scale, l1}, [=](T g, T &value, T &mean, T &square) {
    mean = momentum * mean + (1 - momentum) * g;
    square = momentum2 * square + (1 - momentum2) * (g * g);
    value -= rate * (mean / (sqrt(square) + delta));
  });
}

// Adds to the one of the two outputs that is there.
__device__ __forceinline__ void add_to(double *wide, float *narrow, double value) {
  if (wide)
    *wide += value;
  else
    *narrow = (float)(*narrow + value);
}

// The sum of squares: each block's into `parts`, or where there is one block only, added to the output.
extern "C" __global__ void sumsq(const T *x, i64 n, double *parts, double *wide, float *narrow) {
  __shared__ double shared[32];
  double total = 0;
  i64 packs = aligned(x) ? n / PACK : 0;
  FOR(i, packs) {
    Pack a = ((const Pack *)x)[i];
#pragma unroll
    for (int j = 0; j < PACK; j++) total += (double)a.at[j] * (double)a.at[j];
  }
  FOR(i, n - packs * PACK) {
    double v = x[packs * PACK + i];
    total += v * v;
  }
  total = block_sum(total, shared);
  if (threadIdx.x) return;
  if (gridDim.x > 1)
    parts[blockIdx.x] = total;
  else
    add_to(wide, narrow, total);
}

// One block: adds up the parts.
extern "C" __global__ void add_parts(const double *parts, i64 count, double *wide, float *narrow) {
  __shared__ double shared[32];
  double total = 0;
  FOR(i, count) total += parts[i];
  total = block_sum(total, shared);
  if (threadIdx.x == 0) add_to(wide, narrow, total);
}
