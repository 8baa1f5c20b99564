#include "dispatch.h"

#include <atomic>
#include <initializer_list>

namespace lowprec {
namespace {

bool cpu_has(Isa isa) {
#ifdef LOWPREC_HAVE_AVX512BF16
  for (const Feature& f : cpu_features())
    if (f.isa <= isa && !f.present) return false;
  return true;
#else
  return isa == Isa::scalar;
#endif
}

std::atomic<int>& chosen() {
  static std::atomic<int> isa{static_cast<int>(best_isa())};
  return isa;
}

}  // namespace

std::vector<Feature> cpu_features() {
#ifdef LOWPREC_HAVE_AVX512BF16
  __builtin_cpu_init();
#define LOWPREC_FEATURE(isa, name) Feature{Isa::isa, name, __builtin_cpu_supports(name) != 0}
  return {LOWPREC_FEATURE(avx2, "avx2"),
          LOWPREC_FEATURE(avx2, "fma"),
          LOWPREC_FEATURE(avx2, "bmi2"),
          LOWPREC_FEATURE(avx512, "avx512f"),
          LOWPREC_FEATURE(avx512, "avx512bw"),
          LOWPREC_FEATURE(avx512, "avx512dq"),
          LOWPREC_FEATURE(avx512, "avx512vl"),
          LOWPREC_FEATURE(avx512, "avx512cd"),
          LOWPREC_FEATURE(avx512bf16, "avx512bf16"),
          LOWPREC_FEATURE(avx512bf16, "avx512vbmi"),
          LOWPREC_FEATURE(avx512bf16, "avx512vnni")};
#undef LOWPREC_FEATURE
#else
  return {};
#endif
}

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
