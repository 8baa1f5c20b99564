// Decode. Formats of 8 bits or fewer go through a table that was made with the format; wider ones through arithmetic.
#include "cast.h"
#include "lanes.h"
#include "round.h"

namespace lowprec::LOWPREC_ISA {
namespace {

#if defined(__AVX512VBMI__)
// 64 codes to 64 bf16 values: both bytes of a value are looked up in tables that live in registers, two for each half
// of the codes (one half where the format is odd: the sign bit is then carried over).
struct ByteTables {
  __m512i low[4], high[4];
  bool odd;
  explicit ByteTables(const Format& f) : odd(f.odd) {
    for (int i = 0; i < 4; ++i) {
      low[i] = _mm512_loadu_si512(f.low_bf16 + 64 * i);
      high[i] = _mm512_loadu_si512(f.high_bf16 + 64 * i);
    }
  }
  template <bool Odd>
  void look_up(const uint8_t* codes, __m512i& first, __m512i& second) const {
    const __m512i order = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), _mm512_loadu_si512(codes));
    __m512i lo = _mm512_permutex2var_epi8(low[0], order, low[1]);
    __m512i hi = _mm512_permutex2var_epi8(high[0], order, high[1]);
    if constexpr (Odd) {
      hi = _mm512_ternarylogic_epi64(hi, order, _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);  // hi | order & 0x80
    } else {
      const __mmask64 upper = _mm512_movepi8_mask(order);
      lo = _mm512_mask_blend_epi8(upper, lo, _mm512_permutex2var_epi8(low[2], order, low[3]));
      hi = _mm512_mask_blend_epi8(upper, hi, _mm512_permutex2var_epi8(high[2], order, high[3]));
    }
    first = _mm512_unpacklo_epi8(lo, hi);
    second = _mm512_unpackhi_epi8(lo, hi);
  }
};

inline void put(void* to, __m512i v, bool stream) {
  stream ? _mm512_stream_si512(static_cast<__m512i*>(to), v) : _mm512_storeu_si512(to, v);
}

inline void put_wide(float* to, __m512i bf16, bool stream) {
  const __m512i a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bf16));
  const __m512i b = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bf16, 1));
  put(to, _mm512_slli_epi32(a, 16), stream);
  put(to + 16, _mm512_slli_epi32(b, 16), stream);
}

template <bool Odd, bool Stream>
size_t decode_bf16(const uint8_t* codes, size_t n, const ByteTables& tables, uint16_t* out) {
  size_t i = 0;
  for (; i + 64 <= n; i += 64) {
    __m512i first, second;
    tables.look_up<Odd>(codes + i, first, second);
    put(out + i, first, Stream);
    put(out + i + 32, second, Stream);
  }
  return i;
}

template <bool Odd, bool Stream>
size_t decode_f32(const uint8_t* codes, size_t n, const ByteTables& tables, uint32_t* out) {
  size_t i = 0;
  auto* to = reinterpret_cast<float*>(out);
  for (; i + 64 <= n; i += 64) {
    __m512i first, second;
    tables.look_up<Odd>(codes + i, first, second);
    put_wide(to + i, first, Stream);
    put_wide(to + i + 32, second, Stream);
  }
  return i;
}

// Elements at the head that bring `out` to a cache line, so that streaming stores are possible.
template <class T>
size_t head_of(const T* out, size_t n) {
  return std::min(n, (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64 / sizeof(T));
}
#endif

template <class T>
void look_up(const uint8_t* codes, size_t n, const T* table, T* out) {
  for (size_t i = 0; i < n; ++i) out[i] = table[codes[i]];
}

template <class T>
void decode_table(const uint8_t* codes, size_t n, const Format& f, const T* table, T* out, bool stream) {
#if defined(__AVX512VBMI__)
  if constexpr (sizeof(T) <= 4) {
    if (n >= 64 && (static_cast<const void*>(table) == f.table_bf16 ||
                    (static_cast<const void*>(table) == f.table32 && f.exact_bf16))) {
      const ByteTables tables(f);
      size_t done = stream ? head_of(out, n) : 0;
      look_up(codes, done, table, out);
      auto run = [&]<bool Odd, bool Stream>() {
        if constexpr (sizeof(T) == 2)
          return decode_bf16<Odd, Stream>(codes + done, n - done, tables, out + done);
        else
          return decode_f32<Odd, Stream>(codes + done, n - done, tables, out + done);
      };
      done += f.odd ? (stream ? run.template operator()<true, true>() : run.template operator()<true, false>())
                    : (stream ? run.template operator()<false, true>() : run.template operator()<false, false>());
      return look_up(codes + done, n - done, table, out + done);
    }
  }
#endif
  (void)f, (void)stream;
  look_up(codes, n, table, out);
}

template <class T>
void decode_tables(const void* codes, size_t n, const Format& f, const T* table, void* values, int threads) {
  const bool stream = n * sizeof(T) >= kStream;
  parallel_ranges(n, kChunk, threads, n >= kSerial, [&](size_t first, size_t last) {
    decode_table(static_cast<const uint8_t*>(codes) + first, last - first, f, table, static_cast<T*>(values) + first,
                 stream);
    if (stream) stream_fence();
  });
}

// Codes to values as lane bits. Narrow formats in 32-bit lanes, vectorised; the rest in 64-bit ones.
template <class U, class Code>
void values_of(const Code* codes, size_t n, const Format& f, U* out) {
  using L = Lane<U>;
  const Values<U> value(f);
  const U mask = static_cast<U>(f.mask), half = (mask >> 1) + 1, max = static_cast<U>(f.max_code);
  const U inf = f.inf_code >= 0 ? static_cast<U>(f.inf_code) : ~U{0};
  const bool is_int = f.kind == kInt, zero_nan = f.negative_zero_nan, deep = sizeof(U) == 8 && f.emin < -1022;
  for (size_t i = 0; i < n; ++i) {
    const U code = static_cast<U>(codes[i]) & mask;
    const U sign = code & half ? L::kSign : 0;
    const U magnitude = is_int ? (sign ? (~code + 1) & mask : code) : code & (half - 1);
    U v = deep ? static_cast<U>(deep_value(f, magnitude)) : value(magnitude);
    v |= sign;
    v = !is_int & (magnitude > max) ? (magnitude == inf ? L::kInf | sign : L::kNan) : v;
    out[i] = zero_nan & (code == half) ? L::kNan : v;
  }
}

void store_nearest(const uint32_t* in, void* out, Dtype dtype, size_t at, size_t n) {
  switch (dtype) {
    case kF32:
      return void(std::memcpy(static_cast<uint32_t*>(out) + at, in, n * 4));
    case kBF16:
      return store_chunk<BF16>(in, static_cast<uint16_t*>(out) + at, n);
    case kF16:
      return store_chunk<F16>(in, static_cast<uint16_t*>(out) + at, n);
    default:
      for (size_t i = 0; i < n; ++i) {
        const uint64_t v = bits_of(static_cast<double>(real(in[i])));
        static_cast<uint64_t*>(out)[at + i] = (in[i] & 0x7FFFFFFFu) > 0x7F800000u ? Lane<uint64_t>::kNan : v;
      }
  }
}

void store_nearest(const uint64_t* in, void* out, Dtype dtype, size_t at, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (dtype == kF64)
      static_cast<uint64_t*>(out)[at + i] = in[i];
    else if (dtype == kF32)
      static_cast<uint32_t*>(out)[at + i] = narrow<uint32_t, 8, 23, true, kNearest>(in[i]);
    else if (dtype == kBF16)
      static_cast<uint16_t*>(out)[at + i] = narrow<uint16_t, 8, 7, true, kNearest>(in[i]);
    else
      static_cast<uint16_t*>(out)[at + i] = narrow<uint16_t, 5, 10, true, kNearest>(in[i]);
  }
}

template <class U>
void decode_general(const void* codes, size_t n, const Format& f, void* values, Dtype dtype, int threads) {
  parallel_ranges(n, kChunk, threads, n >= kSerial, [&](size_t first, size_t last) {
    alignas(64) U out[kChunk];
    for (size_t at = first; at < last; at += kChunk) {
      const size_t count = std::min(kChunk, last - at);
      if (f.code_bytes == 2)
        values_of<U>(static_cast<const uint16_t*>(codes) + at, count, f, out);
      else if (f.code_bytes == 4)
        values_of<U>(static_cast<const uint32_t*>(codes) + at, count, f, out);
      else
        values_of<U>(static_cast<const uint64_t*>(codes) + at, count, f, out);
      store_nearest(out, values, dtype, at, count);
    }
  });
}

}  // namespace

void decode_small(const uint8_t* codes, size_t n, const Format& f, uint32_t* values) {
  decode_table(codes, n, f, f.table32, values, false);
}

void decode(const void* codes, size_t n, const Format& f, void* values, Dtype dtype, int threads) {
  if (f.has_table) {
    if (dtype == kF32) return decode_tables(codes, n, f, f.table32, values, threads);
    if (dtype == kF64) return decode_tables(codes, n, f, f.table64, values, threads);
    return decode_tables(codes, n, f, dtype == kF16 ? f.table_f16 : f.table_bf16, values, threads);
  }
  f.narrow ? decode_general<uint32_t>(codes, n, f, values, dtype, threads)
           : decode_general<uint64_t>(codes, n, f, values, dtype, threads);
}

}  // namespace lowprec::LOWPREC_ISA
