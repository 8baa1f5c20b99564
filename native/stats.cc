#include "stats.h"

#include <vector>

#include "lanes.h"

namespace lowprec::LOWPREC_ISA {
namespace {

constexpr size_t kPiece = 16384;  // elements summed by one thread before its sum is put aside

struct Piece {
  size_t tensor, first, n;
  int64_t inf, nan;
  double squares;
  uint64_t top;  // fp64 bits
};

// Sixteen running sums, added in a fixed order: the same bits on every instruction set and for any number of threads.
inline double total(const double* sums) {
  double left[8];
  for (int i = 0; i < 8; ++i) left[i] = sums[i] + sums[i + 8];
  for (int i = 0; i < 4; ++i) left[i] += left[i + 4];
  return (left[0] + left[2]) + (left[1] + left[3]);
}

template <class T>
void piece32(const typename T::Raw* x, Piece& p) {
  alignas(64) double sums[16] = {};
  uint32_t top = 0, inf = 0, nan = 0;
  const size_t whole = p.n / 16 * 16;
  for (size_t i = 0; i < whole; i += 16)
    for (size_t j = 0; j < 16; ++j) {
      const double v = static_cast<double>(real(T::load(x[i + j])));
      sums[j] += v * v;
    }
  for (size_t i = whole; i < p.n; ++i) {
    const double v = static_cast<double>(real(T::load(x[i])));
    sums[i - whole] += v * v;
  }
  for (size_t i = 0; i < p.n; ++i) {
    const uint32_t a = T::load(x[i]) & 0x7FFFFFFFu;
    top = std::max(top, a), inf += a == 0x7F800000u, nan += a > 0x7F800000u;
  }
  p.squares = total(sums), p.inf = inf, p.nan = nan;
  p.top = bits_of(static_cast<double>(real(top)));
}

void piece64(const uint64_t* x, Piece& p) {
  alignas(64) double sums[16] = {};
  p.top = 0, p.inf = 0, p.nan = 0;
  for (size_t i = 0; i < p.n; ++i) {
    const uint64_t a = x[i] & ~(uint64_t{1} << 63);
    sums[i % 16] += real(a) * real(a);
    p.top = std::max(p.top, a), p.inf += a == 0x7FF0000000000000ull, p.nan += a > 0x7FF0000000000000ull;
  }
  p.squares = total(sums);
}

void tensor_stats(const StatsInput* inputs, size_t count, double* out, int threads) {
  std::vector<Piece> pieces;
  size_t elements = 0;
  for (size_t t = 0; t < count; ++t) {
    elements += inputs[t].n;
    for (size_t at = 0; at < inputs[t].n; at += kPiece)
      pieces.push_back({t, at, std::min(kPiece, inputs[t].n - at), 0, 0, 0, 0});
  }
  parallel_ranges(pieces.size(), 1, threads, elements >= kSerial, [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      Piece& p = pieces[i];
      const StatsInput& in = inputs[p.tensor];
      if (in.dtype == kF64)
        piece64(static_cast<const uint64_t*>(in.x) + p.first, p);
      else if (in.dtype == kF32)
        piece32<F32>(static_cast<const uint32_t*>(in.x) + p.first, p);
      else if (in.dtype == kBF16)
        piece32<BF16>(static_cast<const uint16_t*>(in.x) + p.first, p);
      else
        piece32<F16>(static_cast<const uint16_t*>(in.x) + p.first, p);
    }
  });
  std::fill_n(out, 4 * count, 0.0);
  for (const Piece& p : pieces) {
    double* row = out + 4 * p.tensor;
    row[0] += static_cast<double>(p.inf), row[1] += static_cast<double>(p.nan), row[2] += p.squares;
    row[3] = real(std::max(bits_of(row[3]), p.top));
  }
  for (size_t t = 0; t < count; ++t) {  // amax is an fp32 everywhere, with the canonical NaN
    double& top = out[4 * t + 3];
    top = top != top ? real(uint64_t{0x7FF8000000000000}) : static_cast<double>(static_cast<float>(top));
  }
}

template <class T>
void transpose_of(const T* x, size_t rows, size_t columns, T* out, int threads) {
  constexpr size_t tile = 64;
  const size_t bands = (columns + tile - 1) / tile;
  parallel_ranges(bands, 1, threads, rows * columns >= kSerial, [&](size_t first, size_t last) {
    alignas(64) T buffer[tile][tile];
    for (size_t band = first; band < last; ++band)
      for (size_t r = 0; r < rows; r += tile) {
        const size_t c = band * tile, wide = std::min(tile, columns - c), high = std::min(tile, rows - r);
        for (size_t i = 0; i < high; ++i)
          for (size_t j = 0; j < wide; ++j) buffer[j][i] = x[(r + i) * columns + c + j];
        for (size_t j = 0; j < wide; ++j) std::memcpy(out + (c + j) * rows + r, buffer[j], high * sizeof(T));
      }
  });
}

void transpose(const void* x, size_t rows, size_t columns, int bytes, void* out, int threads) {
  auto run = [&]<class T>() { transpose_of(static_cast<const T*>(x), rows, columns, static_cast<T*>(out), threads); };
  bytes == 1   ? run.template operator()<uint8_t>()
  : bytes == 2 ? run.template operator()<uint16_t>()
  : bytes == 4 ? run.template operator()<uint32_t>()
               : run.template operator()<uint64_t>();
}

// Butterflies between sixteen vectors of kLanes elements.
constexpr size_t kLanes = 16;

inline void butterflies(float (*v)[kLanes]) {
  for (size_t half = 1; half < 16; half *= 2)
    for (size_t k = 0; k < 16; ++k) {
      if (k & half) continue;
      for (size_t j = 0; j < kLanes; ++j) {
        const float a = v[k][j], b = v[k + half][j];
        v[k][j] = a + b, v[k + half][j] = a - b;
      }
    }
  for (size_t k = 0; k < 16; ++k)
    for (size_t j = 0; j < kLanes; ++j) v[k][j] *= 0.25f;
}

template <class T>
void hadamard_of(const typename T::Raw* x, size_t rows, size_t columns, const float* signs, bool down, float* out,
                 int threads) {
  const size_t long_side = down ? rows : columns, other = down ? columns : rows, groups = long_side / 16;
  const size_t along = down ? columns : 1, across = down ? 1 : columns;  // strides in elements
  const size_t blocks = (other + kLanes - 1) / kLanes;
  parallel_ranges(blocks, 1, threads, rows * columns >= kSerial, [&](size_t first, size_t last) {
    alignas(64) float v[16][kLanes];
    for (size_t block = first; block < last; ++block) {
      const size_t from = block * kLanes, n = std::min(kLanes, other - from);
      for (size_t g = 0; g < groups; ++g) {
        const size_t origin = from * across + g * 16 * along;
        for (size_t k = 0; k < 16; ++k)
          for (size_t j = 0; j < n; ++j) v[k][j] = real(T::load(x[origin + k * along + j * across])) * signs[k];
        butterflies(v);
        for (size_t k = 0; k < 16; ++k)
          for (size_t j = 0; j < n; ++j) out[origin + k * along + j * across] = v[k][j];
      }
      for (size_t i = groups * 16; i < long_side; ++i)
        for (size_t j = from; j < from + n; ++j) out[i * along + j * across] = real(T::load(x[i * along + j * across]));
    }
  });
}

void hadamard16(const void* x, Dtype dtype, size_t rows, size_t columns, const float* signs, bool down, float* out,
                int threads) {
  if (dtype == kF32)
    hadamard_of<F32>(static_cast<const uint32_t*>(x), rows, columns, signs, down, out, threads);
  else if (dtype == kBF16)
    hadamard_of<BF16>(static_cast<const uint16_t*>(x), rows, columns, signs, down, out, threads);
  else
    hadamard_of<F16>(static_cast<const uint16_t*>(x), rows, columns, signs, down, out, threads);
}

}  // namespace

extern const StatsKernels stats_kernels;
const StatsKernels stats_kernels = {tensor_stats, transpose, hadamard16};

}  // namespace lowprec::LOWPREC_ISA
