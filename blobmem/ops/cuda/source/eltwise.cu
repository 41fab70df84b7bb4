#include "common.cuh"

// The kernels over several inputs have the inputs' addresses in a Dims, of which `count` are used. Any input may be the
// output: all of them are read at an element before it is written.

__device__ __forceinline__ bool all_aligned(Dims xs, int count) {
  bool all = true;
#pragma unroll
  for (int k = 0; k < 8; k++) all = all && (k >= count || aligned((const D *)xs.at[k]));
  return all;
}

// y[i] = f over k of (running value, input k's element, k), from input 0's element through `first`.
template <class First, class F>
__device__ __forceinline__ void fold(Dims xs, int count, D *y, i64 n, First first, F f) {
  i64 packs = aligned(y) && all_aligned(xs, count) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Lot<PACK> total = load<PACK>((const D *)xs.at[0], i * PACK);
#pragma unroll
    for (int j = 0; j < PACK; j++) total.at[j] = first(total.at[j]);
#pragma unroll
    for (int k = 1; k < 8; k++) {
      if (k >= count) continue;
      Lot<PACK> a = load<PACK>((const D *)xs.at[k], i * PACK);
#pragma unroll
      for (int j = 0; j < PACK; j++) total.at[j] = f(total.at[j], a.at[j], k);
    }
    store<PACK>(y, i * PACK, total);
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) {
    i64 at = packs * PACK + i;
    T total = first(((const D *)xs.at[0])[at]);
#pragma unroll
    for (int k = 1; k < 8; k++)
      if (k < count) total = f(total, ((const D *)xs.at[k])[at], k);
    y[at] = total;
  }
}

extern "C" __global__ void sum_two(const D *a, const D *b, D *y, i64 n, T times_a, T times_b) {
  map2(a, b, y, n, [=](T v, T w) { return v * times_a + w * times_b; });
}

extern "C" __global__ void sum(Dims xs, int count, D *y, i64 n, T c0, T c1, T c2, T c3, T c4, T c5, T c6, T c7) {
  T c[8] = {c0, c1, c2, c3, c4, c5, c6, c7};
  fold(xs, count, y, n, [=](T v) { return v * c[0]; }, [=](T total, T v, int k) { return total + v * c[k]; });
}

extern "C" __global__ void product_two(const D *a, const D *b, D *y, i64 n) {
  map2(a, b, y, n, [](T v, T w) { return v * w; });
}

extern "C" __global__ void product(Dims xs, int count, D *y, i64 n) {
  fold(xs, count, y, n, [](T v) { return v; }, [](T total, T v, int) { return total * v; });
}

extern "C" __global__ void scaled(const D *x, D *y, i64 n, T times) {
  map1(x, y, n, [=](T v) { return v * times; });
}

extern "C" __global__ void multiply(const D *x, D *y, i64 n, const T *number, int adds) {
  T times = *number;
  if (adds)
    map2(x, y, y, n, [=](T v, T sum) { return sum + v * times; });
  else
    map1(x, y, n, [=](T v) { return v * times; });
}

extern "C" __global__ void quotient_gradient(const D *dy, const D *x, const D *y, D *dx, i64 n) {
  map3(dy, x, y, dx, n, [](T g, T v, T w) { return w / v * g; });
}

struct __align__(PACK < 4 ? 4 * PACK : 16) Indices { int at[PACK]; };

// The largest so far and whose it is. Of equal ones it is the input of the lower index, but 1 wins against 0.
__device__ __forceinline__ void take_larger(T &largest, int &whose, T v, int k) {
  bool before = (k < 2 ? 1 - k : k) < (whose < 2 ? 1 - whose : whose);
  if (v > largest || (v == largest && before)) whose = k;
  if (v > largest || v != v) largest = v;
}

// `indices` are the inputs' own; a negative one at first says that mask has them already, from an earlier launch.
extern "C" __global__ void maximum(Dims xs, Dims indices, int count, D *y, int *mask, i64 n) {
  bool resumes = indices.at[0] < 0;
  i64 packs = aligned(y) && aligned(mask) && all_aligned(xs, count) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Lot<PACK> largest = load<PACK>((const D *)xs.at[0], i * PACK);
    Indices whose;
    if (resumes) whose = ((const Indices *)mask)[i];
#pragma unroll
    for (int j = 0; j < PACK; j++) whose.at[j] = resumes ? whose.at[j] : (int)indices.at[0];
#pragma unroll
    for (int k = 1; k < 8; k++) {
      if (k >= count) continue;
      Lot<PACK> a = load<PACK>((const D *)xs.at[k], i * PACK);
#pragma unroll
      for (int j = 0; j < PACK; j++) take_larger(largest.at[j], whose.at[j], a.at[j], (int)indices.at[k]);
    }
    store<PACK>(y, i * PACK, largest);
    ((Indices *)mask)[i] = whose;
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) {
    i64 at = packs * PACK + i;
    T largest = ((const D *)xs.at[0])[at];
    int whose = resumes ? mask[at] : (int)indices.at[0];
#pragma unroll
    for (int k = 1; k < 8; k++)
      if (k < count) take_larger(largest, whose, ((const D *)xs.at[k])[at], (int)indices.at[k]);
    y[at] = largest;
    mask[at] = whose;
  }
}

extern "C" __global__ void maximum_gradient(const D *dy, const int *mask, D *dx, i64 n, int index) {
  i64 packs = aligned(dy) && aligned(mask) && aligned(dx) ? n / PACK : 0;
#pragma unroll 1
  FOR(i, packs) {
    Lot<PACK> g = load<PACK>(dy, i * PACK);
    Indices whose = ((const Indices *)mask)[i];
#pragma unroll
    for (int j = 0; j < PACK; j++) g.at[j] = whose.at[j] == index ? g.at[j] : (T)0;
    store<PACK>(dx, i * PACK, g);
  }
#pragma unroll 1
  FOR(i, n - packs * PACK) {
    i64 k = packs * PACK + i;
    dx[k] = mask[k] == index ? dy[k] : (T)0;
  }
}
