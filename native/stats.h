// Health of many tensors in one pass, transposes, and the 16-point Hadamard transform.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"
#include "format.h"

namespace lowprec {

struct StatsInput {
  const void* x;
  Dtype dtype;
  size_t n;
};

struct StatsKernels {
  // Four doubles a tensor: infinities, NaNs, sum of squares, largest magnitude. The sum is taken in an order that
  // depends on the sizes alone.
  void (*tensor_stats)(const StatsInput* inputs, size_t count, double* out, int threads);
  void (*transpose)(const void* x, size_t rows, size_t columns, int bytes, void* out, int threads);
  // Along the last axis (rows of x), or, `down`, along the first. The last rows or columns beside a multiple of 16 are
  // copied.
  void (*hadamard16)(const void* x, Dtype dtype, size_t rows, size_t columns, const float* signs, bool down, float* out,
                     int threads);
};
LOWPREC_DECLARE(StatsKernels, stats_kernels)

}  // namespace lowprec
