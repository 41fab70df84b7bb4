// Needs common.cuh.

// values ** -beta; for the usual beta, 3/4, by roots.
__device__ __forceinline__ T power(T value, T beta) {
  if (beta == (T)0.75) {
    T root = rsqrt(value);
    return root * sqrt(root);
  }
  return pow(value, -beta);
}
