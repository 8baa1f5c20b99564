// The fused ops around the GEMMs: loss, softmax, norm; and the heap's setting.
#include <malloc.h>

#include "bind.h"
#include "loss.h"
#include "norm.h"
#include "softmax.h"

namespace nb = nanobind;

namespace lowprec {
namespace {

// Freed memory stays with the process (keep) or goes back to the system as glibc does it by default.
bool keep_heap(bool keep) {
#ifdef __GLIBC__
  if (keep) return mallopt(M_MMAP_MAX, 0) && mallopt(M_TRIM_THRESHOLD, -1);
  const bool done =
      mallopt(M_MMAP_MAX, 65536) && mallopt(M_MMAP_THRESHOLD, 32 << 20) && mallopt(M_TRIM_THRESHOLD, 64 << 20);
  malloc_trim(0);
  return done;
#else
  return keep && false;
#endif
}

SoftmaxTile tile_of(size_t heads, size_t queries, size_t keys, size_t first_query, bool causal, float scale,
                    Address mask, size_t head_stride, size_t query_stride, size_t key_stride) {
  return {heads,       queries,      keys,      first_query, causal, scale, at<const float>(mask),
          head_stride, query_stride, key_stride};
}

}  // namespace

void bind_fused(nb::module_& m) {
  m.def("keep_heap", keep_heap);
  m.def("loss_forward", [](int type, Address x, Address target, Address loss, Address lse, size_t rows, size_t cols,
                           int64_t ignore, float smoothing, int threads) {
    nb::gil_scoped_release release;
    return loss_kernels().forward(type, at<const void>(x), at<const int64_t>(target), at<float>(loss), at<float>(lse),
                                  rows, cols, ignore, smoothing, threads);
  });
  m.def("loss_backward", [](int type, Address x, Address target, Address lse, Address factor, size_t factor_stride,
                            Address grad, size_t rows, size_t cols, int64_t ignore, float smoothing, int threads) {
    nb::gil_scoped_release release;
    loss_kernels().backward(type, at<const void>(x), at<const int64_t>(target), at<const float>(lse),
                            at<const float>(factor), factor_stride, at<void>(grad), rows, cols, ignore, smoothing,
                            threads);
  });
  m.def("softmax_forward",
        [](size_t heads, size_t queries, size_t keys, size_t first, bool causal, float scale, Address mask, size_t hs,
           size_t qs, size_t ks, int st, int pt, Address s, Address p, Address lse, size_t lse_stride, int threads) {
          nb::gil_scoped_release release;
          softmax_kernels().forward(tile_of(heads, queries, keys, first, causal, scale, mask, hs, qs, ks), st, pt,
                                    at<const void>(s), at<void>(p), at<float>(lse), lse_stride, threads);
        });
  m.def("softmax_backward",
        [](size_t heads, size_t queries, size_t keys, size_t first, bool causal, float scale, Address mask, size_t hs,
           size_t qs, size_t ks, int st, int pt, Address s, Address lse, size_t lse_stride, Address grad_p, Address p,
           Address grad_s, size_t out_head, size_t out_row, int threads) {
          nb::gil_scoped_release release;
          softmax_kernels().backward(tile_of(heads, queries, keys, first, causal, scale, mask, hs, qs, ks), st, pt,
                                     at<const void>(s), at<const float>(lse), lse_stride, at<const void>(grad_p),
                                     at<void>(p), at<void>(grad_s), out_head, out_row, threads);
        });
  m.def("norm_forward", [](int xt, int yt, Address x, Address w, Address b, Address y, Address mean, Address rstd,
                           size_t rows, size_t cols, float eps, bool rms, int threads) {
    nb::gil_scoped_release release;
    norm_kernels().forward(xt, yt, at<const void>(x), at<const float>(w), at<const float>(b), at<void>(y),
                           at<float>(mean), at<float>(rstd), rows, cols, eps, rms, threads);
  });
  m.def("norm_backward", [](int xt, int yt, Address x, Address g, Address w, Address mean, Address rstd, Address gx,
                            Address gw, Address gb, Address scratch, size_t rows, size_t cols, bool rms, int threads) {
    nb::gil_scoped_release release;
    norm_kernels().backward(xt, yt, at<const void>(x), at<const void>(g), at<const float>(w), at<const float>(mean),
                            at<const float>(rstd), at<void>(gx), at<float>(gw), at<float>(gb), at<float>(scratch), rows,
                            cols, rms, threads);
  });
  m.def("column_sum", [](int type, Address x, Address out, Address scratch, size_t rows, size_t cols, int threads) {
    nb::gil_scoped_release release;
    norm_kernels().column_sum(type, at<const void>(x), at<float>(out), at<float>(scratch), rows, cols, threads);
  });
}

}  // namespace lowprec
