// What the convolutions of images of three channels have in common (conv_first.cu, conv_pixels.cu). Needs common.cuh.
//
// Dims are: sizes (height and width of x, height and width of y, channels of y). Widths of x are multiples of 4,
// channels of y of RUN.

#define RUN 64  // channels of y that a block looks after

struct Sizes {
  int height, width, high, across, channels;
  __device__ __forceinline__ Sizes(const Dims &sizes)
      : height((int)sizes.at[0]), width((int)sizes.at[1]), high((int)sizes.at[2]), across((int)sizes.at[3]),
        channels((int)sizes.at[4]) {}
  __device__ __forceinline__ const D *image(const D *x, i64 image) const { return x + image * 3 * height * width; }
};
