// Which instruction set runs. Every kernel source is compiled once per instruction set; each compilation exports one
// constant table of function pointers per topic, and a call goes through the table chosen at load.
//
// To add a topic: a struct of function pointers here or in its own header, LOWPREC_DECLARE(Struct, name) below it, and
// in the kernel source `const Struct name = {...};` inside namespace lowprec::LOWPREC_ISA.
#pragma once

#include <vector>

namespace lowprec {

enum class Isa { scalar = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3 };

Isa current_isa();      // the one in use
Isa best_isa();         // the best this CPU has and this build contains
bool has_isa(Isa isa);  // whether this CPU and this build have it
bool set_isa(Isa isa);  // false when it is not there
const char* isa_name(Isa isa);

struct Feature {
  Isa isa;
  const char* name;
  bool present;
};
std::vector<Feature> cpu_features();  // what each path needs, and whether the CPU has it

#ifdef LOWPREC_HAVE_AVX512BF16
#define LOWPREC_DECLARE(Struct, name) \
  namespace scalar {                  \
  extern const Struct name;           \
  }                                   \
  namespace avx2 {                    \
  extern const Struct name;           \
  }                                   \
  namespace avx512 {                  \
  extern const Struct name;           \
  }                                   \
  namespace avx512bf16 {              \
  extern const Struct name;           \
  }                                   \
  inline const Struct& name() {       \
    switch (current_isa()) {          \
      case Isa::avx512bf16:           \
        return avx512bf16::name;      \
      case Isa::avx512:               \
        return avx512::name;          \
      case Isa::avx2:                 \
        return avx2::name;            \
      default:                        \
        return scalar::name;          \
    }                                 \
  }
#elif defined(LOWPREC_HAVE_SCALAR)
#define LOWPREC_DECLARE(Struct, name) \
  namespace scalar {                  \
  extern const Struct name;           \
  }                                   \
  inline const Struct& name() { return scalar::name; }
#else  // inside a kernel source: only its own table is visible
#define LOWPREC_DECLARE(Struct, name) \
  namespace LOWPREC_ISA {             \
  extern const Struct name;           \
  }
#endif

}  // namespace lowprec
