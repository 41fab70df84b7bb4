// What a batch norm wants of a convolution, channels last, as it is made: normalised, its moments, sums for its gradient, or
// that gradient, each number of which is written once, and what is added to it read once. Who includes it has a Block of
// pixels and channels, and BEGIN, which begins with `block` and with what of it comes to shared memory; and make(block, coming,
// end), which gives each lane's products to what `end` is.
// Needs conv_normed.cuh, batch_norm_gathered.cuh and shared.cuh.
//
// In the following b, other, gamma and beta may be null. `mean` has the lower parts of the means behind the upper ones; xhat =
// (x w + b - mean) * inv_std.

// y = relu(xhat * gamma + beta + other); `kept` gets xhat unless it is null: then y is made of what that holds.
extern "C" __global__ void WITH_SHARED(ROOM) __launch_bounds__(THREADS, 2)
    conv_given(const D *x, const D *w, const D *b, const D *other, D *y, D *kept, const T *mean, const T *inv_std,
               const D *gamma, const D *beta, i64 pixels, int inputs, int channels, int width, int height, int parts,
               int stages, int relu) {
  BEGIN
  for (int c = threadIdx.x; c < block.own; c += THREADS) {
    int n = block.first + c;
    T times = gamma ? (T)gamma[n] : (T)1, plus = beta ? (T)beta[n] : (T)0, scale = kept ? inv_std[n] : inv_std[n] * times;
    T shift = (b ? b[n] - mean[n] : -mean[n]) - mean[channels + n];
    block.keep(0, c, scale), block.keep(1, c, kept ? shift * scale : fma(shift, scale, plus));
    block.keep(2, c, times), block.keep(3, c, plus);
  }
  T least = relu ? (T)0 : -(T)__uint_as_float(0x7f800000u);
  if (kept && other) {
    Normalized<true, true> end = {other, y, kept, least};
    make(block, coming, end);
  } else if (kept) {
    Normalized<true, false> end = {other, y, kept, least};
    make(block, coming, end);
  } else if (other) {
    Normalized<false, true> end = {other, y, kept, least};
    make(block, coming, end);
  } else {
    Normalized<false, false> end = {other, y, kept, least};
    make(block, coming, end);
  }
}

// Of sums a block has one part of channels: what a lane has of these, so many packs, one after the other.
#define EACH (GROUPS * PACK)

// What lanes have of channels, 64 of each, in shared memory: a line of all channels from every four of them.
#define LINES (THREADS / 4)
__device__ __forceinline__ void show_lane(Pack *shared, int which, const T (&values)[EACH]) {
  T *line = (T *)shared + (which * LINES + threadIdx.x / 4) * ACROSS + threadIdx.x % 4 * PACK;
#pragma unroll
  for (int n = 0; n < EACH; n++) line[n / PACK * GROUP + n % PACK] = values[n];
}

// What a channel's lines come to, in double precision; it is that of thread % ACROSS.
template <class F> __device__ __forceinline__ double sum_of_lines(double *sums, F of) {
  double sum = 0;
#pragma unroll 4
  for (int n = threadIdx.x / ACROSS; n < LINES; n += THREADS / ACROSS) sum += of(n);
  __syncthreads();
  sums[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int n = 0; n < THREADS / ACROSS; n++) sum += sums[n * ACROSS + threadIdx.x % ACROSS];
  return sum;
}

// Once all products are made, for what is summed of them to lie where pixels were.
__device__ __forceinline__ void end_pixels() {
  wait_for_copies();
  __syncthreads();
}

// y = x w + b, if it is to be written. Of each channel distances are summed from the mean of the lane's first.
template <bool WRITTEN> struct WithMoments {
  typedef FactorsOf<1> Factors;
  typedef NoPacks Beside;
  const D *beside;
  D *y;
  T count, seen, less[EACH], sums[EACH], squares[EACH];  // of the lane's; `less` is what is added for these distances
  __device__ __forceinline__ WithMoments(D *y) : beside(nullptr), y(y), count(0), seen(0) {
#pragma unroll
    for (int n = 0; n < EACH; n++) less[n] = sums[n] = squares[n] = 0;
  }
  __device__ __forceinline__ Lot<PACK> begin(const Lot<PACK> *factors, int group) const {
    Lot<PACK> lot;
#pragma unroll
    for (int k = 0; k < PACK; k++) lot.at[k] = less[group * PACK + k];
    return lot;
  }
  __device__ __forceinline__ void put(Lot<PACK> lot, const Factors &factors, const Beside &beside, int group, int line, i64 at,
                                      bool inside) {
    if (!inside) return;
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      int n = group * PACK + k;
      sums[n] += lot.at[k], squares[n] = fma(lot.at[k], lot.at[k], squares[n]);
      if (WRITTEN) lot.at[k] = lot.at[k] - less[n] + factors.at[0].at[k];
    }
    if (WRITTEN) ::put(y + at, lot);
    seen = line + 1;
  }
  __device__ __forceinline__ void next() {
    if (count == 0 && seen > 0)
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        less[n] = seen > 1 ? sums[n] * (T)-0.5 : -sums[n];
        squares[n] = max_of(squares[n] + less[n] * sums[n], (T)0), sums[n] = 0;
      }
    count += seen, seen = 0;
  }
  __device__ __forceinline__ void keep(const Block &block, const GatheredMoments &to) {
    double *spare = (double *)block.memory;  // where weights were
    T *counts = (T *)(spare + THREADS);
    end_pixels();
    if (threadIdx.x % 4 == 0) counts[threadIdx.x / 4] = count;
    T share = count > 0 ? 1 / count : (T)0;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      T middle = sums[n] * share;
      squares[n] = max_of(squares[n] - middle * sums[n], (T)0), sums[n] = middle - less[n];
    }
    show_lane(block.shared, 0, sums), show_lane(block.shared, 1, squares);
    __syncthreads();
    const T *means = (const T *)block.shared + threadIdx.x % ACROSS, *spreads = means + LINES * ACROSS;
    double all = sum_of_lines(spare, [&](int n) { return (double)counts[n]; });
    double total = sum_of_lines(spare, [&](int n) { return (double)counts[n] * means[n * ACROSS]; });
    double mean = all > 0 ? total / all : 0;
    double spread = sum_of_lines(spare, [&](int n) {
      double far = counts[n] > 0 ? means[n * ACROSS] - mean : 0;
      return spreads[n * ACROSS] + counts[n] * far * far;
    });
    if (threadIdx.x >= ACROSS) return;
    mean += (double)block.factors[threadIdx.x / PACK].at[threadIdx.x % PACK];  // the bias
    put_moments(to, block.first + threadIdx.x, block.split, all, Statistics{mean, spread});
    if (to.before == 0)  // of parts that no block has
      for (int s = block.split + block.splits; s < to.splits; s += block.splits)
        to.keep_part(block.first + threadIdx.x, s, 0, Statistics{0, 0});
  }
};

// The moments of y = x w + b, which is written unless it is null, of `before` numbers of each channel and these.
extern "C" __global__ void WITH_SHARED(ROOM) __launch_bounds__(THREADS, 2)
    conv_moments(const D *x, const D *w, const D *b, D *y, double *moments, double *places, i64 pixels, int inputs,
                 int channels, int width, int height, int parts, int stages, int planes, double before, int kept) {
  BEGIN
  for (int c = threadIdx.x; c < block.own; c += THREADS) block.keep(0, c, b ? (T)b[block.first + c] : (T)0);
  GatheredMoments to = {{places, channels, planes, (double)pixels + (kept ? before : 0)}, moments, before, kept};
  if (y) {
    WithMoments<true> end(y);
    make(block, coming, end);
    end.keep(block, to);
  } else {
    WithMoments<false> end(y);
    make(block, coming, end);
    end.keep(block, to);
  }
}

// Of x w + b - mean what is added to x w, and, behind other factors, those by which a ReLU is known to be open.
__device__ __forceinline__ void keep_shift(const Block &block, const D *b, const T *mean, const T *inv_std, const Shift &shift,
                                           int place) {
  for (int c = threadIdx.x; c < block.own; c += THREADS) {
    int n = block.first + c;
    block.keep(0, c, (b ? b[n] - mean[n] : -mean[n]) - mean[block.channels + n]);
    block.keep(place, c, shift.times(n) * inv_std[n]), block.keep(place + 1, c, shift.plus(n));
  }
}

// The gradient that a ReLU passes on, of what was normalised.
template <bool RELU> __device__ __forceinline__ T passed_by(T dy, T shifted, T times, T plus) {
  return RELU && !(fma(shifted, times, plus) > 0) ? (T)0 : dy;
}

// Sums of g, and of g * xhat, where g is dy, or 0 where a ReLU was shut; xhat is written unless it is null. inv_std times the
// latter is taken at the end.
template <bool RELU> struct WithSums {
  typedef FactorsOf<RELU ? 4 : 2> Factors;
  typedef Packs Beside;
  enum { TIMES = RELU ? 2 : 0, PLUS = RELU ? 3 : 0 };
  const D *beside;
  D *xhat;
  T plain[EACH], along[EACH];
  __device__ __forceinline__ WithSums(const D *dy, D *xhat) : beside(dy), xhat(xhat) {
#pragma unroll
    for (int n = 0; n < EACH; n++) plain[n] = along[n] = 0;
  }
  __device__ __forceinline__ Lot<PACK> begin(const Lot<PACK> *factors, int group) const { return factors[0]; }
  __device__ __forceinline__ void put(Lot<PACK> lot, const Factors &factors, const Beside &dy, int group, int line, i64 at,
                                      bool inside) {
    if (!inside) return;
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      T g = passed_by<RELU>(dy.of[line][group].at[k], lot.at[k], factors.at[TIMES].at[k], factors.at[PLUS].at[k]);
      plain[group * PACK + k] += g, along[group * PACK + k] = fma(g, lot.at[k], along[group * PACK + k]);
    }
    if (xhat) {
#pragma unroll
      for (int k = 0; k < PACK; k++) lot.at[k] *= factors.at[1].at[k];
      ::put(xhat + at, lot);
    }
  }
  __device__ __forceinline__ void next() {}
  __device__ __forceinline__ void keep(const Block &block, const GatheredSums &to, const T *inv_std) {
    double *spare = (double *)block.memory;  // where weights were
    end_pixels();
    show_lane(block.shared, 0, plain), show_lane(block.shared, 1, along);
    __syncthreads();
    const T *lines = (const T *)block.shared + threadIdx.x % ACROSS;
    double all = sum_of_lines(spare, [&](int n) { return (double)lines[n * ACROSS]; });
    double all_along = sum_of_lines(spare, [&](int n) { return (double)lines[(LINES + n) * ACROSS]; });
    i64 c = block.first + threadIdx.x;
    if (threadIdx.x >= ACROSS) return;
    put_sums(to, c, block.split, all, all_along * inv_std[c]);
    if (to.first)  // of parts that no block has
      for (int s = block.split + block.splits; s < to.splits; s += block.splits) to.keep_part(c, s, 0, 0);
  }
};

// The sums for the gradient of batch normalisation, as `batch_norm_slices` gathers them.
extern "C" __global__ void WITH_SHARED(ROOM) __launch_bounds__(THREADS, 2)
    conv_sums(const D *x, const D *w, const D *b, const T *mean, const T *inv_std, const D *gamma, const D *beta, const D *dy,
              D *xhat, double *sums, double *places, i64 pixels, int inputs, int channels, int width, int height, int parts,
              int stages, int planes, int relu, int first, int kept) {
  BEGIN
  Shift shift = {gamma, beta, relu};
  keep_shift(block, b, mean, inv_std, shift, 2);
  for (int c = threadIdx.x; c < block.own; c += THREADS) block.keep(1, c, inv_std[block.first + c]);
  GatheredSums to = {{places, channels, planes, shift}, sums, first, kept};
  if (relu) {
    WithSums<true> end(dy, xhat);
    make(block, coming, end);
    end.keep(block, to, inv_std);
  } else {
    WithSums<false> end(dy, xhat);
    make(block, coming, end);
    end.keep(block, to, inv_std);
  }
}

// dx = (g - less - xhat * tilt) * scale, whose factors are those of g, of what xhat is made of, and the rest; it may be dy.
template <bool RELU> struct WithGradient {
  typedef FactorsOf<RELU ? 6 : 4> Factors;
  typedef Packs Beside;
  enum { TIMES = RELU ? 4 : 0, PLUS = RELU ? 5 : 0 };
  const D *beside;
  D *dx;
  __device__ __forceinline__ Lot<PACK> begin(const Lot<PACK> *factors, int group) const { return factors[0]; }
  __device__ __forceinline__ void put(Lot<PACK> lot, const Factors &factors, const Beside &dy, int group, int line, i64 at,
                                      bool inside) {
    if (!inside) return;
#pragma unroll
    for (int k = 0; k < PACK; k++) {
      T g = passed_by<RELU>(dy.of[line][group].at[k], lot.at[k], factors.at[TIMES].at[k], factors.at[PLUS].at[k]);
      lot.at[k] = fma(g, factors.at[1].at[k], fma(lot.at[k], factors.at[2].at[k], factors.at[3].at[k]));
    }
    ::put(dx + at, lot);
  }
  __device__ __forceinline__ void next() {}
};

// The gradient of batch normalisation by the sums of a whole batch, whose channels have 1 / `share` numbers.
extern "C" __global__ void WITH_SHARED(ROOM) __launch_bounds__(THREADS, 2)
    conv_gradient(const D *x, const D *w, const D *b, const T *mean, const T *inv_std, const D *gamma, const D *beta,
                  const D *dy, D *dx, const double *sums, i64 pixels, int inputs, int channels, int width, int height,
                  int parts, int stages, double share, int relu) {
  BEGIN
  Shift shift = {gamma, beta, relu};
  keep_shift(block, b, mean, inv_std, shift, 4);
  for (int c = threadIdx.x; c < block.own; c += THREADS) {
    int n = block.first + c;
    double scale = (double)shift.times(n) * inv_std[n];
    block.keep(1, c, (T)scale);
    block.keep(2, c, (T)(-scale * inv_std[n] * sums[channels + n] * share));
    block.keep(3, c, (T)(-scale * sums[n] * share));
  }
  if (relu) {
    WithGradient<true> end = {dy, dx};
    make(block, coming, end);
  } else {
    WithGradient<false> end = {dy, dx};
    make(block, coming, end);
  }
}
