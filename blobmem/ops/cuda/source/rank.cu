#include "loss.cuh"

// The share of labels among the top_k largest, as a loss of hits; tally (may be null): labels seen of each class, then
// labels hit.
extern "C" __global__ void accuracy(const D *x, const T *label, T *share, double *parts, u32 *tally, i64 positions,
                                    int classes, i64 inner, int slices, int top_k, T ignore, i64 *fault, i64 code) {
  __shared__ int shared[THREADS];
  __shared__ double sums[32];
  double hits = 0, seen = 0;
  strips(positions, slices, [&](i64 at, int slice) {
    i64 row = row_of(at, classes, inner);
    int wanted = at < positions ? class_of(label, at, classes, ignore, slice == 0, fault, code) : -1;
    T least = wanted < 0 ? (T)0 : x[row + wanted * inner];
    int end = wanted < 0 ? 0 : classes, better = 0;
    for (int c = slice; c < end; c += slices) better += x[row + c * inner] >= least;
    better = strip_sum(better, shared, slices) - 1;  // it is not better than itself; not a number is never a hit
    if (slice > 0 || wanted < 0) return;
    bool hit = 0 <= better && better < top_k;
    seen += 1;
    hits += hit;
    if (!tally) return;
    atomicAdd(&tally[wanted], 1u);
    if (hit) atomicAdd(&tally[classes + wanted], 1u);
  });
  put_loss(hits, seen, share, parts, 0, sums);
}

extern "C" __global__ void class_shares(const u32 *tally, T *per_class, int classes) {
  FOR(c, classes) per_class[c] = (T)((double)tally[classes + c] / (double)(tally[c] > 0 ? tally[c] : 1));
}

struct Place { T value; int at; };

__device__ __forceinline__ bool before(Place a, Place b) {
  return a.value > b.value || (a.value == b.value && a.at > b.at);
}

// Each largest is searched below the one before; of equals the later is larger, and not a number counts as `lowest`.
extern "C" __global__ void largest(const D *x, T *indices, T *values, i64 positions, int size, i64 inner, int slices,
                                   int top_k, i64 step, T lowest) {
  __shared__ Place shared[THREADS];
  strips(positions, slices, [&](i64 at, int slice) {
    i64 row = row_of(at, size, inner), to = inner == 1 ? at * step : at / inner * step + at % inner;
    bool inside = at < positions;
    Place last = {lowest, -1};
    for (int k = 0; k < top_k; k++) {
      Place best = {lowest, -1};
      for (int c = slice; inside && c < size; c += slices) {
        T value = x[row + c * inner];
        Place other = {value == value ? value : lowest, c};
        if ((last.at < 0 || before(last, other)) && before(other, best)) best = other;
      }
      last = strip_reduce(best, shared, slices, [](Place a, Place b) { return before(b, a) ? b : a; });
      if (slice > 0 || !inside) continue;
      if (indices) indices[to + k * inner] = (T)last.at;
      if (values) values[to + k * inner] = x[row + last.at * inner];
    }
  });
}
