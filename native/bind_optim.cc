#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "bind.h"
#include "optim.h"

namespace nb = nanobind;

namespace lowprec {

void bind_optim(nb::module_& m) {
  // `slots` is an array of OptimSlot, 18 64-bit integers each: see lowprec/kernels/native/optim.py.
  m.def("optim_update", [](const std::vector<int32_t>& codes, const std::vector<float>& coefficients, uint64_t seed,
                           uint32_t step, int threads, Address slots, size_t count) {
    OptimProgram p{};
    if (codes.size() != 11 || coefficients.size() > 12) throw nb::value_error("optim_update: bad program");
    static_assert(sizeof(OptimSlot) == 18 * sizeof(int64_t));
    std::memcpy(&p, codes.data(), 11 * sizeof(int32_t));
    p.threads = threads;
    std::memcpy(p.c, coefficients.data(), coefficients.size() * sizeof(float));
    p.seed = seed, p.step = step;
    nb::gil_scoped_release release;
    optim_kernels().update(p, at<OptimSlot>(slots), count);
  });
  m.def("optim_store_rows",
        [](int store, Address codes, Address scale, Address x, int64_t rows, int64_t cols, int64_t first, bool add,
           bool stochastic, uint64_t seed, uint32_t step, uint32_t stream, int threads) {
          nb::gil_scoped_release release;
          optim_kernels().store_rows(store, at<void>(codes), at<float>(scale), at<const float>(x), rows, cols, first,
                                     add, stochastic, {seed, step, stream}, threads);
        });
  m.def("optim_decode_rows",
        [](int store, Address codes, Address scale, Address out, int64_t rows, int64_t cols, int threads) {
          nb::gil_scoped_release release;
          optim_kernels().decode_rows(store, at<const void>(codes), at<const float>(scale), at<float>(out), rows, cols,
                                      threads);
        });
  m.def("optim_stats", [](int store, Address codes, Address scale, int64_t rows, int64_t cols, int threads) {
    std::vector<double> out(3);
    {
      nb::gil_scoped_release release;
      optim_kernels().stats(store, at<const void>(codes), at<const float>(scale), rows, cols, threads, out.data());
    }
    return out;
  });
}

}  // namespace lowprec
