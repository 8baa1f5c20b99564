// Groups of a matrix that share a scale: their largest magnitudes, and the scales that follow.
#pragma once

#include <vector>

#include "block.h"
#include "fused.h"
#include "lanes.h"

namespace lowprec::LOWPREC_ISA {
namespace {

constexpr uint32_t kInfBits = 0x7F800000u, kNanBits = 0x7FC00000u;

template <class T>
void column_max(const typename T::Raw* x, size_t n, uint32_t* top, bool first) {
  if (first)
    for (size_t i = 0; i < n; ++i) top[i] = T::load(x[i]) & 0x7FFFFFFFu;
  else
    for (size_t i = 0; i < n; ++i) top[i] = std::max(top[i], T::load(x[i]) & 0x7FFFFFFFu);
}

#if defined(__AVX512F__)
// The largest lane of each of 16 vectors, in one vector: pairs are folded until one is left.
inline __m512i max_of_each(const __m512i* v) {
  __m512i a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x44),
                            _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xEE));  // lanes of 128: v0 v0 v1 v1
  for (int i = 0; i < 4; ++i)
    b[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(a[2 * i], a[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(a[2 * i], a[2 * i + 1], 0xDD));  // v0 v1 v2 v3
  for (int i = 0; i < 2; ++i)
    c[i] =
        _mm512_max_epu32(_mm512_unpacklo_epi32(b[2 * i], b[2 * i + 1]), _mm512_unpackhi_epi32(b[2 * i], b[2 * i + 1]));
  // c0: per 128-bit lane j, {b0 part, b1 part, b0 part, b1 part}: vectors j and 4 + j; c1: 8 + j and 12 + j
  const __m512i d = _mm512_max_epu32(_mm512_unpacklo_epi64(c[0], c[1]), _mm512_unpackhi_epi64(c[0], c[1]));
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  return _mm512_permutexvar_epi32(order, d);
}

template <class T>
__m512i magnitudes16(const typename T::Raw* x) {
  __m512i v;
  if constexpr (sizeof(typename T::Raw) == 4)
    v = _mm512_loadu_si512(x);
  else
    v = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16);
  return _mm512_and_si512(v, _mm512_set1_epi32(0x7FFFFFFF));
}
#endif

// Largest magnitude of consecutive runs of `width`, the last one shorter.
template <class T>
void row_group_max(const typename T::Raw* x, size_t n, size_t width, uint32_t* top) {
  size_t g = 0;
#if defined(__AVX512F__)
  if constexpr (!std::is_same_v<T, F16>) {
    if (width % 16 == 0 && width <= 256)
      for (; (g + 16) * width <= n; g += 16) {
        __m512i v[16];
        for (size_t k = 0; k < 16; ++k) {
          const auto* p = x + (g + k) * width;
          v[k] = magnitudes16<T>(p);
          for (size_t j = 16; j < width; j += 16) v[k] = _mm512_max_epu32(v[k], magnitudes16<T>(p + j));
        }
        _mm512_storeu_si512(top + g, max_of_each(v));
      }
  }
#endif
  for (; g * width < n; ++g) {
    const size_t last = std::min(n, (g + 1) * width);
    uint32_t m = 0;
    for (size_t i = g * width; i < last; ++i) m = std::max(m, T::load(x[i]) & 0x7FFFFFFFu);
    top[g] = m;
  }
}

// -- scales ----------------------------------------------------------------------------------------------------------

// What the cast of a group needs: y = x / divide or x * multiply; value = rounded(y) * fold.
struct GroupScales {
  std::vector<float> factor, fold;  // factor: divisor (kDivide) or multiplier
};

// Exponent of the power-of-two scale for a positive finite magnitude, by its bits.
struct PowerRule {
  int top, top_mantissa, half;
  ScaleRule rule;
  PowerRule(const Format& f, ScaleRule scale_rule) : rule(scale_rule) {
    const uint32_t max = bits_of(f.max_value);
    top = static_cast<int>(max >> 23) - 127;  // the largest value of any format is a normal fp32 here
    top_mantissa = static_cast<int>(max & 0x7FFFFFu);
    const int kept = f.kind == kFloat ? f.mantissa_bits : f.bits - 2;
    half = (1 << 23) - (kept > 22 ? 0 : kept < 0 ? 1 << 23 : 1 << (22 - kept));
    if (kept > 22) half = 1 << 23;
  }
  int operator()(uint32_t a) const {
    int e = static_cast<int>(a >> 23), mantissa = static_cast<int>(a & 0x7FFFFFu);
    if (e == 0) {  // subnormal: the clamp below decides for every format with top >= 0; be exact all the same
      const int lead = std::countl_zero(static_cast<uint32_t>(mantissa) | 1u) - 8;
      e = 1 - lead, mantissa = (mantissa << lead) & 0x7FFFFF;
    }
    const int up = rule == kFloorRule  ? 0
                   : rule == kCeilRule ? mantissa > 0
                   : rule == kEvenRule ? mantissa >= half
                                       : mantissa > top_mantissa;
    return std::clamp(e - 127 - top + up, -127, 127);
  }
};

// Scales of n groups from their magnitudes. Returns the smallest exponent of a power-of-two fold.
inline int power_scales(const uint32_t* __restrict top, size_t n, const PowerRule& rule, float* __restrict factor,
                        float* __restrict fold, void* stored, bool bytes) {
  int lowest = 127;
  // Where the format reaches 2, a subnormal magnitude has the smallest scale whatever its bits: no branch is needed.
  const bool simple = rule.top >= 1;
  const int top_exponent = rule.top + 127;
  const int cut = rule.rule == kFloorRule  ? 1 << 23
                  : rule.rule == kCeilRule ? 1
                  : rule.rule == kEvenRule ? rule.half
                                           : rule.top_mantissa + 1;
  alignas(64) int exponents[kChunk];
  for (size_t at = 0; at < n; at += kChunk) {
    const size_t count = std::min(kChunk, n - at);
    const uint32_t* const t = top + at;
    if (simple)
      for (size_t i = 0; i < count; ++i) {
        const int e = static_cast<int>(t[i] >> 23), mantissa = static_cast<int>(t[i] & 0x7FFFFFu);
        const int k = std::min(std::max(e - top_exponent + (mantissa >= cut), -127), 127);
        exponents[i] = e == 0 ? -127 : k;
      }
    else
      for (size_t i = 0; i < count; ++i) exponents[i] = rule(t[i]);
    for (size_t i = 0; i < count; ++i) {
      const bool bad = t[i] >= kInfBits;
      const int k = t[i] == 0 || bad ? 0 : exponents[i];
      const uint32_t inverse = k == 127 ? 1u << 22 : static_cast<uint32_t>(127 - k) << 23;
      const uint32_t direct = k == -127 ? 1u << 22 : static_cast<uint32_t>(127 + k) << 23;
      lowest = std::min(lowest, k);
      factor[at + i] = real(bad ? kNanBits : inverse);
      fold[at + i] = real(bad ? kNanBits : direct);
      exponents[i] = bad ? 255 : k + 127;
    }
    if (stored && bytes)
      for (size_t i = 0; i < count; ++i) static_cast<uint8_t*>(stored)[at + i] = static_cast<uint8_t>(exponents[i]);
  }
  if (stored && !bytes) std::memcpy(stored, fold, n * 4);
  return lowest;
}

inline void divide_scales(const uint32_t* top, size_t n, float max, float* factor, void* stored) {
  const float lowest = real(0x00200001u);
  for (size_t i = 0; i < n; ++i) {
    const float scale = std::max(real(top[i]) / max, lowest);
    const uint32_t b = top[i] >= kInfBits ? kNanBits : top[i] == 0 ? 0x3F800000u : bits_of(scale);
    factor[i] = real(b);
  }
  if (stored) std::memcpy(stored, factor, n * 4);
}

// NVFP4: e4m3 block scales under one fp32 scale; `whole` is S of the tensor.
inline void two_level_scales(const uint32_t* __restrict top, size_t n, const Format& f, float whole,
                             float min_block_scale, float* __restrict factor, float* __restrict fold, void* stored) {
  const float per = whole / f.max_value;
  constexpr uint32_t emin = 121u << 23, add = 20u << 23, shift = 20, largest = 0x43E00000u;  // e4m3: 448, 2^-6
  const bool bad = whole != whole;
  alignas(64) uint32_t codes[kChunk];
  for (size_t at = 0; at < n; at += kChunk) {
    const size_t count = std::min(kChunk, n - at);
    for (size_t i = 0; i < count; ++i) {
      float wanted = real(top[at + i]) * per;
      wanted = wanted < min_block_scale ? min_block_scale : wanted;
      const uint32_t a = bits_of(wanted) & 0x7FFFFFFFu, c = std::min(a, largest), e = std::max(c & kInfBits, emin);
      const float magic = real(e + add), value = (real(c) + magic) - magic;
      const float m = whole / value;
      codes[i] = bad ? 0x7Fu : bits_of(real(c) + magic) - (e + add) + ((e - emin) >> shift);
      factor[at + i] = bad ? real(kNanBits) : m < real(0x7F7FFFFFu) ? m : real(0x7F7FFFFFu);
      fold[at + i] = bad ? real(kNanBits) : value;
    }
    if (stored)
      for (size_t i = 0; i < count; ++i) static_cast<uint8_t*>(stored)[at + i] = static_cast<uint8_t>(codes[i]);
  }
}

inline float whole_scale(uint32_t top, const Format& f) {
  if (top >= kInfBits) return real(kNanBits);
  return top ? std::min(448.0f * f.max_value / real(top), real(0x7F7FFFFFu)) : 1.0f;
}

}  // namespace
}  // namespace lowprec::LOWPREC_ISA
