// Matrix products summed as a tensor core sums them: aligned to the largest exponent, truncated, added.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace lowprec {

struct Accumulate {
  const float* a;  // [rows, depth]
  const float* b;  // [columns, depth]
  float* out;      // [rows, columns]
  size_t rows, columns, depth;
  int least_a, least_b;  // smallest exponents: below, operands are subnormal and keep this exponent
  int step;              // products aligned at once
  int fraction;          // fraction bits kept after alignment
  int mantissa;          // mantissa bits of the partial sum
  size_t promote;        // elements after which the partial sum moves to an fp32 one; 0 for never
};

struct AccumulateKernels {
  void (*matmul)(const Accumulate& p, int threads);
};
LOWPREC_DECLARE(AccumulateKernels, accumulate_kernels)

}  // namespace lowprec
