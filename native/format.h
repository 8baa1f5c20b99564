// A number format as the kernels see it: the bits of lowprec.formats.Format, and what follows from them.
//
// Floats and ints are one thing here. A magnitude code counts quanta: below 2^m codes the quantum is 2^(emin - m), and
// it doubles with every further 2^m codes. A float has its own m and emin; an int is a float whose codes all lie below
// 2^m.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lowprec {

enum Kind : int { kFloat = 0, kInt = 1, kScale = 2, kBinary = 3 };
enum Rounding : int { kNearest = 0, kNearestAway = 1, kTowardZero = 2, kUp = 3, kDown = 4, kStochastic = 5 };
enum Overflow : int { kSaturate = 0, kKeepInf = 1, kIeee = 2 };
enum NanPolicy : int { kNanError = 0, kNanZero = 1, kNanMax = 2 };
enum Dtype : int { kF32 = 0, kF64 = 1, kF16 = 2, kBF16 = 3 };

struct Format {
  // what Python packs
  int kind, bits, exponent_bits, mantissa_bits, bias, nan_style, step_exponent;
  int64_t max_code, inf_code, nan_code;  // -1 where there is none

  // what follows
  int m;                   // bits of a binade of codes (ints: `bits`, so that none is ever left)
  int emin;                // exponent of the first normal (ints: chosen so that the quantum is the step)
  int emax;                // exponent of the largest value
  int code_bytes;          // 1, 2, 4 or 8
  bool narrow;             // every value is an fp32 normal or zero, or shares fp32's exponent range: 32-bit lanes do
  bool magic;              // nearest rounding by adding 2^(e + 23 - m) works in fp32
  bool same_range;         // bias 127, 8 exponent bits: the code is the upper part of an fp32
  bool negative_zero_nan;  // fnuz: a zero loses its sign
  uint64_t sign_xor, sign_add;  // code of -v = ((code of v) ^ sign_xor) + sign_add, masked
  uint64_t mask;
  float max_value;     // narrow formats
  double max_value64;  // all

  // formats of 8 bits or fewer: every value in every dtype, for decoding by table
  bool has_table;
  bool odd;         // value of code | sign bit is minus the value of code: 7 bits index the table
  bool exact_bf16;  // every value is exact in bf16, so that fp32 = bf16 << 16
  uint64_t table64[256];
  uint32_t table32[256];
  uint16_t table_f16[256], table_bf16[256];
  uint8_t low_bf16[256], high_bf16[256];  // the two bytes of table_bf16
};

// The largest binary exponent of a scale (kind "scale") and such details stay with the kernels that use them.
const Format* intern_format(const int64_t* packed, size_t count);  // lives as long as the process; nullptr: wrong count

}  // namespace lowprec
