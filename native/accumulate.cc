// Sixteen columns at a time. A panel of b (values and exponents, element by element) is packed once and serves every
// row of a. Everything is exact in double: a product of two fp32 values of at most 24 significant bits, its truncation
// to an integer multiple of the grid, and the sum of 256 of these below 2^53.
#include "accumulate.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

namespace lowprec::LOWPREC_ISA {
namespace {

constexpr size_t kColumns = 16;
constexpr int kNone = -100000;  // exponent of zero: it takes no part in the alignment

inline int exponent_of(float x, int least) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu;
  if (magnitude == 0) return kNone;
  if (magnitude < 0x00800000u)  // fp32 subnormal
    return std::max(-126 - (std::countl_zero(magnitude) - 8), least);
  return std::max(static_cast<int>(magnitude >> 23) - 127, least);
}

inline double power_of_two(int exponent) {  // of a normal double
  return std::bit_cast<double>(static_cast<uint64_t>(1023 + exponent) << 52);
}

struct Panel {
  std::vector<float> values;   // [depth][16]
  std::vector<int> exponents;  // [depth][16]
  bool finite[kColumns];
};

void pack(const Accumulate& p, size_t first, Panel& panel) {
  panel.values.assign(p.depth * kColumns, 0.0f);
  panel.exponents.assign(p.depth * kColumns, kNone);
  const size_t width = std::min(kColumns, p.columns - first);
  for (size_t j = 0; j < kColumns; ++j) panel.finite[j] = true;
  for (size_t j = 0; j < width; ++j) {
    const float* row = p.b + (first + j) * p.depth;
    for (size_t k = 0; k < p.depth; ++k) {
      panel.values[k * kColumns + j] = row[k];
      panel.exponents[k * kColumns + j] = exponent_of(row[k], p.least_b);
      panel.finite[j] = panel.finite[j] && std::isfinite(row[k]);
    }
  }
}

// One partial sum: the products of elements k0 to k1 and the sum so far, aligned, truncated and added.
inline void step(const Accumulate& p, const float* a, const int* ea, const Panel& panel, size_t k0, size_t k1,
                 double* sum) {
  int top[kColumns];
  double scale[kColumns], total[kColumns];
  for (size_t j = 0; j < kColumns; ++j) {
    const int e = static_cast<int>((std::bit_cast<uint64_t>(sum[j]) >> 52) & 0x7FF) - 1023;
    top[j] = sum[j] == 0.0 ? kNone : std::max(e, -126);
  }
  for (size_t k = k0; k < k1; ++k) {
    const int* e = &panel.exponents[k * kColumns];
    for (size_t j = 0; j < kColumns; ++j) top[j] = std::max(top[j], ea[k] + e[j]);
  }
  for (size_t j = 0; j < kColumns; ++j) {
    top[j] = std::clamp(top[j], -900, 900);
    scale[j] = power_of_two(p.fraction - top[j]);
    total[j] = std::trunc(sum[j] * scale[j]);
  }
  for (size_t k = k0; k < k1; ++k) {
    const float* b = &panel.values[k * kColumns];
    const double factor = a[k];
    for (size_t j = 0; j < kColumns; ++j)
      total[j] += std::trunc((factor * static_cast<double>(b[j])) * scale[j]);
  }
  const uint64_t keep = ~((uint64_t{1} << (52 - p.mantissa)) - 1);
  const double tiny = power_of_two(126 + p.mantissa), grid = power_of_two(-126 - p.mantissa);
  for (size_t j = 0; j < kColumns; ++j) {
    const double value = total[j] * power_of_two(top[j] - p.fraction);
    const double size = std::fabs(value);
    const double normal = std::bit_cast<double>(std::bit_cast<uint64_t>(value) & keep);
    const double subnormal = std::trunc(value * tiny) * grid;
    double made = size < 0x1p-126 ? subnormal : normal;
    made = size >= 0x1p128 ? std::copysign(INFINITY, value) : made;
    made = made == 0.0 ? 0.0 : made;
    sum[j] = std::fabs(sum[j]) == INFINITY ? sum[j] : made;
  }
}

// Rows or columns with Inf or NaN: what is left is the plain sum.
float plain(const Accumulate& p, const float* a, const float* b) {
  double sum = 0.0;
  for (size_t k = 0; k < p.depth; ++k) sum += static_cast<double>(a[k]) * static_cast<double>(b[k]);
  return static_cast<float>(sum);
}

void block(const Accumulate& p, const Panel& panel, size_t i, size_t first, const int* ea, bool finite) {
  const float* a = p.a + i * p.depth;
  const size_t width = std::min(kColumns, p.columns - first);
  double sum[kColumns] = {};
  float high[kColumns] = {};
  const size_t stride = static_cast<size_t>(p.step);
  for (size_t k = 0; k < p.depth; k += stride) {
    step(p, a, ea, panel, k, std::min(k + stride, p.depth), sum);
    if (p.promote && (k + stride) % p.promote == 0)
      for (size_t j = 0; j < kColumns; ++j) {
        high[j] += static_cast<float>(sum[j]);
        sum[j] = 0.0;
      }
  }
  float* out = p.out + i * p.columns + first;
  for (size_t j = 0; j < width; ++j) {
    out[j] = p.promote ? high[j] + static_cast<float>(sum[j]) : static_cast<float>(sum[j]);
    if (!finite || !panel.finite[j]) out[j] = plain(p, a, p.b + (first + j) * p.depth);
  }
}

void matmul(const Accumulate& p, int threads) {
  std::vector<int> ea(p.rows * p.depth);
  std::vector<char> finite(p.rows, 1);
  for (size_t i = 0; i < p.rows; ++i)
    for (size_t k = 0; k < p.depth; ++k) {
      const float x = p.a[i * p.depth + k];
      ea[i * p.depth + k] = exponent_of(x, p.least_a);
      if (!std::isfinite(x)) finite[i] = 0;
    }
  const size_t panels = (p.columns + kColumns - 1) / kColumns;
#pragma omp parallel num_threads(threads) if (p.rows * p.columns * p.depth > 65536)
  {
    Panel panel;
#pragma omp for schedule(dynamic, 1)
    for (size_t c = 0; c < panels; ++c) {
      pack(p, c * kColumns, panel);
      for (size_t i = 0; i < p.rows; ++i) block(p, panel, i, c * kColumns, &ea[i * p.depth], finite[i] != 0);
    }
  }
}

}  // namespace

extern const AccumulateKernels accumulate_kernels;
const AccumulateKernels accumulate_kernels = {matmul};

}  // namespace lowprec::LOWPREC_ISA
