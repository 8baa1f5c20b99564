#include "epilogue.h"

#include <algorithm>
#include <cstring>

namespace lowprec::LOWPREC_ISA {
namespace {

inline float load(const int32_t* p, size_t i) { return static_cast<float>(p[i]); }
inline float load(const float* p, size_t i) { return p[i]; }
inline float load(const uint16_t* p, size_t i) {
  uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void store(float* p, size_t i, float value) { p[i] = value; }
inline void store(uint16_t* p, size_t i, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  p[i] = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// A row at a time; the four shapes of the inner loop keep it free of branches and of loads that are not needed.
template <typename In, typename Out>
void one_row(const In* in, Out* out, float row, const float* column, float one, const float* bias, size_t n) {
  if (column && bias) {
    for (size_t i = 0; i < n; ++i) store(out, i, load(in, i) * row * column[i] + bias[i]);
  } else if (column) {
    for (size_t i = 0; i < n; ++i) store(out, i, load(in, i) * row * column[i]);
  } else if (bias) {
    for (size_t i = 0; i < n; ++i) store(out, i, load(in, i) * row * one + bias[i]);
  } else {
    for (size_t i = 0; i < n; ++i) store(out, i, load(in, i) * row * one);
  }
}

template <typename In, typename Out>
void all_rows(const Epilogue& e, int threads) {
  const In* in = static_cast<const In*>(e.sums);
  Out* out = static_cast<Out*>(e.out);
  const float* column = e.column && e.column_step ? e.column : nullptr;
  const float one = e.column && !e.column_step ? *e.column : 1.0f;
#pragma omp parallel for num_threads(threads) if (e.rows * e.columns > 32768)
  for (size_t r = 0; r < e.rows; ++r) {
    const float row = e.row ? e.row[r * e.row_step] : 1.0f;
    one_row(in + r * e.columns, out + r * e.columns, row, column, one, e.bias, e.columns);
  }
}

template <typename In>
void from(const Epilogue& e, int threads) {
  e.out_type == Store::f32 ? all_rows<In, float>(e, threads) : all_rows<In, uint16_t>(e, threads);
}

void scaled(const Epilogue& e, int threads) {
  switch (e.sums_type) {
    case Store::i32:
      return from<int32_t>(e, threads);
    case Store::f32:
      return from<float>(e, threads);
    case Store::bf16:
      return from<uint16_t>(e, threads);
  }
}

constexpr size_t kStrip = 256;  // columns at a time, so that a strip of a few thousand rows stays in the cache

template <typename In>
bool int8_strip(const In* x, size_t rows, size_t columns, size_t first, size_t n, int8_t* codes, float* scale) {
  uint32_t top[kStrip] = {};
  for (size_t r = 0; r < rows; ++r) {
    const In* row = x + r * columns + first;
    for (size_t i = 0; i < n; ++i) {
      const float value = load(row, i);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      top[i] = std::max(top[i], bits & 0x7FFFFFFFu);
    }
  }
  float s[kStrip];
  for (size_t i = 0; i < n; ++i) {
    float amax;
    std::memcpy(&amax, &top[i], 4);
    if (top[i] >= 0x7F800000u || (top[i] != 0 && amax < 1e-30f)) return false;
    s[i] = top[i] ? amax / 127.0f : 1.0f;
    scale[first + i] = s[i];
  }
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  for (size_t r = 0; r < rows; ++r) {
    const In* row = x + r * columns + first;
    int8_t* out = codes + r * columns + first;
    for (size_t i = 0; i < n; ++i) {
      const float rounded = (load(row, i) / s[i] + kMagic) - kMagic;
      out[i] = static_cast<int8_t>(static_cast<int32_t>(std::min(127.0f, std::max(-127.0f, rounded))));
    }
  }
  return true;
}

bool int8_columns(const void* x, Store type, size_t rows, size_t columns, int8_t* codes, float* scale, int threads) {
  bool good = true;
  const size_t strips = (columns + kStrip - 1) / kStrip;
#pragma omp parallel for reduction(&& : good) num_threads(threads) if (rows * columns > 32768)
  for (size_t strip = 0; strip < strips; ++strip) {
    const size_t first = strip * kStrip, n = std::min(kStrip, columns - first);
    good = good &&
           (type == Store::f32 ? int8_strip(static_cast<const float*>(x), rows, columns, first, n, codes, scale)
                               : int8_strip(static_cast<const uint16_t*>(x), rows, columns, first, n, codes, scale));
  }
  return good;
}

}  // namespace

extern const EpilogueKernels epilogue_kernels;
const EpilogueKernels epilogue_kernels = {scaled, int8_columns};

}  // namespace lowprec::LOWPREC_ISA
