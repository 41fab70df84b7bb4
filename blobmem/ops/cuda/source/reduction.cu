#include "common.cuh"
#include "channel_maps.cuh"

// dx[row][i] = dy[row] * factor
extern "C" __global__ void spread(const T *dy, D *dx, i64 n, i64 rows, i64 size, double factor) {
  i64 packs = n / PACK;
  FOR(i, packs) {
    Channel at(i * PACK, rows, size);
    Lot<PACK> a;
#pragma unroll
    for (int j = 0; j < PACK; j++, at.next()) a.at[j] = (T)(dy[at.c] * factor);
    store<PACK>(dx, i * PACK, a);
  }
  FOR(i, n - packs * PACK) dx[packs * PACK + i] = (T)(dy[Channel(packs * PACK + i, rows, size).c] * factor);
}

// Times the slope of a sum of squares, or of absolute values.
extern "C" __global__ void spread_along(const D *x, const T *dy, D *dx, i64 n, i64 rows, i64 size, double factor,
                                        int squares) {
  map1_channels(x, dx, n, rows, size, [=](i64 row, T v) {
    T value = (T)(dy[row] * factor);
    if (squares) return 2 * value * v;
    return v > 0 ? value : v < 0 ? -value : (T)0;
  });
}
