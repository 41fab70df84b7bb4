#include "common.cuh"

// What is not a number stays so, except where the result is a comparison.

extern "C" __global__ void absval(const D *x, D *y, i64 n) {
  map1(x, y, n, [](T v) { return fabs(v); });
}

extern "C" __global__ void absval_gradient(const D *x, const D *dy, D *dx, i64 n) {
  map2(x, dy, dx, n, [](T v, T g) { return (v > 0 ? (T)1 : v < 0 ? (T)-1 : v) * g; });
}

extern "C" __global__ void bnll(const D *x, D *y, i64 n) {
  map1(x, y, n, [](T v) { return max_of(v, (T)0) + log1p(exp(-fabs(v))); });
}

extern "C" __global__ void bnll_gradient(const D *y, const D *dy, D *dx, i64 n) {
  map2(y, dy, dx, n, [](T v, T g) { return -expm1(-v) * g; });
}

__device__ __forceinline__ T clip_of(T v, T low, T high) {
  T raised = v < low ? low : v;
  return raised > high ? high : raised;
}

extern "C" __global__ void clip(const D *x, D *y, i64 n, T low, T high) {
  map1(x, y, n, [=](T v) { return clip_of(v, low, high); });
}

extern "C" __global__ void clip_gradient(const D *x, const D *dy, D *dx, i64 n, T low, T high) {
  map2(x, dy, dx, n, [=](T v, T g) { return g * (T)(v == clip_of(v, low, high)); });
}

extern "C" __global__ void elu(const D *x, D *y, i64 n, T alpha) {
  map1(x, y, n, [=](T v) { return v > 0 ? v : alpha * expm1(v); });
}

extern "C" __global__ void elu_gradient(const D *x, const D *y, const D *dy, D *dx, i64 n, T alpha) {
  map3(x, y, dy, dx, n, [=](T v, T w, T g) { return v > 0 ? g : (w + alpha) * g; });
}

extern "C" __global__ void exponential(const D *x, D *y, i64 n, T rate, T offset) {
  map1(x, y, n, [=](T v) { return exp(v * rate + offset); });
}

extern "C" __global__ void exponential_gradient(const D *y, const D *dy, D *dx, i64 n, T rate) {
  map2(y, dy, dx, n, [=](T v, T g) { return v * g * rate; });
}

extern "C" __global__ void logarithm(const D *x, D *y, i64 n, T scale, T shift, T factor) {
  map1(x, y, n, [=](T v) { return log(v * scale + shift) * factor; });
}

extern "C" __global__ void logarithm_gradient(const D *x, const D *dy, D *dx, i64 n, T scale, T shift, T factor) {
  map2(x, dy, dx, n, [=](T v, T g) { return factor / (v * scale + shift) * g; });
}

extern "C" __global__ void relu6(const D *x, D *y, i64 n, T slope) {
  map1(x, y, n, [=](T v) { return v > 0 ? min_of(v, (T)6) : v <= 0 && slope == 0 ? (T)0 : v * slope; });
}

extern "C" __global__ void relu6_gradient(const D *x, const D *dy, D *dx, i64 n, T slope) {
  map2(x, dy, dx, n, [=](T v, T g) { return (v >= 6 ? (T)0 : v > 0 ? (T)1 : slope) * g; });
}

extern "C" __global__ void swish(const D *x, D *y, i64 n, T beta) {
  map1(x, y, n, [=](T v) { return v * sigmoid_of(beta * v); });
}

extern "C" __global__ void swish_gradient(const D *x, const D *dy, D *dx, i64 n, T beta) {
  map2(x, dy, dx, n, [=](T v, T g) {
    T s = sigmoid_of(beta * v);
    return ((1 - s) * v * beta + 1) * s * g;
  });
}

extern "C" __global__ void above(const D *x, D *y, i64 n, T threshold) {
  map1(x, y, n, [=](T v) { return (T)(v > threshold); });
}
