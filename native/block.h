// Scaled casts of a matrix: amax of every group, scales, and the cast, with as few passes over memory as the groups
// allow.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"
#include "format.h"

namespace lowprec {

struct RngKey;

enum ScaleMode : int { kUnscaled = 0, kDivide = 1, kPowerOfTwo = 2, kTwoLevel = 3 };
enum ScaleRule : int { kFloorRule = 0, kCeilRule = 1, kEvenRule = 2, kRceilRule = 3 };
enum Output : int { kCodes = 0, kValuesBF16 = 1, kValuesF32 = 2 };

// What a plan says, without the tensor.
struct ScalePlan {
  const Format* format;
  ScaleMode mode;
  ScaleRule rule;
  Rounding rounding;
  Overflow overflow;
  bool byte_scales;  // e8m0 codes (power of two) or e4m3 codes (two-level), else fp32
  float min_block_scale;
};

struct ScaledCast {
  const void* x;
  Dtype dtype;
  size_t rows, columns, group_rows, group_columns;
  const float* given;   // scales to be used, or nullptr
  void* scales;         // written in the plan's storage, or nullptr
  float* tensor_scale;  // two-level
  Output output;
  bool fold;          // values are multiplied by their group's factor (power of two or e4m3)
  void* out;          // codes or values
  int64_t* counters;  // flushed, saturated, not finite, amax bits; or nullptr
  int threads;
};

// Done, or why not: the caller then takes the reference.
enum ScaleResult : int { kDone = 0, kNanWithoutCode = 1, kScaleNotPowerOfTwo = 2 };

struct Dequantise {
  const void* codes;
  size_t rows, columns, group_rows, group_columns;
  const void* scales;          // one a group: fp32, or codes of `scale_format`
  const Format* scale_format;  // nullptr: fp32
  const float* tensor_scale;   // or nullptr
  void* out;
  Dtype dtype;
  int threads;
};

struct BlockKernels {
  ScaleResult (*cast)(const ScaledCast& job, const ScalePlan& plan, const RngKey& key);
  void (*dequantise)(const Dequantise& job, const Format& format);
  void (*block_amax)(const void* x, Dtype dtype, size_t rows, size_t columns, size_t group_rows, size_t group_columns,
                     float* out, int threads);
};
LOWPREC_DECLARE(BlockKernels, block_kernels)

}  // namespace lowprec
