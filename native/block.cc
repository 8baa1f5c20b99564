// Scaled casts of a matrix. Work is cut into bands of rows (as high as a group) and strips of columns that stay in the
// caches: a strip's magnitudes, its scales and its cast follow each other there, so memory is read once. Only a scale
// of the whole tensor, or NVFP4's, needs a second read; it runs backwards over what the first one left in the cache.
#include "block.h"

#include "block_loops.h"
#include "general.h"
#include "groups.h"

namespace lowprec::LOWPREC_ISA {
namespace {

struct Geometry {
  size_t rows, columns, group_rows, group_columns, across, strip, strips, bands;
  explicit Geometry(const ScaledCast& job)
      : rows(job.rows), columns(job.columns), group_rows(job.group_rows), group_columns(job.group_columns) {
    across = (columns + group_columns - 1) / group_columns;
    const size_t wide = group_rows == 1 ? kChunk : group_rows <= 512 ? 512 : 128;
    strip = std::min(group_columns >= wide ? group_columns : wide / group_columns * group_columns, columns);
    strips = (columns + strip - 1) / strip;
    bands = (rows + group_rows - 1) / group_rows;
  }
  bool whole() const { return bands == 1 && across == 1; }
  void flatten() {  // one group: its shape does not matter
    columns = group_columns = rows * columns, rows = group_rows = bands = 1;
    strip = std::min(columns, 16 * kChunk), strips = (columns + strip - 1) / strip;
  }
};

struct Strip {
  size_t first_row, last_row, first, last, group, groups;  // group: index of its first group in the scales
};

Strip strip_of(const Geometry& g, size_t item) {
  const size_t band = item / g.strips, first = item % g.strips * g.strip, last = std::min(g.columns, first + g.strip);
  const size_t from = first / g.group_columns, to = (last + g.group_columns - 1) / g.group_columns;
  const size_t row = band * g.group_rows;
  return {row, std::min(g.rows, row + g.group_rows), first, last, band * g.across + from, to - from};
}

template <class T>
void strip_max(const typename T::Raw* x, const Geometry& g, const Strip& s, uint32_t* scratch, uint32_t* top) {
  const size_t n = s.last - s.first;
  const auto* at = x + s.first_row * g.columns + s.first;
  if (g.group_rows == 1) return row_group_max<T>(at, n, g.group_columns, top);
  uint32_t* columns = g.group_columns == 1 ? top : scratch;
  for (size_t r = s.first_row; r < s.last_row; ++r, at += g.columns) column_max<T>(at, n, columns, r == s.first_row);
  if (g.group_columns > 1) row_group_max<F32>(columns, n, g.group_columns, top);
}

// Stands in where a format has no fused road, so that its rules can be made all the same.
const Format& ordinary() {
  static const Format e4m3 = [] {
    Format f{};
    f.bits = 8, f.m = 3, f.emin = -6, f.emax = 8, f.max_code = 0x7E, f.max_value = 448, f.mask = 0xFF;
    return f;
  }();
  return e4m3;
}

// One call: everything that does not change from strip to strip.
struct Caster {
  const ScaledCast& job;
  const ScalePlan& plan;
  const RngKey& key;
  const Format& f;
  Geometry g;
  bool computed, flat, two_passes, fused, narrow_y, values;
  float whole = 1;      // two-level: S
  uint32_t tensor = 0;  // magnitude of a tensor group
  Counts counts;
  bool nan_without_code = false;
  Nearest rule;
  Thresholds thresholds;
  Specials<uint32_t> codes32, values32;
  Specials<uint64_t> codes64, values64;
  PowerRule power;

  Caster(const ScaledCast& j, const ScalePlan& p, const RngKey& k)
      : job(j),
        plan(p),
        key(k),
        f(*p.format),
        g(j),
        computed(!j.given && p.mode != kUnscaled),
        flat(g.whole() && p.mode != kTwoLevel),
        two_passes(computed && (p.mode == kTwoLevel || flat)),
        fused(f.magic && f.code_bytes == 1 && p.overflow == kSaturate && f.emin - f.m >= -22 &&
              (p.rounding == kNearest || (p.rounding == kStochastic && !j.counters))),
        narrow_y(f.narrow && f.kind != kScale && f.kind != kBinary && p.mode != kPowerOfTwo),
        values(j.output != kCodes),
        rule(f.magic ? f : ordinary(), kNanZero),
        thresholds(f.magic ? f : ordinary()),
        codes32(code_specials<uint32_t>(f, p.rounding, p.overflow, kNanZero)),
        values32(value_specials<uint32_t>(f, p.rounding, p.overflow)),
        codes64(code_specials<uint64_t>(f, p.rounding, p.overflow, kNanZero)),
        values64(value_specials<uint64_t>(f, p.rounding, p.overflow)),
        power(f, p.rule) {}
};

// Buffers of one thread.
struct Work {
  std::vector<uint32_t> scratch, top;
  std::vector<float> factor, fold, emin, largest;
  alignas(64) uint32_t loaded[kChunk], y[kChunk], r[kChunk], random[kChunk];
  alignas(64) uint64_t wide[kChunk], wide_r[kChunk];
  alignas(64) uint32_t out[kChunk];
  Counts counts;
  bool nan_without_code = false;
  explicit Work(const Geometry& g) {
    const size_t groups = (g.strip + g.group_columns - 1) / g.group_columns + 1;
    scratch.resize(g.group_rows > 1 && g.group_columns > 1 ? g.strip : 0);
    top.resize(groups), factor.resize(groups), fold.resize(groups), emin.resize(groups), largest.resize(groups);
  }
};

// Scales of a strip; returns whether values can be had directly (power of two, far from the ends of fp32).
bool strip_scales(const Caster& c, const Strip& s, const uint32_t* top, Work& w) {
  float *factor = w.factor.data(), *fold = w.fold.data();
  void* stored = nullptr;
  if (c.job.scales && c.computed) stored = static_cast<char*>(c.job.scales) + s.group * (c.plan.byte_scales ? 1 : 4);
  if (c.plan.mode == kTwoLevel) {
    two_level_scales(top, s.groups, c.f, c.whole, c.plan.min_block_scale, factor, fold, stored);
  } else if (c.plan.mode == kDivide) {
    if (c.computed)
      divide_scales(top, s.groups, c.f.max_value, factor, stored);
    else
      std::memcpy(factor, c.job.given + s.group, s.groups * 4);
  } else if (c.plan.mode == kPowerOfTwo) {
    int lowest = 127;
    uint32_t highest = 0;
    if (c.computed) {
      lowest = power_scales(top, s.groups, c.power, factor, fold, stored, c.plan.byte_scales);
      for (size_t i = 0; i < s.groups; ++i) highest = std::max(highest, top[i]);
    } else {
      for (size_t i = 0; i < s.groups; ++i) {
        const uint32_t b = bits_of(c.job.given[s.group + i]);
        fold[i] = real(b);
        factor[i] = 1.0f / fold[i];
      }
      highest = kInfBits;
    }
    if (!c.values || !c.fused || !c.job.fold) return false;
    const bool direct = highest < static_cast<uint32_t>(127 + 100) << 23 && lowest + c.f.emin - c.f.m > -120;
    for (size_t i = 0; direct && i < s.groups; ++i) {
      const int k = static_cast<int>(bits_of(fold[i]) >> 23) - 127;
      w.emin[i] = real(static_cast<uint32_t>(c.f.emin + k + 127) << 23);
      w.largest[i] = c.f.max_value * fold[i];
    }
    return direct;
  }
  return false;
}

void put_values(const uint32_t* v, const Segment& s, const Caster& c, void* out) {
  const bool fold = c.job.fold && c.plan.mode != kUnscaled;
  if (c.job.output == kValuesF32) {
    auto* to = static_cast<uint32_t*>(out);
    for_groups(s, [=](size_t i, float, float by) { to[i] = fold ? bits_of(real(v[i]) * by) : v[i]; });
  } else {
    auto* to = static_cast<uint16_t*>(out);
    for_groups(s, [=](size_t i, float, float by) { to[i] = bits_to_bf16(fold ? bits_of(real(v[i]) * by) : v[i]); });
  }
}

void put_values(const uint64_t* v, const Segment& s, const Caster& c, void* out) {
  const bool fold = c.job.fold && c.plan.mode != kUnscaled;
  for_groups(s, [&](size_t i, float, float by) {
    uint64_t b = fold ? bits_of(real(v[i]) * static_cast<double>(by)) : v[i];
    if (c.job.output == kValuesF32)
      static_cast<uint32_t*>(out)[i] = narrow<uint32_t, 8, 23, true, kNearest>(b);
    else
      static_cast<uint16_t*>(out)[i] = narrow<uint16_t, 8, 7, true, kNearest>(b);
  });
}

// The general road for a segment: any rounding, overflow and format.
template <class U>
void general_segment(const U* y, U* r, const uint32_t* x, const Segment& s, const Caster& c, Work& w, void* out) {
  constexpr bool wide = sizeof(U) == 8;
  round_any<U>(y, w.random, s.n, c.f, c.plan.rounding, c.key.bits, r);
  if (c.job.counters) {
    const U max = static_cast<U>(c.f.max_code);
    for_groups(s, [&](size_t i, float, float fold) {
      const uint32_t a = x[i] & 0x7FFFFFFFu;
      const bool finite = a < kInfBits, dead = c.plan.mode == kTwoLevel && fold == 0;
      const U b = y[i] & ~Lane<U>::kSign;
      const bool number = b <= Lane<U>::kInf, over = r[i] > max;
      bool becomes_nan = false;
      if constexpr (wide)
        becomes_nan = over && c.codes64.over_nan[y[i] >> 63];
      else
        becomes_nan = over && c.codes32.over_nan[y[i] >> 31];
      w.counts.flushed += finite && a && number && !becomes_nan && (dead || (r[i] == 0 && c.f.kind != kBinary));
      w.counts.saturated += finite && number && over && !dead && !(becomes_nan && c.f.nan_code < 0);
      w.counts.special += !finite;
      w.counts.top = std::max(w.counts.top, a);
    });
  }
  if (c.values) {
    if constexpr (wide)
      finish_values<uint64_t>(y, r, s.n, c.f, c.values64);
    else
      finish_values<uint32_t>(y, r, s.n, c.f, c.values32);
    return put_values(r, s, c, out);
  }
  size_t nans;
  if constexpr (wide)
    nans = finish_codes<uint64_t>(y, r, s.n, c.f, c.codes64);
  else
    nans = finish_codes<uint32_t>(y, r, s.n, c.f, c.codes32);
  w.nan_without_code |= nans && c.f.nan_code < 0 && !c.computed;
  w.nan_without_code |= nans && c.f.nan_code < 0 && c.plan.overflow != kSaturate;
  store_codes<U>(r, out, 0, s.n, c.f.code_bytes);
}

template <class T>
void staged_segment(const typename T::Raw* x, const Segment& s, const Caster& c, Work& w, void* out) {
  const bool guard = !c.computed && c.plan.overflow == kSaturate;
  auto fix_overflow = [&](auto* y, auto inf) {  // a finite x whose y overflows is a finite overflow
    for (size_t i = 0; i < s.n; ++i) {
      const bool finite = (T::load(x[i]) & 0x7FFFFFFFu) < kInfBits;
      y[i] -= finite && (y[i] << 1) == (inf << 1);
    }
  };
  if (c.fused && c.plan.rounding == kStochastic) {
    scale_segment<T>(x, s, c.plan.mode, guard, w.y);
    const Grid<uint32_t> grid(c.f, c.key.bits);
    const uint32_t max = c.rule.max;
    for (size_t i = 0; i < s.n; ++i)
      w.r[i] = round_magnitude<uint32_t, kStochastic>(std::min(w.y[i] & 0x7FFFFFFFu, max), false, grid, w.random[i]);
    if (c.values) {
      finish_values<uint32_t>(w.y, w.r, s.n, c.f, c.values32);
      return put_values(w.r, s, c, out);
    }
    const size_t nans = finish_codes<uint32_t>(w.y, w.r, s.n, c.f, c.codes32);
    w.nan_without_code |= nans && c.f.nan_code < 0 && !c.computed;
    return store_codes<uint32_t>(w.r, out, 0, s.n, 1);
  }
  load_chunk<T>(x, w.loaded, s.n);
  if (c.narrow_y) {
    scale_segment<T>(x, s, c.plan.mode, guard, w.y);
    fix_overflow(w.y, kInfBits);
    return general_segment<uint32_t>(w.y, w.r, w.loaded, s, c, w, out);
  }
  scale_segment_wide<T>(x, s, c.plan.mode, guard, w.wide);
  fix_overflow(w.wide, Lane<uint64_t>::kInf);
  general_segment<uint64_t>(w.wide, w.wide_r, w.loaded, s, c, w, out);
}

template <class T, class Out>
void nearest_values(const typename T::Raw* x, const Segment& s, Way way, const Format& f, void* out) {
  const ValueLoop<Out> rule(f);
  auto* to = static_cast<typename Out::Raw*>(out);
  switch (way) {
    case kDiv:
      return value_segment<T, Out, kDiv>(x, s, rule, to);
    case kMul:
      return value_segment<T, Out, kMul>(x, s, rule, to);
    case kExactMul:
      return value_segment<T, Out, kExactMul>(x, s, rule, to);
    case kDirect:
      return value_segment<T, Out, kDirect>(x, s, rule, to);
    default:
      return value_segment<T, Out, kReady>(x, s, rule, to);
  }
}

template <class T>
void nearest_segment(const typename T::Raw* x, const Segment& s, Way way, const Caster& c, void* out) {
  if (c.values)
    return c.job.output == kValuesBF16 ? nearest_values<T, BF16>(x, s, way, c.f, out)
                                       : nearest_values<T, F32>(x, s, way, c.f, out);
  const CodeLoop rule(c.f);
  auto* to = static_cast<uint8_t*>(out);
  way == kDiv     ? code_segment<T, kDiv>(x, s, rule, to)
  : way == kReady ? code_segment<T, kReady>(x, s, rule, to)
                  : code_segment<T, kMul>(x, s, rule, to);
}

template <class T>
void cast_segment(const typename T::Raw* x, Segment s, bool direct, const float* emin, const float* largest, Caster& c,
                  Work& w, void* out) {
  if (!c.fused || c.plan.rounding != kNearest) return staged_segment<T>(x, s, c, w, out);
  const bool given = !c.computed;
  if (given || c.job.counters) {
    scale_segment<T>(x, s, c.plan.mode, given, w.y);
    if (c.job.counters) count_segment<T>(x, w.y, s, c.thresholds, c.plan.mode == kTwoLevel, w.counts);
    if (given && !c.values && c.f.nan_code < 0) {
      uint32_t top = 0;
      for (size_t i = 0; i < s.n; ++i) top = std::max(top, w.y[i] & 0x7FFFFFFFu);
      w.nan_without_code |= top > kInfBits;
    }
  }
  if (direct) return nearest_segment<T>(x, {s.n, s.width, emin, largest}, kDirect, c, out);
  const bool fold = c.job.fold && c.values && c.plan.mode != kDivide && c.plan.mode != kUnscaled;
  if (given && !fold) return nearest_segment<F32>(w.y, s, kReady, c, out);
  if (given) {  // rare: a power of two that was given
    const ValueLoop<F32> rule(c.f);
    value_segment<F32, F32, kReady>(w.y, s, rule, w.r);
    return put_values(w.r, s, c, out);
  }
  const Way way = c.plan.mode == kDivide ? kDiv : c.plan.mode == kTwoLevel ? kExactMul : kMul;
  nearest_segment<T>(x, s, way, c, out);
}

template <class T>
void cast_strip(Caster& c, const Strip& s, bool direct, Work& w) {
  const auto* x = static_cast<const typename T::Raw*>(c.job.x);
  const size_t bytes = c.job.output == kValuesF32 ? 4 : c.values ? 2 : c.f.code_bytes;
  const bool stream = c.job.rows * c.job.columns * bytes >= kStream;
  const size_t width = c.g.group_columns;
  for (size_t r = s.first_row; r < s.last_row; ++r)
    for (size_t at = s.first; at < s.last; at += kChunk) {
      const size_t n = std::min(kChunk, s.last - at), group = (at - s.first) / width, index = r * c.g.columns + at;
      const Segment segment{n, width >= kChunk ? 0 : width, w.factor.data() + group, w.fold.data() + group};
      if (c.plan.rounding == kStochastic) random_chunk(c.key, index, n, w.random);
      char* to = static_cast<char*>(c.job.out) + index * bytes;
      void* out = stream && bytes <= 4 ? static_cast<void*>(w.out) : to;
      const float *emin = w.emin.data() + group, *largest = w.largest.data() + group;
      if constexpr (std::is_same_v<T, F16>) {
        alignas(64) uint32_t loaded[kChunk];
        load_chunk<F16>(x + index, loaded, n);
        cast_segment<F32>(loaded, segment, direct, emin, largest, c, w, out);
      } else {
        cast_segment<T>(x + index, segment, direct, emin, largest, c, w, out);
      }
      if (out != to) stream_copy(to, out, n * bytes);
    }
  if (stream) stream_fence();
}

template <class T>
void run(Caster& c, std::vector<uint32_t>& tops) {
  const auto* x = static_cast<const typename T::Raw*>(c.job.x);
  const bool big = c.g.rows * c.g.columns >= kSerial;
  if (c.flat) c.g.flatten();
  const size_t items = c.g.bands * c.g.strips;
  if (c.two_passes && !c.flat) {
    tops.resize(c.g.bands * c.g.across);
    parallel_ranges(items, 1, c.job.threads, big, [&](size_t first, size_t last) {
      std::vector<uint32_t> scratch(c.g.group_rows > 1 && c.g.group_columns > 1 ? c.g.strip : 0);
      uint32_t top = 0;
      for (size_t i = first; i < last; ++i) {
        const Strip s = strip_of(c.g, i);
        strip_max<T>(x, c.g, s, scratch.data(), tops.data() + s.group);
        for (size_t k = 0; k < s.groups; ++k) top = std::max(top, tops[s.group + k]);
      }
#pragma omp critical(lowprec_block)
      c.tensor = std::max(c.tensor, top);
    });
    c.whole = whole_scale(c.tensor, c.f);
    *c.job.tensor_scale = c.tensor >= kInfBits ? real(kNanBits) : 1.0f / c.whole;
  }
  parallel_ranges(items, 1, c.job.threads, big, [&](size_t first, size_t last) {
    Work w(c.g);
    bool direct = false;
    for (size_t k = first; k < last; ++k) {
      const Strip s = strip_of(c.g, c.two_passes ? last - 1 - (k - first) : k);
      const uint32_t* top = w.top.data();
      if (c.flat) {
        w.top[0] = c.tensor;
      } else if (c.two_passes) {
        top = tops.data() + s.group;
      } else if (c.computed) {
        strip_max<T>(x, c.g, s, w.scratch.data(), w.top.data());
      }
      if (!c.flat || k == first) direct = strip_scales(c, s, top, w);
      cast_strip<T>(c, s, direct, w);
    }
#pragma omp critical(lowprec_block)
    {
      c.counts.flushed += w.counts.flushed, c.counts.saturated += w.counts.saturated;
      c.counts.special += w.counts.special, c.counts.top = std::max(c.counts.top, w.counts.top);
      c.nan_without_code |= w.nan_without_code;
    }
  });
}

}  // namespace

uint32_t amax(const void* x, Dtype dtype, size_t n, int threads);  // cast.cc

namespace {

ScaleResult cast(const ScaledCast& job, const ScalePlan& plan, const RngKey& key) {
  Caster c(job, plan, key);
  if (plan.mode == kPowerOfTwo && job.given) {
    const size_t groups = c.g.bands * c.g.across;
    for (size_t i = 0; i < groups; ++i) {
      const uint32_t b = bits_of(job.given[i]);
      if ((b & 0x7FFFFFu) || b >> 23 == 0 || b >> 23 > 253) return kScaleNotPowerOfTwo;
    }
  }
  if (c.two_passes && c.flat) c.tensor = amax(job.x, job.dtype, job.rows * job.columns, job.threads);
  std::vector<uint32_t> tops;
  if (job.dtype == kF32)
    run<F32>(c, tops);
  else if (job.dtype == kBF16)
    run<BF16>(c, tops);
  else
    run<F16>(c, tops);
  if (job.counters) {
    job.counters[0] = c.counts.flushed, job.counters[1] = c.counts.saturated, job.counters[2] = c.counts.special;
    job.counters[3] = c.counts.top > kInfBits ? kNanBits : c.counts.top;
  }
  return c.nan_without_code ? kNanWithoutCode : kDone;
}

template <class T>
void block_amax_of(const ScaledCast& job, uint32_t* out) {
  const Geometry g(job);
  parallel_ranges(g.bands * g.strips, 1, job.threads, g.rows * g.columns >= kSerial, [&](size_t first, size_t last) {
    std::vector<uint32_t> scratch(g.group_rows > 1 && g.group_columns > 1 ? g.strip : 0);
    for (size_t i = first; i < last; ++i) {
      const Strip s = strip_of(g, i);
      strip_max<T>(static_cast<const typename T::Raw*>(job.x), g, s, scratch.data(), out + s.group);
      for (size_t k = 0; k < s.groups; ++k)
        out[s.group + k] = out[s.group + k] > kInfBits ? kNanBits : out[s.group + k];
    }
  });
}

void block_amax(const void* x, Dtype dtype, size_t rows, size_t columns, size_t group_rows, size_t group_columns,
                float* out, int threads) {
  ScaledCast job{};
  job.x = x, job.rows = rows, job.columns = columns, job.group_rows = group_rows, job.group_columns = group_columns;
  job.threads = threads;
  auto* to = reinterpret_cast<uint32_t*>(out);
  dtype == kF32    ? block_amax_of<F32>(job, to)
  : dtype == kBF16 ? block_amax_of<BF16>(job, to)
                   : block_amax_of<F16>(job, to);
}

}  // namespace

void dequantise(const Dequantise& job, const Format& format);  // dequantise.cc

extern const BlockKernels block_kernels;
const BlockKernels block_kernels = {cast, dequantise, block_amax};

}  // namespace lowprec::LOWPREC_ISA
