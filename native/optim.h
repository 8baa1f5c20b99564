// Optimizer kernels: one pass over weights, gradients and states. See lowprec/kernels/reference/optim.py for what each
// store, rounding and rule means; this is the same arithmetic, in the same order, sixteen lanes at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace lowprec {

// Numbers of the stores, as in lowprec/kernels/stores.py.
enum StoreCode : int32_t {
  kNone = 0,
  kFp32 = 1,
  kBf16 = 2,
  kFp16 = 3,
  kFp16Block = 4,
  kFp16BlockPlus = 5,
  kE4m3Block = 6,
  kE5m2Block = 7,
  kE4m3Root = 8,
  kE5m2Root = 9,
  kDynamic8 = 10,
  kDynamic8Root = 11,
  kDynamic4 = 12,
  kLinear4Root = 13,
  kE4m3Row = 14,
  kE5m2Row = 15,
  kRemainder16 = 16,
};

enum OptimRule : int32_t { kSgd = 0, kAdam = 1, kLion = 2 };

struct OptimProgram {
  int32_t rule, weight, grad, master, residue, states[3], stochastic, state_stochastic, nesterov, threads;
  float c[12];  // factor, l2, keep, then the rule's own
  uint64_t seed;
  uint32_t step;
};

// One parameter. Rows and columns as blocks are laid out; addresses of codes and of their scales.
struct OptimSlot {
  int64_t rows, cols;
  int64_t weight, weight_scale, master, master_scale, residue, grad, grad_scale;
  int64_t states[3], scales[3];
  int64_t stream, offset;
  int64_t nonfinite;  // out: elements kept as they were
};

struct DitherKey {
  uint64_t seed;
  uint32_t step, stream;
};

struct OptimKernels {
  void (*update)(const OptimProgram& program, OptimSlot* slots, size_t count);
  // Rows [first, first + rows) of a stored tensor: encode x, or add x to what is stored (then rounding stochastically).
  void (*store_rows)(int32_t store, void* codes, float* scale, const float* x, int64_t rows, int64_t cols,
                     int64_t first, bool add, bool stochastic, const DitherKey& key, int threads);
  void (*decode_rows)(int32_t store, const void* codes, const float* scale, float* out, int64_t rows, int64_t cols,
                      int threads);
  // Inf, NaN, and the sum of squares of the finite, row by row and so the same for any number of threads.
  void (*stats)(int32_t store, const void* codes, const float* scale, int64_t rows, int64_t cols, int threads,
                double* out);
};
LOWPREC_DECLARE(OptimKernels, optim_kernels)

}  // namespace lowprec
