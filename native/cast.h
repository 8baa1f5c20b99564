// Elementwise kernels: casts and reductions over one tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"
#include "format.h"

namespace lowprec {

struct RngKey;

struct CastKernels {
  // Codes of n values. Returns how many became NaN in a format that has none (and were written as `nan` says).
  size_t (*encode)(const void* x, Dtype dtype, size_t n, const Format& format, Rounding rounding, Overflow overflow,
                   NanPolicy nan, const RngKey& key, void* codes, int threads);
  void (*decode)(const void* codes, size_t n, const Format& format, void* values, Dtype dtype, int threads);
  // Values on the format's grid, in the dtype of x.
  void (*round_to)(const void* x, Dtype dtype, size_t n, const Format& format, Rounding rounding, Overflow overflow,
                   const RngKey& key, void* values, int threads);
  // Largest |x| as fp32 bits: an integer maximum, so NaN wins and the order of the elements does not matter.
  uint32_t (*amax)(const void* x, Dtype dtype, size_t n, int threads);
};
LOWPREC_DECLARE(CastKernels, cast_kernels)

}  // namespace lowprec
