// Linear layers with the weights of GGUF's K-quants: Q4_K, Q5_K and Q6_K.
//
// A matrix is blocks of 32 columns, each a run of superblocks of 256 values of k. A superblock is, for each column, a float
// that scales it and, but for Q6_K, one that scales its minima; then the scales of its groups of 32 values (of 16 in Q6_K),
// and as many minima, as bytes with a sign, [pair of groups][32 columns][2]; then the codes. The lower four bits of these
// are bytes as in grouped.cpp, [4 of k][16 columns][4], with the last 16 columns in the upper halves. The other bits come
// first, 64 bytes for as many steps of four values of k as they fill, those of a step's first 16 columns lowest.
//
// A weight is scale * group_scale * code - min_scale * group_min; in Q6_K, scale * group_scale * (code - 32).
#include <algorithm>

#include "rounded.h"

namespace nextn {

namespace {

constexpr int64_t kLine = 64;  // bytes that one line is prefetched for

template <int kBits>
struct Form {
  static constexpr int64_t kValues = kBits == 6 ? 16 : 32;  // of a group
  static constexpr bool kHasMinima = kBits < 6;
  static constexpr int kHigh = kBits - 4;                   // bits of a code above the lower four
  static constexpr int64_t kSteps = kHigh ? 4 / kHigh : 1;  // of four values of k, that 64 bytes of higher bits fill
  static constexpr int64_t kRun = 64 * kSteps + (kHigh ? 64 : 0);
  static constexpr int64_t kPairs = kSuperblock / kValues / 2;
  static constexpr int64_t kFactors = kPairs * 2 * kColumns;  // bytes of the scales, or minima, of groups
  static constexpr int64_t kFloats = 4 * kColumns;
  static constexpr int64_t kHeader = (kHasMinima ? 2 : 1) * (kFloats + kFactors);
  static constexpr int64_t kGroupBytes = kValues / 4 / kSteps * kRun;

  const char* at;

  const char* scales() const { return at; }
  const char* min_scales() const { return at + kFloats; }
  const char* group_scales(int64_t group) const {
    return at + (kHasMinima ? 2 : 1) * kFloats + group / 2 * 2 * kColumns;
  }
  const char* group_mins(int64_t group) const { return group_scales(group) + kFactors; }
};

// The integer sums of one group, codes times values: sums [kCount][32]. start: what those of a row begin with.
#if defined(__AVX512VNNI__)
// The codes of 16 columns: the lower bits, and those above them, of which `place` is the first in `high`.
template <int kHigh>
__m512i codes_of(__m512i low, __m512i high, int place) {
  if constexpr (kHigh == 0) return low;
  const __m512i mask = _mm512_set1_epi8(char(((1 << kHigh) - 1) << 4));
  const __m512i moved = place < 4 ? _mm512_slli_epi16(high, 4 - place) : _mm512_srli_epi16(high, place - 4);
  return _mm512_ternarylogic_epi32(low, moved, mask, 0xF8);  // low | (moved & mask)
}

template <int kCount, int kBits>
inline __attribute__((always_inline)) void sum_group(const int16_t* codes, const char* at, const int32_t* start,
                                                     Early& early, int32_t* sums) {
  using F = Form<kBits>;
  Sums<kCount> all([&](int row, int) { return _mm512_set1_epi32(start[row]); });
  const __m512i lower = _mm512_set1_epi8(15);
#pragma GCC unroll 8
  for (int run = 0; run < F::kValues / 4 / F::kSteps; ++run) {
    const __m512i high_bits = _mm512_loadu_si512(at);
    if (F::kHigh) early.fetch(), at += 64;
#pragma GCC unroll 4
    for (int step = 0; step < F::kSteps; ++step, at += 64, codes += 4 * kCount) {
      early.fetch();
      const __m512i both = _mm512_loadu_si512(at), upper = _mm512_and_si512(_mm512_srli_epi16(both, 4), lower);
      all.add(codes, codes_of<F::kHigh>(_mm512_and_si512(both, lower), high_bits, 2 * step * F::kHigh),
              codes_of<F::kHigh>(upper, high_bits, (2 * step + 1) * F::kHigh));
    }
  }
  all.keep(sums);
}
#elif defined(__AVX2__)
// Of eight columns: at place kByte of each 64 bytes, in the lower or upper halves of bytes.
template <int kCount, int kBits, int64_t kByte, bool kIsUpper>
void sum_columns(const int16_t* codes, const char* at, const int32_t* start, int32_t* sums) {
  using F = Form<kBits>;
  const __m256i lower = _mm256_set1_epi8(15), mask = _mm256_set1_epi8(char((1 << F::kHigh) - 1));
  Sums<kCount> some;
  for (int row = 0; row < kCount; ++row) some.of[row] = _mm256_set1_epi32(start[row]);
#pragma GCC unroll 2
  for (int64_t run = 0; run < F::kValues / 4 / F::kSteps; ++run, at += F::kRun) {
    const __m256i high_bits = bytes_at(at + kByte);
#pragma GCC unroll 4
    for (int step = 0; step < F::kSteps; ++step, codes += 4 * kCount) {
      __m256i bytes = bytes_at(at + kByte + (F::kHigh ? 64 : 0) + 64 * step);
      bytes = _mm256_and_si256(kIsUpper ? _mm256_srli_epi16(bytes, 4) : bytes, lower);
      if (F::kHigh) {
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(high_bits, (2 * step + kIsUpper) * F::kHigh), mask);
        bytes = _mm256_or_si256(bytes, _mm256_slli_epi16(high, 4));
      }
      some.add(codes, bytes);
    }
  }
  some.keep(sums + (kIsUpper ? 16 : 0) + kByte / 4);
}

template <int kCount, int kBits>
void sum_group(const int16_t* codes, const char* at, const int32_t* start, Early& early, int32_t* sums) {
  for (int64_t place = 0; place < Form<kBits>::kGroupBytes; place += 64) early.fetch();
  sum_columns<kCount, kBits, 0, false>(codes, at, start, sums);
  sum_columns<kCount, kBits, 32, false>(codes, at, start, sums);
  sum_columns<kCount, kBits, 0, true>(codes, at, start, sums);
  sum_columns<kCount, kBits, 32, true>(codes, at, start, sums);
}
#else
template <int kCount, int kBits>
void sum_group(const int16_t* codes, const char* at, const int32_t* start, Early& early, int32_t* sums) {
  using F = Form<kBits>;
  for (int row = 0; row < kCount; ++row) std::fill_n(sums + row * kColumns, kColumns, start[row]);
  for (int64_t place = 0; place < F::kGroupBytes; place += 64) early.fetch();
  for (int64_t step = 0; step < F::kValues / 4; ++step) {
    const int64_t within = step % F::kSteps;
    const auto* run = reinterpret_cast<const uint8_t*>(at + step / F::kSteps * F::kRun);
    const uint8_t* low = run + (F::kHigh ? 64 : 0) + 64 * within;
    for (int64_t column = 0; column < kColumns; ++column)
      for (int i = 0; i < 4; ++i) {
        const int64_t byte = column % 16 * 4 + i, is_upper = column / 16;
        int32_t code = low[byte] >> 4 * is_upper & 15;
        if (F::kHigh) code |= (run[byte] >> (2 * within + is_upper) * F::kHigh & ((1 << F::kHigh) - 1)) << 4;
        for (int row = 0; row < kCount; ++row)
          sums[row * kColumns + column] += code * codes[(step * kCount + row) * 4 + kPlaces[i]];
      }
  }
}
#endif

// The factors of 16 columns in one group of a pair, as floats.
inline Sixteen factors_of(const char* pairs, int which) {
#if defined(__AVX512BW__)
  const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)));
  const __m512i first = which ? words : _mm512_slli_epi32(words, 16);
  return (Sixteen)_mm512_cvtepi32_ps(_mm512_srai_epi32(first, 16));
#else
  float values[kSixteen];
  for (int64_t i = 0; i < kSixteen; ++i) values[i] = float(int8_t(pairs[2 * i + which]));
  return sixteen(values);
#endif
}

// kCount rows times one block: sums [kCount][32].
template <int kCount, int kBits>
struct KQuantBlock {
  static constexpr int kMost = kMostRows;
  using F = Form<kBits>;

  static void run(const Rows& x, const char* weights, Early early, float* sums) {
    std::fill_n(sums, kCount * kColumns, 0.0f);
    for (int64_t k = 0; k < x.depth; k += kSuperblock) {
      const F form{weights};
      for (int64_t place = 0; place < F::kHeader; place += 64) early.fetch();
      weights += F::kHeader;
      for (int64_t begin = 0; begin < kSuperblock; begin += kGroup, weights += kGroup / F::kValues * F::kGroupBytes)
        add_values(x, k + begin, form, weights, early, sums);
    }
  }

 private:
  // Adds kGroup values of k, which have one scale in each row.
  static void add_values(const Rows& x, int64_t k, const F& form, const char* at, Early& early, float* sums) {
    alignas(64) int32_t whole[kCount * kColumns];
    alignas(64) float scaled[kCount * kColumns] = {}, less[kCount * kColumns] = {};
    for (int64_t i = 0; i < kGroup / F::kValues; ++i, at += F::kGroupBytes) {
      const int64_t group = k / F::kValues + i, within = group % (kSuperblock / F::kValues);
      int32_t totals[kCount], start[kCount];
      for (int row = 0; row < kCount; ++row) {
        totals[row] = x.totals[row * x.totals_of_row + group];
        start[row] = F::kHasMinima ? 0 : -32 * totals[row];
      }
      sum_group<kCount, kBits>(x.codes + (k + i * F::kValues) * kCount, at, start, early, whole);
      const char* factors = form.group_scales(within);
      for (int half = 0; half < 2; ++half) {
        const Sixteen scales = factors_of(factors + 32 * half, group % 2);
        const Sixteen minima = F::kHasMinima ? factors_of(form.group_mins(within) + 32 * half, group % 2) : Sixteen{};
        for (int row = 0; row < kCount; ++row) {
          const int64_t j = row * kColumns + half * kSixteen;
          put(scaled + j, fused(floats(whole + j), scales, sixteen(scaled + j)));
          if (F::kHasMinima) put(less + j, fused(minima, Sixteen{} + float(totals[row]), sixteen(less + j)));
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const Sixteen scale = loaded<Sixteen>(form.scales() + half * 64);
      const Sixteen min_scale = F::kHasMinima ? loaded<Sixteen>(form.min_scales() + half * 64) : Sixteen{};
      for (int row = 0; row < kCount; ++row) {
        const int64_t j = row * kColumns + half * kSixteen;
        Sixteen values = product(sixteen(scaled + j), scale);
        if (F::kHasMinima) values = fused(-sixteen(less + j), min_scale, values);
        put(sums + j, fused(values, Sixteen{} + x.scales[row * x.groups + k / kGroup], sixteen(sums + j)));
      }
    }
  }
};

template <int kCount>
using Q4KBlock = KQuantBlock<kCount, 4>;
template <int kCount>
using Q5KBlock = KQuantBlock<kCount, 5>;
template <int kCount>
using Q6KBlock = KQuantBlock<kCount, 6>;

}  // namespace

void multiply_kquants(const Product& product, int64_t begin, int64_t end) {
  switch (product.type) {
    case Q4_K:
      return multiply_rounded<Q4KBlock>(product, begin, end, kLine);
    case Q5_K:
      return multiply_rounded<Q5KBlock>(product, begin, end, kLine);
    default:
      return multiply_rounded<Q6KBlock>(product, begin, end, kLine);
  }
}

}  // namespace nextn
