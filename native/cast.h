// Elementwise kernels: casts and reductions over one tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace lowprec {

struct CastKernels {
  // Largest |x| of n fp32 values as bits with the sign cleared: integer maximum, so NaN wins and the order of the
  // elements does not matter.
  uint32_t (*amax_f32)(const uint32_t* x, size_t n, int threads);
};
LOWPREC_DECLARE(CastKernels, cast_kernels)

}  // namespace lowprec
