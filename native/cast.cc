#include "cast.h"

#include <algorithm>

namespace lowprec::LOWPREC_ISA {
namespace {

uint32_t amax_f32(const uint32_t* x, size_t n, int threads) {
  uint32_t top = 0;
#pragma omp parallel for reduction(max : top) num_threads(threads) if (n > 65536)
  for (size_t i = 0; i < n; ++i) top = std::max(top, x[i] & 0x7FFFFFFFu);
  return top;
}

}  // namespace

extern const CastKernels cast_kernels;
const CastKernels cast_kernels = {amax_f32};

}  // namespace lowprec::LOWPREC_ISA
