// Linear layers with weights of four bits, and embeddings of such weights.
//
// A matrix is blocks of 32 columns, each a run of groups of 32, 64 or 128 values of k. A group is a word for each column,
// the float of its scale with the zero in place of the last eight bits, then [4 of k][16 columns][4] bytes: the lower
// halves are codes of the first 16 columns, the upper halves of the others. A weight is (code - zero) * scale.
#include <algorithm>
#include <bit>

#include "rounded.h"
#include "strided.h"

namespace nextn {

namespace {

constexpr int64_t kStep = 2 * kColumns;    // bytes of four values of k
constexpr int64_t kWords = 4 * kColumns;   // bytes of the scales and zeros of a group
constexpr int32_t kZeroBits = 0xFF;

// The integer sums of one group, codes minus zeros times `steps` fours of k: sums [kCount][32]. totals: of each row, the
// sum of its values, `stride` apart.
#if defined(__AVX512VNNI__)
template <int kCount>
void sum_group(const int8_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights, Early early,
               int32_t* sums) {
  constexpr int kApart = kCount <= 2 ? 2 : 1;  // a sum waits for the one before it
  __m512i acc[kApart][2 * kCount];  // in registers, which needs loops that are unrolled
  __m512i zeros[2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
    zeros[half] = _mm512_and_si512(_mm512_loadu_si512(weights + 64 * half), _mm512_set1_epi32(kZeroBits));
#pragma GCC unroll 32
  for (int i = 0; i < 2 * kCount; ++i) {
    // Both fit 16 bits; the upper 16 of the zeros are 0.
    acc[0][i] = _mm512_madd_epi16(zeros[i % 2], _mm512_set1_epi32(-totals[i / 2 * stride]));
#pragma GCC unroll 4
    for (int part = 1; part < kApart; ++part) acc[part][i] = _mm512_setzero_si512();
  }
  const __m512i four_bits = _mm512_set1_epi8(15);
  const char* at = weights + kWords;
  for (int64_t step = 0; step < steps; step += kApart)
#pragma GCC unroll 4
    for (int part = 0; part < kApart; ++part, at += kStep, codes += 4 * kCount) {
      early.fetch();
      const __m512i both = _mm512_loadu_si512(at);
      const __m512i low = _mm512_and_si512(both, four_bits);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), four_bits);
#pragma GCC unroll 16
      for (int row = 0; row < kCount; ++row) {
        int32_t four;
        std::memcpy(&four, codes + 4 * row, sizeof four);
        const __m512i value = _mm512_set1_epi32(four);
        add_products(acc[part][2 * row], low, value);
        add_products(acc[part][2 * row + 1], high, value);
      }
    }
#pragma GCC unroll 32
  for (int i = 0; i < 2 * kCount; ++i) {
#pragma GCC unroll 4
    for (int part = 1; part < kApart; ++part) acc[0][i] = _mm512_add_epi32(acc[0][i], acc[part][i]);
    _mm512_store_si512(sums + 16 * i, acc[0][i]);
  }
}
#elif defined(__AVX2__)
template <int kCount>
void sum_group(const int8_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights, Early early,
               int32_t* sums) {
  const __m256i ones = _mm256_set1_epi16(1), four_bits = _mm256_set1_epi8(15), zero_bits = _mm256_set1_epi32(kZeroBits);
  for (int64_t column = 0; column < kColumns; column += 8) {
    const auto words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 4 * column));
    const __m256i zeros = _mm256_and_si256(words, zero_bits);
    __m256i acc[kCount];
    // Both fit 16 bits; the upper 16 of the zeros are 0.
    for (int row = 0; row < kCount; ++row) acc[row] = _mm256_madd_epi16(zeros, _mm256_set1_epi32(-totals[row * stride]));
    const __m128i shift = _mm_cvtsi32_si128(column < 16 ? 0 : 4);
    const char* at = weights + kWords + column % 16 * 4;
    for (int64_t step = 0; step < steps; ++step, at += kStep) {
      if (column == 0) early.fetch();
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
      const __m256i w = _mm256_and_si256(_mm256_srl_epi16(both, shift), four_bits);
      for (int row = 0; row < kCount; ++row) {
        int32_t four;
        std::memcpy(&four, codes + step * 4 * kCount + 4 * row, sizeof four);
        const __m256i pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(four));
        acc[row] = _mm256_add_epi32(acc[row], _mm256_madd_epi16(pairs, ones));
      }
    }
    for (int row = 0; row < kCount; ++row)
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + row * kColumns + column), acc[row]);
  }
}
#else
template <int kCount>
void sum_group(const int8_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights, Early early,
               int32_t* sums) {
  for (int64_t column = 0; column < kColumns; ++column) {
    int32_t word;
    std::memcpy(&word, weights + 4 * column, sizeof word);
    for (int row = 0; row < kCount; ++row) sums[row * kColumns + column] = -totals[row * stride] * (word & kZeroBits);
  }
  const auto* four = reinterpret_cast<const uint8_t*>(weights + kWords);
  for (int64_t step = 0; step < steps; ++step, four += kStep) {
    early.fetch();
    for (int row = 0; row < kCount; ++row)
      for (int64_t column = 0; column < kColumns; ++column)
        for (int i = 0; i < 4; ++i) {
          const int32_t both = four[4 * (column % 16) + i];
          sums[row * kColumns + column] += (column < 16 ? both & 15 : both >> 4) * codes[(step * kCount + row) * 4 + i];
        }
  }
}
#endif

Sixteen scales_of(const char* words) { return floats_of(loaded<SixteenInts>(words) & ~kZeroBits); }

// kCount rows times one block: sums [kCount][32].
template <int kCount>
struct Int4Block {
  static constexpr int kMost = kMostInt4Rows;

  static void run(const Rows& x, const char* weights, Early early, float* sums) {
    const int64_t group = x.depth / x.totals_of_row, steps = group / 4, bytes = kWords + steps * kStep;
    alignas(64) int32_t whole[kCount * kColumns];
    std::fill_n(sums, kCount * kColumns, 0.0f);
    for (int64_t i = 0; i < x.totals_of_row; ++i, weights += bytes) {
      __builtin_prefetch(early.next), __builtin_prefetch(early.next + 64);  // a group's words
      early.next += kWords;
      sum_group<kCount>(x.codes + i * group * kCount, x.totals + i, x.totals_of_row, steps, weights, early, whole);
      early = early.after(steps);
      const Sixteen scales[] = {scales_of(weights), scales_of(weights + 64)};
      for (int row = 0; row < kCount; ++row) {
        const Sixteen scale = Sixteen{} + x.scales[row * x.groups + i * group / kGroup];
        for (int half = 0; half < 2; ++half) {
          const int64_t at = row * kColumns + half * kSixteen;
          put(sums + at, fused(floats(whole + at), product(scale, scales[half]), sixteen(sums + at)));
        }
      }
    }
  }
};

// A column of a packed matrix, one value of k after another.
struct Column {
  const char* block;
  int64_t column, group;

  float value(int64_t k) const {
    const char* from = block + k / group * (kWords + group / 4 * kStep);
    int32_t word;
    std::memcpy(&word, from + 4 * column, sizeof word);
    const int32_t both = uint8_t(from[kWords + k % group / 4 * kStep + column % 16 * 4 + k % 4]);
    const int32_t code = column < 16 ? both & 15 : both >> 4;
    return float(code - (word & kZeroBits)) * std::bit_cast<float>(word & ~kZeroBits);
  }
};

// views: out [T, D], packed [V, D], ids [T]; ints: V, D, type. A row whose id is none of the V is zero.
void int4_embedding(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  const int64_t num = call.ints[0], k = call.ints[1], type = call.ints[2];
  int64_t begin, end;
  worker.share(out.size[0], begin, end);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = data<int64_t>(ids)[row * ids.stride[0]];
    const bool exists = id >= 0 && id < num;
    const Column column{packed.data + (exists ? id / kColumns * block_bytes(type, k) : 0), exists ? id % kColumns : 0, int4_group(type)};
    for (int64_t i = 0; i < k; ++i)
      store_one(out.data + (row * out.stride[0] + i) * (out.type == F32 ? 4 : 2), out.type, exists ? column.value(i) : 0.0f);
  }
}

bool select_int4_embedding(Call& call) {
  if (call.views.size() != 3 || call.ints.size() != 3 || !is_int4(call.ints[2])) return false;
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  if (!is_float(out.type) || out.ndim != 2 || out.stride[1] != 1 || out.size[1] != call.ints[1]) return false;
  if (ids.type != I64 || ids.ndim != 1 || ids.size[0] != out.size[0] || !is_bytes(packed)) return false;
  if (call.ints[0] < 1 || call.ints[1] < 1) return false;
  if (packed.size[0] != packed_bytes(call.ints[2], call.ints[0], call.ints[1])) return false;
  call.kernel = int4_embedding;
  call.parallel = out.size[0] * out.size[1] >= kParallel;
  return true;
}

const Op int4_embedding_op{"int4_embedding", select_int4_embedding};

}  // namespace

void multiply_int4(const Product& product, int64_t begin, int64_t end) {
  multiply_rounded<Int4Block>(product, begin, end, kStep, [](int64_t, const float*) {});
}

}  // namespace nextn
