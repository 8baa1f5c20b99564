// Element types, conversions and the loop over threads, shared by the kernel sources.
//
// Everything here is branch-free on single elements: the loops that call it are vectorised by the compiler, each time
// for the instruction set the source is being compiled for. That is how one source serves them all with the same bits.
#pragma once

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace lowprec::LOWPREC_ISA {
namespace {

constexpr size_t kChunk = 1024;               // elements that a stage hands to the next through the first-level cache
constexpr size_t kSerial = 32768;             // elements below which starting threads costs more than it gives
constexpr size_t kStream = size_t{24} << 20;  // bytes written above which stores bypass the caches

inline uint32_t bits_of(float v) { return std::bit_cast<uint32_t>(v); }
inline uint64_t bits_of(double v) { return std::bit_cast<uint64_t>(v); }
inline float real(uint32_t b) { return std::bit_cast<float>(b); }
inline double real(uint64_t b) { return std::bit_cast<double>(b); }

// An fp16 as an fp32. Subnormals are made normal by a subtraction, which no flush-to-zero mode can touch.
inline uint32_t half_to_bits(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFF) << 13;
  const uint32_t exponent = magnitude & 0x0F800000u;
  const uint32_t normal = magnitude + (exponent == 0x0F800000u ? 224u << 23 : 112u << 23);
  const uint32_t subnormal = bits_of(real(magnitude + (113u << 23)) - real(113u << 23));
  return (exponent ? normal : subnormal) | static_cast<uint32_t>(h & 0x8000) << 16;
}

// Nearest, ties to even; NaN becomes the canonical one.
inline uint16_t bits_to_bf16(uint32_t b) {
  const uint32_t rounded = (b + 0x7FFFu + (b >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((b & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

inline uint16_t bits_to_half(uint32_t b) {
  const uint32_t a = b & 0x7FFFFFFFu, sign = b >> 16 & 0x8000;
  const uint32_t normal = (a - (112u << 23) + 0xFFFu + (a >> 13 & 1)) >> 13;
  const uint32_t subnormal = bits_of(real(a) + real(126u << 23)) - (126u << 23);  // 2^-1: one unit is 2^-24
  uint32_t r = a < (113u << 23) ? subnormal : normal;
  r = a >= (143u << 23) ? 0x7C00u : std::min(r, 0x7C00u);
  return static_cast<uint16_t>(a > 0x7F800000u ? 0x7E00u : r | sign);
}

// Element types: the integer that holds one, and its value as the bits of an fp32 (exact).
struct F32 {
  using Raw = uint32_t;
  static uint32_t load(Raw v) { return v; }
  static Raw store(uint32_t b) { return b; }
};
struct BF16 {
  using Raw = uint16_t;
  static uint32_t load(Raw v) { return static_cast<uint32_t>(v) << 16; }
  static Raw store(uint32_t b) { return bits_to_bf16(b); }
};
struct F16 {
  using Raw = uint16_t;
  static uint32_t load(Raw v) { return half_to_bits(v); }
  static Raw store(uint32_t b) { return bits_to_half(b); }
};

template <class T>
void load_chunk(const typename T::Raw* in, uint32_t* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = T::load(in[i]);
}

template <class T>
void store_chunk(const uint32_t* in, typename T::Raw* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = T::store(in[i]);
}

// Stores that bypass the caches, for outputs too large to be found there again: the line is not read before it is
// written.
inline void stream_copy(void* to, const void* from, size_t bytes) {
#if defined(__AVX512F__)
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  const size_t head = std::min(bytes, (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64);
  std::memcpy(out, in, head);
  size_t i = head;
  for (; i + 64 <= bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
  std::memcpy(out + i, in + i, bytes - i);
#else
  std::memcpy(to, from, bytes);
#endif
}

inline void stream_fence() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

// Call f(first, last) on ranges that cover [0, n), each a multiple of `grain` long but the last; one range a thread.
template <class F>
void parallel_ranges(size_t n, size_t grain, int threads, bool worth, F f) {
  if (threads <= 1 || !worth || n <= grain) return f(size_t{0}, n);
#pragma omp parallel num_threads(threads)
  {
    const size_t count = static_cast<size_t>(omp_get_num_threads()), self = static_cast<size_t>(omp_get_thread_num());
    const size_t units = (n + grain - 1) / grain;
    const size_t first = units * self / count * grain, last = std::min(n, units * (self + 1) / count * grain);
    if (first < last) f(first, last);
  }
}

}  // namespace
}  // namespace lowprec::LOWPREC_ISA
