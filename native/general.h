// The general road of a cast, in stages over a chunk in the first-level cache: load, round, finish. It serves every
// format, rounding and overflow.
#pragma once

#include "lanes.h"
#include "philox.h"
#include "round.h"

namespace lowprec::LOWPREC_ISA {
namespace {

// What a magnitude past the largest, an infinity or a NaN becomes, by sign; in codes or in values.
template <class U>
struct Specials {
  U over[2], inf[2], nan;
  bool over_nan[2], inf_nan[2];
};

inline bool stops_at_max(Rounding rounding, Overflow overflow, bool negative) {
  return overflow != kIeee || rounding == kTowardZero || (rounding == kUp && negative) ||
         (rounding == kDown && !negative);
}

template <class U, class Max, class Inf>
Specials<U> specials(const Format& f, Rounding rounding, Overflow overflow, U nan, Max max, Inf inf) {
  Specials<U> s{};
  s.nan = nan;
  for (int negative = 0; negative < 2; ++negative) {
    const bool stop = stops_at_max(rounding, overflow, negative), has_inf = f.inf_code >= 0;
    s.over_nan[negative] = !stop && !has_inf;
    s.over[negative] = stop ? max(negative) : has_inf ? inf(negative) : nan;
    s.inf_nan[negative] = overflow != kSaturate && !has_inf;
    s.inf[negative] = overflow == kSaturate ? max(negative) : has_inf ? inf(negative) : nan;
    if (f.kind == kScale && negative) s.over_nan[1] = s.inf_nan[1] = true, s.over[1] = s.inf[1] = nan;
  }
  return s;
}

template <class U>
U with_sign(const Format& f, U code, bool negative) {
  if (f.kind == kScale || (f.negative_zero_nan && !code)) return code;
  const U all = negative ? ~U{0} : U{0};
  return ((code ^ (all & static_cast<U>(f.sign_xor))) + (all & static_cast<U>(f.sign_add))) & static_cast<U>(f.mask);
}

template <class U>
Specials<U> code_specials(const Format& f, Rounding rounding, Overflow overflow, NanPolicy policy) {
  const U nan = static_cast<U>(f.nan_code >= 0 ? f.nan_code : policy == kNanMax ? f.max_code : 0);
  return specials<U>(
      f, rounding, overflow, nan, [&](bool n) { return with_sign<U>(f, static_cast<U>(f.max_code), n); },
      [&](bool n) { return with_sign<U>(f, static_cast<U>(f.inf_code), n); });
}

template <class U>
Specials<U> value_specials(const Format& f, Rounding rounding, Overflow overflow) {
  using L = Lane<U>;
  const U max = sizeof(U) == 4 ? static_cast<U>(bits_of(f.max_value)) : static_cast<U>(bits_of(f.max_value64));
  return specials<U>(
      f, rounding, overflow, L::kNan, [&](bool n) { return max | (n ? L::kSign : U{0}); },
      [&](bool n) { return L::kInf | (n ? L::kSign : U{0}); });
}

template <class U, Rounding R, bool Deep>
void round_chunk(const U* x, const uint32_t* random, size_t n, const Grid<U>& format, U* r) {
  const Grid<U> grid = format;
  for (size_t i = 0; i < n; ++i) {
    const U a = x[i] & ~Lane<U>::kSign;
    const bool negative = (x[i] & Lane<U>::kSign) != 0;
    r[i] = round_magnitude<U, R, Deep>(a, negative, grid, R == kStochastic ? random[i] : 0);
  }
}

template <Rounding R>
void scale_chunk(const uint64_t* x, const uint32_t* random, size_t n, const Format& f, int bits, uint64_t* r) {
  for (size_t i = 0; i < n; ++i)
    r[i] = round_scale<R>(x[i] & ~Lane<uint64_t>::kSign, f.bias, bits, R == kStochastic ? random[i] : 0);
}

template <class U>
void round_any(const U* x, const uint32_t* random, size_t n, const Format& f, Rounding rounding, int bits, U* r) {
  if (f.kind == kBinary) return void(std::fill_n(r, n, U{0}));
  auto run = [&]<Rounding R>() {
    if constexpr (sizeof(U) == 8)
      if (f.kind == kScale) return scale_chunk<R>(x, random, n, f, bits, r);
    const Grid<U> grid(f, bits);
    if constexpr (sizeof(U) == 8)
      if (grid.deep) return round_chunk<U, R, true>(x, random, n, grid, r);
    round_chunk<U, R, false>(x, random, n, grid, r);
  };
  switch (rounding) {
    case kNearest:
      return run.template operator()<kNearest>();
    case kNearestAway:
      return run.template operator()<kNearestAway>();
    case kTowardZero:
      return run.template operator()<kTowardZero>();
    case kUp:
      return run.template operator()<kUp>();
    case kDown:
      return run.template operator()<kDown>();
    default:
      return run.template operator()<kStochastic>();
  }
}

// Magnitude codes to codes, in place; returns how many are NaN.
template <class U>
size_t finish_codes(const U* x, U* r, size_t n, const Format& f, const Specials<U>& s) {
  if (f.kind == kBinary) {
    size_t nans = 0;
    for (size_t i = 0; i < n; ++i) {
      const U a = x[i] & ~Lane<U>::kSign;
      const bool nan = a > Lane<U>::kInf;
      r[i] = nan ? s.nan : static_cast<U>(x[i] != a && a != 0);
      nans += nan;
    }
    return nans;
  }
  // Everything the loop reads is a local value: that is what lets the compiler vectorise it.
  const U max = static_cast<U>(f.max_code), mask = static_cast<U>(f.mask), nan = s.nan;
  const U sign_xor = f.kind == kScale ? 0 : static_cast<U>(f.sign_xor);
  const U sign_add = f.kind == kScale ? 0 : static_cast<U>(f.sign_add);
  const U zero_sign = f.negative_zero_nan ? 0 : 1, negative_nan = f.kind == kScale;
  const U over0 = s.over[0], over1 = s.over[1], inf0 = s.inf[0], inf1 = s.inf[1];
  const U over_nan0 = s.over_nan[0], over_nan1 = s.over_nan[1], inf_nan0 = s.inf_nan[0], inf_nan1 = s.inf_nan[1];
  U count = 0;
  for (size_t i = 0; i < n; ++i) {
    const U a = x[i] & ~Lane<U>::kSign, code = r[i];
    const U negative = x[i] >> (sizeof(U) * 8 - 1), all = (code | zero_sign) != 0 ? U{0} - negative : U{0};
    const U is_inf = a == Lane<U>::kInf, is_over = code > max;
    U result = ((code ^ (all & sign_xor)) + (all & sign_add)) & mask;
    result = is_over ? (negative ? over1 : over0) : result;
    result = is_inf ? (negative ? inf1 : inf0) : result;
    const U over_bad = negative ? over_nan1 : over_nan0, inf_bad = negative ? inf_nan1 : inf_nan0;
    U bad = is_inf ? inf_bad : is_over & over_bad;
    bad |= static_cast<U>(a > Lane<U>::kInf) | (negative & negative_nan & static_cast<U>(a != 0));
    r[i] = bad ? nan : result;
    count += bad;
  }
  return static_cast<size_t>(count);
}

template <class U>
void finish_values(const U* x, U* r, size_t n, const Format& f, const Specials<U>& s) {
  using L = Lane<U>;
  if (f.kind == kBinary) {
    for (size_t i = 0; i < n; ++i) {
      const U a = x[i] & ~L::kSign;
      r[i] = a > L::kInf ? L::kNan : bits_of(typename L::Real(1)) | (a ? x[i] & L::kSign : 0);
    }
    return;
  }
  const U max = static_cast<U>(f.max_code);
  const bool ready = f.kind == kScale || f.emin < -1022;
  if (ready) {  // rare: values one at a time, marked by a sign so as not to be taken for codes
    for (size_t i = 0; i < n; ++i)
      r[i] = r[i] > max
                 ? r[i]
                 : static_cast<U>(f.kind == kScale ? bits_of(__builtin_ldexp(1.0, static_cast<int>(r[i]) - f.bias))
                                                   : deep_value(f, r[i])) |
                       U{1} << (sizeof(U) * 8 - 1);
  }
  const Values<U> value(ready ? Format{} : f);
  const U zero_sign = f.kind == kFloat && !f.negative_zero_nan, negative_nan = f.kind == kScale;
  const U sign_mask = f.kind == kScale ? 0 : L::kSign;
  const U over0 = s.over[0], over1 = s.over[1], inf0 = s.inf[0], inf1 = s.inf[1];
  for (size_t i = 0; i < n; ++i) {
    const U a = x[i] & ~L::kSign, sign = x[i] & sign_mask, code = r[i];
    const U negative = x[i] >> (sizeof(U) * 8 - 1);
    const bool over = ready ? code >> (sizeof(U) * 8 - 1) == 0 : code > max;
    U v = ready ? code & ~L::kSign : value(code);
    v |= (v | zero_sign) != 0 ? sign : U{0};
    v = over ? (negative ? over1 : over0) : v;
    v = a == L::kInf ? (negative ? inf1 : inf0) : v;
    const U bad = static_cast<U>(a > L::kInf) | (negative & negative_nan & static_cast<U>(a != 0));
    r[i] = bad ? L::kNan : v;
  }
}

template <class T>
void load_wide(const typename T::Raw* in, uint64_t* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = bits_of(static_cast<double>(real(T::load(in[i]))));
}

inline void load_any(const void* x, Dtype dtype, size_t at, size_t n, uint32_t* out) {
  switch (dtype) {
    case kF16:
      return load_chunk<F16>(static_cast<const uint16_t*>(x) + at, out, n);
    case kBF16:
      return load_chunk<BF16>(static_cast<const uint16_t*>(x) + at, out, n);
    default:
      return load_chunk<F32>(static_cast<const uint32_t*>(x) + at, out, n);
  }
}

inline void load_any(const void* x, Dtype dtype, size_t at, size_t n, uint64_t* out) {
  switch (dtype) {
    case kF16:
      return load_wide<F16>(static_cast<const uint16_t*>(x) + at, out, n);
    case kBF16:
      return load_wide<BF16>(static_cast<const uint16_t*>(x) + at, out, n);
    case kF64:
      return void(std::memcpy(out, static_cast<const uint64_t*>(x) + at, n * 8));
    default:
      return load_wide<F32>(static_cast<const uint32_t*>(x) + at, out, n);
  }
}

template <class U>
void store_codes(const U* in, void* out, size_t at, size_t n, int bytes) {
  auto put = [&]<class T>(T* to) {
    for (size_t i = 0; i < n; ++i) to[at + i] = static_cast<T>(in[i]);
  };
  bytes == 1   ? put(static_cast<uint8_t*>(out))
  : bytes == 2 ? put(static_cast<uint16_t*>(out))
  : bytes == 4 ? put(static_cast<uint32_t*>(out))
               : put(static_cast<uint64_t*>(out));
}

// Values of the grid back to the dtype of x: towards zero where that cannot hold one (65504 in bf16), never to
// infinity.
inline void store_values(const uint32_t* in, void* out, Dtype dtype, size_t at, size_t n) {
  if (dtype == kF32) return void(std::memcpy(static_cast<uint32_t*>(out) + at, in, n * 4));
  auto* to = static_cast<uint16_t*>(out) + at;
  if (dtype == kBF16) {
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<uint16_t>(in[i] >> 16);
  } else {
    for (size_t i = 0; i < n; ++i)
      to[i] = narrow<uint16_t, 5, 10, false, kTowardZero>(bits_of(static_cast<double>(real(in[i]))));
  }
}

inline void store_values(const uint64_t* in, void* out, Dtype dtype, size_t at, size_t n) {
  if (dtype == kF64) return void(std::memcpy(static_cast<uint64_t*>(out) + at, in, n * 8));
  for (size_t i = 0; i < n; ++i) {
    if (dtype == kF32)
      static_cast<uint32_t*>(out)[at + i] = narrow<uint32_t, 8, 23, false, kTowardZero>(in[i]);
    else if (dtype == kBF16)
      static_cast<uint16_t*>(out)[at + i] = narrow<uint16_t, 8, 7, false, kTowardZero>(in[i]);
    else
      static_cast<uint16_t*>(out)[at + i] = narrow<uint16_t, 5, 10, false, kTowardZero>(in[i]);
  }
}

}  // namespace
}  // namespace lowprec::LOWPREC_ISA
