// The softmax inside attention, over rows of scores: fp32 inside, scores and probabilities in their own dtypes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace lowprec {

// A tile of scores: `heads` matrices of `queries` x `keys`, contiguous. Row (h, i) sees keys j < limit, where limit is
// keys, or min(keys, first_query + i + 1) under a causal mask; what it does not see gets probability 0.
struct SoftmaxTile {
  size_t heads, queries, keys;
  size_t first_query;
  bool causal;
  float scale;
  // additive mask: fp32 values at mask[h * head_stride + i * query_stride + j * key_stride]; null for none
  const float* mask;
  size_t head_stride, query_stride, key_stride;
};

struct SoftmaxKernels {
  // p = softmax(scale * s + mask), lse[h * lse_stride + i] = its log-sum-exp (+Inf where nothing is seen, p is then 0).
  // p may be s where the dtypes agree.
  void (*forward)(const SoftmaxTile& tile, int s_type, int p_type, const void* s, void* p, float* lse,
                  size_t lse_stride, int threads);
  // p = exp(scale * s + mask - lse); grad_s = p * (grad_p - sum(p * grad_p)) * scale. s and grad_p are tiles; p and
  // grad_s are windows of larger matrices: a row starts at h * out_head + i * out_row. They have the dtype of grad_p
  // and may be s and grad_p.
  void (*backward)(const SoftmaxTile& tile, int s_type, int p_type, const void* s, const float* lse, size_t lse_stride,
                   const void* grad_p, void* p, void* grad_s, size_t out_head, size_t out_row, int threads);
};
LOWPREC_DECLARE(SoftmaxKernels, softmax_kernels)

}  // namespace lowprec
