// Encode and round_to. Two roads lead to the same bits: a general one in stages (load, round, finish) for every format,
// rounding and overflow, and a fused one for what training does all day: nearest, saturating, from fp32 or bf16.
#include "cast.h"

#include "fused.h"
#include "general.h"

namespace lowprec::LOWPREC_ISA {
namespace {

// Load and round [0, n) chunk by chunk; finish(x, r, at, count) takes the magnitudes from there.
template <class U, class Finish>
void rounded_chunks(const void* x, Dtype dtype, size_t n, const Format& f, Rounding rounding, const RngKey& key,
                    int threads, Finish finish) {
  parallel_ranges(n, kChunk, threads, n >= kSerial, [&](size_t first, size_t last) {
    alignas(64) U in[kChunk], r[kChunk];
    alignas(64) uint32_t random[kChunk];
    for (size_t at = first; at < last; at += kChunk) {
      const size_t count = std::min(kChunk, last - at);
      load_any(x, dtype, at, count, in);
      if (rounding == kStochastic) random_chunk(key, at, count, random);
      round_any<U>(in, random, count, f, rounding, key.bits, r);
      finish(in, r, at, count);
    }
  });
}

template <class U>
size_t encode_general(const void* x, Dtype dtype, size_t n, const Format& f, Rounding rounding, Overflow overflow,
                      NanPolicy policy, const RngKey& key, void* codes, int threads) {
  const auto s = code_specials<U>(f, rounding, overflow, policy);
  size_t nans = 0;
  rounded_chunks<U>(x, dtype, n, f, rounding, key, threads, [&](const U* in, U* r, size_t at, size_t count) {
    const size_t found = finish_codes<U>(in, r, count, f, s);
    store_codes<U>(r, codes, at, count, f.code_bytes);
    if (found)
#pragma omp atomic
      nans += found;
  });
  return f.nan_code >= 0 ? 0 : nans;
}

template <class U>
void round_general(const void* x, Dtype dtype, size_t n, const Format& f, Rounding rounding, Overflow overflow,
                   const RngKey& key, void* values, int threads) {
  const auto s = value_specials<U>(f, rounding, overflow);
  rounded_chunks<U>(x, dtype, n, f, rounding, key, threads, [&](const U* in, U* r, size_t at, size_t count) {
    finish_values<U>(in, r, count, f, s);
    store_values(r, values, dtype, at, count);
  });
}

bool lanes32(Dtype dtype, const Format& f) {
  return dtype != kF64 && f.kind != kScale && (f.narrow || f.kind == kBinary);
}

// -- the fused road --

template <class T, class Code, Sign S, class Rule>
uint32_t encode_fused(const typename T::Raw* x, size_t n, const Rule& rule, const uint32_t* random, Code* codes) {
  const Rule p = rule;
  uint32_t top = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t b = T::load(x[i]), a = b & 0x7FFFFFFFu;
    uint32_t code;
    if constexpr (requires { p.magnitude(a, a); })
      code = p.magnitude(a, random[i]);
    else
      code = p.magnitude(a);
    if constexpr (S == Sign::twos_complement) {
      const uint32_t all = static_cast<uint32_t>(static_cast<int32_t>(b) >> 31);
      code = ((code ^ all) - all) & p.mask;
    } else {
      const uint32_t sign = (b >> p.sign_shift) & p.sign_mask;
      code |= S == Sign::upper_bit || code ? sign : 0;
    }
    codes[i] = static_cast<Code>(a > 0x7F800000u ? p.nan : code);
    top = std::max(top, a);
  }
  return top;
}

template <class T>
uint32_t encode_scale_fused(const typename T::Raw* x, size_t n, uint8_t* codes) {
  uint32_t top = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t b = T::load(x[i]), a = b & 0x7FFFFFFFu, rest = a & 0x7FFFFFu, e = a >> 23;
    const uint32_t normal = std::min(e + (rest + (e & 1) > 0x400000u), 254u), subnormal = a > 0x600000u;
    const bool nan = (a > 0x7F800000u) | (b > 0x80000000u);
    codes[i] = static_cast<uint8_t>(nan ? 255 : e ? normal : subnormal);
    top = std::max(top, a);
  }
  return top;
}

template <class Code, class Body>
bool fused_chunks(size_t n, Code* out, int threads, Body body) {
  const bool stream = n * sizeof(Code) >= kStream;
  uint32_t top = 0;
  parallel_ranges(n, kChunk, threads, n >= kSerial, [&](size_t first, size_t last) {
    alignas(64) Code buffer[kChunk];
    uint32_t mine = 0;
    for (size_t at = first; at < last; at += kChunk) {
      const size_t count = std::min(kChunk, last - at);
      mine = std::max<uint32_t>(mine, body(at, count, stream ? buffer : out + at));
      if (stream) stream_copy(out + at, buffer, count * sizeof(Code));
    }
    if (stream) stream_fence();
#pragma omp critical(lowprec_top)
    top = std::max(top, mine);
  });
  return top > 0x7F800000u;
}

// Returns whether the fused road was taken; `has_nan` says whether x holds one.
template <class T, class Code>
bool encode_fast(const void* input, size_t n, const Format& f, Rounding rounding, NanPolicy policy, const RngKey& key,
                 Code* codes, int threads, bool& has_nan) {
  const auto* x = static_cast<const typename T::Raw*>(input);
  auto run = [&]<Sign S, class Rule>(const Rule& rule) {
    has_nan = fused_chunks(n, codes, threads, [&](size_t at, size_t count, Code* to) {
      if constexpr (requires { rule.magnitude(0u, 0u); }) {
        alignas(64) uint32_t random[kChunk];
        random_chunk(key, at, count, random);
        return encode_fused<T, Code, S>(x + at, count, rule, random, to);
      } else {
        return encode_fused<T, Code, S>(x + at, count, rule, nullptr, to);
      }
    });
    return true;
  };
  auto run_signed = [&](const auto& rule) {
    if (f.kind == kInt) return run.template operator()<Sign::twos_complement>(rule);
    if (f.negative_zero_nan) return run.template operator()<Sign::upper_bit_unless_zero>(rule);
    return run.template operator()<Sign::upper_bit>(rule);
  };
  if constexpr (sizeof(Code) == 1) {
    if (f.kind == kScale && f.bits == 8 && f.bias == 127 && rounding == kNearest) {
      has_nan = fused_chunks(n, codes, threads, [&](size_t at, size_t count, Code* to) {
        return encode_scale_fused<T>(x + at, count, to);
      });
      return true;
    }
  }
  if (f.same_range && sizeof(Code) > 1)
    return rounding == kNearest ? run.template operator()<Sign::upper_bit>(NearestUpper(f, policy))
                                : run.template operator()<Sign::upper_bit>(StochasticUpper(f, policy, key.bits));
  if (!f.magic) return false;
  return rounding == kNearest ? run_signed(Nearest(f, policy)) : run_signed(Stochastic(f, policy, key.bits));
}

size_t count_nan(const void* x, Dtype dtype, size_t n) {
  alignas(64) uint32_t in[kChunk];
  size_t nans = 0;
  for (size_t at = 0; at < n; at += kChunk) {
    const size_t count = std::min(kChunk, n - at);
    load_any(x, dtype, at, count, in);
    for (size_t i = 0; i < count; ++i) nans += (in[i] & 0x7FFFFFFFu) > 0x7F800000u;
  }
  return nans;
}

size_t encode(const void* x, Dtype dtype, size_t n, const Format& f, Rounding rounding, Overflow overflow,
              NanPolicy policy, const RngKey& key, void* codes, int threads) {
  if ((rounding == kNearest || rounding == kStochastic) && overflow == kSaturate && f.code_bytes <= 2 &&
      (dtype == kF32 || dtype == kBF16)) {
    bool has_nan = false;
    auto fast = [&]<class T, class Code>() {
      return encode_fast<T>(x, n, f, rounding, policy, key, static_cast<Code*>(codes), threads, has_nan);
    };
    const bool wide = dtype == kF32, bytes = f.code_bytes == 1;
    if (wide ? (bytes ? fast.template operator()<F32, uint8_t>() : fast.template operator()<F32, uint16_t>())
             : (bytes ? fast.template operator()<BF16, uint8_t>() : fast.template operator()<BF16, uint16_t>()))
      return has_nan && f.nan_code < 0 ? count_nan(x, dtype, n) : 0;
  }
  return lanes32(dtype, f) ? encode_general<uint32_t>(x, dtype, n, f, rounding, overflow, policy, key, codes, threads)
                           : encode_general<uint64_t>(x, dtype, n, f, rounding, overflow, policy, key, codes, threads);
}

template <class T>
void round_fast(const void* input, size_t n, const Format& f, void* output, int threads) {
  const auto* x = static_cast<const typename T::Raw*>(input);
  const Nearest p(f, kNanError);
  const bool drop = f.kind == kInt || f.negative_zero_nan;
  fused_chunks(n, static_cast<typename T::Raw*>(output), threads, [&](size_t at, size_t count, typename T::Raw* to) {
    for (size_t i = 0; i < count; ++i) {
      const uint32_t b = T::load(x[at + i]), a = b & 0x7FFFFFFFu, v = p.value(a);
      const uint32_t signed_value = v | (drop & (v == 0) ? 0 : b & 0x80000000u);
      const uint32_t result = a > 0x7F800000u ? 0x7FC00000u : signed_value;
      to[i] = static_cast<typename T::Raw>(result >> (8 * (4 - sizeof(typename T::Raw))));
    }
    return 0u;
  });
}

void round_to(const void* x, Dtype dtype, size_t n, const Format& f, Rounding rounding, Overflow overflow,
              const RngKey& key, void* values, int threads) {
  if (rounding == kNearest && overflow == kSaturate && f.magic && dtype == kF32)
    return round_fast<F32>(x, n, f, values, threads);
  if (rounding == kNearest && overflow == kSaturate && f.magic && dtype == kBF16)
    return round_fast<BF16>(x, n, f, values, threads);
  return lanes32(dtype, f) ? round_general<uint32_t>(x, dtype, n, f, rounding, overflow, key, values, threads)
                           : round_general<uint64_t>(x, dtype, n, f, rounding, overflow, key, values, threads);
}

// -- amax ------------------------------------------------------------------------------------------------------------

template <class Raw>
Raw amax_bits(const void* input, size_t n, int threads) {
  const auto* x = static_cast<const Raw*>(input);
  constexpr Raw magnitude = static_cast<Raw>(~Raw{0}) >> 1;
  Raw top = 0;
  parallel_ranges(n, 4096, threads, n >= kSerial, [&](size_t first, size_t last) {
    Raw mine = 0;
    for (size_t i = first; i < last; ++i) mine = std::max<Raw>(mine, x[i] & magnitude);
#pragma omp critical(lowprec_top)
    top = std::max(top, mine);
  });
  return top;
}

}  // namespace

uint32_t amax(const void* x, Dtype dtype, size_t n, int threads) {
  uint32_t top;
  if (dtype == kF64)
    top = bits_of(static_cast<float>(real(amax_bits<uint64_t>(x, n, threads))));
  else if (dtype == kF32)
    top = amax_bits<uint32_t>(x, n, threads);
  else
    top =
        dtype == kBF16 ? BF16::load(amax_bits<uint16_t>(x, n, threads)) : F16::load(amax_bits<uint16_t>(x, n, threads));
  return top > 0x7F800000u ? 0x7FC00000u : top;
}

void decode(const void* codes, size_t n, const Format& f, void* values, Dtype dtype, int threads);  // decode.cc

extern const CastKernels cast_kernels;
const CastKernels cast_kernels = {encode, decode, round_to, amax};

}  // namespace lowprec::LOWPREC_ISA
