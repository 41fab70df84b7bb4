// Reductions by channel of arrays (outer, channels, inner). A channel's elements are `outer` runs of `inner`; they are
// looked after in places of W elements, W being PACK where runs are made of whole packs and 1 elsewhere. A channel may
// be cut into `splits` parts of about equal length, a block each. Sums go up in a fixed order, across threads in
// double precision.
// Needs common.cuh.

// Whether runs of `inner` elements are whole packs; the arrays must be aligned too.
__device__ __forceinline__ bool whole_packs(i64 inner) { return inner % PACK == 0; }

// The places of one channel from `first` on, `step` at a time: `at` is the offset of the place's first element, `outer`
// and `place` where that is. One division at the start; from there on it is counted.
template <int W> struct Walk {
  i64 at, outer, place;
  i64 places, step_at, step_outer, step_place, wrap;
  __device__ __forceinline__ Walk(i64 channels, i64 inner, i64 c, i64 first, i64 step) {
    places = inner / W;
    outer = first / places;
    place = first - outer * places;
    at = (outer * channels + c) * inner + place * W;
    step_outer = step / places;
    step_place = step - step_outer * places;
    step_at = step_outer * channels * inner + step_place * W;
    wrap = (channels - 1) * inner;
  }
  __device__ __forceinline__ void next() {
    at += step_at;
    outer += step_outer;
    place += step_place;
    if (place >= places) {
      place -= places;
      outer++;
      at += wrap;
    }
  }
};

// The places [first, stop) of part s of `splits`.
struct Part {
  i64 first, stop;
  __device__ __forceinline__ Part(i64 places, i64 s, i64 splits)
      : first(places * s / splits), stop(places * (s + 1) / splits) {}
};

// put(get(i)) for i from `first` on, `step` at a time, below `stop`; COUNT loads are in flight at once. The compiler
// cannot arrange that by itself: stores may alias the loads, and the loop may end after any.
template <int COUNT, class G, class P>
__device__ __forceinline__ void grouped(i64 first, i64 stop, i64 step, G get, P put) {
  i64 i = first;
  for (; i + (COUNT - 1) * step < stop; i += COUNT * step) {
    decltype(get(i)) values[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) values[k] = get(i + k * step);
#pragma unroll
    for (int k = 0; k < COUNT; k++) put(values[k]);
  }
  for (; i < stop; i += step) put(get(i));
}

// put(get(walk)) for each place of a part that thread `thread` of `step` looks after.
template <int W, int COUNT, class G, class P>
__device__ __forceinline__ void for_places(i64 channels, i64 inner, i64 c, Part part, int thread, int step, G get,
                                           P put) {
  Walk<W> walk(channels, inner, c, part.first + thread, step);
  auto get_next = [&](i64) {
    auto value = get(walk);
    walk.next();
    return value;
  };
  grouped<COUNT>(part.first + thread, part.stop, step, get_next, put);
}

template <class V> struct Found { i64 at; V value; };  // at an offset

// put(offset, get(offset)) for each place.
template <int W, int COUNT, class G, class P>
__device__ __forceinline__ void map_places(i64 channels, i64 inner, i64 c, Part part, int thread, int step, G get,
                                           P put) {
  typedef Found<decltype(get((i64)0))> Value;
  for_places<W, COUNT>(
      channels, inner, c, part, thread, step, [&](const Walk<W> &walk) { return Value{walk.at, get(walk.at)}; },
      [&](const Value &found) { put(found.at, found.value); });
}

// The sum over the warps of a block, lane by lane; `sums` may be used again after the call. Every thread gets it.
__device__ __forceinline__ double lane_sum(double value, double (&sums)[32][33]) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  __syncthreads();
  sums[warp][lane] = value;
  __syncthreads();
  value = sums[0][lane];
  for (int i = 1; i < warps; i++) value += sums[i][lane];
  return value;
}

// The sum of every second number from parts[0] on, n of them, in a fixed order; every thread of the block gets it.
__device__ __forceinline__ double block_sum_of_pairs(const double *parts, i64 n, double *shared) {
  double total = 0;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) total += parts[2 * i];
  return block_sum(total, shared);
}
