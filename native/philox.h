// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): a counter-based generator. The words of
// element i depend on (seed, step, tensor, i) alone, so the result is the same for any number of threads and any
// chunking.
#pragma once

#include "lanes.h"

namespace lowprec {

struct RngKey {
  uint64_t seed;
  uint32_t step, tensor;
  uint64_t offset;  // global index of the first element
  int bits;         // random bits an element
};

namespace LOWPREC_ISA {
namespace {

constexpr uint32_t kPhilox0 = 0xD2511F53u, kPhilox1 = 0xCD9E8D57u, kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

inline void philox_block(uint64_t block, const RngKey& key, uint32_t* out) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = key.step, c3 = key.tensor;
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += kWeyl0, k1 += kWeyl1) {
    const uint64_t p0 = static_cast<uint64_t>(kPhilox0) * c0, p1 = static_cast<uint64_t>(kPhilox1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// `count` consecutive blocks of four words.
inline void philox_blocks(uint64_t block, size_t count, const RngKey& key, uint32_t* out) {
  size_t i = 0;
#if defined(__AVX512F__)
  // Eight blocks at a time, a word in the low half of each 64-bit lane; the multiplication ignores the high halves.
  const __m512i m0 = _mm512_set1_epi64(kPhilox0), m1 = _mm512_set1_epi64(kPhilox1), low = _mm512_set1_epi64(0xFFFFFFFF);
  const __m512i ramp = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0),
                second = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  for (; i + 8 <= count; i += 8) {
    __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(block + i)), ramp);
    __m512i c1 = _mm512_srli_epi64(c0, 32), c2 = _mm512_set1_epi64(key.step), c3 = _mm512_set1_epi64(key.tensor);
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += kWeyl0, k1 += kWeyl1) {
      const __m512i p0 = _mm512_mul_epu32(m0, c0), p1 = _mm512_mul_epu32(m1, c2);
      c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, _mm512_set1_epi64(k0), 0x96);
      c1 = p1;
      c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, _mm512_set1_epi64(k1), 0x96);
      c3 = p0;
    }
    const __m512i c01 = _mm512_ternarylogic_epi64(low, c0, _mm512_slli_epi64(c1, 32), 0xCA);  // low ? c0 : c1 << 32
    const __m512i c23 = _mm512_ternarylogic_epi64(low, c2, _mm512_slli_epi64(c3, 32), 0xCA);
    _mm512_storeu_si512(out + 4 * i, _mm512_permutex2var_epi64(c01, first, c23));
    _mm512_storeu_si512(out + 4 * i + 16, _mm512_permutex2var_epi64(c01, second, c23));
  }
#endif
  for (; i < count; ++i) philox_block(block + i, key, out + 4 * i);
}

// Random numbers of key.bits bits for the elements [index, index + n), n <= kChunk; index counts from key.offset.
inline void random_chunk(const RngKey& key, uint64_t index, size_t n, uint32_t* out) {
  alignas(64) uint32_t words[kChunk + 16];
  const uint64_t i = key.offset + index;
  if (key.bits <= 16) {
    const size_t lead = i % 8;
    philox_blocks(i / 8, (lead + n + 7) / 8, key, words);
    const auto* halves = reinterpret_cast<const uint8_t*>(words) + 2 * lead;
    const int drop = 16 - key.bits;
    for (size_t j = 0; j < n; ++j) {
      uint16_t half;
      std::memcpy(&half, halves + 2 * j, 2);
      out[j] = static_cast<uint32_t>(half) >> drop;
    }
  } else {
    const size_t lead = i % 4;
    philox_blocks(i / 4, (lead + n + 3) / 4, key, words);
    const int drop = 32 - key.bits;
    for (size_t j = 0; j < n; ++j) out[j] = words[lead + j] >> drop;
  }
}

}  // namespace
}  // namespace LOWPREC_ISA
}  // namespace lowprec
