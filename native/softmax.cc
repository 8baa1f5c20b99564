#include "softmax.h"

#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace lowprec::LOWPREC_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// 0, 1, 2, ...
constexpr I16 kIota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// scale * s + mask of one row in fp32, -Inf where the row does not see. Reads to the end of the row, past the limit.
template <class S>
LOWPREC_INLINE F16 logits(const SoftmaxTile& t, const S* s, const float* mask, size_t j, size_t limit) {
  F16 v = load(s + j, t.keys - j, 0.0f) * t.scale;
  if (mask != nullptr) {
    if (t.key_stride == 1)
      v = v + load(mask + j, t.keys - j, 0.0f);
    else
      for (size_t i = 0; i < kLanes && j + i < limit; ++i) v[i] += mask[(j + i) * t.key_stride];
  }
  return limit - j >= kLanes ? v : select(kIota < static_cast<int32_t>(limit - j), v, splat(-kInfinity));
}

size_t limit_of(const SoftmaxTile& t, size_t i) {
  const size_t seen = t.first_query + i + 1;
  return t.causal && seen < t.keys ? seen : t.keys;
}

template <class P>
LOWPREC_INLINE void clear(P* p, size_t from, size_t to) {
  for (size_t j = from; j < to; j += kLanes) store(p + j, to - j, splat(0.0f));
}

template <class S, class P>
void forward_row(const SoftmaxTile& t, size_t h, size_t i, const S* s, P* p, float* lse, float* buffer) {
  const size_t limit = limit_of(t, i);
  const float* mask = t.mask ? t.mask + h * t.head_stride + i * t.query_stride : nullptr;
  F16 best = splat(-kInfinity), nan = splat(0.0f);
  for (size_t j = 0; j < limit; j += kLanes) {
    const F16 v = logits(t, s, mask, j, limit);
    best = vmax(v, best);
    nan = select(v != v, v, nan);
    Storage<float>::store(buffer + j, v);
  }
  const float found = fold_sum(nan);
  const float top = found != found ? found : fold_max(best);
  if (top == -kInfinity) {
    *lse = kInfinity;
    return clear(p, 0, t.keys);
  }
  F16 sum = splat(0.0f);
  for (size_t j = 0; j < limit; j += kLanes) {
    const F16 e = vexp(Storage<float>::load(buffer + j) - top);
    sum = sum + e;
    Storage<float>::store(buffer + j, e);
  }
  const float total = fold_sum(sum), inverse = 1.0f / total;
  *lse = static_cast<float>(std::log(static_cast<double>(total))) + top;
  size_t j = 0;
  for (; j < limit; j += kLanes) store(p + j, t.keys - j, Storage<float>::load(buffer + j) * inverse);
  clear(p, j, t.keys);
}

template <class S, class P>
void backward_row(const SoftmaxTile& t, size_t h, size_t i, const S* s, float lse, const P* grad, P* p, P* grad_s,
                  float* buffer) {
  const size_t limit = limit_of(t, i);
  const float* mask = t.mask ? t.mask + h * t.head_stride + i * t.query_stride : nullptr;
  F16 sum = splat(0.0f);
  for (size_t j = 0; j < limit; j += kLanes) {
    const F16 v = vexp(logits(t, s, mask, j, limit) - lse);
    sum = sum + v * load(grad + j, t.keys - j, 0.0f);
    Storage<float>::store(buffer + j, v);
    store(p + j, t.keys - j, v);
  }
  const float dot = fold_sum(sum);
  size_t j = 0;
  for (; j < limit; j += kLanes) {
    const F16 v = Storage<float>::load(buffer + j);
    store(grad_s + j, t.keys - j, (v * (load(grad + j, t.keys - j, 0.0f) - dot)) * t.scale);
  }
  clear(p, j, t.keys);
  clear(grad_s, j, t.keys);
}

// Rows are dealt to threads in turn: under a causal mask later rows cost more.
template <class Fn>
void each_row(const SoftmaxTile& t, int threads, Fn&& f) {
  const size_t rows = t.heads * t.queries;
#pragma omp parallel num_threads(threads) if (rows * t.keys > 8192)
  {
    std::vector<float> buffer((t.keys + kLanes - 1) / kLanes * kLanes);
#pragma omp for schedule(static, 8)
    for (size_t r = 0; r < rows; ++r) f(r, r / t.queries, r % t.queries, buffer.data());
  }
}

void forward(const SoftmaxTile& t, int s_type, int p_type, const void* s, void* p, float* lse, size_t lse_stride,
             int threads) {
  with_types(s_type, p_type, [&](auto a, auto b) {
    using S = decltype(a);
    using P = decltype(b);
    each_row(t, threads, [&](size_t r, size_t h, size_t i, float* buffer) {
      forward_row(t, h, i, static_cast<const S*>(s) + r * t.keys, static_cast<P*>(p) + r * t.keys,
                  lse + h * lse_stride + i, buffer);
    });
  });
}

void backward(const SoftmaxTile& t, int s_type, int p_type, const void* s, const float* lse, size_t lse_stride,
              const void* grad_p, void* p, void* grad_s, size_t out_head, size_t out_row, int threads) {
  with_types(s_type, p_type, [&](auto a, auto b) {
    using S = decltype(a);
    using P = decltype(b);
    each_row(t, threads, [&](size_t r, size_t h, size_t i, float* buffer) {
      const size_t out = h * out_head + i * out_row;
      backward_row(t, h, i, static_cast<const S*>(s) + r * t.keys, lse[h * lse_stride + i],
                   static_cast<const P*>(grad_p) + r * t.keys, static_cast<P*>(p) + out, static_cast<P*>(grad_s) + out,
                   buffer);
    });
  });
}

}  // namespace

extern const SoftmaxKernels softmax_kernels;
const SoftmaxKernels softmax_kernels = {forward, backward};

}  // namespace lowprec::LOWPREC_ISA
