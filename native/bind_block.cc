#include <nanobind/stl/vector.h>

#include <deque>
#include <map>
#include <mutex>

#include "bind.h"
#include "block.h"
#include "philox.h"

namespace nb = nanobind;

namespace lowprec {
namespace {

// Plans are interned as formats are: a call passes one address.
const ScalePlan* intern_plan(Address format, int mode, int rule, int rounding, int overflow, bool byte_scales,
                             float min_block_scale) {
  static std::mutex lock;
  static std::deque<ScalePlan> store;
  std::lock_guard guard(lock);
  return &store.emplace_back(ScalePlan{at<const Format>(format), ScaleMode(mode), ScaleRule(rule), Rounding(rounding),
                                       Overflow(overflow), byte_scales, min_block_scale});
}

}  // namespace

void bind_block(nb::module_& m) {
  m.def("scale_plan",
        [](Address format, int mode, int rule, int rounding, int overflow, bool byte_scales, float floor) {
          return reinterpret_cast<Address>(intern_plan(format, mode, rule, rounding, overflow, byte_scales, floor));
        });
  m.def("scaled_cast",
        [](Address plan, Address x, int dtype, size_t rows, size_t columns, size_t group_rows, size_t group_columns,
           Address given, Address scales, Address tensor_scale, int output, bool fold, Address out, Address counters,
           int threads, uint64_t seed, uint32_t step, uint32_t tensor, uint64_t offset, int bits) {
          nb::gil_scoped_release release;
          const ScaledCast job{at<const void>(x),
                               Dtype(dtype),
                               rows,
                               columns,
                               group_rows,
                               group_columns,
                               at<const float>(given),
                               at<void>(scales),
                               at<float>(tensor_scale),
                               Output(output),
                               fold,
                               at<void>(out),
                               at<int64_t>(counters),
                               threads};
          const RngKey key{seed, step, tensor, offset, bits};
          return static_cast<int>(block_kernels().cast(job, *at<const ScalePlan>(plan), key));
        });
  m.def("dequantise",
        [](Address format, Address codes, size_t rows, size_t columns, size_t group_rows, size_t group_columns,
           Address scales, Address scale_format, Address tensor_scale, Address out, int dtype, int threads) {
          nb::gil_scoped_release release;
          const Dequantise job{at<const void>(codes),
                               rows,
                               columns,
                               group_rows,
                               group_columns,
                               at<const void>(scales),
                               at<const Format>(scale_format),
                               at<const float>(tensor_scale),
                               at<void>(out),
                               Dtype(dtype),
                               threads};
          block_kernels().dequantise(job, *at<const Format>(format));
        });
  m.def("block_amax", [](Address x, int dtype, size_t rows, size_t columns, size_t group_rows, size_t group_columns,
                         Address out, int threads) {
    nb::gil_scoped_release release;
    block_kernels().block_amax(at<const void>(x), Dtype(dtype), rows, columns, group_rows, group_columns,
                               at<float>(out), threads);
  });
}

}  // namespace lowprec
