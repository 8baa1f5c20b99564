#include <nanobind/stl/vector.h>

#include <vector>

#include "bind.h"
#include "stats.h"

namespace nb = nanobind;

namespace lowprec {

void bind_stats(nb::module_& m) {
  m.def("tensor_stats", [](const std::vector<Address>& x, const std::vector<int>& dtypes, const std::vector<size_t>& n,
                           Address out, int threads) {
    nb::gil_scoped_release release;
    std::vector<StatsInput> inputs;
    for (size_t i = 0; i < x.size(); ++i) inputs.push_back({at<const void>(x[i]), Dtype(dtypes[i]), n[i]});
    stats_kernels().tensor_stats(inputs.data(), inputs.size(), at<double>(out), threads);
  });
  m.def("transpose", [](Address x, size_t rows, size_t columns, int bytes, Address out, int threads) {
    nb::gil_scoped_release release;
    stats_kernels().transpose(at<const void>(x), rows, columns, bytes, at<void>(out), threads);
  });
  m.def("hadamard16",
        [](Address x, int dtype, size_t rows, size_t columns, Address signs, bool down, Address out, int threads) {
          nb::gil_scoped_release release;
          stats_kernels().hadamard16(at<const void>(x), Dtype(dtype), rows, columns, at<const float>(signs), down,
                                     at<float>(out), threads);
        });
}

}  // namespace lowprec
