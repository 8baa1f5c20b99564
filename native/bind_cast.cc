#include "bind.h"
#include "cast.h"

namespace nb = nanobind;

namespace lowprec {

void bind_cast(nb::module_& m) {
  m.def("amax_f32", [](Address x, size_t n, int threads) {
    nb::gil_scoped_release release;
    return cast_kernels().amax_f32(at<const uint32_t>(x), n, threads);
  });
}

}  // namespace lowprec
