// Cross-entropy of class indices over rows of logits: fp32 inside, logits and gradient in their own dtype.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace lowprec {

struct LossKernels {
  // lse[r] = log sum exp(logits[r]); loss[r] = (1 - smoothing) (lse - x[target]) + smoothing (lse - mean x), 0 where
  // target is ignore. Returns how many targets are out of range (their loss is NaN).
  size_t (*forward)(int type, const void* logits, const int64_t* target, float* loss, float* lse, size_t rows,
                    size_t cols, int64_t ignore, float smoothing, int threads);
  // grad[r][j] = (exp(x - lse) - (1 - smoothing) [j == target] - smoothing / cols) * factor[r * factor_stride], 0 for
  // ignored rows. May write over the logits.
  void (*backward)(int type, const void* logits, const int64_t* target, const float* lse, const float* factor,
                   size_t factor_stride, void* grad, size_t rows, size_t cols, int64_t ignore, float smoothing,
                   int threads);
};
LOWPREC_DECLARE(LossKernels, loss_kernels)

}  // namespace lowprec
