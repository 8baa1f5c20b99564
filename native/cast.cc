// Encode and round_to. Two roads lead to the same bits: a general one in stages (load, round, finish) for every format,
// rounding and overflow, and a fused one for what training does all day: nearest, saturating, from fp32 or bf16.
#include "cast.h"

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

bool stops_at_max(Rounding rounding, Overflow overflow, bool negative) {
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

// -- the general road ----------------------------------------------------------------------------------------------

template <class U, Rounding R>
void round_chunk(const U* x, const uint32_t* random, size_t n, const Format& f, int bits, U* r) {
  const Grid<U> grid(f, bits);
  for (size_t i = 0; i < n; ++i) {
    const U a = x[i] & ~Lane<U>::kSign;
    r[i] = round_magnitude<U, R>(a, (x[i] & Lane<U>::kSign) != 0, grid, R == kStochastic ? random[i] : 0);
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
    round_chunk<U, R>(x, random, n, f, bits, r);
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
  size_t nans = 0;
  if (f.kind == kBinary) {
    for (size_t i = 0; i < n; ++i) {
      const U a = x[i] & ~Lane<U>::kSign;
      const bool nan = a > Lane<U>::kInf;
      r[i] = nan ? s.nan : static_cast<U>(x[i] != a && a != 0);
      nans += nan;
    }
    return nans;
  }
  const U max = static_cast<U>(f.max_code), mask = static_cast<U>(f.mask);
  const U sign_xor = static_cast<U>(f.kind == kScale ? 0 : f.sign_xor),
          sign_add = static_cast<U>(f.kind == kScale ? 0 : f.sign_add);
  const bool drop_sign = f.negative_zero_nan, unsigned_only = f.kind == kScale;
  U count = 0;
  for (size_t i = 0; i < n; ++i) {
    const U a = x[i] & ~Lane<U>::kSign;
    const bool negative = (x[i] & Lane<U>::kSign) != 0;
    const U all = negative & !(drop_sign & (r[i] == 0)) ? ~U{0} : U{0};
    U code = ((r[i] ^ (all & sign_xor)) + (all & sign_add)) & mask;
    const bool over = r[i] > max, inf = a == Lane<U>::kInf;
    code = over ? (negative ? s.over[1] : s.over[0]) : code;
    code = inf ? (negative ? s.inf[1] : s.inf[0]) : code;
    const bool bad =
        (a > Lane<U>::kInf) |
        (inf ? (negative ? s.inf_nan[1] : s.inf_nan[0]) : over & (negative ? s.over_nan[1] : s.over_nan[0])) |
        (unsigned_only & negative & (a != 0));
    r[i] = bad ? s.nan : code;
    count += bad;
  }
  return nans + static_cast<size_t>(count);
}

template <class U>
void finish_values(const U* x, U* r, size_t n, const Format& f, const Specials<U>& s) {
  const Values<U> value(f.kind == kScale || f.kind == kBinary ? Format{} : f);
  const U max = static_cast<U>(f.max_code);
  const bool keep_zero_sign = f.kind == kFloat && !f.negative_zero_nan, scale = f.kind == kScale;
  const bool deep = sizeof(U) == 8 && f.emin < -1022;
  for (size_t i = 0; i < n; ++i) {
    const U a = x[i] & ~Lane<U>::kSign, sign = x[i] & Lane<U>::kSign;
    U v;
    if (f.kind == kBinary)
      v = bits_of(typename Lane<U>::Real(1)) | (a ? sign : 0);
    else if (scale)
      v = static_cast<U>(bits_of(__builtin_ldexp(1.0, static_cast<int>(std::min(r[i], max)) - f.bias)));
    else {
      v = deep ? static_cast<U>(deep_value(f, r[i])) : value(r[i]);
      v |= keep_zero_sign || r[i] ? sign : 0;
    }
    if (f.kind != kBinary) {
      v = r[i] > max ? s.over[sign != 0] : v;
      v = a == Lane<U>::kInf ? s.inf[sign != 0] : v;
      v = scale && sign && a ? s.nan : v;
    }
    r[i] = a > Lane<U>::kInf ? s.nan : v;
  }
}

template <class T>
void load_wide(const typename T::Raw* in, uint64_t* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = bits_of(static_cast<double>(real(T::load(in[i]))));
}

void load_any(const void* x, Dtype dtype, size_t at, size_t n, uint32_t* out) {
  switch (dtype) {
    case kF16:
      return load_chunk<F16>(static_cast<const uint16_t*>(x) + at, out, n);
    case kBF16:
      return load_chunk<BF16>(static_cast<const uint16_t*>(x) + at, out, n);
    default:
      return load_chunk<F32>(static_cast<const uint32_t*>(x) + at, out, n);
  }
}

void load_any(const void* x, Dtype dtype, size_t at, size_t n, uint64_t* out) {
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
void store_values(const uint32_t* in, void* out, Dtype dtype, size_t at, size_t n) {
  if (dtype == kF32) return void(std::memcpy(static_cast<uint32_t*>(out) + at, in, n * 4));
  auto* to = static_cast<uint16_t*>(out) + at;
  if (dtype == kBF16) {
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<uint16_t>(in[i] >> 16);
  } else {
    for (size_t i = 0; i < n; ++i)
      to[i] = narrow<uint16_t, 5, 10, false, kTowardZero>(bits_of(static_cast<double>(real(in[i]))));
  }
}

void store_values(const uint64_t* in, void* out, Dtype dtype, size_t at, size_t n) {
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

// -- the fused road: nearest and saturating --------------------------------------------------------------------------

// Nearest by addition (round.h); clamping first is the same as saturating after.
struct Nearest {
  uint32_t max, emin, add, shift, nan, sign_shift, sign_mask, sign_xor, sign_add, mask;
  explicit Nearest(const Format& f, NanPolicy policy)
      : max(bits_of(f.max_value)),
        emin(static_cast<uint32_t>(f.emin + 127) << 23),
        add(static_cast<uint32_t>(23 - f.m) << 23),
        shift(23 - f.m),
        nan(static_cast<uint32_t>(f.nan_code >= 0     ? f.nan_code
                                  : policy == kNanMax ? f.max_code
                                                      : 0)),
        sign_shift(32 - f.bits),
        sign_mask(1u << (f.bits - 1)),
        sign_xor(static_cast<uint32_t>(f.sign_xor)),
        sign_add(static_cast<uint32_t>(f.sign_add)),
        mask(static_cast<uint32_t>(f.mask)) {}

  uint32_t magnitude(uint32_t a) const {
    const uint32_t c = std::min(a, max), e = std::max(c & 0x7F800000u, emin), magic = e + add;
    return bits_of(real(c) + real(magic)) - magic + ((e - emin) >> shift);
  }
  uint32_t value(uint32_t a) const {
    const uint32_t c = std::min(a, max), e = std::max(c & 0x7F800000u, emin);
    const float magic = real(e + add);
    return bits_of((real(c) + magic) - magic);
  }
};

// The upper part of an fp32 (bf16, tf32, fp32): integer rounding; subnormals and normals are one sequence.
struct NearestUpper {
  uint32_t shift, half, max, nan, sign_shift, sign_mask;
  explicit NearestUpper(const Format& f, NanPolicy)
      : shift(23 - f.m),
        half((1u << shift >> 1) - (shift > 0)),
        max(static_cast<uint32_t>(f.max_code)),
        nan(static_cast<uint32_t>(f.nan_code)),
        sign_shift(32 - f.bits),
        sign_mask(1u << (f.bits - 1)) {}
  uint32_t magnitude(uint32_t a) const { return std::min((a + half + (a >> shift & (shift > 0))) >> shift, max); }
};

enum class Sign { upper_bit, upper_bit_unless_zero, twos_complement };

template <class T, class Code, Sign S, class Rule>
uint32_t encode_fused(const typename T::Raw* x, size_t n, const Rule& rule, Code* codes) {
  const Rule p = rule;
  uint32_t top = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t b = T::load(x[i]), a = b & 0x7FFFFFFFu;
    uint32_t code = p.magnitude(a);
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
bool encode_fast(const void* input, size_t n, const Format& f, NanPolicy policy, Code* codes, int threads,
                 bool& has_nan) {
  const auto* x = static_cast<const typename T::Raw*>(input);
  auto run = [&]<Sign S, class Rule>(const Rule& rule) {
    has_nan = fused_chunks(n, codes, threads, [&](size_t at, size_t count, Code* to) {
      return encode_fused<T, Code, S>(x + at, count, rule, to);
    });
    return true;
  };
  if constexpr (sizeof(Code) == 1) {
    if (f.kind == kScale && f.bits == 8 && f.bias == 127) {
      has_nan = fused_chunks(n, codes, threads, [&](size_t at, size_t count, Code* to) {
        return encode_scale_fused<T>(x + at, count, to);
      });
      return true;
    }
  }
  if (f.same_range) return run.template operator()<Sign::upper_bit>(NearestUpper(f, policy));
  if (!f.magic) return false;
  const Nearest rule(f, policy);
  if (f.kind == kInt) return run.template operator()<Sign::twos_complement>(rule);
  if (f.negative_zero_nan) return run.template operator()<Sign::upper_bit_unless_zero>(rule);
  return run.template operator()<Sign::upper_bit>(rule);
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
  if (rounding == kNearest && overflow == kSaturate && f.code_bytes <= 2 && (dtype == kF32 || dtype == kBF16)) {
    bool has_nan = false, done;
    if (f.code_bytes == 1)
      done = dtype == kF32 ? encode_fast<F32>(x, n, f, policy, static_cast<uint8_t*>(codes), threads, has_nan)
                           : encode_fast<BF16>(x, n, f, policy, static_cast<uint8_t*>(codes), threads, has_nan);
    else
      done = dtype == kF32 ? encode_fast<F32>(x, n, f, policy, static_cast<uint16_t*>(codes), threads, has_nan)
                           : encode_fast<BF16>(x, n, f, policy, static_cast<uint16_t*>(codes), threads, has_nan);
    if (done) return has_nan && f.nan_code < 0 ? count_nan(x, dtype, n) : 0;
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

}  // namespace

void decode(const void* codes, size_t n, const Format& f, void* values, Dtype dtype, int threads);  // decode.cc

extern const CastKernels cast_kernels;
const CastKernels cast_kernels = {encode, decode, round_to, amax};

}  // namespace lowprec::LOWPREC_ISA
