#include "optim.h"

#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "optim_codec.h"

namespace lowprec::LOWPREC_ISA {
namespace {

constexpr size_t kTile = 1024;  // elements that pass through the first-level cache at once; a multiple of every block
constexpr size_t kGroup = 256;  // elements that share a shift of their dither
constexpr uint64_t kStateKey = 0x6C6F777072656373ull;

// A piece of a row: elements [col, col + n) of row `row`.
struct Span {
  int64_t row, col, cols;
  size_t n;
  int64_t flat() const { return row * cols + col; }
};

OPTIM_INLINE size_t padded(size_t n) { return (n + kLane - 1) / kLane * kLane; }

// Calls f with the codec of a store.
template <class F>
OPTIM_INLINE void with_store(int32_t store, F&& f) {
  switch (store) {
    case kFp32:
      return f(Fp32{});
    case kBf16:
      return f(Bf16{});
    case kFp16:
      return f(Fp16{});
    case kFp16Block:
      return f(HalfBlock<false>{});
    case kFp16BlockPlus:
      return f(HalfBlock<true>{});
    case kE4m3Block:
      return f(E4m3Block{});
    case kE5m2Block:
      return f(E5m2Block{});
    case kE4m3Root:
      return f(E4m3Root{});
    case kE5m2Root:
      return f(E5m2Root{});
    case kDynamic8:
      return f(Dynamic8<false>{});
    case kDynamic8Root:
      return f(Dynamic8<true>{});
    case kDynamic4:
      return f(Nibbles<Float4>{});
    case kLinear4Root:
      return f(Nibbles<Linear4>{});
    case kE4m3Row:
      return f(E4m3Row{});
    case kE5m2Row:
      return f(E5m2Row{});
    default:
      return;
  }
}

template <class C>
constexpr bool kNibbles = requires { C::nibbles; };

constexpr bool row_scaled(int32_t store) { return store == kE4m3Row || store == kE5m2Row; }

// Bytes of n elements of a codec, and where a span's codes and scales begin.
template <class C>
OPTIM_INLINE size_t bytes(size_t n) {
  return kNibbles<C> ? (n + 1) / 2 : n * sizeof(typename C::Raw);
}
template <class C>
OPTIM_INLINE typename C::Raw* codes_at(int64_t base, const Span& s) {
  auto* p = reinterpret_cast<typename C::Raw*>(base);
  if constexpr (kNibbles<C>) return p + s.row * ((s.cols + 1) / 2) + s.col / 2;
  return p + s.flat();
}
template <class C>
OPTIM_INLINE float* scale_at(int64_t base, const Span& s, bool row) {
  auto* p = reinterpret_cast<float*>(base);
  if (row) return p + s.row;
  const auto size = static_cast<int64_t>(C::size);
  return p + s.row * ((s.cols + size - 1) / size) + s.col / size;
}

template <class C>
OPTIM_INLINE VF load_some(const typename C::Raw* p, size_t n) {
  if (n >= kLane) return C::load(p);
  typename C::Raw part[kLane] = {};
  std::memcpy(part, p, bytes<C>(n));
  VF v = C::load(part);
  for (size_t i = n; i < kLane; ++i) v[i] = 0.0f;
  return v;
}
template <class C, class... R>
OPTIM_INLINE void store_some(typename C::Raw* p, size_t n, VF x, R... random) {
  if (n >= kLane) return C::store(p, x, random...);
  typename C::Raw part[kLane];
  C::store(part, x, random...);
  std::memcpy(p, part, bytes<C>(n));
}
template <class C>
OPTIM_INLINE typename C::Raw* advance(typename C::Raw* p, size_t i) {
  return kNibbles<C> ? p + i / 2 : p + i;
}

// -- whole spans ------------------------------------------------------------------------------------------------------

// out[0 .. padded(n)) = the values of a span, zero past its end.
template <class C>
void decode_span(int64_t codes, int64_t scales, const Span& s, bool row, float* out) {
  auto* p = codes_at<C>(codes, s);
  if constexpr (!C::block) {
    for (size_t i = 0; i < s.n; i += kLane) put(out + i, load_some<C>(p + i, s.n - i));
  } else {
    const float* scale = scale_at<C>(scales, s, row);
    const size_t size = row ? s.n : C::size;
    for (size_t b = 0; b < s.n; b += size, ++scale) {
      const VF factor = vf(*scale);
      for (size_t i = b; i < std::min(s.n, b + size); i += kLane) {
        const VF v = load_some<C>(advance<C>(p, i), s.n - i) * factor;
        put(out + i, C::root ? v * v : v);
      }
    }
    // a scale of NaN must not reach past the end
    for (size_t i = s.n; i < padded(s.n); ++i) out[i] = 0.0f;
  }
}

enum class Random { none, halves, words, dither };

OPTIM_INLINE VU random_at(Random kind, const void* random, size_t i) {
  if (kind == Random::halves) return widen(get<VH>(static_cast<const uint16_t*>(random) + i));
  const VU r = get<VU>(static_cast<const uint32_t*>(random) + i);
  return r;
}

// bf16 takes the upper half of the dither, the others all of it.
template <class C>
constexpr bool kHalf = std::is_same_v<C, Bf16>;
// Floats under a scale are dithered: a uniform share of the quantum is added, then rounding is to nearest.
template <class C>
constexpr bool kDithered = requires { C::dithered; };

template <class C, bool Stochastic>
OPTIM_INLINE void encode_block(typename C::Raw* p, VF inverse, const float* x, size_t n, Random kind,
                               const void* random, size_t at) {
  for (size_t i = 0; i < n; i += kLane) {
    VF y = get<VF>(x + i);
    if constexpr (C::block) {
      y = y * inverse;
      y = choose(special(y), VF{}, y);
    }
    if constexpr (Stochastic && !std::is_same_v<C, Fp32>) {
      const VU r = random_at(kind, random, at + i);
      if constexpr (kDithered<C>) {
        if (kind == Random::dither) {
          store_some<C>(advance<C>(p, i), n - i, y, centred(r));
          continue;
        }
      }
      store_some<C>(advance<C>(p, i), n - i, y, kind == Random::dither && kHalf<C> ? r >> 16 : r);
    } else {
      store_some<C>(advance<C>(p, i), n - i, y);
    }
  }
}

// Encode x[0 .. n) (zero up to the next multiple of 16) into a span. A root store is given the roots.
template <class C, bool Stochastic>
void encode_span(int64_t codes, int64_t scales, const Span& s, bool row, const float* x, Random kind,
                 const void* random) {
  auto* p = codes_at<C>(codes, s);
  if constexpr (!C::block) {
    encode_block<C, Stochastic>(p, VF{}, x, s.n, kind, random, 0);
  } else {
    float* scale = scale_at<C>(scales, s, row);
    const size_t size = row ? s.n : C::size;
    for (size_t b = 0; b < s.n; b += size, ++scale) {
      const size_t n = std::min(size, s.n - b);
      VU top = {};
      for (size_t i = 0; i < n; i += kLane) top = umax(top, ubits(get<VF>(x + b + i)) & kMagnitude);
      const Scale sc = block_scale<C>(fold_max(top));
      *scale = sc.scale;
      encode_block<C, Stochastic>(advance<C>(p, b), vf(sc.inverse), x + b, n, kind, random, b);
    }
  }
}

void decode_any(int32_t store, int64_t codes, int64_t scales, const Span& s, float* out) {
  with_store(store, [&](auto c) { decode_span<decltype(c)>(codes, scales, s, row_scaled(store), out); });
}

void encode_any(int32_t store, int64_t codes, int64_t scales, const Span& s, const float* x, Random kind,
                const void* random) {
  with_store(store, [&](auto c) {
    if (kind == Random::none)
      encode_span<decltype(c), false>(codes, scales, s, row_scaled(store), x, kind, random);
    else
      encode_span<decltype(c), true>(codes, scales, s, row_scaled(store), x, kind, random);
  });
}

// -- draws ------------------------------------------------------------------------------------------------------------

// The dither of states: element i of a tensor gets base[i % 256] + (a word drawn for the group i / 256). Every element
// is uniform, a draw is made for every 256 only, and state k takes word k.
struct DitherBase {
  alignas(64) uint32_t x[kGroup + kLane];
  DitherBase() {
    for (uint64_t b = 0; b < kGroup / 4; ++b) philox(b, {0, 0, 0}, x + 4 * b);
    for (size_t i = 0; i < kLane; ++i) x[kGroup + i] = x[i];
  }
};
inline const DitherBase kDither{};

void dither_span(uint64_t index, size_t n, const PhiloxKey& key, int state, uint32_t* out) {
  size_t i = 0;
  while (i < n) {
    const uint64_t group = (index + i) / kGroup, at = (index + i) % kGroup;
    uint32_t w[4];
    philox(group, {key.seed ^ kStateKey, key.step, key.stream}, w);
    const size_t end = std::min<size_t>(padded(n), i + (kGroup - at));
    const VU shift = vu(w[state]);
    size_t j = i;
    if (at % kLane == 0)
      for (; j + kLane <= end; j += kLane) put(out + j, get<VU>(kDither.x + at + (j - i)) + shift);
    for (; j < end; ++j) out[j] = kDither.x[(at + (j - i)) % kGroup] + w[state];
    i += kGroup - at;
  }
}

// -- rules ------------------------------------------------------------------------------------------------------------

// Sixteen elements: old values in, new values out. Every rule has up to three states.
struct Lanes {
  VF w, g, s[3];
};

OPTIM_INLINE Mask apply_rule(const OptimProgram& p, int rule, int states, Lanes& x) {
  const float* c = p.c;
  const Lanes old = x;
  x.g = x.g * c[0];
  if (c[1] != 0.0f) x.g = x.g + x.w * c[1];
  if (c[2] != 1.0f) x.w = x.w * c[2];
  if (rule == kAdam) {
    x.s[0] = x.s[0] + (x.g - x.s[0]) * c[4];
    x.s[1] = x.s[1] * c[5] + (x.g * c[6]) * x.g;
    VF v = x.s[1];
    if (states == 3) v = x.s[2] = (v > x.s[2]) | (v != v) ? v : x.s[2];
    x.w = x.w - (x.s[0] / (vsqrt(v) * c[7] + c[8])) * c[3];
  } else if (rule == kLion) {
    const VF d = x.s[0] * c[4] + x.g * c[5];
    x.s[0] = x.s[0] * c[6] + x.g * c[7];
    const VF one = d > 0.0f ? vf(1.0f) : (d < 0.0f ? vf(-1.0f) : d);
    x.w = x.w - one * c[3];
  } else {
    if (states) {
      x.s[0] = x.s[0] * c[4] + x.g * c[5];
      x.g = p.nesterov ? x.g + x.s[0] * c[4] : x.s[0];
    }
    x.w = x.w - x.g * c[3];
  }
  Mask bad = special(x.w);
  for (int k = 0; k < states; ++k) bad = either(bad, special(x.s[k]));
  x.w = choose(bad, old.w, x.w);
  for (int k = 0; k < states; ++k) x.s[k] = choose(bad, old.s[k], x.s[k]);
  return bad;
}

template <int Rule, int States>
int run_rule(const OptimProgram& p, float* w, const float* g, float* const* s, const bool* root, size_t n) {
  int bad = 0;
  for (size_t i = 0; i < n; i += kLane) {
    Lanes x;
    x.w = get<VF>(w + i);
    x.g = get<VF>(g + i);
    for (int k = 0; k < States; ++k) x.s[k] = get<VF>(s[k] + i);
    bad += count(apply_rule(p, Rule, States, x));
    put(w + i, x.w);
    for (int k = 0; k < States; ++k) put(s[k] + i, root[k] ? vsqrt(x.s[k]) : x.s[k]);
  }
  return bad;
}

// -- tiles ------------------------------------------------------------------------------------------------------------

constexpr size_t kRoom = kTile + 16 * kLane;

struct Scratch {
  alignas(64) float w[kRoom], g[kRoom], s[3][kRoom], r[kRoom];
  alignas(64) uint32_t random[kRoom], dither[kRoom];
  std::vector<float> row;  // a whole row of weights whose scale is only known at its end
};

constexpr bool is_root(int32_t store) {
  return store == kE4m3Root || store == kE5m2Root || store == kDynamic8Root || store == kLinear4Root;
}

// Where the values of a plain fp32 span can be worked on in place, else null.
OPTIM_INLINE float* in_place(int32_t store, int64_t codes, const Span& s) {
  return store == kFp32 && s.n % kLane == 0 ? reinterpret_cast<float*>(codes) + s.flat() : nullptr;
}

PhiloxKey key_of(const OptimProgram& p, const OptimSlot& t) {
  return {p.seed, p.step, static_cast<uint32_t>(t.stream)};
}

// Random bits for rounding weights into a store: 16 where that decides exactly (bf16), else 32.
Random draw_for(int32_t store, const OptimProgram& p, const OptimSlot& t, int64_t flat, size_t n, uint32_t* out,
                const void*& random) {
  if (!p.stochastic || store == kFp32 || store == kRemainder16) return Random::none;
  const auto index = static_cast<uint64_t>(t.offset + flat);
  if (store == kBf16) {
    random = draw_halves(index, n, key_of(p, t), out);
    return Random::halves;
  }
  random = draw_words(index, n, key_of(p, t), out);
  return Random::words;
}

void read_remainder(const OptimSlot& t, const Span& s, float* out) {
  const auto* high = reinterpret_cast<const uint16_t*>(t.weight) + s.flat();
  const auto* low = reinterpret_cast<const int16_t*>(t.master) + s.flat();
  for (size_t i = 0; i < s.n; ++i)
    out[i] = std::bit_cast<float>((static_cast<uint32_t>(high[i]) << 16) +
                                  static_cast<uint32_t>(static_cast<int32_t>(low[i])));
  for (size_t i = s.n; i < padded(s.n); ++i) out[i] = 0.0f;
}

void write_remainder(const OptimSlot& t, const Span& s, const float* w) {
  auto* high = reinterpret_cast<uint16_t*>(t.weight) + s.flat();
  auto* low = reinterpret_cast<uint16_t*>(t.master) + s.flat();
  for (size_t i = 0; i < s.n; ++i) {
    const uint32_t b = std::bit_cast<uint32_t>(w[i]);
    const bool special = (b & kInfBits) == kInfBits, nan = (b & kMagnitude) > kInfBits;
    high[i] = static_cast<uint16_t>(special ? (b >> 16) | (nan ? 0x40u : 0u) : (b + 0x8000u) >> 16);
    low[i] = static_cast<uint16_t>(special ? 0u : b);
  }
}

// The weight of a span as fp32.
float* read_weight(const OptimProgram& p, const OptimSlot& t, const Span& s, Scratch& x) {
  if (p.master == kRemainder16) {
    read_remainder(t, s, x.w);
    return x.w;
  }
  const bool master = p.master != kNone;
  const int32_t store = master ? p.master : p.weight;
  const int64_t codes = master ? t.master : t.weight;
  if (p.residue == kNone)
    if (float* w = in_place(store, codes, s)) return w;
  decode_any(store, codes, master ? t.master_scale : t.weight_scale, s, x.w);
  if (p.residue != kNone) {
    decode_any(p.residue, t.residue, 0, s, x.r);
    for (size_t i = 0; i < s.n; i += kLane) put(x.w + i, get<VF>(x.w + i) + get<VF>(x.r + i));
  }
  return x.w;
}

// Round the weight of a span, keep what is cut off, write it back. A row-scaled weight only collects its row.
void write_weight(const OptimProgram& p, const OptimSlot& t, const Span& s, float* w, Scratch& x) {
  if (p.master == kRemainder16) return write_remainder(t, s, w);
  const void* random = nullptr;
  Random kind = Random::none;
  if (p.master != kNone) {
    kind = draw_for(p.master, p, t, s.flat(), s.n, x.random, random);
    if (w == x.w) {
      encode_any(p.master, t.master, t.master_scale, s, w, kind, random);
      if (p.master != kFp32) decode_any(p.master, t.master, t.master_scale, s, w);
    }
    kind = Random::none;
  } else if (!row_scaled(p.weight)) {
    kind = draw_for(p.weight, p, t, s.flat(), s.n, x.random, random);
  }
  if (row_scaled(p.weight)) {
    std::copy(w, w + s.n, x.row.data() + s.col);
    return;
  }
  if (w != x.w && p.master == kNone) return;  // worked on in place
  encode_any(p.weight, t.weight, t.weight_scale, s, w, kind, random);
  if (p.residue != kNone) {
    decode_any(p.weight, t.weight, t.weight_scale, s, x.r);
    for (size_t i = 0; i < s.n; i += kLane) put(x.r + i, get<VF>(w + i) - get<VF>(x.r + i));
    encode_any(p.residue, t.residue, 0, s, x.r, Random::none, nullptr);
  }
}

// The end of a row: its scale is known now.
void finish_row(const OptimProgram& p, const OptimSlot& t, int64_t row, Scratch& x) {
  const auto n = static_cast<size_t>(t.cols);
  for (size_t i = n; i < padded(n); ++i) x.row[i] = 0.0f;
  const Span s{row, 0, t.cols, n};
  std::vector<uint32_t> drawn;
  const void* random = nullptr;
  Random kind = Random::none;
  if (p.master == kNone && p.stochastic) {
    drawn.resize(n + 128);
    kind = draw_for(p.weight, p, t, s.flat(), n, drawn.data(), random);
  }
  encode_any(p.weight, t.weight, t.weight_scale, s, x.row.data(), kind, random);
  if (p.residue == kNone) return;
  for (int64_t col = 0; col < t.cols; col += kTile) {
    const Span part{row, col, t.cols, std::min<size_t>(kTile, static_cast<size_t>(t.cols - col))};
    decode_any(p.weight, t.weight, t.weight_scale, part, x.r);
    for (size_t i = 0; i < part.n; i += kLane) put(x.r + i, get<VF>(x.row.data() + col + i) - get<VF>(x.r + i));
    for (size_t i = part.n; i < padded(part.n); ++i) x.r[i] = 0.0f;
    encode_any(p.residue, t.residue, 0, part, x.r, Random::none, nullptr);
  }
}

int run_any(const OptimProgram& p, int states, float* w, const float* g, float* const* s, const bool* root, size_t n) {
  if (p.rule == kAdam)
    return states == 3 ? run_rule<kAdam, 3>(p, w, g, s, root, n) : run_rule<kAdam, 2>(p, w, g, s, root, n);
  if (p.rule == kLion) return run_rule<kLion, 1>(p, w, g, s, root, n);
  return states ? run_rule<kSgd, 1>(p, w, g, s, root, n) : run_rule<kSgd, 0>(p, w, g, s, root, n);
}

// -- Adam in one loop -------------------------------------------------------------------------------------------------
// The common pairs of states are decoded, updated and encoded block by block without a stage between: the same
// operations as above, in the same order. Only whole blocks whose dither is aligned come here.

struct MemF32 {
  float* p;
  VF load(size_t i) const { return get<VF>(p + i); }
  void store(size_t i, VF x) const { put(p + i, x); }
};
template <bool Stochastic>
struct MemBf16 {
  uint16_t* p;
  const uint16_t* random;
  VF load(size_t i) const { return Bf16::load(p + i); }
  void store(size_t i, VF x) const {
    if constexpr (Stochastic)
      Bf16::store(p + i, x, widen(get<VH>(random + i)));
    else
      Bf16::store(p + i, x);
  }
};

// Where the new values of a state go: into a buffer until the block's scale is known, or where they belong.
template <class C, bool Stochastic>
OPTIM_INLINE void put_state(typename C::Raw* p, float* buffer, VU& top, VF x, VF old, Mask bad, const uint32_t* base,
                            uint32_t shift) {
  if constexpr (C::block) {
    put(buffer, x);
    top = umax(top, ubits(x) & kMagnitude);
  } else if constexpr (Stochastic && !std::is_same_v<C, Fp32>) {
    C::store(p, choose(bad, old, x), (get<VU>(base) + shift) >> 16);
  } else {
    C::store(p, choose(bad, old, x));
  }
}

template <class C, bool Stochastic>
OPTIM_INLINE void encode_hot(typename C::Raw* p, float* scale, const float* x, VU top, size_t n, const uint32_t* base,
                             uint32_t shift, uint32_t* spare) {
  const Scale sc = block_scale<C>(fold_max(top));
  *scale = sc.scale;
  if (__builtin_expect(sc.inverse == 0.0f, 0)) {
    for (size_t i = 0; i < n; i += kLane) put(spare + i, get<VU>(base + i) + shift);
    return encode_block<C, Stochastic>(p, vf(0.0f), x, n, Stochastic ? Random::dither : Random::none, spare, 0);
  }
  const VF inverse = vf(sc.inverse);
  const VU add = vu(shift);
  for (size_t i = 0; i < n; i += kLane) {
    const VF y = get<VF>(x + i) * inverse;
    if constexpr (Stochastic) {
      const VU r = get<VU>(base + i) + add;
      if constexpr (kDithered<C>)
        C::store(advance<C>(p, i), y, centred(r));
      else
        C::store(advance<C>(p, i), y, kHalf<C> ? r >> 16 : r);
    } else {
      C::store(advance<C>(p, i), y);
    }
  }
}

// The rare block in which some element must stay as it was: its old states are still in place.
template <class C>
void keep_old(const typename C::Raw* p, VF factor, const Mask* bad, float* buffer, VU& top, size_t n) {
  top = VU{};
  for (size_t j = 0; j < n; j += kLane) {
    VF old = C::load(kNibbles<C> ? p + j / 2 : p + j);
    if constexpr (C::block) old = old * factor;
    const VF x = choose(bad[j / kLane], C::root ? vsqrt(old * old) : old, get<VF>(buffer + j));
    put(buffer + j, x);
    top = umax(top, ubits(x) & kMagnitude);
  }
}

// e4m3 as fp16 bits is 2^8 too small: the factor goes into the scale (exact, and far from overflow).
template <class C>
constexpr float hot_factor = 1.0f;
template <>
constexpr float hot_factor<E4m3Block> = 256.0f;
template <>
constexpr float hot_factor<E4m3Root> = 256.0f;

template <class C>
OPTIM_INLINE VF load_hot(const typename C::Raw* p) {
#ifdef __AVX512F__
  if constexpr (hot_factor<C> != 1.0f) {
    const __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i magnitude = _mm256_slli_epi16(c, 7), sign = _mm256_slli_epi16(c, 8);
    const __m256i half = C::root ? magnitude
                                 : _mm256_ternarylogic_epi32(_mm256_set1_epi16(0x3F80), magnitude,
                                                             _mm256_and_si256(sign, _mm256_set1_epi16(-0x8000)), 0xEA);
    return (VF)_mm512_cvtph_ps(half);
  }
#else
  if constexpr (hot_factor<C> != 1.0f) return C::load(p) * (1.0f / hot_factor<C>);
#endif
  return C::load(p);
}

template <class S1, class S2, bool Stochastic, class W, class G>
int adam_hot(const OptimProgram& p, const OptimSlot& t, const Span& s, W w, G g, Scratch& x) {
  constexpr size_t size = S1::block ? S1::size : kGroup;
  const VF factor = vf(p.c[0]), keep = vf(p.c[2]), rate = vf(p.c[3]), b1c = vf(p.c[4]), b2 = vf(p.c[5]),
           b2c = vf(p.c[6]), correction = vf(p.c[7]), eps = vf(p.c[8]);
  auto* p1 = codes_at<S1>(t.states[0], s);
  auto* p2 = codes_at<S2>(t.states[1], s);
  [[maybe_unused]] float *scale1 = nullptr, *scale2 = nullptr;
  if constexpr (S1::block) scale1 = scale_at<S1>(t.scales[0], s, false);
  if constexpr (S2::block) scale2 = scale_at<S2>(t.scales[1], s, false);
  uint32_t words[4] = {};
  Mask masks[kGroup / kLane];
  int bad = 0;
  for (size_t b = 0; b < s.n; b += size) {
    const uint64_t index = static_cast<uint64_t>(t.offset + s.flat()) + b;
    if (Stochastic && index % kGroup == 0)
      philox(index / kGroup, {p.seed ^ kStateKey, p.step, static_cast<uint32_t>(t.stream)}, words);
    const uint32_t* base = kDither.x + index % kGroup;
    const size_t n = std::min(size, s.n - b);
    VF f1 = {}, f2 = {};
    if constexpr (S1::block) f1 = vf(*scale1 * hot_factor<S1>);
    if constexpr (S2::block) f2 = vf(*scale2 * hot_factor<S2>);
    VU top1 = {}, top2 = {};
    Mask any = special(VF{});
    for (size_t j = 0; j < n; j += kLane) {
      const size_t i = b + j;
      const VF w_old = w.load(i), gr = g.load(i) * factor;
      VF m_old = load_hot<S1>(advance<S1>(p1, i)), v_old = load_hot<S2>(advance<S2>(p2, i));
      if constexpr (S1::block) m_old = m_old * f1;
      if constexpr (S2::block) v_old = v_old * f2;
      if constexpr (S2::root) v_old = v_old * v_old;
      const VF m = m_old + (gr - m_old) * b1c;
      const VF v = v_old * b2 + (gr * b2c) * gr;
      const VF r = vsqrt(v);
      const VF w_new = w_old * keep - (m / (r * correction + eps)) * rate;
      // an Inf or NaN of m reaches w_new
      const Mask wrong = either(special(w_new), special(v));
      any = either(any, wrong);
      masks[j / kLane] = wrong;
      w.store(i, choose(wrong, w_old, w_new));
      put_state<S1, Stochastic>(advance<S1>(p1, i), x.s[0] + j, top1, m, m_old, wrong, base + j, words[0]);
      put_state<S2, Stochastic>(advance<S2>(p2, i), x.s[1] + j, top2, S2::root ? r : v, v_old, wrong, base + j,
                                words[1]);
    }
    if (__builtin_expect(count(any) != 0, 0)) {
      if constexpr (S1::block) keep_old<S1>(advance<S1>(p1, b), vf(*scale1), masks, x.s[0], top1, n);
      if constexpr (S2::block) keep_old<S2>(advance<S2>(p2, b), vf(*scale2), masks, x.s[1], top2, n);
      for (size_t j = 0; j < n; j += kLane) bad += count(masks[j / kLane]);
    }
    if constexpr (S1::block)
      encode_hot<S1, Stochastic>(advance<S1>(p1, b), scale1++, x.s[0], top1, n, base, words[0], x.dither);
    if constexpr (S2::block)
      encode_hot<S2, Stochastic>(advance<S2>(p2, b), scale2++, x.s[1], top2, n, base, words[1], x.dither);
  }
  return bad;
}

// Runs the loop for a pair of states, if there is one; -1 if not.
template <class W, class G>
int adam_states(const OptimProgram& p, const OptimSlot& t, const Span& s, W w, G g, Scratch& x) {
  const int pair = p.states[0] * 32 + p.states[1];
  const auto run = [&](auto a, auto b) {
    using A = decltype(a);
    using B = decltype(b);
    return p.state_stochastic ? adam_hot<A, B, true>(p, t, s, w, g, x) : adam_hot<A, B, false>(p, t, s, w, g, x);
  };
  switch (pair) {
    case kFp32 * 32 + kFp32:
      return adam_hot<Fp32, Fp32, false>(p, t, s, w, g, x);
    case kBf16 * 32 + kBf16:
      return run(Bf16{}, Bf16{});
    case kDynamic8 * 32 + kDynamic8Root:
      return run(Dynamic8<false>{}, Dynamic8<true>{});
    case kE4m3Block * 32 + kE4m3Root:
      return run(E4m3Block{}, E4m3Root{});
    case kE4m3Block * 32 + kFp16BlockPlus:
      return run(E4m3Block{}, HalfBlock<true>{});
    case kDynamic4 * 32 + kLinear4Root:
      return run(Nibbles<Float4>{}, Nibbles<Linear4>{});
    default:
      return -1;
  }
}

bool hot(const OptimProgram& p, const OptimSlot& t, const Span& s) {
  return p.rule == kAdam && p.c[1] == 0.0f && p.states[2] == kNone && s.n % kLane == 0 &&
         static_cast<uint64_t>(t.offset + s.flat()) % kGroup == 0;
}

int run_tile(const OptimProgram& p, const OptimSlot& t, const Span& s, Scratch& x) {
  const bool one_loop = hot(p, t, s);
  if (one_loop && p.weight == kBf16 && p.grad == kBf16 && p.master == kNone && p.residue == kNone) {
    auto* w = reinterpret_cast<uint16_t*>(t.weight) + s.flat();
    const MemBf16<false> g{reinterpret_cast<uint16_t*>(t.grad) + s.flat(), nullptr};
    const int bad = p.stochastic ? adam_states(p, t, s,
                                               MemBf16<true>{w, draw_halves(static_cast<uint64_t>(t.offset + s.flat()),
                                                                            s.n, key_of(p, t), x.random)},
                                               g, x)
                                 : adam_states(p, t, s, MemBf16<false>{w, nullptr}, g, x);
    if (bad >= 0) return bad;
  }
  float* w = read_weight(p, t, s, x);
  const float* g = in_place(p.grad, t.grad, s);
  if (!g) {
    decode_any(p.grad, t.grad, t.grad_scale, s, x.g);
    g = x.g;
  }
  if (one_loop) {
    const int bad = adam_states(p, t, s, MemF32{w}, MemF32{const_cast<float*>(g)}, x);
    if (bad >= 0) {
      write_weight(p, t, s, w, x);
      return bad;
    }
  }
  float* states[3] = {};
  bool root[3] = {}, staged[3] = {};
  int count = 0;
  for (; count < 3 && p.states[count] != kNone; ++count) {
    states[count] = in_place(p.states[count], t.states[count], s);
    staged[count] = !states[count];
    root[count] = is_root(p.states[count]);
    if (!staged[count]) continue;
    decode_any(p.states[count], t.states[count], t.scales[count], s, x.s[count]);
    states[count] = x.s[count];
  }
  int bad = run_any(p, count, w, g, states, root, padded(s.n));
  for (int k = 0; k < count; ++k) {
    if (!staged[k]) continue;
    const bool dithered = p.state_stochastic && p.states[k] != kFp32;
    if (dithered) dither_span(static_cast<uint64_t>(t.offset + s.flat()), s.n, key_of(p, t), k, x.dither);
    encode_any(p.states[k], t.states[k], t.scales[k], s, states[k], dithered ? Random::dither : Random::none, x.dither);
  }
  write_weight(p, t, s, w, x);
  return bad;
}

// -- work -------------------------------------------------------------------------------------------------------------

// A tensor whose stores have no scale, or whose rows are whole blocks, is one long row.
OptimSlot flattened(const OptimProgram& p, OptimSlot t) {
  if (row_scaled(p.weight) || row_scaled(p.grad)) return t;
  bool blocks = false;
  for (int32_t store : {p.weight, p.grad, p.master, p.states[0], p.states[1], p.states[2]})
    blocks |= store >= kFp16Block && store <= kLinear4Root;
  if (!blocks || t.cols % static_cast<int64_t>(kGroup) == 0) t.cols *= t.rows, t.rows = 1;
  return t;
}

void update(const OptimProgram& p, OptimSlot* slots, size_t count) {
  std::vector<OptimSlot> flat(count);
  std::vector<int64_t> ends(count);
  int64_t total = 0, widest = 0, elements = 0;
  const bool by_row = row_scaled(p.weight);
  for (size_t i = 0; i < count; ++i) {
    flat[i] = flattened(p, slots[i]);
    slots[i].nonfinite = 0;
    const int64_t tiles = by_row ? 1 : (flat[i].cols + static_cast<int64_t>(kTile) - 1) / static_cast<int64_t>(kTile);
    total += flat[i].rows * tiles;
    elements += flat[i].rows * flat[i].cols;
    widest = std::max(widest, flat[i].cols);
    ends[i] = total;
  }
  const int threads = elements < 16384 ? 1 : static_cast<int>(std::min<int64_t>(p.threads, total));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t workers = omp_get_num_threads(), self = omp_get_thread_num();
    int64_t unit = total * self / workers;
    const int64_t last = total * (self + 1) / workers;
    static thread_local Scratch scratch;
    if (by_row) scratch.row.resize(std::max(scratch.row.size(), padded(static_cast<size_t>(widest)) + kLane));
    size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin());
    while (unit < last) {
      const OptimSlot& t = flat[i];
      const int64_t begin = i ? ends[i - 1] : 0, stop = std::min(last, ends[i]), step = static_cast<int64_t>(kTile);
      const int64_t tiles = by_row ? 1 : (t.cols + step - 1) / step;
      int64_t bad = 0;
      for (; unit < stop; ++unit) {
        const int64_t row = (unit - begin) / tiles, first = (unit - begin) % tiles * step;
        const int64_t end = by_row ? t.cols : std::min(first + step, t.cols);
        for (int64_t col = first; col < end; col += step)
          bad += run_tile(p, t, {row, col, t.cols, static_cast<size_t>(std::min(step, end - col))}, scratch);
        if (by_row) finish_row(p, t, row, scratch);
      }
      if (bad) __atomic_fetch_add(&slots[i].nonfinite, bad, __ATOMIC_RELAXED);
      ++i;
    }
  }
}

// -- stored tensors ---------------------------------------------------------------------------------------------------

template <class F>
void for_spans(int64_t rows, int64_t cols, int threads, F f) {
  const int64_t step = static_cast<int64_t>(kTile), tiles = (cols + step - 1) / step;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * cols > 16384)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < tiles; ++k)
      f(Span{row, k * step, cols, static_cast<size_t>(std::min(step, cols - k * step))});
}

// The same where a row has one scale.
void store_whole_rows(int32_t store, int64_t codes, int64_t scales, const float* x, int64_t rows, int64_t cols,
                      int64_t first, bool add, bool stochastic, const DitherKey& key, int threads) {
  const auto n = static_cast<size_t>(cols);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * cols > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<float> sum(padded(n)), old(add ? padded(n) : 0);
    std::copy(x + row * cols, x + (row + 1) * cols, sum.begin());
    const Span s{first + row, 0, cols, n};
    if (add) {
      decode_any(store, codes, scales, s, old.data());
      for (size_t i = 0; i < n; ++i) sum[i] = sum[i] + old[i];
    }
    if (!stochastic) {
      encode_any(store, codes, scales, s, sum.data(), Random::none, nullptr);
      continue;
    }
    std::vector<uint32_t> dither(padded(n) + kLane);
    dither_span(static_cast<uint64_t>(s.flat()), n, {key.seed, key.step, key.stream}, 0, dither.data());
    encode_any(store, codes, scales, s, sum.data(), Random::dither, dither.data());
  }
}

void store_rows(int32_t store, void* codes, float* scale, const float* x, int64_t rows, int64_t cols, int64_t first,
                bool add, bool stochastic, const DitherKey& key, int threads) {
  const auto at = reinterpret_cast<int64_t>(codes), scales = reinterpret_cast<int64_t>(scale);
  if (row_scaled(store))
    return store_whole_rows(store, at, scales, x, rows, cols, first, add, stochastic, key, threads);
  for_spans(rows, cols, threads, [&](const Span& part) {
    static thread_local Scratch t;
    const Span s{first + part.row, part.col, cols, part.n};
    decode_any(kFp32, reinterpret_cast<int64_t>(x), 0, part, t.w);
    if (add) {
      decode_any(store, at, scales, s, t.g);
      for (size_t i = 0; i < s.n; i += kLane) put(t.w + i, get<VF>(t.w + i) + get<VF>(t.g + i));
    }
    if (is_root(store))
      for (size_t i = 0; i < s.n; i += kLane) put(t.w + i, vsqrt(get<VF>(t.w + i)));
    const PhiloxKey k{key.seed, key.step, key.stream};
    const auto index = static_cast<uint64_t>(s.flat());
    if (!stochastic) return encode_any(store, at, scales, s, t.w, Random::none, nullptr);
    dither_span(index, s.n, k, 0, t.dither);
    encode_any(store, at, scales, s, t.w, Random::dither, t.dither);
  });
}

void decode_rows(int32_t store, const void* codes, const float* scale, float* out, int64_t rows, int64_t cols,
                 int threads) {
  for_spans(rows, cols, threads, [&](const Span& s) {
    static thread_local Scratch t;
    decode_any(store, reinterpret_cast<int64_t>(codes), reinterpret_cast<int64_t>(scale), s, t.w);
    std::copy(t.w, t.w + s.n, out + s.flat());
  });
}

void stats(int32_t store, const void* codes, const float* scale, int64_t rows, int64_t cols, int threads, double* out) {
  const int64_t step = static_cast<int64_t>(kTile);
  std::vector<double> inf(static_cast<size_t>(rows)), nan(inf), sum(inf);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * cols > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    static thread_local Scratch t;
    const auto r = static_cast<size_t>(row);
    for (int64_t col = 0; col < cols; col += step) {
      const Span s{row, col, cols, static_cast<size_t>(std::min(step, cols - col))};
      decode_any(store, reinterpret_cast<int64_t>(codes), reinterpret_cast<int64_t>(scale), s, t.w);
      double lanes[16] = {};
      for (size_t i = 0; i < s.n; ++i) {
        const uint32_t b = std::bit_cast<uint32_t>(t.w[i]) & kMagnitude;
        inf[r] += b == kInfBits;
        nan[r] += b > kInfBits;
        lanes[i % 16] += b < kInfBits ? static_cast<double>(t.w[i]) * static_cast<double>(t.w[i]) : 0.0;
      }
      for (double v : lanes) sum[r] += v;
    }
  }
  out[0] = out[1] = out[2] = 0.0;
  for (size_t r = 0; r < inf.size(); ++r) out[0] += inf[r], out[1] += nan[r], out[2] += sum[r];
}

}  // namespace

extern const OptimKernels optim_kernels;
const OptimKernels optim_kernels = {update, store_rows, decode_rows, stats};

}  // namespace lowprec::LOWPREC_ISA
