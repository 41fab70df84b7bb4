#include "common.cuh"

// data = (pixels - mean) * scale, the rows of some items turned round, and the labels beside. A warp takes a row, a row
// of blocks an item. cuts has three numbers for each item: where it lies in the mean, top and left, and whether its rows
// are turned round; null says that neither matters. The mean, null for none, has values that lie `plane`, `line` and
// `step` apart. A small batch takes as long as its loads wait for one another, so that none does that needs not.
extern "C" __global__ void place_images(const u8 *pixels, const int *cuts, const T *given, const T *mean, D *data,
                                        T *labels, int items, int channels, int height, int width, int plane,
                                        int line, int step, T scale) {
  int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= channels * height) return;
  int channel = row / height, y = row - channel * height;
#pragma unroll 1
  for (int item = blockIdx.y; item < items; item += gridDim.y) {
    const int *cut = cuts + 3 * (i64)item;
    int top = cuts ? cut[0] : 0, left = cuts ? cut[1] : 0, turned = cuts ? cut[2] : 0;
    bool labelled = labels && row == 0 && lane == 0;
    T label = labelled ? given[item] : (T)0;
    i64 start = ((i64)item * channels * height + row) * width;
    const T *from = mean ? mean + (i64)channel * plane + (i64)(top + y) * line + (i64)left * step : mean;
#pragma unroll 4
    for (int x = lane; x < width; x += 32) {
      int at = turned ? width - 1 - x : x;
      T value = (T)pixels[start + at];
      if (from) value -= from[at * step];
      data[start + x] = value * scale;
    }
    if (labelled) labels[item] = label;
  }
}
