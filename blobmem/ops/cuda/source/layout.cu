#include "common.cuh"

// Rows of `from` numbers become rows of `to`, a multiple of PACK, the rest zeros.
extern "C" __global__ void widen(const D *x, D *y, i64 packs, int from, int to) {
  int per_row = to / PACK;
  FOR(i, packs) {
    i64 row = quotient(i, per_row);
    int first = (int)(i - row * per_row) * PACK;
    Pack pack;
#pragma unroll
    for (int j = 0; j < PACK; j++) pack.at[j] = first + j < from ? x[row * from + first + j] : (T)0;
    ((Pack *)y)[i] = pack;
  }
}

// The same of images whose channels lie in planes of `positions`.
extern "C" __global__ void widen_planes(const D *x, D *y, i64 packs, int from, int to, i64 positions) {
  int per_row = to / PACK;
  FOR(i, packs) {
    i64 row = quotient(i, per_row), image = quotient(row, positions);
    int first = (int)(i - row * per_row) * PACK;
    const D *here = x + image * from * positions + (row - image * positions);
    Pack pack;
#pragma unroll
    for (int j = 0; j < PACK; j++) pack.at[j] = first + j < from ? here[(first + j) * positions] : (T)0;
    ((Pack *)y)[i] = pack;
  }
}

// And back.
extern "C" __global__ void narrow(const D *x, D *y, i64 n, int from, int to) {
  FOR(i, n) {
    i64 row = quotient(i, to);
    y[i] = x[row * from + (i - row * to)];
  }
}

// y = squares of rows x columns bytes, each turned over: seldom run, for masks that somebody looks at.
extern "C" __global__ void turn_bytes(const u8 *x, u8 *y, i64 n, int rows, int columns) {
  FOR(i, n) {
    i64 line = quotient(i, rows), square = quotient(line, columns);
    y[i] = x[(square * rows + (i - line * rows)) * columns + (line - square * columns)];
  }
}
