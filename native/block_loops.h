// The inner loops of scaled casts: one row segment whose groups have their scales. Nearest and saturating, fused from
// load to store; `y` is the scaled element, `v` its rounded value.
//
//   kDiv       y = x / factor            v as it is
//   kMul       y = x * factor            v * fold, rounded to the output (power-of-two scales, codes of NVFP4)
//   kExactMul  y = x * factor            v * fold, exact in bf16 (values of NVFP4)
//   kDirect    x itself is rounded to the grid times the group's power of two: nothing is multiplied
//   kReady     y was computed before
#pragma once

#include "block.h"
#include "fused.h"
#include "general.h"
#include "lanes.h"

namespace lowprec::LOWPREC_ISA {
namespace {

enum Way : int { kDiv, kMul, kExactMul, kDirect, kReady };

// Groups along the segment: `width` elements share factor[g] and fold[g]; width 1 means one of each an element, and
// width 0 one for the whole segment.
struct Segment {
  size_t n, width;
  const float *factor, *fold;
};

template <Way W>
inline uint32_t scaled(uint32_t b, float factor) {
  if constexpr (W == kDiv)
    return bits_of(real(b) / factor);
  else if constexpr (W == kMul || W == kExactMul)
    return bits_of(real(b) * factor);
  else
    return b;
}

struct CodeLoop {
  Nearest rule;
  uint32_t keep_sign;  // 1 where -0 has a code
  CodeLoop(const Format& f) : rule(f, kNanZero), keep_sign(!f.negative_zero_nan) {}

  template <Way W>
  uint8_t one(uint32_t b, float factor) const {
    const uint32_t y = scaled<W>(b, factor), a = y & 0x7FFFFFFFu;
    const uint32_t r = rule.magnitude(a);
    uint32_t all = static_cast<uint32_t>(static_cast<int32_t>(y) >> 31);
    all = (r | keep_sign) != 0 ? all : 0;
    const uint32_t code = ((r ^ (all & rule.sign_xor)) + (all & rule.sign_add)) & rule.mask;
    return static_cast<uint8_t>(a > 0x7F800000u ? rule.nan : code);
  }
};

template <class Out>
struct ValueLoop {
  Nearest rule;
  uint32_t drop_zero_sign;
  ValueLoop(const Format& f) : rule(f, kNanZero), drop_zero_sign(f.kind == kInt || f.negative_zero_nan) {}

  // Direct: `factor` holds the bits of the smallest exponent of the grid, `fold` the largest value.
  template <Way W>
  typename Out::Raw one(uint32_t b, float factor, float fold) const {
    const uint32_t y = scaled<W>(b, factor), a = y & 0x7FFFFFFFu;
    uint32_t v;
    if constexpr (W == kDirect) {
      const uint32_t c = std::min(a, bits_of(fold)), e = std::max(c & 0x7F800000u, bits_of(factor));
      const float magic = real(e + rule.add);
      v = bits_of((real(c) + magic) - magic);
    } else {
      v = rule.value(a);
      if constexpr (W == kMul || W == kExactMul) v = bits_of(real(v) * fold);
    }
    v |= (drop_zero_sign & static_cast<uint32_t>(v == 0)) ? 0 : y & 0x80000000u;
    v = a > 0x7F800000u ? 0x7FC00000u : v;
    if constexpr (sizeof(typename Out::Raw) == 4)
      return v;
    else if constexpr (W == kMul)
      return bits_to_bf16(v);
    else
      return static_cast<uint16_t>(v >> 16);
  }
};

// f(i, factor, fold) for every element; the group width is a constant where that makes short loops disappear.
template <class F>
inline __attribute__((always_inline)) void for_groups(const Segment& s, F f) {
  // Local values: a store of bytes may alias anything that is read through a reference.
  const size_t n = s.n;
  const float* const factors = s.factor;
  const float* const folds = s.fold;
#if !defined(__AVX512F__)  // AVX-512 has its own loops for these widths
  auto fixed = [=]<size_t Width>() __attribute__((always_inline)) {
    size_t g = 0;
    for (; (g + 1) * Width <= n; ++g) {
      const float factor = factors[g], fold = folds[g];
#pragma GCC ivdep
      for (size_t j = 0; j < Width; ++j) f(g * Width + j, factor, fold);
    }
    for (size_t i = g * Width; i < n; ++i) f(i, factors[g], folds[g]);
  };
#endif
  if (s.width == 1) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) f(i, factors[i], folds[i]);
#if !defined(__AVX512F__)
  } else if (s.width == 16) {
    fixed.template operator()<16>();
  } else if (s.width == 32) {
    fixed.template operator()<32>();
#endif
  } else {
    const size_t width = s.width ? s.width : n;
    for (size_t g = 0, at = 0; at < n; ++g, at += width) {
      const size_t last = std::min(n, at + width);
      const float factor = factors[g], fold = folds[g];
#pragma GCC ivdep
      for (size_t i = at; i < last; ++i) f(i, factor, fold);
    }
  }
}

#if defined(__AVX512F__)
// The same by hand, sixteen elements at a time: short groups and byte stores are where the compiler does worst.
template <Way W>
inline __m512i scaled16(__m512i b, __m512 factor) {
  if constexpr (W == kDiv)
    return _mm512_castps_si512(_mm512_div_ps(_mm512_castsi512_ps(b), factor));
  else if constexpr (W == kMul || W == kExactMul)
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(b), factor));
  else
    return b;
}

inline __m512i set(uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }

struct Code16 {
  __m512i max, emin, add, nan, sign_xor, sign_add, mask;
  __m128i shift;
  __mmask16 drop;  // where a zero has no sign
  explicit Code16(const CodeLoop& l)
      : max(set(l.rule.max)),
        emin(set(l.rule.emin)),
        add(set(l.rule.add)),
        nan(set(l.rule.nan)),
        sign_xor(set(l.rule.sign_xor)),
        sign_add(set(l.rule.sign_add)),
        mask(set(l.rule.mask)),
        shift(_mm_cvtsi32_si128(static_cast<int>(l.rule.shift))),
        drop(l.keep_sign ? 0 : 0xFFFF) {}
  template <Way W>
  __m128i operator()(__m512i b, __m512 factor, __m512) const {
    const __m512i y = scaled16<W>(b, factor), a = _mm512_and_si512(y, set(0x7FFFFFFF));
    const __m512i c = _mm512_min_epu32(a, max), e = _mm512_max_epu32(_mm512_and_si512(c, set(0x7F800000)), emin);
    const __m512i magic = _mm512_add_epi32(e, add);
    const __m512i t = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(c), _mm512_castsi512_ps(magic)));
    const __m512i r = _mm512_add_epi32(_mm512_sub_epi32(t, magic), _mm512_srl_epi32(_mm512_sub_epi32(e, emin), shift));
    __mmask16 negative = _mm512_movepi32_mask(y);
    negative &= static_cast<__mmask16>(~(_mm512_testn_epi32_mask(r, r) & drop));
    __m512i code = _mm512_mask_add_epi32(r, negative, _mm512_xor_si512(r, sign_xor), sign_add);
    code = _mm512_mask_mov_epi32(_mm512_and_si512(code, mask), _mm512_cmpgt_epu32_mask(a, set(0x7F800000)), nan);
    return _mm512_cvtepi32_epi8(code);
  }
  static void store(uint8_t* to, __mmask16 live, __m128i v) { _mm_mask_storeu_epi8(to, live, v); }
};

template <class Out>
struct Value16 {
  __m512i max, emin, add;
  __mmask16 drop;
  explicit Value16(const ValueLoop<Out>& l)
      : max(set(l.rule.max)), emin(set(l.rule.emin)), add(set(l.rule.add)), drop(l.drop_zero_sign ? 0xFFFF : 0) {}
  template <Way W>
  __m512i operator()(__m512i b, __m512 factor, __m512 fold) const {
    const __m512i y = scaled16<W>(b, factor), a = _mm512_and_si512(y, set(0x7FFFFFFF));
    const __m512i top = W == kDirect ? _mm512_castps_si512(fold) : max,
                  low = W == kDirect ? _mm512_castps_si512(factor) : emin;
    const __m512i c = _mm512_min_epu32(a, top), e = _mm512_max_epu32(_mm512_and_si512(c, set(0x7F800000)), low);
    const __m512 magic = _mm512_castsi512_ps(_mm512_add_epi32(e, add));
    __m512 value = _mm512_sub_ps(_mm512_add_ps(_mm512_castsi512_ps(c), magic), magic);
    if constexpr (W == kMul || W == kExactMul) value = _mm512_mul_ps(value, fold);
    __m512i v = _mm512_castps_si512(value);
    const __mmask16 unsigned_zero = _mm512_testn_epi32_mask(v, v) & drop;
    v = _mm512_mask_or_epi32(v, static_cast<__mmask16>(~unsigned_zero), v, _mm512_and_si512(y, set(0x80000000u)));
    v = _mm512_mask_mov_epi32(v, _mm512_cmpgt_epu32_mask(a, set(0x7F800000)), set(0x7FC00000));
    if constexpr (W == kMul && sizeof(typename Out::Raw) == 2) {  // to nearest: subnormals of bf16 may drop bits
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(v, 16), set(1));
      const __mmask16 number = _mm512_cmple_epu32_mask(_mm512_and_si512(v, set(0x7FFFFFFF)), set(0x7F800000));
      v = _mm512_mask_add_epi32(v, number, v, _mm512_add_epi32(odd, set(0x7FFF)));
    }
    return v;
  }
  static void store(typename Out::Raw* to, __mmask16 live, __m512i v) {
    if constexpr (sizeof(typename Out::Raw) == 4)
      _mm512_mask_storeu_epi32(to, live, v);
    else
      _mm256_mask_storeu_epi16(to, live, _mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
  }
};

template <class T>
inline __m512i load16(const typename T::Raw* x, __mmask16 live) {
  if constexpr (sizeof(typename T::Raw) == 4)
    return _mm512_maskz_loadu_epi32(live, x);
  else
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live, x)), 16);
}

// Returns false for group widths that do not fill vectors.
template <class T, Way W, class Body, class Raw>
inline bool vectors(const typename T::Raw* x, const Segment& s, const Body& body, Raw* out) {
  if (s.width > 1 && s.width % 16) return false;
  const size_t n = s.n, width = s.width ? s.width : n;
  auto step = [&](size_t i, size_t last, __m512 factor, __m512 fold) __attribute__((always_inline)) {
    const __mmask16 live = last - i >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (last - i)) - 1);
    Body::store(out + i, live, body.template operator()<W>(load16<T>(x + i, live), factor, fold));
  };
  if (s.width == 1) {
    for (size_t i = 0; i < n; i += 16) {
      const __mmask16 live = n - i >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (n - i)) - 1);
      step(i, n, _mm512_maskz_loadu_ps(live, s.factor + i), _mm512_maskz_loadu_ps(live, s.fold + i));
    }
    return true;
  }
  for (size_t g = 0, at = 0; at < n; ++g, at += width) {
    const size_t last = std::min(n, at + width);
    const __m512 factor = _mm512_set1_ps(s.factor[g]), fold = _mm512_set1_ps(s.fold[g]);
    for (size_t i = at; i < last; i += 16) step(i, last, factor, fold);
  }
  return true;
}
#endif

template <class T, Way W>
void code_segment(const typename T::Raw* x, const Segment& s, const CodeLoop& rule, uint8_t* out) {
#if defined(__AVX512F__)
  if (vectors<T, W>(x, s, Code16(rule), out)) return;
#endif
  const CodeLoop local = rule;
  for_groups(s, [=](size_t i, float factor, float)
                    __attribute__((always_inline)) { out[i] = local.one<W>(T::load(x[i]), factor); });
}

template <class T, class Out, Way W>
void value_segment(const typename T::Raw* x, const Segment& s, const ValueLoop<Out>& rule, typename Out::Raw* out) {
#if defined(__AVX512F__)
  if (vectors<T, W>(x, s, Value16<Out>(rule), out)) return;
#endif
  const ValueLoop<Out> local = rule;
  for_groups(s, [=](size_t i, float factor, float fold)
                    __attribute__((always_inline)) { out[i] = local.template one<W>(T::load(x[i]), factor, fold); });
}

// y for the roads in stages. Guard: with a scale that was given, an infinity must not vanish by saturating.
template <class T>
void scale_segment(const typename T::Raw* x, const Segment& s, ScaleMode mode, bool guard, uint32_t* y) {
  if (mode == kUnscaled)
    load_chunk<T>(x, y, s.n);
  else if (mode == kDivide)
    for_groups(s, [=](size_t i, float factor, float)
                      __attribute__((always_inline)) { y[i] = scaled<kDiv>(T::load(x[i]), factor); });
  else
    for_groups(s, [=](size_t i, float factor, float)
                      __attribute__((always_inline)) { y[i] = scaled<kMul>(T::load(x[i]), factor); });
  for (size_t i = 0; guard && i < s.n; ++i) y[i] = (T::load(x[i]) & 0x7FFFFFFFu) >= 0x7F800000u ? 0x7FC00000u : y[i];
}

// The same in 64-bit lanes, where dividing by a power of two never rounds.
template <class T>
void scale_segment_wide(const typename T::Raw* x, const Segment& s, ScaleMode mode, bool guard, uint64_t* y) {
  for_groups(s, [=](size_t i, float factor, float) {
    const uint32_t b = T::load(x[i]);
    const double v = mode == kUnscaled   ? static_cast<double>(real(b))
                     : mode == kDivide   ? static_cast<double>(real(b) / factor)
                     : mode == kTwoLevel ? static_cast<double>(real(b) * factor)
                                         : static_cast<double>(real(b)) * static_cast<double>(factor);
    y[i] = guard && (b & 0x7FFFFFFFu) >= 0x7F800000u ? Lane<uint64_t>::kNan : bits_of(v);
  });
}

struct Counts {
  int64_t flushed = 0, saturated = 0, special = 0;
  uint32_t top = 0;
};

// Counters of nearest rounding follow from thresholds on |y| alone.
struct Thresholds {
  uint32_t zero_upto, over_from;
  explicit Thresholds(const Format& f) {
    zero_upto = bits_of(static_cast<float>(__builtin_ldexp(1.0, f.emin - f.m - 1)));
    const int e = std::max(f.emax, f.emin);
    const float half = static_cast<float>(__builtin_ldexp(1.0, e - f.m - 1));
    over_from = bits_of(f.max_value + half) + ((f.max_code & 1) == 0);
  }
};

template <class T>
void count_segment(const typename T::Raw* x, const uint32_t* y, const Segment& s, const Thresholds& t, bool two_level,
                   Counts& counts) {
  uint32_t flushed = 0, saturated = 0, special = 0, top = 0;
  const uint32_t zero = t.zero_upto, over = t.over_from, level = two_level;
  for_groups(s, [&](size_t i, float, float fold) {
    const uint32_t a = T::load(x[i]) & 0x7FFFFFFFu, b = y[i] & 0x7FFFFFFFu;
    const uint32_t dead = level & static_cast<uint32_t>(fold == 0), finite = a < 0x7F800000u, number = b <= 0x7F800000u;
    flushed += finite & number & static_cast<uint32_t>(a != 0) & (dead | static_cast<uint32_t>(b <= zero));
    saturated += finite & number & (dead ^ 1u) & static_cast<uint32_t>(b >= over);
    special += finite ^ 1u;
    top = std::max(top, a);
  });
  counts.flushed += flushed, counts.saturated += saturated, counts.special += special;
  counts.top = std::max(counts.top, top);
}

}  // namespace
}  // namespace lowprec::LOWPREC_ISA
