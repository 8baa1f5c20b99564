// Layer and RMS normalisation, forward and backward, and column sums: fp32 inside, any of the three dtypes outside.
#pragma once

#include <cstddef>

#include "dispatch.h"

namespace lowprec {

// Sums over rows (weight, bias and column sums) are taken in blocks of 64 rows, each in order, and the blocks are
// added in order: the same bits for any number of threads.
constexpr size_t kSumRows = 64;

struct NormKernels {
  // y = (x - mean) * rstd * weight + bias; rms: mean is 0. weight and bias may be null. mean is not written for rms.
  void (*forward)(int x_type, int y_type, const void* x, const float* weight, const float* bias, void* y, float* mean,
                  float* rstd, size_t rows, size_t cols, float eps, bool rms, int threads);
  // grad_x, and grad_weight / grad_bias where not null. scratch: 2 * ceil(rows / 64) * cols floats.
  void (*backward)(int x_type, int y_type, const void* x, const void* grad_y, const float* weight, const float* mean,
                   const float* rstd, void* grad_x, float* grad_weight, float* grad_bias, float* scratch, size_t rows,
                   size_t cols, bool rms, int threads);
  // out[j] = sum over rows of x[i][j]. scratch: ceil(rows / 64) * cols floats.
  void (*column_sum)(int type, const void* x, float* out, float* scratch, size_t rows, size_t cols, int threads);
};
LOWPREC_DECLARE(NormKernels, norm_kernels)

}  // namespace lowprec
