#include "norm.h"

#include <cmath>

#include "vec.h"

namespace lowprec::LOWPREC_ISA {
namespace {

template <class X>
float row_mean(const X* x, size_t cols) {
  F16 sum = splat(0.0f);
  for (size_t j = 0; j < cols; j += kLanes) sum = sum + load(x + j, cols - j, 0.0f);
  return fold_sum(sum) / static_cast<float>(cols);
}

template <class X>
float row_variance(const X* x, size_t cols, float mean) {
  F16 sum = splat(0.0f);
  for (size_t j = 0; j < cols; j += kLanes) {
    const F16 d = load(x + j, cols - j, mean) - mean;
    sum = sum + d * d;
  }
  return fold_sum(sum) / static_cast<float>(cols);
}

template <class X, class Y>
void forward_of(const X* x, const float* w, const float* b, Y* y, float* mean, float* rstd, size_t rows, size_t cols,
                float eps, bool rms, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * cols > 32768)
  for (size_t r = 0; r < rows; ++r) {
    const X* in = x + r * cols;
    Y* out = y + r * cols;
    const float m = rms ? 0.0f : row_mean(in, cols);
    const float s = 1.0f / std::sqrt(row_variance(in, cols, m) + eps);
    if (!rms) mean[r] = m;
    rstd[r] = s;
    for (size_t j = 0; j < cols; j += kLanes) {
      F16 v = (load(in + j, cols - j, 0.0f) - m) * s;
      if (w) v = v * load(w + j, cols - j, 0.0f);
      if (b) v = v + load(b + j, cols - j, 0.0f);
      store(out + j, cols - j, v);
    }
  }
}

// One row: grad_x, and this row's share added to the sums of its block.
template <class X, class Y>
void backward_row(const X* x, const Y* g, const float* w, float mean, float rstd, X* out, float* sum_w, float* sum_b,
                  size_t cols, bool rms) {
  F16 first = splat(0.0f), second = splat(0.0f);
  for (size_t j = 0; j < cols; j += kLanes) {
    const size_t left = cols - j;
    const F16 hat = (load(x + j, left, mean) - mean) * rstd, dy = load(g + j, left, 0.0f);
    const F16 v = w ? dy * load(w + j, left, 0.0f) : dy;
    first = first + v;
    second = second + v * hat;
    if (sum_w) store(sum_w + j, left, load(sum_w + j, left, 0.0f) + dy * hat);
    if (sum_b) store(sum_b + j, left, load(sum_b + j, left, 0.0f) + dy);
  }
  const float c1 = rms ? 0.0f : fold_sum(first) / static_cast<float>(cols);
  const float c2 = fold_sum(second) / static_cast<float>(cols);
  for (size_t j = 0; j < cols; j += kLanes) {
    const size_t left = cols - j;
    const F16 hat = (load(x + j, left, mean) - mean) * rstd, dy = load(g + j, left, 0.0f);
    const F16 v = w ? dy * load(w + j, left, 0.0f) : dy;
    store(out + j, left, ((v - c1) - hat * c2) * rstd);
  }
}

void zero(float* x, size_t n) { std::memset(x, 0, n * sizeof(float)); }

void add_blocks(const float* parts, float* out, size_t blocks, size_t cols) {
  zero(out, cols);
  for (size_t k = 0; k < blocks; ++k)
    for (size_t j = 0; j < cols; j += kLanes)
      store(out + j, cols - j, load(out + j, cols - j, 0.0f) + load(parts + k * cols + j, cols - j, 0.0f));
}

template <class X, class Y>
void backward_of(const X* x, const Y* g, const float* w, const float* mean, const float* rstd, X* out, float* grad_w,
                 float* grad_b, float* scratch, size_t rows, size_t cols, bool rms, int threads) {
  const size_t blocks = (rows + kSumRows - 1) / kSumRows;
  float* parts_w = grad_w ? scratch : nullptr;
  float* parts_b = grad_b ? scratch + blocks * cols : nullptr;
#pragma omp parallel for num_threads(threads) if (rows * cols > 32768)
  for (size_t k = 0; k < blocks; ++k) {
    float* sum_w = parts_w ? parts_w + k * cols : nullptr;
    float* sum_b = parts_b ? parts_b + k * cols : nullptr;
    if (sum_w) zero(sum_w, cols);
    if (sum_b) zero(sum_b, cols);
    for (size_t r = k * kSumRows; r < rows && r < (k + 1) * kSumRows; ++r)
      backward_row(x + r * cols, g + r * cols, w, rms ? 0.0f : mean[r], rstd[r], out + r * cols, sum_w, sum_b, cols,
                   rms);
  }
  if (grad_w) add_blocks(parts_w, grad_w, blocks, cols);
  if (grad_b) add_blocks(parts_b, grad_b, blocks, cols);
}

template <class X>
void column_sum_of(const X* x, float* out, float* scratch, size_t rows, size_t cols, int threads) {
  const size_t blocks = (rows + kSumRows - 1) / kSumRows;
#pragma omp parallel for num_threads(threads) if (rows * cols > 32768)
  for (size_t k = 0; k < blocks; ++k) {
    float* sum = scratch + k * cols;
    zero(sum, cols);
    for (size_t r = k * kSumRows; r < rows && r < (k + 1) * kSumRows; ++r)
      for (size_t j = 0; j < cols; j += kLanes)
        store(sum + j, cols - j, load(sum + j, cols - j, 0.0f) + load(x + r * cols + j, cols - j, 0.0f));
  }
  add_blocks(scratch, out, blocks, cols);
}

void forward(int x_type, int y_type, const void* x, const float* weight, const float* bias, void* y, float* mean,
             float* rstd, size_t rows, size_t cols, float eps, bool rms, int threads) {
  with_types(x_type, y_type, [&](auto a, auto b) {
    using X = decltype(a);
    using Y = decltype(b);
    forward_of(static_cast<const X*>(x), weight, bias, static_cast<Y*>(y), mean, rstd, rows, cols, eps, rms, threads);
  });
}

void backward(int x_type, int y_type, const void* x, const void* grad_y, const float* weight, const float* mean,
              const float* rstd, void* grad_x, float* grad_weight, float* grad_bias, float* scratch, size_t rows,
              size_t cols, bool rms, int threads) {
  with_types(x_type, y_type, [&](auto a, auto b) {
    using X = decltype(a);
    using Y = decltype(b);
    backward_of(static_cast<const X*>(x), static_cast<const Y*>(grad_y), weight, mean, rstd, static_cast<X*>(grad_x),
                grad_weight, grad_bias, scratch, rows, cols, rms, threads);
  });
}

void column_sum(int type, const void* x, float* out, float* scratch, size_t rows, size_t cols, int threads) {
  with_type(type, [&](auto a) {
    using X = decltype(a);
    column_sum_of(static_cast<const X*>(x), out, scratch, rows, cols, threads);
  });
}

}  // namespace

extern const NormKernels norm_kernels;
const NormKernels norm_kernels = {forward, backward, column_sum};

}  // namespace lowprec::LOWPREC_ISA
