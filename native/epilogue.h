// The pass after a GEMM: scales of rows and columns, bias, and the dtype of the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace lowprec {

// How elements of the sums and of the result are stored.
enum class Store : int { i32 = 0, f32 = 1, bf16 = 2 };

struct Epilogue {
  const void* sums;  // [rows, columns], contiguous
  Store sums_type;
  const float* row;  // one factor a row, or one for all (row_step 0), or null
  size_t row_step;
  const float* column;
  size_t column_step;
  const float* bias;  // one a column, or null
  void* out;          // [rows, columns], contiguous; may be `sums` where both have the same width
  Store out_type;     // f32 or bf16
  size_t rows, columns;
};

struct EpilogueKernels {
  // out = round(((float(sums) * row) * column) + bias), each operation rounded to fp32.
  void (*scaled)(const Epilogue& e, int threads);
  // int8 codes of a matrix with one scale a column: scale = amax / 127 (1 for a column of zeros), code = x / scale
  // rounded to nearest even. False, with nothing promised of the results, where a column's amax is not finite or so
  // small that its scale would be subnormal.
  bool (*int8_columns)(const void* x, Store type, size_t rows, size_t columns, int8_t* codes, float* scale,
                       int threads);
};
LOWPREC_DECLARE(EpilogueKernels, epilogue_kernels)

}  // namespace lowprec
