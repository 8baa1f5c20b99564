// Sixteen lanes in the compiler's vector types, and the few operations that need the instruction set by name.
// Only kernel sources of the optimizers include this.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside the intrinsics' headers

#define OPTIM_INLINE static inline __attribute__((always_inline))

namespace lowprec::LOWPREC_ISA {
namespace {

typedef float VF __attribute__((vector_size(64)));
typedef uint32_t VU __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));
typedef uint16_t VH __attribute__((vector_size(32)));
typedef uint8_t VB __attribute__((vector_size(16)));

constexpr size_t kLane = 16;

OPTIM_INLINE VU ubits(VF x) { return reinterpret_cast<VU>(x); }
OPTIM_INLINE VF real(VU x) { return reinterpret_cast<VF>(x); }
OPTIM_INLINE VF vf(float x) { return x - VF{}; }
OPTIM_INLINE VU vu(uint32_t x) { return x - VU{}; }

template <class V, class T>
OPTIM_INLINE V get(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
OPTIM_INLINE void put(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// The compiler takes these apart into scalars where they are not called by name.
OPTIM_INLINE VU widen(VH h) {
#if defined(__AVX512F__)
  return (VU)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  __m256i half[2] = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)h)),
                     _mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)h, 1))};
  VU r;
  std::memcpy(&r, half, sizeof r);
  return r;
#else
  return __builtin_convertvector(h, VU);
#endif
}
OPTIM_INLINE VU widen(VB b) {
#if defined(__AVX512F__)
  return (VU)_mm512_cvtepu8_epi32((__m128i)b);
#elif defined(__AVX2__)
  __m256i half[2] = {_mm256_cvtepu8_epi32((__m128i)b), _mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)b, 8))};
  VU r;
  std::memcpy(&r, half, sizeof r);
  return r;
#else
  return __builtin_convertvector(b, VU);
#endif
}
OPTIM_INLINE VF to_float(VU x) { return __builtin_convertvector(reinterpret_cast<VI>(x), VF); }  // below 2^31
OPTIM_INLINE VU to_int(VF x) { return reinterpret_cast<VU>(__builtin_convertvector(x, VI)); }    // toward zero

OPTIM_INLINE VH narrow16(VU x) {
#ifdef __AVX512F__
  return (VH)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, VH);
#endif
}
OPTIM_INLINE VB narrow8(VU x) {
#ifdef __AVX512F__
  return (VB)_mm512_cvtepi32_epi8((__m512i)x);
#else
  return __builtin_convertvector(x, VB);
#endif
}

OPTIM_INLINE VF vsqrt(VF x) {
#ifdef __AVX512F__
  return (VF)_mm512_sqrt_ps((__m512)x);
#else
  VF r;
  for (int i = 0; i < 16; ++i) r[i] = std::sqrt(x[i]);
  return r;
#endif
}

OPTIM_INLINE VF above_zero(VF x) {
#ifdef __AVX512F__
  return (VF)_mm512_max_ps((__m512)x, _mm512_setzero_ps());
#else
  return x > 0.0f ? x : VF{};
#endif
}

OPTIM_INLINE VU umax(VU a, VU b) {
#ifdef __AVX512F__
  return (VU)_mm512_max_epu32((__m512i)a, (__m512i)b);
#else
  return a > b ? a : b;
#endif
}
OPTIM_INLINE VU umin(VU a, VU b) {
#ifdef __AVX512F__
  return (VU)_mm512_min_epu32((__m512i)a, (__m512i)b);
#else
  return a < b ? a : b;
#endif
}

OPTIM_INLINE uint32_t fold_max(VU v) {
#ifdef __AVX512F__
  const __m256i a = _mm256_max_epu32(_mm512_castsi512_si256((__m512i)v), _mm512_extracti64x4_epi64((__m512i)v, 1));
  __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4E));
  b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(b));
#else
  uint32_t m = 0;
  for (int i = 0; i < 16; ++i) m = m > v[i] ? m : v[i];
  return m;
#endif
}

// table[i % 32]
OPTIM_INLINE VF lookup32(const float* table, VU i) {
#ifdef __AVX512F__
  return (VF)_mm512_permutex2var_ps(_mm512_load_ps(table), (__m512i)i, _mm512_load_ps(table + 16));
#else
  VF r;
  for (int k = 0; k < 16; ++k) r[k] = table[i[k] & 31];
  return r;
#endif
}
// table[i % 16]
OPTIM_INLINE VF lookup16(const float* table, VU i) {
#ifdef __AVX512F__
  return (VF)_mm512_permutexvar_ps((__m512i)i, _mm512_load_ps(table));
#else
  VF r;
  for (int k = 0; k < 16; ++k) r[k] = table[i[k] & 15];
  return r;
#endif
}

// Leading zeros of 32 bits.
OPTIM_INLINE VU leading_zeros(VU x) {
#ifdef __AVX512CD__
  return (VU)_mm512_lzcnt_epi32((__m512i)x);
#else
  VU r;
  for (int k = 0; k < 16; ++k) r[k] = static_cast<uint32_t>(std::countl_zero(x[k]));
  return r;
#endif
}

// Lanes that are Inf or NaN, and what is done with them.
#ifdef __AVX512F__
typedef __mmask16 Mask;
OPTIM_INLINE Mask special(VF x) { return _mm512_fpclass_ps_mask((__m512)x, 0x99); }
OPTIM_INLINE Mask either(Mask a, Mask b) { return _kor_mask16(a, b); }
OPTIM_INLINE int count(Mask a) { return __builtin_popcount(a); }
OPTIM_INLINE VF choose(Mask m, VF a, VF b) { return (VF)_mm512_mask_mov_ps((__m512)b, m, (__m512)a); }
#else
typedef VI Mask;
OPTIM_INLINE Mask special(VF x) { return (ubits(x) & 0x7F800000u) == 0x7F800000u; }
OPTIM_INLINE Mask either(Mask a, Mask b) { return a | b; }
OPTIM_INLINE int count(Mask a) {
  int n = 0;
  for (int i = 0; i < 16; ++i) n += a[i] != 0;
  return n;
}
OPTIM_INLINE VF choose(Mask m, VF a, VF b) { return m ? a : b; }
#endif

// fp16 bits (in the low half of a lane) as fp32: exact. Subnormals through a subtraction that no flush mode touches.
OPTIM_INLINE VF half_value(VU h) {
#ifdef __AVX512F__
  return (VF)_mm512_cvtph_ps((__m256i)narrow16(h));
#else
  const VU magnitude = (h & 0x7FFFu) << 13, exponent = magnitude & 0x0F800000u;
  const VU normal = magnitude + (exponent == 0x0F800000u ? vu(224u << 23) : vu(112u << 23));
  const VU subnormal = ubits(real(magnitude + (113u << 23)) - real(vu(113u << 23)));
  return real((exponent != 0u ? normal : subnormal) | (h & 0x8000u) << 16);
#endif
}

// -- draws: Philox4x32-10 ---------------------------------------------------------------------------------------------

struct PhiloxKey {
  uint64_t seed;
  uint32_t step, stream;
};

OPTIM_INLINE void philox(uint64_t block, const PhiloxKey& key, uint32_t* out) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = key.step, c3 = key.stream;
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// `count` consecutive blocks of four words; writes up to seven blocks more.
OPTIM_INLINE void philox_run(uint64_t block, size_t count, const PhiloxKey& key, uint32_t* out) {
#ifdef __AVX512F__
  // Eight blocks at a time, a word in the low half of each 64-bit lane; the multiplication ignores the high halves.
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  const __m512i ramp = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), low = _mm512_set1_epi64(0xFFFFFFFF);
  const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0),
                second = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  for (size_t i = 0; i < count; i += 8) {
    __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(block + i)), ramp);
    __m512i c1 = _mm512_srli_epi64(c0, 32), c2 = _mm512_set1_epi64(key.step), c3 = _mm512_set1_epi64(key.stream);
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const __m512i p0 = _mm512_mul_epu32(m0, c0), p1 = _mm512_mul_epu32(m1, c2);
      c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, _mm512_set1_epi64(k0), 0x96);
      c1 = p1;
      c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, _mm512_set1_epi64(k1), 0x96);
      c3 = p0;
    }
    const __m512i c01 = _mm512_ternarylogic_epi64(low, c0, _mm512_slli_epi64(c1, 32), 0xCA);
    const __m512i c23 = _mm512_ternarylogic_epi64(low, c2, _mm512_slli_epi64(c3, 32), 0xCA);
    _mm512_storeu_si512(out + 4 * i, _mm512_permutex2var_epi64(c01, first, c23));
    _mm512_storeu_si512(out + 4 * i + 16, _mm512_permutex2var_epi64(c01, second, c23));
  }
#else
  for (size_t i = 0; i < count; ++i) philox(block + i, key, out + 4 * i);
#endif
}

// 16 random bits for each of n elements from global element `index` on; `out` has room for n + 80.
OPTIM_INLINE const uint16_t* draw_halves(uint64_t index, size_t n, const PhiloxKey& key, uint32_t* out) {
  const size_t lead = index % 8;
  philox_run(index / 8, (lead + n + 7) / 8, key, out);
  return reinterpret_cast<const uint16_t*>(out) + lead;  // little endian: low half first
}
OPTIM_INLINE const uint32_t* draw_words(uint64_t index, size_t n, const PhiloxKey& key, uint32_t* out) {
  const size_t lead = index % 4;
  philox_run(index / 4, (lead + n + 3) / 4, key, out);
  return out + lead;
}

}  // namespace
}  // namespace lowprec::LOWPREC_ISA
