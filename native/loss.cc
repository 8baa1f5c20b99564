#include "loss.h"

#include <cmath>
#include <limits>

#include "vec.h"

namespace lowprec::LOWPREC_ISA {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The row is read three times, but a row fits in the first-level cache: memory sees it once.
template <class T>
struct Row {
  const T* x;
  size_t cols;

  float top() const {
    F16 best = splat(kLowest), nan = splat(0.0f);
    for (size_t j = 0; j < cols; j += kLanes) {
      const F16 v = load(x + j, cols - j, kLowest);
      best = vmax(v, best);
      nan = select(v != v, v, nan);
    }
    const float found = fold_sum(nan);
    return found != found ? found : fold_max(best);
  }
  float exp_sum(float top) const {
    F16 sum = splat(0.0f);
    for (size_t j = 0; j < cols; j += kLanes) sum = sum + vexp(load(x + j, cols - j, kLowest) - top);
    return fold_sum(sum);
  }
  float sum() const {
    F16 total = splat(0.0f);
    for (size_t j = 0; j < cols; j += kLanes) total = total + load(x + j, cols - j, 0.0f);
    return fold_sum(total);
  }
  float at(size_t j) const { return load_part(x + j, 1, 0.0f)[0]; }
};

template <class T>
size_t forward_of(const T* x, const int64_t* target, float* loss, float* lse, size_t rows, size_t cols, int64_t ignore,
                  float smoothing, int threads) {
  size_t bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) if (rows * cols > 16384)
  for (size_t r = 0; r < rows; ++r) {
    const Row<T> row{x + r * cols, cols};
    const float top = row.top();
    lse[r] = static_cast<float>(std::log(static_cast<double>(row.exp_sum(top)))) + top;
    if (target[r] == ignore) {
      loss[r] = 0.0f;
    } else if (target[r] < 0 || target[r] >= static_cast<int64_t>(cols)) {
      loss[r] = std::numeric_limits<float>::quiet_NaN();
      ++bad;
    } else {
      loss[r] = lse[r] - row.at(target[r]);
      if (smoothing > 0.0f)
        loss[r] = (1.0f - smoothing) * loss[r] + smoothing * (lse[r] - row.sum() / static_cast<float>(cols));
    }
  }
  return bad;
}

template <class T>
void backward_of(const T* x, const int64_t* target, const float* lse, const float* factor, size_t stride, T* grad,
                 size_t rows, size_t cols, int64_t ignore, float smoothing, int threads) {
  const float rest = smoothing / static_cast<float>(cols);
#pragma omp parallel for num_threads(threads) if (rows * cols > 16384)
  for (size_t r = 0; r < rows; ++r) {
    const T* in = x + r * cols;
    T* out = grad + r * cols;
    if (target[r] == ignore) {
      for (size_t j = 0; j < cols; j += kLanes) store(out + j, cols - j, splat(0.0f));
      continue;
    }
    const float f = factor[r * stride], shift = lse[r];
    const size_t hit = target[r];
    const float p = vexp(splat(load_part(in + hit, 1, 0.0f)[0] - shift))[0];  // before `in` may be written over
    for (size_t j = 0; j < cols; j += kLanes) {
      const F16 v = vexp(load(in + j, cols - j, kLowest) - shift);
      store(out + j, cols - j, (v - rest) * f);
    }
    store_part(out + hit, 1, splat(((p - rest) - (1.0f - smoothing)) * f));
  }
}

size_t forward(int type, const void* logits, const int64_t* target, float* loss, float* lse, size_t rows, size_t cols,
               int64_t ignore, float smoothing, int threads) {
  size_t bad = 0;
  with_type(type, [&](auto a) {
    using T = decltype(a);
    bad = forward_of(static_cast<const T*>(logits), target, loss, lse, rows, cols, ignore, smoothing, threads);
  });
  return bad;
}

void backward(int type, const void* logits, const int64_t* target, const float* lse, const float* factor,
              size_t factor_stride, void* grad, size_t rows, size_t cols, int64_t ignore, float smoothing,
              int threads) {
  with_type(type, [&](auto a) {
    using T = decltype(a);
    backward_of(static_cast<const T*>(logits), target, lse, factor, factor_stride, static_cast<T*>(grad), rows, cols,
                ignore, smoothing, threads);
  });
}

}  // namespace

extern const LossKernels loss_kernels;
const LossKernels loss_kernels = {forward, backward};

}  // namespace lowprec::LOWPREC_ISA
