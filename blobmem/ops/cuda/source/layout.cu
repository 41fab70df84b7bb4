#include "common.cuh"

// Squares of `down` x `right` pixels, of which y has high x across from each image, the first of them beginning `top` rows
// above it and `left` columns left of it, and each `step` columns behind the one before. A square's numbers lie together,
// `wide` of each pixel, zeros of all but the first `seen` columns.
struct Squares {
  int channels, height, width, last, step, seen, high, across, down, right, top, left, wide;
  __device__ __forceinline__ Squares(const Dims &images, const Dims &squares)
      : channels(images.at[0]), height(images.at[1]), width(images.at[2]), last(images.at[3]), step(images.at[4]),
        seen(images.at[5]), high(squares.at[0]), across(squares.at[1]), down(squares.at[2]), right(squares.at[3]),
        top(squares.at[4]), left(squares.at[5]), wide(squares.at[6]) {}
  __device__ __forceinline__ int numbers() const { return down * right * wide; }
};

// y = squares of images x, whose channels lie in planes or `last`; zeros behind the channels and around the images. The
// numbers of a square are a multiple of PACK.
extern "C" __global__ void fold(const D *x, D *y, i64 packs, Dims images, Dims squares) {
  Squares s(images, squares);
  int per_square = s.numbers() / PACK, step = s.last ? 1 : s.height * s.width, apart = s.last ? s.channels : 1;
  D nothing;
  nothing = (T)0;
  FOR(i, packs) {
    i64 square = quotient(i, per_square), line = quotient(square, s.across), image = quotient(line, s.high);
    int first = (int)(i - square * per_square) * PACK, pixel = first / s.wide, c = first - pixel * s.wide;
    int row = pixel / s.right, column = pixel - row * s.right;
    int v = (int)(line - image * s.high) * s.down - s.top + row, u = (int)(square - line * s.across) * s.step - s.left;
    const D *here = x + image * s.channels * s.height * s.width;
    Pack pack;
#pragma unroll
    for (int j = 0; j < PACK; j++) {
      bool inside = c < s.channels && column < s.seen && v >= 0 && v < s.height && u + column >= 0 && u + column < s.width;
      pack.at[j] = inside ? here[(i64)c * step + (v * s.width + u + column) * apart] : nothing;
      if (++c == s.wide) {
        c = 0;
        if (++column == s.right) column = 0, v++;
      }
    }
    ((Pack *)y)[i] = pack;
  }
}

// x, n numbers in planes, (+)= what is where `fold` would have put it in y.
extern "C" __global__ void unfold(const D *y, D *x, i64 n, Dims images, Dims squares, int accumulate) {
  Squares s(images, squares);
  FOR(i, n) {
    i64 line = quotient(i, s.width), plane = quotient(line, s.height), image = quotient(plane, s.channels);
    int u = (int)(i - line * s.width) + s.left, v = (int)(line - plane * s.height) + s.top;
    i64 square = (image * s.high + v / s.down) * s.across + u / s.right;
    i64 pixel = square * s.down * s.right + v % s.down * s.right + u % s.right;
    T found = y[pixel * s.wide + (plane - image * s.channels)];
    x[i] = (accumulate ? (T)x[i] : (T)0) + found;
  }
}

// y = squares of rows x columns bytes, each turned over: seldom run, for masks that somebody looks at.
extern "C" __global__ void turn_bytes(const u8 *x, u8 *y, i64 n, int rows, int columns) {
  FOR(i, n) {
    i64 line = quotient(i, rows), square = quotient(line, columns);
    y[i] = x[(square * rows + (i - line * rows)) * columns + (line - square * columns)];
  }
}
