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
inline void for_groups(const Segment& s, F f) {
  auto fixed = [&]<size_t Width>() {
    size_t g = 0;
    for (; (g + 1) * Width <= s.n; ++g) {
      const float factor = s.factor[g], fold = s.fold[g];
#pragma GCC ivdep
      for (size_t j = 0; j < Width; ++j) f(g * Width + j, factor, fold);
    }
    for (size_t i = g * Width; i < s.n; ++i) f(i, s.factor[g], s.fold[g]);
  };
  if (s.width == 1) {
#pragma GCC ivdep
    for (size_t i = 0; i < s.n; ++i) f(i, s.factor[i], s.fold[i]);
  } else if (s.width == 16) {
    fixed.template operator()<16>();
  } else if (s.width == 32) {
    fixed.template operator()<32>();
  } else {
    const size_t width = s.width ? s.width : s.n;
    for (size_t g = 0, at = 0; at < s.n; ++g, at += width) {
      const size_t last = std::min(s.n, at + width);
      const float factor = s.factor[g], fold = s.fold[g];
#pragma GCC ivdep
      for (size_t i = at; i < last; ++i) f(i, factor, fold);
    }
  }
}

template <class T, Way W>
void code_segment(const typename T::Raw* x, const Segment& s, const CodeLoop& rule, uint8_t* out) {
  const CodeLoop local = rule;
  for_groups(s, [=](size_t i, float factor, float)
                    __attribute__((always_inline)) { out[i] = local.one<W>(T::load(x[i]), factor); });
}

template <class T, class Out, Way W>
void value_segment(const typename T::Raw* x, const Segment& s, const ValueLoop<Out>& rule, typename Out::Raw* out) {
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
