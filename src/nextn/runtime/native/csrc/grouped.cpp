// Linear layers with weights of four and eight bits in groups, and embeddings of such weights.
//
// A matrix is blocks of 32 columns, each a run of groups of 32, 64 or 128 values of k. A group is a word for each column,
// the float of its scale with the zero in place of the last eight bits, then its codes. Of eight bits, these are
// [4 of k][32 columns][4] bytes; of four, [4 of k][16 columns][4]: the lower halves are codes of the first 16 columns, the
// upper halves of the others. A weight is (code - zero) * scale.
#include <algorithm>
#include <bit>

#include "rounded.h"
#include "strided.h"

namespace nextn {

namespace {

template <int kBits>
constexpr int64_t kStep = kColumns * kBits / 2;  // bytes of four values of k
constexpr int64_t kWords = 4 * kColumns;         // bytes of the scales and zeros of a group
constexpr int32_t kZeroBits = 0xFF;

// The code of a column and of one of four values of k.
template <int kBits>
int32_t code_of(const uint8_t* four, int64_t column, int64_t i) {
  if constexpr (kBits == 8) return four[4 * column + i];
  const int32_t both = four[4 * (column % 16) + i];
  return column < 16 ? both & 15 : both >> 4;
}

// The integer sums of one group, codes minus zeros times `steps` fours of k: sums [kCount][32]. totals: of each row, the
// sum of its values, `stride` apart.
#if defined(__AVX512VNNI__)
template <int kCount, int kBits>
void sum_group(const int8_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights,
               Early early, int32_t* sums) {
  constexpr int kApart = kCount <= 2 ? 2 : 1;  // a sum waits for the one before it
  __m512i acc[kApart][2 * kCount];             // in registers, which needs loops that are unrolled
  __m512i zeros[2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
    zeros[half] = _mm512_and_si512(_mm512_loadu_si512(weights + 64 * half), _mm512_set1_epi32(kZeroBits));
  // The upper halves of bytes stay where they are, as codes times 16: kUpper is in their scales.
  if constexpr (kBits == 4) zeros[1] = _mm512_slli_epi32(zeros[1], 4);
#pragma GCC unroll 32
  for (int i = 0; i < 2 * kCount; ++i) {
    // Both fit 16 bits; the upper 16 of the zeros are 0.
    acc[0][i] = _mm512_madd_epi16(zeros[i % 2], _mm512_set1_epi32(-totals[i / 2 * stride]));
#pragma GCC unroll 4
    for (int part = 1; part < kApart; ++part) acc[part][i] = _mm512_setzero_si512();
  }
  const __m512i lower = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(char(0xF0));
  const char* at = weights + kWords;
  for (int64_t step = 0; step < steps; step += kApart)
#pragma GCC unroll 4
    for (int part = 0; part < kApart; ++part, at += kStep<kBits>, codes += 4 * kCount) {
      early.fetch();
      const __m512i first = _mm512_loadu_si512(at);
      __m512i low, high;
      if constexpr (kBits == 4) {
        low = _mm512_and_si512(first, lower), high = _mm512_and_si512(first, upper);
      } else {
        low = first, high = _mm512_loadu_si512(at + 64);
      }
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
// Eight columns' codes of four values of k, as bytes with a sign: of eight bits, they are less by 128.
template <int kBits>
__m256i signed_codes(const char* at, int64_t column) {
  const auto bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  if constexpr (kBits == 8) return _mm256_xor_si256(bytes, _mm256_set1_epi8(char(128)));
  return _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(column < 16 ? 0 : 4)), _mm256_set1_epi8(15));
}

template <int kCount, int kBits>
void sum_group(const int8_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights,
               Early early, int32_t* sums) {
  const __m256i ones = _mm256_set1_epi16(1), zero_bits = _mm256_set1_epi32(kZeroBits);
  for (int64_t column = 0; column < kColumns; column += 8) {
    const auto words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 4 * column));
    const __m256i less = _mm256_set1_epi32(kBits == 8 ? 128 : 0);
    const __m256i zeros = _mm256_sub_epi32(_mm256_and_si256(words, zero_bits), less);
    __m256i acc[kCount];
    for (int row = 0; row < kCount; ++row)
      acc[row] = _mm256_mullo_epi32(zeros, _mm256_set1_epi32(-totals[row * stride]));
    const char* at = weights + kWords + (kBits == 8 ? column : column % 16) * 4;
    for (int64_t step = 0; step < steps; ++step, at += kStep<kBits>) {
      if (column == 0) early.fetch();
      // Products of bytes are of one with a sign and one without, and two of them must fit 16 bits: |w| and sign(w) x.
      const __m256i w = signed_codes<kBits>(at, column), size = kBits == 8 ? _mm256_abs_epi8(w) : w;
      for (int row = 0; row < kCount; ++row) {
        int32_t four;
        std::memcpy(&four, codes + step * 4 * kCount + 4 * row, sizeof four);
        const __m256i value = _mm256_set1_epi32(four);
        const __m256i pairs = _mm256_maddubs_epi16(size, kBits == 8 ? _mm256_sign_epi8(value, w) : value);
        acc[row] = _mm256_add_epi32(acc[row], _mm256_madd_epi16(pairs, ones));
      }
    }
    for (int row = 0; row < kCount; ++row)
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + row * kColumns + column), acc[row]);
  }
}
#else
template <int kCount, int kBits>
void sum_group(const int8_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights,
               Early early, int32_t* sums) {
  for (int64_t column = 0; column < kColumns; ++column) {
    int32_t word;
    std::memcpy(&word, weights + 4 * column, sizeof word);
    for (int row = 0; row < kCount; ++row) sums[row * kColumns + column] = -totals[row * stride] * (word & kZeroBits);
  }
  for (int64_t step = 0; step < steps; ++step) {
    early.fetch();
    const auto* four = reinterpret_cast<const uint8_t*>(weights + kWords + step * kStep<kBits>);
    for (int row = 0; row < kCount; ++row)
      for (int64_t column = 0; column < kColumns; ++column)
        for (int i = 0; i < 4; ++i)
          sums[row * kColumns + column] += code_of<kBits>(four, column, i) * codes[(step * kCount + row) * 4 + i];
  }
}
#endif

Sixteen scales_of(const char* words) { return floats_of(loaded<SixteenInts>(words) & ~kZeroBits); }

// What the sums of the last 16 columns are to be multiplied with.
#if defined(__AVX512VNNI__)
template <int kBits>
constexpr float kUpper = kBits == 4 ? 1.0f / 16 : 1.0f;
#else
template <int kBits>
constexpr float kUpper = 1.0f;
#endif

// kCount rows times one block: sums [kCount][32].
template <int kCount, int kBits>
struct GroupedBlock {
  static constexpr int kMost = kMostGroupedRows;

  static void run(const Rows& x, const char* weights, Early early, float* sums) {
    const int64_t group = x.depth / x.totals_of_row, steps = group / 4, bytes = kWords + steps * kStep<kBits>;
    alignas(64) int32_t whole[kCount * kColumns];
    std::fill_n(sums, kCount * kColumns, 0.0f);
    for (int64_t i = 0; i < x.totals_of_row; ++i, weights += bytes) {
      early.fetch(0), early.fetch(64);  // a group's words
      early.next += kWords;
      sum_group<kCount, kBits>(x.codes + i * group * kCount, x.totals + i, x.totals_of_row, steps, weights, early,
                               whole);
      early = early.after(steps);
      const Sixteen scales[] = {scales_of(weights), scales_of(weights + 64) * kUpper<kBits>};
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

template <int kCount>
using Int4Block = GroupedBlock<kCount, 4>;
template <int kCount>
using Int8GroupBlock = GroupedBlock<kCount, 8>;

// A column of a packed matrix, one value of k after another.
template <int kBits>
struct Column {
  const char* block;
  int64_t column, group;

  float value(int64_t k) const {
    const char* from = block + k / group * (kWords + group / 4 * kStep<kBits>);
    int32_t word;
    std::memcpy(&word, from + 4 * column, sizeof word);
    const auto* four = reinterpret_cast<const uint8_t*>(from + kWords + k % group / 4 * kStep<kBits>);
    return float(code_of<kBits>(four, column, k % 4) - (word & kZeroBits)) * std::bit_cast<float>(word & ~kZeroBits);
  }
};

// views: out [T, D], packed [V, D], ids [T]; ints: V, D, type. A row whose id is none of the V is zero.
template <int kBits>
void grouped_embedding(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  const int64_t num = call.ints[0], k = call.ints[1], type = call.ints[2];
  int64_t begin, end;
  worker.share(out.size[0], begin, end);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = data<int64_t>(ids)[row * ids.stride[0]];
    const bool exists = id >= 0 && id < num;
    const Column<kBits> column{packed.data + (exists ? id / kColumns * block_bytes(type, k) : 0),
                               exists ? id % kColumns : 0, values_per_group(type)};
    for (int64_t i = 0; i < k; ++i)
      store_one(out.data + (row * out.stride[0] + i) * (out.type == F32 ? 4 : 2), out.type,
                exists ? column.value(i) : 0.0f);
  }
}

bool select_grouped_embedding(Call& call) {
  if (call.views.size() != 3 || call.ints.size() != 3 || !is_grouped(call.ints[2])) return false;
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  if (!is_float(out.type) || out.ndim != 2 || out.stride[1] != 1 || out.size[1] != call.ints[1]) return false;
  if (ids.type != I64 || ids.ndim != 1 || ids.size[0] != out.size[0] || !is_bytes(packed)) return false;
  if (call.ints[0] < 1 || call.ints[0] > packed.size[0] || call.ints[1] < 1) return false;
  if (packed.size[0] != packed_bytes(call.ints[2], call.ints[0], call.ints[1])) return false;
  call.kernel = is_int4(call.ints[2]) ? grouped_embedding<4> : grouped_embedding<8>;
  call.parallel = out.size[0] * out.size[1] >= kParallel;
  return true;
}

const Op grouped_embedding_op{"grouped_embedding", select_grouped_embedding};

}  // namespace

void multiply_grouped(const Product& product, int64_t begin, int64_t end) {
  const auto no_more = [](int64_t, const float*) {};
  if (is_int4(product.type)) return multiply_rounded<Int4Block>(product, begin, end, kStep<4>, no_more);
  multiply_rounded<Int8GroupBlock>(product, begin, end, kStep<8>, no_more);
}

}  // namespace nextn
