// The one rounding. A finite magnitude is brought to the code of a format by integers alone, in 32-bit lanes (fp32 and
// what is exact in it) or 64-bit lanes (fp64, and formats that fp32 cannot hold): never through another format, so it
// is rounded once. Codes here have no sign and no upper limit; a code above the format's largest is an overflow.
//
//   exponent e = max(exponent of x, emin), quantum 2^(e - m), q = |x| / quantum rounded, code = q + (e - emin) * 2^m
//
// For nearest in fp32 there is a shorter way: adding 2^(e + 23 - m) makes the floating-point unit round to that
// quantum, and the low bits of the sum are q. It serves normals and subnormals alike.
#pragma once

#include "format.h"
#include "lanes.h"

namespace lowprec::LOWPREC_ISA {
namespace {

template <class U>
struct Lane;
template <>
struct Lane<uint32_t> {
  using Int = int32_t;
  using Real = float;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr uint32_t kInf = 0x7F800000u, kSign = 0x80000000u, kNan = 0x7FC00000u;
};
template <>
struct Lane<uint64_t> {
  using Int = int64_t;
  using Real = double;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr uint64_t kInf = 0x7FF0000000000000ull, kSign = 0x8000000000000000ull, kNan = 0x7FF8000000000000ull;
};

// What rounding needs to know of a format, in the lane's own terms.
template <class U>
struct Grid {
  using Int = typename Lane<U>::Int;
  int m;
  Int emin;   // biased as the lane's exponents are
  Int drop;   // mantissa bits dropped from a normal
  bool deep;  // normals of the format are subnormals of the lane
  int bits;   // stochastic: random bits
  explicit Grid(const Format& f, int random_bits = 0) : Grid(f.m, f.emin, random_bits) {}
  Grid(int mantissa, int lowest, int random_bits = 0)
      : m(mantissa), emin(lowest + Lane<U>::kBias), drop(Lane<U>::kMantissa - m), deep(emin < 1), bits(random_bits) {}
};

// Deep: normals of the format may be subnormals of the lane.
template <class U, Rounding R, bool Deep = false>
inline U round_magnitude(U a, bool negative, const Grid<U>& g, uint32_t random) {
  using L = Lane<U>;
  using Int = typename L::Int;
  constexpr int M = L::kMantissa;
  const Int field = static_cast<Int>(a >> M);
  const U hidden = field ? U{1} << M : 0;
  U significand = (a & ((U{1} << M) - 1)) | hidden;
  Int e = field + (field == 0);
  if constexpr (Deep) {
    if (field == 0) {
      const int lead = std::countl_zero(significand | 1) - (63 - M);
      e = significand ? e - lead : g.emin;
      significand <<= lead;
    }
  }
  const Int below = g.emin - e;
  const Int shift = g.drop + std::max<Int>(below, 0);
  const Int s = std::min<Int>(shift, M + 3);
  const U base = static_cast<U>(std::max<Int>(-below, 0)) << g.m;
  const U q = significand >> s;
  const U rest = significand & ((U{1} << s) - 1), half = (U{1} << s) >> 1;
  const U some = s != 0;
  U up = 0;
  if constexpr (R == kNearest)
    up = some & static_cast<U>(rest + ((q + base) & 1) >
                               half);  // ties to the even code (m may be 0); with s = 0 nothing is dropped
  else if constexpr (R == kNearestAway)
    up = some & static_cast<U>(rest >= half);
  else if constexpr (R == kUp)
    up = (rest != 0) & !negative;
  else if constexpr (R == kDown)
    up = (rest != 0) & negative;
  else if constexpr (R == kStochastic) {
    // T = floor(rest / 2^shift * 2^bits + 1/2); up where the random number is below it
    const Int k = std::min<Int>(shift - g.bits, M + 4);
    const Int left = std::min<Int>(std::max<Int>(-k, 0), sizeof(U) * 8 - 1), right = std::max<Int>(k, 1);
    const U threshold = k > 0 ? (rest + (U{1} << (right - 1))) >> right : rest << left;
    up = random < threshold;
  }
  return base + q + up;
}

// The value of a magnitude code, as bits of the lane's floating-point type. Exact where the format is narrow (32-bit
// lanes) or in any case (64-bit lanes).
template <class U>
struct Values {
  using L = Lane<U>;
  int m, up;
  U direct;  // the code's own bits, moved up, are the value (the same exponent range)
  U rebias;
  typename L::Real quantum;
  explicit Values(const Format& f) : m(f.m), up(L::kMantissa - f.m), direct(f.emin == 1 - L::kBias) {
    rebias = static_cast<U>(static_cast<typename L::Int>(f.emin - 1 + L::kBias)) << L::kMantissa;
    quantum = direct ? 0 : static_cast<typename L::Real>(__builtin_ldexp(1.0, f.emin - f.m));
  }
  U operator()(U code) const {
    const U moved = code << up, shifted = code >> m;
    const U small = bits_of(static_cast<typename L::Real>(static_cast<typename L::Int>(code)) * quantum);
    return (shifted | direct) != 0 ? moved + rebias : small;
  }
};

// Formats whose normals are fp64 subnormals (a user's own): one element at a time.
inline uint64_t deep_value(const Format& f, uint64_t code) {
  const uint64_t exponent = code >> f.m, mantissa = code & ((uint64_t{1} << f.m) - 1);
  return bits_of(exponent ? __builtin_ldexp(static_cast<double>(mantissa | uint64_t{1} << f.m),
                                            static_cast<int>(exponent) - 1 + f.emin - f.m)
                          : __builtin_ldexp(static_cast<double>(mantissa), f.emin - f.m));
}

// The code of a scale format (an exponent alone) before clamping at the top: 64-bit lanes, nothing fp32 is a subnormal
// there.
template <Rounding R>
inline uint64_t round_scale(uint64_t a, int bias, int bits, uint32_t random) {
  if (!a) return 0;
  int64_t e = static_cast<int64_t>(a >> 52);
  uint64_t rest = a & ((uint64_t{1} << 52) - 1);
  if (!e) {
    const int lead = std::countl_zero(rest) - 11;
    rest = (rest << lead) & ((uint64_t{1} << 52) - 1), e = 1 - lead;
  }
  const int64_t code = e - 1023 + bias;
  constexpr uint64_t half = uint64_t{1} << 51;
  bool up = false;
  if constexpr (R == kNearest) up = rest > half || (rest == half && (code & 1));
  if constexpr (R == kNearestAway) up = rest >= half;
  if constexpr (R == kUp) up = rest != 0;
  if constexpr (R == kStochastic) up = random < ((rest + (uint64_t{1} << (51 - bits))) >> (52 - bits));
  return static_cast<uint64_t>(std::max<int64_t>(code + up, 0));
}

// fp64 to a narrower dtype with one rounding. `Outward`: overflow becomes infinity, else the largest finite value.
template <class To, int E, int M, bool Outward, Rounding R>
inline To narrow(uint64_t b) {
  const uint64_t a = b & ~Lane<uint64_t>::kSign;
  const bool negative = b >> 63;
  constexpr uint64_t inf = ((uint64_t{1} << E) - 1) << M;
  uint64_t r = round_magnitude<uint64_t, R>(a, negative, Grid<uint64_t>(M, 2 - (1 << (E - 1))), 0);
  r = r >= inf ? inf - !Outward : r;
  r = a == Lane<uint64_t>::kInf ? inf : r;
  const uint64_t nan = inf | (uint64_t{1} << (M - 1));
  return static_cast<To>(a > Lane<uint64_t>::kInf ? nan : r | static_cast<uint64_t>(negative) << (E + M));
}

}  // namespace
}  // namespace lowprec::LOWPREC_ISA
