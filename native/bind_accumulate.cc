#include "accumulate.h"
#include "bind.h"

namespace nb = nanobind;

namespace lowprec {

void bind_accumulate(nb::module_& m) {
  m.def("accumulate_matmul",
        [](Address a, Address b, Address out, size_t rows, size_t columns, size_t depth, int least_a, int least_b,
           int step, int fraction, int mantissa, size_t promote, int threads) {
          nb::gil_scoped_release release;
          accumulate_kernels().matmul({at<const float>(a), at<const float>(b), at<float>(out), rows, columns, depth,
                                       least_a, least_b, step, fraction, mantissa, promote},
                                      threads);
        });
}

}  // namespace lowprec
