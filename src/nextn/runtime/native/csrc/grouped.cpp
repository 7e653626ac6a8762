// Linear layers with weights of four and eight bits in groups, and embeddings of such weights.
//
// A matrix is blocks of 32 columns, each a run of groups of 32, 64 or 128 values of k. A group is a word for each column,
// the float of its scale with the zero in place of the last eight bits, then its codes. Of eight bits, these are
// [4 of k][32 columns][4] bytes; of four, [4 of k][16 columns][4]: the lower halves are codes of the first 16 columns, the
// upper halves of the others. A weight is (code - zero) * scale. With minima, the lower half of a word is the scale in fp16,
// the upper half the minimum, and a weight is code * scale + minimum.
#include <algorithm>
#include <vector>

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
// sum of its values, `stride` apart. They wrap around on the way, but what they end with does not.
#if defined(__AVX512VNNI__)
template <int kCount, int kBits, bool kMinima>
void sum_group(const int16_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights,
               Early early, int32_t* sums) {
  __m512i zeros[2];
  for (int half = 0; half < 2; ++half)
    zeros[half] = _mm512_and_si512(_mm512_loadu_si512(weights + 64 * half), _mm512_set1_epi32(kZeroBits));
  Sums<kCount> all([&](int row, int half) {
    if constexpr (kMinima) return _mm512_setzero_si512();
    return _mm512_mullo_epi32(zeros[half], _mm512_set1_epi32(-totals[row * stride]));
  });
  const __m512i lower = _mm512_set1_epi8(15);
  const char* at = weights + kWords;
  for (int64_t step = 0; step < steps; ++step, at += kStep<kBits>, codes += 4 * kCount) {
    early.fetch();
    const __m512i first = _mm512_loadu_si512(at);
    if constexpr (kBits == 4)
      all.add(codes, _mm512_and_si512(first, lower), _mm512_and_si512(_mm512_srli_epi16(first, 4), lower));
    else
      all.add(codes, first, _mm512_loadu_si512(at + 64));
  }
  all.keep(sums);
}
#elif defined(__AVX2__)
// Of eight columns from `column` on.
template <int kCount, int kBits, bool kMinima, int64_t kColumn>
void sum_columns(const int16_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights,
                 Early early, int32_t* sums) {
  const __m256i lower = _mm256_set1_epi8(15);
  const __m256i zeros = _mm256_and_si256(bytes_at(weights + 4 * kColumn), _mm256_set1_epi32(kZeroBits));
  Sums<kCount> some;
  for (int row = 0; row < kCount; ++row)
    some.of[row] =
        kMinima ? _mm256_setzero_si256() : _mm256_mullo_epi32(zeros, _mm256_set1_epi32(-totals[row * stride]));
  const char* at = weights + kWords + (kBits == 8 ? kColumn : kColumn % 16) * 4;
  for (int64_t step = 0; step < steps; ++step, at += kStep<kBits>, codes += 4 * kCount) {
    if (kColumn == 0) early.fetch();
    __m256i bytes = bytes_at(at);
    if (kBits == 4) bytes = _mm256_and_si256(kColumn < 16 ? bytes : _mm256_srli_epi16(bytes, 4), lower);
    some.add(codes, bytes);
  }
  some.keep(sums + kColumn);
}

template <int kCount, int kBits, bool kMinima>
void sum_group(const int16_t* codes, const int32_t* totals, int64_t stride, int64_t steps, const char* weights,
               Early early, int32_t* sums) {
  sum_columns<kCount, kBits, kMinima, 0>(codes, totals, stride, steps, weights, early, sums);
  sum_columns<kCount, kBits, kMinima, 8>(codes, totals, stride, steps, weights, early, sums);
  sum_columns<kCount, kBits, kMinima, 16>(codes, totals, stride, steps, weights, early, sums);
  sum_columns<kCount, kBits, kMinima, 24>(codes, totals, stride, steps, weights, early, sums);
}
#else
template <int kCount, int kBits, bool kMinima>
void sum_group(const int16_t* codes, const int32_t*, int64_t, int64_t steps, const char* weights, Early,
               int32_t* sums) {
  for (int64_t column = 0; column < kColumns; ++column) {
    int32_t word;
    std::memcpy(&word, weights + 4 * column, sizeof word);
    const int32_t zero = kMinima ? 0 : word & kZeroBits;
    for (int row = 0; row < kCount; ++row) {
      int32_t sum = 0;
      for (int64_t step = 0; step < steps; ++step) {
        const auto* four = reinterpret_cast<const uint8_t*>(weights + kWords + step * kStep<kBits>);
        for (int i = 0; i < 4; ++i)
          sum += (code_of<kBits>(four, column, i) - zero) * codes[(step * kCount + row) * 4 + kPlaces[i]];
      }
      sums[row * kColumns + column] = sum;
    }
  }
}
#endif

Sixteen scales_of(const char* words) { return floats_of(loaded<SixteenInts>(words) & ~kZeroBits); }

// The lower or upper halves of sixteen words, which are numbers in fp16.
Sixteen halves_of(const char* words, bool is_upper) {
  const SixteenInts all = loaded<SixteenInts>(words), bits = (is_upper ? all >> 16 : all) & 0xFFFF;
#if defined(__AVX512F__)
  return (Sixteen)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__AVX2__) && defined(__F16C__)
  // What packs two registers goes by halves of each.
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bits.low, (__m256i)bits.high), 0xD8);
  return {(Sixteen::Half)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          (Sixteen::Half)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#else
  // The exponent is less by 112; of numbers without a leading one, too.
  const Sixteen size = floats_of((bits & 0x7FFF) << 13) * 0x1p112f;
  return floats_of(bits_of(size) | (bits & 0x8000) << 16);
#endif
}

// kCount rows times one block: sums [kCount][32].
template <int kCount, int kBits, bool kMinima>
struct GroupedBlock {
  static constexpr int kMost = kMostRows;

  static void run(const Rows& x, const char* weights, Early early, float* sums) {
    const int64_t group = x.depth / x.totals_of_row, steps = group / 4, bytes = kWords + steps * kStep<kBits>;
    alignas(64) int32_t whole[kCount * kColumns];
    std::fill_n(sums, kCount * kColumns, 0.0f);
    for (int64_t i = 0; i < x.totals_of_row; ++i, weights += bytes) {
      early.fetch(0), early.fetch(64);  // a group's words
      early.next += kWords;
      sum_group<kCount, kBits, kMinima>(x.codes + i * group * kCount, x.totals + i, x.totals_of_row, steps, weights,
                                        early, whole);
      early = early.after(steps);
      for (int half = 0; half < 2; ++half) add_half(x, i, i * group / kGroup, weights + 64 * half, half, whole, sums);
    }
  }

 private:
  // Adds the integer sums of a group, of 16 columns.
  static void add_half(const Rows& x, int64_t group, int64_t of_row, const char* words, int half, const int32_t* whole,
                       float* sums) {
    const Sixteen scales = kMinima ? halves_of(words, false) : scales_of(words);
    const Sixteen minima = kMinima ? halves_of(words, true) : Sixteen{};
    for (int row = 0; row < kCount; ++row) {
      const int64_t at = row * kColumns + half * kSixteen;
      const float scale = x.scales[row * x.groups + of_row];
      Sixteen sum = sixteen(sums + at);
      if (kMinima) sum = fused(minima, Sixteen{} + scale * float(x.totals[row * x.totals_of_row + group]), sum);
      put(sums + at, fused(floats(whole + at), product(Sixteen{} + scale, scales), sum));
    }
  }
};

template <int kCount>
using Int4Block = GroupedBlock<kCount, 4, false>;
template <int kCount>
using Int8Block = GroupedBlock<kCount, 8, false>;
template <int kCount>
using Int4MinimaBlock = GroupedBlock<kCount, 4, true>;
template <int kCount>
using Int8MinimaBlock = GroupedBlock<kCount, 8, true>;

// Writes the weights [0, k) of a column of a packed matrix.
template <int kBits>
void read_column(const char* block, int64_t column, int64_t k, int64_t type, float* to) {
  const int64_t group = values_per_group(type);
  for (int64_t first = 0; first < k; first += group, block += kWords + group / 4 * kStep<kBits>) {
    const char* words = block + column / kSixteen * 64;
    SixteenInts all = loaded<SixteenInts>(words);
    alignas(64) int32_t zeros[kSixteen];
    alignas(64) float scales[kSixteen], minima[kSixteen] = {};
    kept(zeros, has_minima(type) ? SixteenInts{} : all & kZeroBits);
    put(scales, has_minima(type) ? halves_of(words, false) : scales_of(words));
    if (has_minima(type)) put(minima, halves_of(words, true));
    const int64_t place = column % kSixteen;
    for (int64_t i = first; i < std::min(first + group, k); ++i) {
      const auto* four = reinterpret_cast<const uint8_t*>(block + kWords + (i - first) / 4 * kStep<kBits>);
      const float value = float(code_of<kBits>(four, column, i % 4) - zeros[place]) * scales[place];
      to[i] = has_minima(type) ? value + minima[place] : value;
    }
  }
}

// views: out [T, D], packed [V, D], ids [T]; ints: V, D, type. A row whose id is none of the V is zero.
void grouped_embedding(const Call& call, const Worker& worker) {
  static thread_local std::vector<float> values;
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  const int64_t num = call.ints[0], k = call.ints[1], type = call.ints[2];
  int64_t begin, end;
  worker.share(out.size[0], begin, end);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = data<int64_t>(ids)[row * ids.stride[0]];
    values.assign(k, 0.0f);
    if (id >= 0 && id < num)
      (is_int4(type) ? read_column<4> : read_column<8>)(packed.data + id / kColumns * block_bytes(type, k),
                                                        id % kColumns, k, type, values.data());
    for (int64_t i = 0; i < k; ++i)
      store_one(out.data + (row * out.stride[0] + i) * (out.type == F32 ? 4 : 2), out.type, values[i]);
  }
}

bool select_grouped_embedding(Call& call) {
  if (call.views.size() != 3 || call.ints.size() != 3 || !is_grouped(call.ints[2])) return false;
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  if (!is_float(out.type) || out.ndim != 2 || out.stride[1] != 1 || out.size[1] != call.ints[1]) return false;
  if (ids.type != I64 || ids.ndim != 1 || ids.size[0] != out.size[0] || !is_bytes(packed)) return false;
  if (call.ints[0] < 1 || call.ints[0] > packed.size[0] || call.ints[1] < 1) return false;
  if (packed.size[0] != packed_bytes(call.ints[2], call.ints[0], call.ints[1])) return false;
  call.kernel = grouped_embedding;
  call.parallel = out.size[0] * out.size[1] >= kParallel;
  return true;
}

const Op grouped_embedding_op{"grouped_embedding", select_grouped_embedding};

}  // namespace

void multiply_grouped(const Product& product, int64_t begin, int64_t end) {
  switch (product.type) {
    case INT4_MINIMA:
      return multiply_rounded<Int4MinimaBlock>(product, begin, end, kStep<4>);
    case INT8_MINIMA:
      return multiply_rounded<Int8MinimaBlock>(product, begin, end, kStep<8>);
    default:
      if (is_int4(product.type)) return multiply_rounded<Int4Block>(product, begin, end, kStep<4>);
      return multiply_rounded<Int8Block>(product, begin, end, kStep<8>);
  }
}

}  // namespace nextn
