// Sixteen lanes of fp32, written with the compiler's vector types: one source, the same arithmetic (and so the same
// bits) on every instruction set. Storage types are loaded into fp32 lanes and stored with one rounding to nearest
// even.
//
// Sums over a row are defined by lanes: lane j adds elements j, j + 16, j + 32, ... in order, then lanes are folded
// 8 + 8, 4 + 4, 2 + 2, 1 + 1. The reference does the same, so results agree to the bit.
//
// Only kernel sources include this header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside the intrinsics' headers

#define LOWPREC_INLINE static inline __attribute__((always_inline))

namespace lowprec::LOWPREC_ISA {

constexpr size_t kLanes = 16;
typedef float F16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

LOWPREC_INLINE U16 bits_of(F16 x) { return reinterpret_cast<U16>(x); }
LOWPREC_INLINE F16 float_of(U16 x) { return reinterpret_cast<F16>(x); }
LOWPREC_INLINE F16 splat(float x) { return x - F16{}; }
LOWPREC_INLINE U16 splat_bits(uint32_t x) { return x - U16{}; }
LOWPREC_INLINE F16 select(I16 mask, F16 a, F16 b) { return mask ? a : b; }
LOWPREC_INLINE F16 vmax(F16 a, F16 b) { return a > b ? a : b; }

template <typename T>
struct Storage;

template <>
struct Storage<float> {
  static F16 load(const float* p) {
    F16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, F16 v) { std::memcpy(p, &v, sizeof v); }
};

template <>
struct Storage<bf16> {
  static F16 load(const bf16* p) {
    H16 h;
    std::memcpy(&h, p, sizeof h);
    return float_of(__builtin_convertvector(h, U16) << 16);
  }
  static void store(bf16* p, F16 v) {
#ifdef __AVX512BF16__
    // The instruction rounds as below but takes fp32 subnormals for zero: those (rare) go the long way.
    const __m512i magnitude = _mm512_and_si512((__m512i)v, _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i less = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(1));
    if (__builtin_expect(_mm512_cmplt_epu32_mask(less, _mm512_set1_epi32(0x7FFFFF)) == 0, 1)) {
      const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
      std::memcpy(p, &h, sizeof h);
      return;
    }
#endif
    const U16 u = bits_of(v);
    const U16 rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    const U16 out = (u & 0x7FFFFFFFu) > 0x7F800000u ? splat_bits(0x7FC0u) : rounded;
    const H16 h = __builtin_convertvector(out, H16);
    std::memcpy(p, &h, sizeof h);
  }
};

template <>
struct Storage<fp16> {
#if defined(__AVX512F__)
  static F16 load(const fp16* p) {
    return (F16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(fp16* p, F16 v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#elif defined(__F16C__)
  static F16 load(const fp16* p) {
    float out[16];
    for (int i = 0; i < 16; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
    return Storage<float>::load(out);
  }
  static void store(fp16* p, F16 v) {
    float in[16];
    Storage<float>::store(in, v);
    for (int i = 0; i < 16; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  static F16 load(const fp16* p) {
    F16 v;
    for (int i = 0; i < 16; ++i) {
      _Float16 h;
      std::memcpy(&h, p + i, 2);
      v[i] = static_cast<float>(h);
    }
    return v;
  }
  static void store(fp16* p, F16 v) {
    for (int i = 0; i < 16; ++i) {
      const _Float16 h = static_cast<_Float16>(v[i]);
      std::memcpy(p + i, &h, 2);
    }
  }
#endif
};

// The last n < 16 elements of a row, the missing ones filled.
template <typename T>
LOWPREC_INLINE F16 load_part(const T* p, size_t n, float fill) {
  T part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(T));
  F16 v = Storage<T>::load(part);
  for (size_t i = n; i < kLanes; ++i) v[i] = fill;
  return v;
}

template <typename T>
LOWPREC_INLINE void store_part(T* p, size_t n, F16 v) {
  T part[kLanes];
  Storage<T>::store(part, v);
  std::memcpy(p, part, n * sizeof(T));
}

template <typename T>
LOWPREC_INLINE F16 load(const T* p, size_t left, float fill) {
  return left >= kLanes ? Storage<T>::load(p) : load_part(p, left, fill);
}

template <typename T>
LOWPREC_INLINE void store(T* p, size_t left, F16 v) {
  if (left >= kLanes)
    Storage<T>::store(p, v);
  else
    store_part(p, left, v);
}

LOWPREC_INLINE float fold_sum(F16 v) {
  float a[16];
  std::memcpy(a, &v, sizeof a);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) a[i] += a[i + n];
  return a[0];
}

LOWPREC_INLINE float fold_max(F16 v) {
  float a[16];
  std::memcpy(a, &v, sizeof a);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) a[i] = a[i] > a[i + n] ? a[i] : a[i + n];
  return a[0];
}

// exp(x) within 1 ulp of the exact value (tested): x = n ln 2 + r with |r| <= ln 2 / 2, exp(r) by a polynomial of
// degree 6, times 2^n by adding to the exponent field. Below -87 the result is 0, above 88 it stays at e^88: what a
// softmax or a sigmoid makes of either is the same. NaN stays NaN.
LOWPREC_INLINE F16 vexp(F16 x) {
  const F16 clipped = x > 88.0f ? splat(88.0f) : x;
  const F16 shifted = clipped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits
  const F16 n = shifted - 12582912.0f;
  const F16 r = (clipped - n * 0.693145751953125f) - n * 1.4286068e-6f;  // ln 2 in two parts, the first of 16 bits
  F16 p = r * 1.381459878757596e-3f + 8.368716575205326e-3f;
  p = p * r + 4.166838899254799e-2f;
  p = p * r + 1.666652113199234e-1f;
  p = p * r + 4.999999403953552e-1f;
  p = (r * r) * p + r + 1.0f;
  const F16 scaled = float_of(bits_of(p) + (bits_of(shifted) << 23));
  return x < -87.0f ? F16{} : scaled;
}

// Calls f with a value of each element type: 0 fp32, 1 bf16, 2 fp16.
template <class Fn>
LOWPREC_INLINE void with_type(int type, Fn&& f) {
  if (type == 0) return f(float{});
  if (type == 1) return f(bf16{});
  return f(fp16{});
}

template <class Fn>
LOWPREC_INLINE void with_types(int x, int y, Fn&& f) {
  with_type(x, [&](auto a) { with_type(y, [&](auto b) { f(a, b); }); });
}

}  // namespace lowprec::LOWPREC_ISA
