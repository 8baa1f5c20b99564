#include <nanobind/stl/vector.h>

#include "bind.h"
#include "cast.h"
#include "philox.h"

namespace nb = nanobind;

namespace lowprec {

void bind_cast(nb::module_& m) {
  m.def("format", [](const std::vector<int64_t>& packed) {
    const Format* f = intern_format(packed.data(), packed.size());
    if (!f) throw nb::value_error("a packed format has ten numbers");
    return reinterpret_cast<Address>(f);
  });
  m.def("encode", [](Address x, int dtype, size_t n, Address format, int rounding, int overflow, int nan, Address codes,
                     int threads, uint64_t seed, uint32_t step, uint32_t tensor, uint64_t offset, int bits) {
    nb::gil_scoped_release release;
    const RngKey key{seed, step, tensor, offset, bits};
    return cast_kernels().encode(at<const void>(x), Dtype(dtype), n, *at<const Format>(format), Rounding(rounding),
                                 Overflow(overflow), NanPolicy(nan), key, at<void>(codes), threads);
  });
  m.def("decode", [](Address codes, size_t n, Address format, Address values, int dtype, int threads) {
    nb::gil_scoped_release release;
    cast_kernels().decode(at<const void>(codes), n, *at<const Format>(format), at<void>(values), Dtype(dtype), threads);
  });
  m.def("round_to", [](Address x, int dtype, size_t n, Address format, int rounding, int overflow, Address values,
                       int threads, uint64_t seed, uint32_t step, uint32_t tensor, uint64_t offset, int bits) {
    nb::gil_scoped_release release;
    const RngKey key{seed, step, tensor, offset, bits};
    cast_kernels().round_to(at<const void>(x), Dtype(dtype), n, *at<const Format>(format), Rounding(rounding),
                            Overflow(overflow), key, at<void>(values), threads);
  });
  m.def("amax_into", [](Address x, int dtype, size_t n, Address result, int threads) {
    nb::gil_scoped_release release;
    *at<uint32_t>(result) = cast_kernels().amax(at<const void>(x), Dtype(dtype), n, threads);
  });
}

}  // namespace lowprec
