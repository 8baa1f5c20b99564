// The fused road of a cast: saturating, to nearest or stochastically, for formats that fp32 arithmetic serves. A rule
// turns the bits of |x| into a code without sign.
#pragma once

#include "round.h"

namespace lowprec::LOWPREC_ISA {
namespace {

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

// Stochastic, any format in 32-bit lanes.
struct Stochastic : Nearest {
  Grid<uint32_t> grid;
  Stochastic(const Format& f, NanPolicy policy, int random_bits) : Nearest(f, policy), grid(f, random_bits) {}
  uint32_t magnitude(uint32_t a, uint32_t random) const {
    return round_magnitude<uint32_t, kStochastic>(std::min(a, max), false, grid, random);
  }
};

// Stochastic for the upper part of an fp32: what is dropped has the same width everywhere.
struct StochasticUpper : NearestUpper {
  uint32_t left, right, round;
  StochasticUpper(const Format& f, NanPolicy policy, int random_bits)
      : NearestUpper(f, policy),
        left(std::max(random_bits - static_cast<int>(shift), 0)),
        right(std::max(static_cast<int>(shift) - random_bits, 0)),
        round(right ? 1u << (right - 1) : 0) {}
  uint32_t magnitude(uint32_t a, uint32_t random) const {
    const uint32_t rest = a & ((1u << shift) - 1), threshold = ((rest << left) + round) >> right;
    return std::min((a >> shift) + (random < threshold), max);
  }
};

enum class Sign { upper_bit, upper_bit_unless_zero, twos_complement };

}  // namespace
}  // namespace lowprec::LOWPREC_ISA
