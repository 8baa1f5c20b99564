// Codes and scales back to values: fp32(code * scale), then rounded once to the dtype. Formats of 8 bits or fewer.
#include "block.h"
#include "block_loops.h"

namespace lowprec::LOWPREC_ISA {

void decode_small(const uint8_t* codes, size_t n, const Format& f, uint32_t* values);  // decode.cc

namespace {

template <class Out>
void scale_values(const uint32_t* v, const Segment& s, float tensor_scale, bool two, typename Out::Raw* out) {
  for_groups(s, [=](size_t i, float factor, float) __attribute__((always_inline)) {
    float value = real(v[i]) * factor;
    value = two ? value * tensor_scale : value;
    const uint32_t b = bits_of(value);
    out[i] = Out::store((b & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : b);
  });
}

}  // namespace

void dequantise(const Dequantise& job, const Format& format) {
  const size_t across = (job.columns + job.group_columns - 1) / job.group_columns, width = job.group_columns;
  const size_t bytes = job.dtype == kF32 ? 4 : 2, n_all = job.rows * job.columns;
  const bool two = job.tensor_scale != nullptr, stream = n_all * bytes >= kStream;
  const float tensor_scale = two ? *job.tensor_scale : 1.0f;
  const size_t step = width >= kChunk ? kChunk : kChunk / width * width;
  parallel_ranges(job.rows, 1, job.threads, n_all >= kSerial, [&](size_t first, size_t last) {
    alignas(64) uint32_t v[kChunk], buffer[kChunk];
    alignas(64) float factor[kChunk];
    for (size_t r = first; r < last; ++r) {
      const size_t band = r / job.group_rows * across;
      for (size_t at = 0, n; at < job.columns; at += n) {
        n = std::min({step, job.columns - at, width >= kChunk ? width - at % width : step});
        const size_t group = band + at / width;
        const size_t groups = std::max<size_t>(1, (n + width - 1) / width);
        for (size_t g = 0; g < groups; ++g)
          factor[g] = job.scale_format
                          ? real(job.scale_format->table32[static_cast<const uint8_t*>(job.scales)[group + g]])
                          : static_cast<const float*>(job.scales)[group + g];
        const size_t index = r * job.columns + at;
        decode_small(static_cast<const uint8_t*>(job.codes) + index, n, format, v);
        const Segment s{n, width >= kChunk ? 0 : width, factor, factor};
        void* to = static_cast<char*>(job.out) + index * bytes;
        void* out = stream ? static_cast<void*>(buffer) : to;
        if (job.dtype == kF32)
          scale_values<F32>(v, s, tensor_scale, two, static_cast<uint32_t*>(out));
        else if (job.dtype == kBF16)
          scale_values<BF16>(v, s, tensor_scale, two, static_cast<uint16_t*>(out));
        else
          scale_values<F16>(v, s, tensor_scale, two, static_cast<uint16_t*>(out));
        if (stream) stream_copy(to, out, n * bytes);
      }
    }
    if (stream) stream_fence();
  });
}

}  // namespace lowprec::LOWPREC_ISA
