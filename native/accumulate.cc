// Sixteen columns at a time. A panel of b (values and exponents, element by element) is packed once and serves every
// row of a. Everything is exact in double: a product of two fp32 values of at most 24 significant bits, its truncation
// to an integer multiple of the grid, and the sum of 256 of these below 2^53.
#include "accumulate.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"

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

typedef int32_t I16 __attribute__((vector_size(64)));
typedef int64_t L8 __attribute__((vector_size(64)));
typedef double D8 __attribute__((vector_size(64)));
typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

inline D8 truncated(D8 x) {
#ifdef __AVX512F__
  return reinterpret_cast<D8>(
      _mm512_roundscale_pd(reinterpret_cast<__m512d>(x), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
#else
  for (int j = 0; j < 8; ++j) x[j] = std::trunc(x[j]);
  return x;
#endif
}

inline D8 powers(L8 exponent) { return reinterpret_cast<D8>((exponent + 1023) << 52); }  // of normal doubles

template <typename V, typename T>
inline V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Sixteen sums as two halves.
struct Sums {
  D8 half[2];
};

inline L8 exponents(D8 sum) {
  const L8 e = ((reinterpret_cast<L8>(sum) >> 52) & 0x7FF) - 1023;
  const L8 least = e < -126 ? L8{} - 126 : e;
  return sum == 0.0 ? L8{} + kNone : least;
}

// One partial sum: the products of elements k0 to k1 and the sum so far, aligned, truncated and added.
inline void step(const Accumulate& p, const float* a, const int* ea, const Panel& panel, size_t k0, size_t k1,
                 Sums& sums) {
  I16 top = I16{} + kNone;
  for (size_t k = k0; k < k1; ++k) {
    const I16 e = load<I16>(&panel.exponents[k * kColumns]) + ea[k];
    top = top > e ? top : e;
  }
  I8 part[2];
  std::memcpy(part, &top, sizeof part);
  L8 tops[2];
  D8 scale[2], total[2];
  for (int h = 0; h < 2; ++h) {
    const L8 products = __builtin_convertvector(part[h], L8), before = exponents(sums.half[h]);
    L8 t = products > before ? products : before;
    t = t < -900 ? L8{} - 900 : t;
    tops[h] = t > 900 ? L8{} + 900 : t;
    scale[h] = powers(p.fraction - tops[h]);
    total[h] = truncated(sums.half[h] * scale[h]);
  }
  for (size_t k = k0; k < k1; ++k) {
    const float* b = &panel.values[k * kColumns];
    const double factor = a[k];
    total[0] += truncated((__builtin_convertvector(load<F8>(b), D8) * factor) * scale[0]);
    total[1] += truncated((__builtin_convertvector(load<F8>(b + 8), D8) * factor) * scale[1]);
  }
  const int64_t keep = ~((int64_t{1} << (52 - p.mantissa)) - 1);
  const double tiny = power_of_two(126 + p.mantissa), grid = power_of_two(-126 - p.mantissa);
  const D8 infinite = D8{} + INFINITY;
  for (int h = 0; h < 2; ++h) {
    const D8 value = total[h] * powers(tops[h] - p.fraction);
    const L8 bits = reinterpret_cast<L8>(value), sign = bits & INT64_MIN;
    const D8 size = reinterpret_cast<D8>(bits & INT64_MAX), before = sums.half[h];
    D8 made = size < 0x1p-126 ? truncated(value * tiny) * grid : reinterpret_cast<D8>(bits & keep);
    made = size >= 0x1p128 ? reinterpret_cast<D8>(reinterpret_cast<L8>(infinite) | sign) : made;
    made = made == 0.0 ? D8{} : made;
    sums.half[h] = reinterpret_cast<D8>(reinterpret_cast<L8>(before) & INT64_MAX) == infinite ? before : made;
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
  Sums sums = {};
  float high[kColumns] = {};
  double sum[kColumns];
  const size_t stride = static_cast<size_t>(p.step);
  for (size_t k = 0; k < p.depth; k += stride) {
    step(p, a, ea, panel, k, std::min(k + stride, p.depth), sums);
    if (p.promote && (k + stride) % p.promote == 0) {
      std::memcpy(sum, &sums, sizeof sum);
      for (size_t j = 0; j < kColumns; ++j) high[j] += static_cast<float>(sum[j]);
      sums = {};
    }
  }
  std::memcpy(sum, &sums, sizeof sum);
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
