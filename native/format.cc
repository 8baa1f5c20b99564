// Formats are interned: packed once by Python, completed here, and never freed, so that a kernel call passes one
// address.
#include "format.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

namespace lowprec {
namespace {

constexpr size_t kPacked = 10;

// Round a double to a narrower IEEE format (exponent bits e, mantissa bits m), ties to even, as bits.
uint64_t narrow_double(double v, int e, int m) {
  uint64_t bits;
  std::memcpy(&bits, &v, 8);
  const uint64_t sign = bits >> 63 << (e + m);
  if (std::isnan(v)) return (((1ull << e) - 1) << m) | (1ull << (m - 1));
  const uint64_t inf = ((1ull << e) - 1) << m;
  const double a = std::fabs(v);
  if (std::isinf(v)) return sign | inf;
  if (a == 0) return sign;
  const int emin = 2 - (1 << (e - 1));
  int exponent;
  std::frexp(a, &exponent);
  const int quantum = std::max(exponent - 1, emin) - m;
  const uint64_t q = static_cast<uint64_t>(std::nearbyint(std::ldexp(a, -quantum)));  // at most 2^(m + 1): exact
  const uint64_t code = q + (static_cast<uint64_t>(quantum + m - emin) << m);
  return sign | std::min(code, inf);
}

double value_of(const Format& f, uint64_t code) {
  if (f.nan_code >= 0 && f.kind == kScale && code == static_cast<uint64_t>(f.nan_code)) return std::nan("");
  if (f.kind == kScale) return std::ldexp(1.0, static_cast<int>(code) - f.bias);
  if (f.kind == kBinary) return code ? -1.0 : 1.0;
  const uint64_t top = 1ull << (f.bits - 1);
  if (f.kind == kInt) {
    const double v = static_cast<double>(code) - (code & top ? std::ldexp(1.0, f.bits) : 0.0);
    return std::ldexp(v, f.step_exponent);
  }
  const uint64_t magnitude = code & (top - 1);
  const bool negative = code & top;
  if (f.negative_zero_nan && negative && !magnitude) return std::nan("");
  double v;
  if (f.inf_code >= 0 && magnitude == static_cast<uint64_t>(f.inf_code))
    v = std::numeric_limits<double>::infinity();
  else if (magnitude > static_cast<uint64_t>(f.max_code))
    return std::nan("");
  else {
    const uint64_t exponent = magnitude >> f.m, mantissa = magnitude & ((1ull << f.m) - 1);
    v = exponent ? std::ldexp(static_cast<double>(mantissa | 1ull << f.m), static_cast<int>(exponent) - f.bias - f.m)
                 : std::ldexp(static_cast<double>(mantissa), f.emin - f.m);
  }
  return negative ? -v : v;
}

void fill_tables(Format& f) {
  f.has_table = f.bits <= 8;
  f.exact_bf16 = f.odd = f.has_table;
  if (!f.has_table) return;
  for (int code = 0; code < 256; ++code) {
    const double v = value_of(f, static_cast<uint64_t>(code) & f.mask);
    const uint64_t canonical = 0x7FF8000000000000ull;
    std::memcpy(&f.table64[code], &v, 8);
    if (std::isnan(v)) f.table64[code] = canonical;
    f.table32[code] = static_cast<uint32_t>(narrow_double(v, 8, 23));
    f.table_f16[code] = static_cast<uint16_t>(narrow_double(v, 5, 10));
    f.table_bf16[code] = static_cast<uint16_t>(narrow_double(v, 8, 7));
    f.low_bf16[code] = static_cast<uint8_t>(f.table_bf16[code]);
    f.high_bf16[code] = static_cast<uint8_t>(f.table_bf16[code] >> 8);
    f.exact_bf16 = f.exact_bf16 && f.table32[code] == static_cast<uint32_t>(f.table_bf16[code]) << 16;
  }
  f.odd = f.bits == 8 && f.kind == kFloat;
  for (int code = 0; f.odd && code < 128; ++code)
    f.odd = f.table_bf16[code + 128] == (f.table_bf16[code] | 0x8000) && f.table32[code] <= 0x7F800000u;
}

Format complete(const int64_t* p) {
  Format f{};
  f.kind = static_cast<int>(p[0]), f.bits = static_cast<int>(p[1]), f.exponent_bits = static_cast<int>(p[2]);
  f.mantissa_bits = static_cast<int>(p[3]), f.bias = static_cast<int>(p[4]), f.nan_style = static_cast<int>(p[5]);
  f.step_exponent = static_cast<int>(p[6]), f.max_code = p[7], f.inf_code = p[8], f.nan_code = p[9];
  f.mask = f.bits == 64 ? ~0ull : (1ull << f.bits) - 1;
  f.code_bytes = f.bits <= 8 ? 1 : f.bits <= 16 ? 2 : f.bits <= 32 ? 4 : 8;
  f.negative_zero_nan = f.nan_style == 3;
  if (f.kind == kInt) {
    f.m = f.bits, f.emin = f.step_exponent + f.m;
    f.sign_xor = ~0ull, f.sign_add = 1;
  } else {
    f.m = f.mantissa_bits, f.emin = 1 - f.bias;
    f.sign_xor = 0, f.sign_add = 1ull << (f.bits - 1);
  }
  const double top = value_of(f, static_cast<uint64_t>(f.max_code));
  f.max_value64 = top;
  f.max_value = static_cast<float>(top);
  int exponent;
  std::frexp(top, &exponent);
  f.emax = exponent - 1;
  f.same_range = f.kind == kFloat && f.exponent_bits == 8 && f.bias == 127 && f.m <= 23 && f.nan_style == 1;
  const bool in_range = (f.kind == kFloat || f.kind == kInt) && f.m <= 23 && f.emax <= 127 && f.emin >= -126 &&
                        f.emin - f.m >= -126 && static_cast<double>(f.max_value) == top;
  f.narrow = f.same_range || in_range;
  f.magic = in_range && f.emin - f.m >= -124 && f.m >= 1 && f.m <= 20 && f.emax + 23 - f.m <= 126;
  fill_tables(f);
  return f;
}

}  // namespace

const Format* intern_format(const int64_t* packed, size_t count) {
  if (count != kPacked) return nullptr;
  static std::mutex lock;
  static std::map<std::vector<int64_t>, const Format*> known;
  static std::deque<Format> store;
  std::lock_guard guard(lock);
  std::vector<int64_t> key(packed, packed + count);
  auto& entry = known[key];
  if (!entry) entry = &store.emplace_back(complete(packed));
  return entry;
}

}  // namespace lowprec
