// Every store as a struct: how sixteen elements are loaded as fp32 and stored from it. The layouts and the arithmetic
// are those of lowprec/kernels/reference/optim.py.
#pragma once

#include "optim.h"
#include "optim_lanes.h"

namespace lowprec::LOWPREC_ISA {
namespace {

constexpr uint32_t kInfBits = 0x7F800000u, kMagnitude = 0x7FFFFFFFu;

// The code of magnitude y >= 0 in a float format of M mantissa bits whose smallest normal is 2^E: nearest, ties to
// even. Adding 2^(e + 23 - M) makes the floating-point unit round to the quantum of y's binade; no upper limit.
template <int M, int E>
OPTIM_INLINE VU float_code(VF y) {
  const VU binade = umax(ubits(y) & kInfBits, vu(uint32_t(127 + E) << 23));
  const VF magic = real(binade + (uint32_t(23 - M) << 23));
  return (ubits(y + magic) - ubits(magic)) + ((binade - (uint32_t(127 + E) << 23)) >> (23 - M));
}

// The same with stochastic rounding from R = 32 random bits.
template <int M, int E, int R>
OPTIM_INLINE VU float_code(VF y, VU random) {
  static_assert(R == 32);
  const VU binade = umax(ubits(y) & kInfBits, vu(uint32_t(127 + E) << 23));
  const VF scaled = y * real(vu(uint32_t(254 + M) << 23) - binade);  // in units of the quantum
  const VU whole = to_int(scaled);
  const VF x = (scaled - to_float(whole)) * 4294967296.0f;
  const VU t = __builtin_convertvector(x, VU);
  const VU threshold = t + ((x - __builtin_convertvector(t, VF)) >= 0.5f ? vu(1) : vu(0));
  const VU up = random < threshold ? vu(1) : vu(0);
  return whole + up + ((binade - (uint32_t(127 + E) << 23)) >> (23 - M));
}

// Nearest after adding a share of the quantum in [-1/2, 1/2): a uniform share makes that stochastic rounding. Zero
// stays zero.
template <int M, int E>
OPTIM_INLINE VU float_code(VF y, VF share) {
  const VU binade = umax(ubits(y) & kInfBits, vu(uint32_t(127 + E) << 23));
  const VF magic = real(binade + (uint32_t(23 - M) << 23));
  const VF moved = above_zero(y + real(binade - (uint32_t(M) << 23)) * share);
  return (ubits(moved + magic) - ubits(magic)) + ((binade - (uint32_t(127 + E) << 23)) >> (23 - M));
}

// Random bits as fp32 in [-1/2, 1/2).
OPTIM_INLINE VF centred(VU random) { return real((random >> 9) | 0x3F800000u) - 1.5f; }

// -- plain elements ---------------------------------------------------------------------------------------------------

struct Fp32 {
  static constexpr bool block = false, root = false;
  static constexpr size_t size = 256;
  typedef float Raw;
  OPTIM_INLINE VF load(const Raw* p) { return get<VF>(p); }
  OPTIM_INLINE void store(Raw* p, VF x) { put(p, x); }
};

OPTIM_INLINE VU bf16_nearest(VF x) {
  const VU u = ubits(x);
  const VU rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return (u & kMagnitude) > kInfBits ? vu(0x7FC0u) : rounded;
}
OPTIM_INLINE VU bf16_stochastic(VF x, VU random16) {
  const VU u = ubits(x);
  const VU rounded = (u + (0xFFFFu - random16)) >> 16;
  const VU special = (u & kMagnitude) > kInfBits ? vu(0x7FC0u) : u >> 16;
  return (u & kInfBits) == kInfBits ? special : rounded;
}

struct Bf16 {
  static constexpr bool block = false, root = false;
  static constexpr size_t size = 256;
  typedef uint16_t Raw;
  OPTIM_INLINE VF load(const Raw* p) { return real(widen(get<VH>(p)) << 16); }
  OPTIM_INLINE void store(Raw* p, VF x) { put(p, narrow16(bf16_nearest(x))); }
  OPTIM_INLINE void store(Raw* p, VF x, VU random16) { put(p, narrow16(bf16_stochastic(x, random16))); }
};

struct Fp16 {
  static constexpr bool block = false, root = false;
  static constexpr size_t size = 256;
  typedef uint16_t Raw;
  OPTIM_INLINE VF load(const Raw* p) { return half_value(widen(get<VH>(p))); }
  OPTIM_INLINE void finish(Raw* p, VF x, VU code) {
    const VU a = ubits(x) & kMagnitude;
    code = umin(code, vu(0x7C00u));
    code = a >= kInfBits ? (a > kInfBits ? vu(0x7E00u) : vu(0x7C00u)) : code;
    put(p, narrow16(code | ((ubits(x) >> 16) & 0x8000u)));
  }
  OPTIM_INLINE VF capped(VF x) { return real(umin(ubits(x) & kMagnitude, vu(0x4F000000u))); }
  OPTIM_INLINE void store(Raw* p, VF x) { finish(p, x, float_code<10, -14>(capped(x))); }
  OPTIM_INLINE void store(Raw* p, VF x, VU random32) { finish(p, x, float_code<10, -14, 32>(capped(x), random32)); }
};

// -- codes under block scales -----------------------------------------------------------------------------------------
// load gives the code's value before its scale (a root store: of the root); store takes value times inverse scale.

template <int M, int E, uint32_t Max, bool Root, bool Row>
struct Float8 {
  static constexpr bool block = true, root = Root, pow2 = Row, fill_zero = false;
  static constexpr bool dithered = true;
  static constexpr size_t size = 256;
  typedef uint8_t Raw;
  static constexpr float top = M == 3 ? 448.0f : 57344.0f;
  OPTIM_INLINE VF load(const Raw* p) {
    const VU c = widen(get<VB>(p));
    if constexpr (M == 3) {
      const VU magnitude = c & 0x7Fu;
      const VF v = half_value(magnitude << 7) * 256.0f;  // the exponent of fp16 has 8 more
      const VU sign = (c & 0x80u) << 24;
      return real((magnitude == 0x7Fu ? vu(0x7FC00000u) : ubits(v)) | sign);
    } else {
      return half_value(c << 8);
    }
  }
  OPTIM_INLINE void finish(Raw* p, VF y, VU code) {
    code = umin(code, vu(Max));
    if constexpr (Root)
      code = umax(code, y > 0.0f ? vu(1) : vu(0));
    else
      code = code | ((ubits(y) >> 24) & 0x80u);
    put(p, narrow8(code));
  }
  OPTIM_INLINE VF magnitude(VF y) { return Root ? y : real(ubits(y) & kMagnitude); }
  OPTIM_INLINE void store(Raw* p, VF y) { finish(p, y, float_code<M, E>(magnitude(y))); }
  OPTIM_INLINE void store(Raw* p, VF y, VU random) { finish(p, y, float_code<M, E, 32>(magnitude(y), random)); }
  OPTIM_INLINE void store(Raw* p, VF y, VF share) { finish(p, y, float_code<M, E>(magnitude(y), share)); }
};
typedef Float8<3, -6, 0x7E, false, false> E4m3Block;
typedef Float8<2, -14, 0x7B, false, false> E5m2Block;
typedef Float8<3, -6, 0x7E, true, false> E4m3Root;
typedef Float8<2, -14, 0x7B, true, false> E5m2Root;
typedef Float8<3, -6, 0x7E, false, true> E4m3Row;
typedef Float8<2, -14, 0x7B, false, true> E5m2Row;

template <bool Plus>
struct HalfBlock {
  static constexpr bool dithered = true;
  static constexpr bool block = true, root = false, pow2 = true, fill_zero = false;
  static constexpr size_t size = 256;
  typedef uint16_t Raw;
  static constexpr float top = 65504.0f;
  OPTIM_INLINE VF load(const Raw* p) { return half_value(widen(get<VH>(p))); }
  OPTIM_INLINE void finish(Raw* p, VF y, VU code) {
    code = umin(code, vu(0x7BFFu));
    if constexpr (Plus) code = umax(code, y > 0.0f ? vu(1) : vu(0));
    put(p, narrow16(code | ((ubits(y) >> 16) & 0x8000u)));
  }
  OPTIM_INLINE VF magnitude(VF y) { return real(ubits(y) & kMagnitude); }
  OPTIM_INLINE void store(Raw* p, VF y) { finish(p, y, float_code<10, -14>(magnitude(y))); }
  OPTIM_INLINE void store(Raw* p, VF y, VU random) { finish(p, y, float_code<10, -14, 32>(magnitude(y), random)); }
  OPTIM_INLINE void store(Raw* p, VF y, VF share) { finish(p, y, float_code<10, -14>(magnitude(y), share)); }
};

// The dynamic map of D decades, each three binades wide: code c >= 1 lies in decade d = floor(log2 c).
template <int D>
struct DynamicTable {
  alignas(64) float slope[16] = {}, start[16] = {};  // by leading zeros of the code, % 16
  alignas(64) float into[32] = {}, shift[32] = {};   // by the exponent field of the value, % 32
  float top = 0;
  DynamicTable() {
    for (int d = 0; d < D; ++d) {
      const double unit = std::ldexp(1.0, 3 * (d - D + 1)), n = std::ldexp(1.0, d), step = 0.875 * unit / n;
      slope[(31 - d) & 15] = static_cast<float>(step);
      start[(31 - d) & 15] = static_cast<float>(0.5 * step - 0.75 * unit);
    }
    for (int e = 127 - 3 * D; e <= 127; ++e) {
      int d = e == 127 ? D - 1 : D - 1 - (126 - e) / 3;
      d = d < 0 ? 0 : d;
      const double unit = std::ldexp(1.0, 3 * (d - D + 1)), n = std::ldexp(1.0, d), step = 0.875 * unit / n;
      into[e & 31] = static_cast<float>(1.0 / step);
      shift[e & 31] = static_cast<float>(n * 6.0 / 7.0);
    }
    top = static_cast<float>((std::ldexp(1.0, D) - 1) * slope[(32 - D) & 15] + start[(32 - D) & 15]);
  }
};
template <int D>
inline const DynamicTable<D> kDynamic{};

template <int D>
OPTIM_INLINE VF dynamic_value(VU c) {
  const DynamicTable<D>& t = kDynamic<D>;
  const VU i = leading_zeros(c);
  return to_float(c) * lookup16(t.slope, i) + lookup16(t.start, i);
}
template <int D>
OPTIM_INLINE VF dynamic_position(VF y) {
  const DynamicTable<D>& t = kDynamic<D>;
  const VU e = umax(ubits(y) >> 23, vu(127 - 3 * D));
  return y * lookup32(t.into, e) + lookup32(t.shift, e);
}

template <bool Root>
struct Dynamic8 {
  static constexpr bool block = true, root = Root, pow2 = false, fill_zero = false;
  static constexpr size_t size = 256;
  static constexpr int decades = Root ? 8 : 7;
  typedef uint8_t Raw;
  static inline const float top = kDynamic<decades>.top;
  OPTIM_INLINE VF load(const Raw* p) {
    const VU c = widen(get<VB>(p));
    if constexpr (Root) return dynamic_value<8>(c);
    return real(ubits(dynamic_value<7>(c & 0x7Fu)) | (c & 0x80u) << 24);
  }
  OPTIM_INLINE void finish(Raw* p, VF y, VF position) {
    const VU c = umin(to_int(position), vu(Root ? 255 : 127));
    if constexpr (Root) {
      put(p, narrow8(y > 0.0f ? umax(c, vu(1)) : vu(0)));
    } else {
      const VU sign = (ubits(y) >> 24) & 0x80u;
      put(p, narrow8((y != 0.0f ? c : vu(0)) | sign));
    }
  }
  OPTIM_INLINE VF magnitude(VF y) { return Root ? y : real(ubits(y) & kMagnitude); }
  OPTIM_INLINE void store(Raw* p, VF y) { finish(p, y, dynamic_position<decades>(magnitude(y))); }
  OPTIM_INLINE void store(Raw* p, VF y, VU random) {
    finish(p, y, dynamic_position<decades>(magnitude(y)) + centred(random));
  }
};

// Four bits, two elements a byte, the first in the low half.
OPTIM_INLINE VU load_nibbles(const uint8_t* p) {
  uint64_t raw;
  std::memcpy(&raw, p, 8);
#if defined(__AVX512F__)
  const __m128i b = _mm_cvtsi64_si128(static_cast<long long>(raw));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i both = _mm_unpacklo_epi8(_mm_and_si128(b, mask), _mm_and_si128(_mm_srli_epi16(b, 4), mask));
  return (VU)_mm512_cvtepu8_epi32(both);
#else
  VU r;
  for (int i = 0; i < 16; ++i) r[i] = static_cast<uint32_t>(raw >> (4 * i)) & 15u;
  return r;
#endif
}
OPTIM_INLINE void store_nibbles(uint8_t* p, VU c) {
#if defined(__AVX512F__)
  const __m128i b = (__m128i)narrow8(c);  // even + 16 * odd, in 16-bit pairs
  const __m128i pairs = _mm_maddubs_epi16(b, _mm_set1_epi16(0x1001));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
#else
  uint64_t raw = 0;
  for (int i = 0; i < 16; ++i) raw |= static_cast<uint64_t>(c[i] & 15u) << (4 * i);
  std::memcpy(p, &raw, 8);
#endif
}

// Four bits of a first moment: sign and an e2m1 magnitude, {0, 1/2, 1, 3/2, 2, 3, 4, 6}.
struct Float4 {
  static constexpr bool dithered = true;
  static constexpr bool block = true, root = false, pow2 = false, fill_zero = false, nibbles = true;
  static constexpr size_t size = 128;
  typedef uint8_t Raw;
  static constexpr float top = 6.0f;
  OPTIM_INLINE VF value(VU c) {
    alignas(64) static constexpr float table[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return lookup16(table, c);
  }
  OPTIM_INLINE VU finish(VF y, VU code) { return umin(code, vu(7)) | ((ubits(y) >> 28) & 8u); }
  OPTIM_INLINE VU code(VF y) { return finish(y, float_code<1, 0>(real(ubits(y) & kMagnitude))); }
  OPTIM_INLINE VU code(VF y, VU random) { return finish(y, float_code<1, 0, 32>(real(ubits(y) & kMagnitude), random)); }
  OPTIM_INLINE VU code(VF y, VF share) { return finish(y, float_code<1, 0>(real(ubits(y) & kMagnitude), share)); }
};

// Four bits of a root: linear, 1/16 to 16/16, without a zero.
struct Linear4 {
  static constexpr bool block = true, root = true, pow2 = false, fill_zero = true, nibbles = true;
  static constexpr size_t size = 128;
  typedef uint8_t Raw;
  static constexpr float top = 1.0f;
  OPTIM_INLINE VF value(VU c) { return (to_float(c) + 1.0f) * 0.0625f; }
  OPTIM_INLINE VU clamp(VF position) { return umin(to_int(position > 0.0f ? position : vf(0.0f)), vu(15)); }
  OPTIM_INLINE VU code(VF y) { return clamp(y * 16.0f - 0.5f); }
  OPTIM_INLINE VU code(VF y, VU random) { return clamp((y * 16.0f - 0.5f) + centred(random)); }
};

// Adds load and store of packed bytes to a four-bit codec; `p` points at the byte of an even element.
template <class C>
struct Nibbles : C {
  OPTIM_INLINE VF load(const uint8_t* p) { return C::value(load_nibbles(p)); }
  OPTIM_INLINE void store(uint8_t* p, VF y) { store_nibbles(p, C::code(y)); }
  template <class R>
  OPTIM_INLINE void store(uint8_t* p, VF y, R random) {
    store_nibbles(p, C::code(y, random));
  }
};

// -- scales -----------------------------------------------------------------------------------------------------------

struct Scale {
  float scale, inverse;
};

// Scale of a block from the bits of its largest magnitude.
template <class C>
OPTIM_INLINE Scale block_scale(uint32_t amax_bits) {
  const float amax = std::bit_cast<float>(amax_bits);
  if (amax_bits >= kInfBits) return {std::bit_cast<float>(0x7FC00000u), 0.0f};
  if (amax_bits == 0) return {C::fill_zero ? 0.0f : 1.0f, 1.0f};
  if constexpr (C::pow2) {
    int e, e_top;
    const float f = std::frexp(amax, &e), f_top = std::frexp(C::top, &e_top);
    e = e - e_top + (f > f_top);
    e = e < -126 ? -126 : e;
    return {std::ldexp(1.0f, e), std::ldexp(1.0f, -e)};
  } else {
    const float least = C::top * std::bit_cast<float>(1u << 23);
    const float scale = (amax < least ? least : amax) / C::top;
    return {scale, 1.0f / scale};
  }
}

}  // namespace
}  // namespace lowprec::LOWPREC_ISA
