#include "common.cuh"
#include "channel_maps.cuh"

// y[r, c] += b[c], with ReLU if wanted; n elements in all
extern "C" __global__ void add_bias(D *y, const D *b, i64 n, i64 columns, int relu) {
  map1_channels(y, y, n, columns, 1, [=](i64 c, T v) {
    v += b[c];
    return relu && v <= 0 ? (T)0 : v;
  });
}
