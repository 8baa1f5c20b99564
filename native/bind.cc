#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "dispatch.h"

namespace nb = nanobind;
using namespace lowprec;

NB_MODULE(_native, m) {
  m.def("isa", [] { return std::string(isa_name(current_isa())); });
  m.def("isas", [] {
    std::vector<std::string> names;
    for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512bf16})
      if (has_isa(isa)) names.emplace_back(isa_name(isa));
    return names;
  });
  m.def("set_isa", [](const std::string& name) {
    for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512bf16})
      if (name == isa_name(isa)) return set_isa(isa);
    return false;
  });
  // Instruction set -> the CPU features its path needs, each with whether this CPU has it.
  m.def("cpu_features", [] {
    std::vector<std::tuple<std::string, std::string, bool>> rows;
    for (const Feature& f : cpu_features()) rows.emplace_back(isa_name(f.isa), f.name, f.present);
    return rows;
  });
  bind_block(m);
  bind_accumulate(m);
  bind_cast(m);
  bind_stats(m);
  bind_epilogue(m);
  bind_optim(m);
  bind_fused(m);
}
