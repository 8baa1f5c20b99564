#include "bind.h"
#include "epilogue.h"

namespace nb = nanobind;

namespace lowprec {

void bind_epilogue(nb::module_& m) {
  m.def("epilogue_scaled",
        [](Address sums, int sums_type, Address row, size_t row_step, Address column, size_t column_step, Address bias,
           Address out, int out_type, size_t rows, size_t columns, int threads) {
          nb::gil_scoped_release release;
          epilogue_kernels().scaled({at<const void>(sums), static_cast<Store>(sums_type), at<const float>(row),
                                     row_step, at<const float>(column), column_step, at<const float>(bias),
                                     at<void>(out), static_cast<Store>(out_type), rows, columns},
                                    threads);
        });
  m.def("int8_columns",
        [](Address x, int type, size_t rows, size_t columns, Address codes, Address scale, int threads) {
          nb::gil_scoped_release release;
          return epilogue_kernels().int8_columns(at<const void>(x), static_cast<Store>(type), rows, columns,
                                                 at<int8_t>(codes), at<float>(scale), threads);
        });
}

}  // namespace lowprec
