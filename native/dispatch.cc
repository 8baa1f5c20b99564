#include "dispatch.h"

#include <atomic>
#include <initializer_list>

namespace lowprec {
namespace {

bool cpu_has(Isa isa) {
#ifdef LOWPREC_HAVE_AVX512BF16
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  switch (isa) {
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx512;
    case Isa::avx512bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
             __builtin_cpu_supports("avx512vnni");
    default:
      return true;
  }
#else
  return isa == Isa::scalar;
#endif
}

std::atomic<int>& chosen() {
  static std::atomic<int> isa{static_cast<int>(best_isa())};
  return isa;
}

}  // namespace

Isa best_isa() {
  for (Isa isa : {Isa::avx512bf16, Isa::avx512, Isa::avx2})
    if (cpu_has(isa)) return isa;
  return Isa::scalar;
}

bool has_isa(Isa isa) { return cpu_has(isa); }

Isa current_isa() { return static_cast<Isa>(chosen().load(std::memory_order_relaxed)); }

bool set_isa(Isa isa) {
  if (!has_isa(isa)) return false;
  chosen().store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512bf16:
      return "avx512bf16";
    default:
      return "scalar";
  }
}

}  // namespace lowprec
