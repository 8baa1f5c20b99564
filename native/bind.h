// One bind function per topic; bind.cc calls them all. Tensors cross as addresses (uintptr_t): the Python side has
// checked dtype, device, contiguity and size before it calls.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace lowprec {

using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_block(nanobind::module_& m);
void bind_accumulate(nanobind::module_& m);
void bind_cast(nanobind::module_& m);
void bind_stats(nanobind::module_& m);
void bind_epilogue(nanobind::module_& m);
void bind_optim(nanobind::module_& m);
void bind_fused(nanobind::module_& m);

}  // namespace lowprec
