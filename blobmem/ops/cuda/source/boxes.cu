#include "common.cuh"

#define THREADS 256  // of a block that suppresses

// One size of prior boxes (number `k` of `sizes`) at every point of a plane; y: boxes, then variances.
extern "C" __global__ void prior_boxes(T *y, i64 height, i64 width, int sizes, int k, double half_width,
                                       double half_height, double image_height, double image_width, double step_down,
                                       double step_across, double offset, int clip, double v0, double v1, double v2,
                                       double v3) {
  T *variances = y + height * width * sizes * 4;
  FOR(i, height * width) {
    double x = ((double)(i % width) + offset) * step_across, z = ((double)(i / width) + offset) * step_down;
    double box[4] = {(x - half_width) / image_width, (z - half_height) / image_height, (x + half_width) / image_width,
                     (z + half_height) / image_height};
    double variance[4] = {v0, v1, v2, v3};
    i64 at = (i * sizes + k) * 4;
    for (int j = 0; j < 4; j++) {
      T value = (T)box[j];
      y[at + j] = !clip ? value : value < 0 ? (T)0 : value > 1 ? (T)1 : value;
      variances[at + j] = (T)variance[j];
    }
  }
}

#define CORNER 1
#define CENTER_SIZE 2

// offsets (images, count, places, 4) to boxes (images, places, count, 4); variances may be null.
extern "C" __global__ void decode(const T *offsets, const T *priors, const T *variances, T *boxes, i64 images,
                                  i64 count, i64 places, int code, i64 *fault, i64 fault_code) {
  FOR(i, images * places * count) {
    i64 p = i % count, c = i / count % places, n = i / count / places;
    const T *prior = priors + 4 * p, *offset = offsets + ((n * count + p) * places + c) * 4;
    T x0 = prior[0], y0 = prior[1], x1 = prior[2], y1 = prior[3], wide = x1 - x0, tall = y1 - y0;
    if (code != CORNER && i < count && !(x1 > x0 && y1 > y0)) report(fault, fault_code, p, x1 > x0 ? tall : wide);
    double moves[4];
    for (int j = 0; j < 4; j++) moves[j] = (variances ? (double)variances[4 * p + j] : 1) * (double)offset[j];
    T *box = boxes + 4 * i;
    if (code == CENTER_SIZE) {
      double x = moves[0] * wide + (double)(x0 + x1) / 2, y = moves[1] * tall + (double)(y0 + y1) / 2;
      double w = exp(moves[2]) * wide / 2, h = exp(moves[3]) * tall / 2;
      box[0] = (T)(x - w), box[1] = (T)(y - h), box[2] = (T)(x + w), box[3] = (T)(y + h);
    } else {
      double across = code == CORNER ? 1 : (double)wide, down = code == CORNER ? 1 : (double)tall;
      box[0] = (T)(x0 + moves[0] * across), box[1] = (T)(y0 + moves[1] * down);
      box[2] = (T)(x1 + moves[2] * across), box[3] = (T)(y1 + moves[3] * down);
    }
  }
}

__device__ __forceinline__ T clipped(double value, double limit) {
  return (T)(value < 0 ? 0 : value > limit ? limit : value);
}

// One anchor (number `a` of `anchors`: left, top, width, height) at every point of every image, moved and clipped.
extern "C" __global__ void propose(const T *scores, const T *deltas, const T *info, T *boxes, T *kept_scores,
                                   i64 images, i64 height, i64 width, int numbers, int anchors, int a, double left,
                                   double top, double w, double h, int stride, double least, T not_a_number, i64 *fault,
                                   i64 code) {
  i64 plane = height * width;
  FOR(i, images * plane) {
    i64 n = i / plane, point = i % plane, r = point / width, c = point % width;
    const T *of = info + n * numbers, *moves = deltas + (n * anchors + a) * 4 * plane + point;
    if (point == 0 && a == 0) {
      // the difference of a number and itself is 0, unless it is infinite or not a number
      for (int j = 0; j < (numbers > 3 ? 4 : 3); j++)
        if (!(of[j] > 0 && of[j] - of[j] == 0)) report(fault, code, n, (double)of[j]);
    }
    double right = (double)of[1] - 1, bottom = (double)of[0] - 1;
    double x = (double)(c * stride) + left + 0.5 * w + (double)moves[0] * w;
    double y = (double)(r * stride) + top + 0.5 * h + (double)moves[plane] * h;
    double wide = (double)exp(moves[2 * plane]) * w, tall = (double)exp(moves[3 * plane]) * h;
    i64 place = n * plane * anchors + point * anchors + a;
    T *box = boxes + 4 * place;
    T x0 = clipped(x - 0.5 * wide, right), x1 = clipped(x + 0.5 * wide, right);
    T y0 = clipped(y - 0.5 * tall, bottom), y1 = clipped(y + 0.5 * tall, bottom);
    box[0] = x0, box[1] = y0, box[2] = x1, box[3] = y1;
    bool large = (double)(x1 - x0) + 1 >= least * (double)of[numbers > 3 ? 3 : 2] &&
                 (double)(y1 - y0) + 1 >= least * (double)of[2];
    kept_scores[place] = large ? scores[(n * 2 * anchors + anchors + a) * plane + point] : not_a_number;
  }
}

// Intersection over union; `one` is added to sides.
__device__ __forceinline__ double overlap(const T *a, const T *b, double one) {
  double wide = (double)(min_of(a[2], b[2]) - max_of(a[0], b[0])) + one;
  double tall = (double)(min_of(a[3], b[3]) - max_of(a[1], b[1])) + one;
  if (!(wide > 0 && tall > 0)) return 0;
  double shared = wide * tall;
  double first = ((double)a[2] - (double)a[0] + one) * ((double)a[3] - (double)a[1] + one);
  double second = ((double)b[2] - (double)b[0] + one) * ((double)b[3] - (double)b[1] + one);
  return shared / (first + second - shared);
}

// Whether box a comes before box b: a higher score, or the same and a lower index; -1 comes last.
__device__ __forceinline__ bool precedes(const T *scores, int classes, int a, int b) {
  if (a < 0 || b < 0) return a >= 0;
  T one = scores[(i64)a * classes], other = scores[(i64)b * classes];
  return one > other || (one == other && a < b);
}

// Sort the block's `order`, a power of two long (bitonic).
__device__ __forceinline__ void sort_boxes(int *order, int length, const T *scores, int classes) {
  for (int run = 2; run <= length; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < length; i += THREADS) {
        int j = i ^ step;
        if (j <= i) continue;
        bool falls = (i & run) == 0;
        int a = order[i], b = order[j];
        if (falls ? precedes(scores, classes, b, a) : precedes(scores, classes, a, b)) order[i] = b, order[j] = a;
      }
    }
  }
  __syncthreads();
}

// A block takes a class of an image after another; `orders` has `length` places for each block, `length` the power of
// two that is not below `count`.
extern "C" __global__ void suppress(const T *boxes, const T *scores, int *kept, int *orders, i64 pairs, int count,
                                    int classes, int places, int room, int length, int background, double least,
                                    int entering, double threshold, double eta, double one) {
  __shared__ int entered;
  __shared__ int sums[32];
  int *order = orders + (i64)blockIdx.x * length;
  for (i64 i = blockIdx.x; i < pairs; i += gridDim.x) {
    i64 n = i / classes, c = i % classes;
    int *chosen = kept + i * room;
    const T *score = scores + n * count * classes + c;
    const T *candidates = boxes + (n * places + (places > 1 ? c : 0)) * count * 4;
    __syncthreads();
    if (threadIdx.x == 0) entered = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < count && c != background; p += THREADS)
      if ((double)score[(i64)p * classes] > least) order[atomicAdd(&entered, 1)] = p;  // any order: it is sorted next
    __syncthreads();
    int size = entered, padded = 1;
    while (padded < size) padded *= 2;
    for (int k = size + threadIdx.x; k < padded; k += THREADS) order[k] = -1;
    sort_boxes(order, padded, score, classes);
    int found = 0;
    double limit = threshold;
    for (int k = 0; k < size && k < entering && found < room; k++) {
      const T *box = candidates + (i64)order[k] * 4;
      int bad = 0;
      for (int m = threadIdx.x; m < found; m += THREADS) bad |= overlap(box, candidates + (i64)chosen[m] * 4, one) > limit;
      if (block_max(bad, sums)) continue;
      if (threadIdx.x == 0) chosen[found] = order[k];
      found++;
      if (eta < 1 && limit > 0.5) limit *= eta;
      __syncthreads();
    }
    for (int k = found + threadIdx.x; k < room; k += THREADS) chosen[k] = -1;
  }
}

// A block for each image: how many of each class's boxes are among its `most` best (all, if negative). The classes are
// merged: the best of those that come next, of equals that of the first class, is counted in each round.
extern "C" __global__ void best_of(const T *scores, const int *kept, int *counts, int count, int classes, int room,
                                   int most) {
  __shared__ T values[THREADS];
  __shared__ int owners[THREADS];
  int t = threadIdx.x;
  const T *score = scores + (i64)blockIdx.x * count * classes;
  const int *chosen = kept + (i64)blockIdx.x * classes * room;
  int *taken = counts + (i64)blockIdx.x * classes;
  for (int c = t; c < classes; c += THREADS) {
    int k = 0;
    while (most < 0 && k < room && chosen[(i64)c * room + k] >= 0) k++;
    taken[c] = k;
  }
  for (int round = 0; round < most; round++) {
    int owner = -1;
    T value = 0;
    for (int c = t; c < classes; c += THREADS) {
      int k = taken[c], p = k < room ? chosen[(i64)c * room + k] : -1;
      if (p < 0) continue;
      T other = score[(i64)p * classes + c];
      if (owner < 0 || other > value) owner = c, value = other;
    }
    __syncthreads();
    values[t] = value, owners[t] = owner;
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
      if (t < step && owners[t + step] >= 0) {
        T other = values[t + step];
        if (owners[t] < 0 || other > values[t] || (other == values[t] && owners[t + step] < owners[t]))
          values[t] = other, owners[t] = owners[t + step];
      }
      __syncthreads();
    }
    int best = owners[0];
    if (best < 0) return;
    if (best % THREADS == t) taken[best]++;
  }
}

// A block for each class of each image writes its rows after those of the blocks before it. With nothing kept at all,
// the first writes a row for each image.
extern "C" __global__ void write_detections(const T *boxes, const T *scores, const int *kept, const int *counts, T *rows,
                                            i64 most, int count, int classes, int places, int room) {
  __shared__ i64 sums[32];
  i64 before = 0, total = 0;
  for (i64 i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
    total += counts[i];
    if (i < blockIdx.x) before += counts[i];
  }
  before = block_sum(before, sums);
  total = block_sum(total, sums);
  if (total == 0) {
    if (blockIdx.x == 0)
      for (i64 i = threadIdx.x; i < most * 7; i += blockDim.x) rows[i] = i % 7 ? (T)-1 : (T)(i / 7);
    return;
  }
  i64 n = blockIdx.x / classes, c = blockIdx.x % classes;
  for (i64 k = threadIdx.x; k < counts[blockIdx.x] && before + k < most; k += blockDim.x) {
    i64 p = kept[(i64)blockIdx.x * room + k];
    const T *box = boxes + ((n * places + (places > 1 ? c : 0)) * count + p) * 4;
    T *row = rows + (before + k) * 7;
    row[0] = (T)n, row[1] = (T)c, row[2] = scores[(n * count + p) * classes + c];
    for (int j = 0; j < 4; j++) row[3 + j] = box[j];
  }
}

// A block for each image; region_scores may be null.
extern "C" __global__ void write_regions(const T *boxes, const T *scores, const int *kept, T *regions, T *region_scores,
                                         i64 most, int count, int room) {
  __shared__ i64 sums[32];
  i64 n = blockIdx.x, before = 0;
  for (i64 i = threadIdx.x; i < n * room; i += blockDim.x) before += kept[i] >= 0;
  before = block_sum(before, sums);
  for (i64 k = threadIdx.x; k < room && before + k < most; k += blockDim.x) {
    i64 p = kept[n * room + k];
    if (p < 0) break;
    const T *box = boxes + (n * count + p) * 4;
    T *row = regions + (before + k) * 5;
    row[0] = (T)n;
    for (int j = 0; j < 4; j++) row[1 + j] = box[j];
    if (region_scores) region_scores[before + k] = scores[n * count + p];
  }
}
