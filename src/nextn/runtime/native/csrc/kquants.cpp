// Linear layers with the weights of GGUF's K-quants: Q4_K, Q5_K and Q6_K.
//
// A matrix is blocks of 32 columns, each a run of superblocks of 256 values of k. A superblock is, for each column, a float
// that scales it and, but for Q6_K, one that scales its minima; then the scales of its groups of 32 values (of 16 in Q6_K),
// and as many minima, as bytes with a sign, [pair of groups][32 columns][2]; then the codes. The lower four bits of these
// are bytes as in grouped.cpp, [4 of k][16 columns][4], with the last 16 columns in the upper halves. The other bits come
// first, 64 bytes for as many steps of four values of k as they fill, those of a step's first 16 columns lowest.
//
// A weight is scale * group_scale * code - min_scale * group_min. In Q6_K the code of 0 is 32, so its minima are 32 times
// the scales.
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
  const char* group_scales(int64_t pair) const { return at + (kHasMinima ? 2 : 1) * kFloats + pair * 2 * kColumns; }
  const char* group_mins(int64_t pair) const { return group_scales(pair) + (kHasMinima ? kFactors : 0); }

  // What the minima of 16 columns are multiplied with.
  Sixteen min_scales(int half) const {
    if constexpr (kHasMinima) return loaded<Sixteen>(at + kFloats + half * 64);
    return loaded<Sixteen>(at + half * 64) * 32.0f;
  }
};

// The integer sums of one group, codes times values: sums [kCount][32]. In the last 16 columns of Q4_K with VNNI, where the
// upper halves of bytes stay in their place, they are 16 times as large.
#if defined(__AVX512VNNI__)
template <int kBits>
constexpr float kUpper = kBits == 4 ? 1.0f / 16 : 1.0f;

// The codes of 16 columns: the lower bits, and those above them, of which `place` is the first in `high`.
template <int kHigh>
__m512i codes_of(__m512i low, __m512i high, int place) {
  if constexpr (kHigh == 0) return low;
  const __m512i mask = _mm512_set1_epi8(char(((1 << kHigh) - 1) << 4));
  const __m512i moved = place < 4 ? _mm512_slli_epi16(high, 4 - place) : _mm512_srli_epi16(high, place - 4);
  return _mm512_ternarylogic_epi32(low, moved, mask, 0xF8);  // low | (moved & mask)
}

template <int kCount, int kBits>
inline __attribute__((always_inline)) void sum_group(const int8_t* codes, const char* at, Early& early, int32_t* sums) {
  using F = Form<kBits>;
  constexpr int kApart = kCount <= 2 ? 2 : 1;  // a sum waits for the one before it
  __m512i acc[kApart][2 * kCount];             // in registers, which needs loops that are unrolled
#pragma GCC unroll 64
  for (int i = 0; i < kApart * 2 * kCount; ++i) acc[i / (2 * kCount)][i % (2 * kCount)] = _mm512_setzero_si512();
  const __m512i lower = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(char(0xF0));
#pragma GCC unroll 8
  for (int run = 0; run < F::kValues / 4 / F::kSteps; ++run) {
    const __m512i high_bits = _mm512_loadu_si512(at);
    if (F::kHigh) early.fetch(), at += 64;
#pragma GCC unroll 4
    for (int step = 0; step < F::kSteps; ++step, at += 64, codes += 4 * kCount) {
      const int part = (run * F::kSteps + step) % kApart;
      early.fetch();
      const __m512i both = _mm512_loadu_si512(at);
      __m512i high = _mm512_and_si512(both, upper);
      if (F::kHigh) high = _mm512_srli_epi16(high, 4);
      const __m512i first = codes_of<F::kHigh>(_mm512_and_si512(both, lower), high_bits, 2 * step * F::kHigh);
      const __m512i second = codes_of<F::kHigh>(high, high_bits, (2 * step + 1) * F::kHigh);
#pragma GCC unroll 16
      for (int row = 0; row < kCount; ++row) {
        int32_t four;
        std::memcpy(&four, codes + 4 * row, sizeof four);
        const __m512i value = _mm512_set1_epi32(four);
        add_products(acc[part][2 * row], first, value);
        add_products(acc[part][2 * row + 1], second, value);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < 2 * kCount; ++i) {
    if (kApart == 2) acc[0][i] = _mm512_add_epi32(acc[0][i], acc[kApart - 1][i]);
    _mm512_store_si512(sums + 16 * i, acc[0][i]);
  }
}
#else
template <int kBits>
constexpr float kUpper = 1.0f;

#if defined(__AVX2__)
template <int kCount, int kBits>
void sum_group(const int8_t* codes, const char* at, Early& early, int32_t* sums) {
  using F = Form<kBits>;
  const __m256i ones = _mm256_set1_epi16(1), lower = _mm256_set1_epi8(15);
  const __m256i mask = _mm256_set1_epi8(char((1 << F::kHigh) - 1));
  for (int64_t place = 0; place < F::kGroupBytes; place += 64) early.fetch();
  for (int64_t column = 0; column < kColumns; column += 8) {
    const int64_t byte = column % 16 * 4, is_upper = column / 16;
    __m256i acc[kCount];
    for (auto& each : acc) each = _mm256_setzero_si256();
    for (int64_t step = 0; step < F::kValues / 4; ++step) {
      const int64_t within = step % F::kSteps;
      const char* run = at + step / F::kSteps * F::kRun + byte;
      const char* low = run + (F::kHigh ? 64 : 0) + 64 * within;
      const auto shifted = [](const char* from, int64_t bits) {
        return _mm256_srl_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
                                _mm_cvtsi32_si128(int(bits)));
      };
      __m256i w = _mm256_and_si256(shifted(low, 4 * is_upper), lower);
      if (F::kHigh) {
        const __m256i high = _mm256_and_si256(shifted(run, (2 * within + is_upper) * F::kHigh), mask);
        w = _mm256_or_si256(w, _mm256_slli_epi16(high, 4));
      }
      for (int row = 0; row < kCount; ++row) {
        int32_t four;
        std::memcpy(&four, codes + (step * kCount + row) * 4, sizeof four);
        const __m256i pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(four));
        acc[row] = _mm256_add_epi32(acc[row], _mm256_madd_epi16(pairs, ones));
      }
    }
    for (int row = 0; row < kCount; ++row)
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + row * kColumns + column), acc[row]);
  }
}
#else
template <int kCount, int kBits>
void sum_group(const int8_t* codes, const char* at, Early& early, int32_t* sums) {
  using F = Form<kBits>;
  std::fill_n(sums, kCount * kColumns, 0);
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
          sums[row * kColumns + column] += code * codes[(step * kCount + row) * 4 + i];
      }
  }
}
#endif
#endif

// The factors of 16 columns in one group of a pair, or sums of one, as floats.
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

// The minima of kGroup values of k times the sums of the rows' codes: sums [kCount][32]. `totals` are of one row, of a pair
// of groups in a word.
template <int kCount, int kBits>
void sum_minima(const Rows& x, const int32_t* totals, const Form<kBits>& form, int64_t pair, int32_t* sums) {
  constexpr int64_t kPairs = kGroup / Form<kBits>::kValues / 2;
#if defined(__AVX512VNNI__)
  for (int half = 0; half < 2; ++half) {
    __m512i minima[kPairs];
    for (int64_t i = 0; i < kPairs; ++i)
      minima[i] = _mm512_cvtepi8_epi16(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(form.group_mins(pair + i) + half * 32)));
    for (int row = 0; row < kCount; ++row) {
      __m512i sum = _mm512_setzero_si512();
      for (int64_t i = 0; i < kPairs; ++i)
        sum = _mm512_dpwssd_epi32(sum, minima[i], _mm512_set1_epi32(totals[row * x.totals_of_row + i]));
      _mm512_store_si512(sums + row * kColumns + half * kSixteen, sum);
    }
  }
#else
  std::fill_n(sums, kCount * kColumns, 0);
  for (int64_t i = 0; i < kPairs; ++i) {
    const char* minima = form.group_mins(pair + i);
    for (int row = 0; row < kCount; ++row) {
      const int32_t both = totals[row * x.totals_of_row + i];
      for (int64_t column = 0; column < kColumns; ++column)
        sums[row * kColumns + column] +=
            int8_t(minima[2 * column]) * int16_t(both) + int8_t(minima[2 * column + 1]) * (both >> 16);
    }
  }
#endif
}

// kCount rows times one block: sums [kCount][32].
template <int kCount, int kBits>
struct KQuantBlock {
  static constexpr int kMost = kMostGroupedRows;
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
    constexpr int64_t kGroups = kGroup / F::kValues;
    const int64_t pair = k % kSuperblock / F::kValues / 2;
    alignas(64) int32_t whole[kCount * kColumns];
    alignas(64) float scaled[kCount * kColumns];
    for (int64_t i = 0; i < kGroups; ++i, at += F::kGroupBytes) {
      sum_group<kCount, kBits>(x.codes + (k + i * F::kValues) * kCount, at, early, whole);
      const char* factors = form.group_scales(pair + i / 2);
      const Sixteen scales[] = {factors_of(factors, i % 2), factors_of(factors + 32, i % 2) * kUpper<kBits>};
      for (int64_t j = 0; j < kCount * kColumns; j += kSixteen) {
        const Sixteen before = i ? sixteen(scaled + j) : Sixteen{};
        put(scaled + j, fused(floats(whole + j), scales[j / kSixteen % 2], before));
      }
    }
    sum_minima<kCount, kBits>(x, x.totals + k / F::kValues / 2, form, pair, whole);
    for (int half = 0; half < 2; ++half) {
      const Sixteen scale = loaded<Sixteen>(form.scales() + half * 64), min_scale = form.min_scales(half);
      for (int row = 0; row < kCount; ++row) {
        const int64_t j = row * kColumns + half * kSixteen;
        const Sixteen less = product(floats(whole + j), min_scale),
                      of_row = Sixteen{} + x.scales[row * x.groups + k / kGroup];
        put(sums + j, fused(fused(sixteen(scaled + j), scale, -less), of_row, sixteen(sums + j)));
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
  const auto no_more = [](int64_t, const float*) {};
  switch (product.type) {
    case Q4_K:
      return multiply_rounded<Q4KBlock>(product, begin, end, kLine, no_more);
    case Q5_K:
      return multiply_rounded<Q5KBlock>(product, begin, end, kLine, no_more);
    default:
      return multiply_rounded<Q6KBlock>(product, begin, end, kLine, no_more);
  }
}

}  // namespace nextn
