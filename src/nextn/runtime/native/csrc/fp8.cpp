// Linear layers with weights in fp8 (e4m3), in groups of values of k that have a scale in each column.
//
// A matrix is blocks of 32 columns, each a run of groups of 32, 64 or 128 values of k. A group is a float for each column,
// 256 times its scale, then its codes, [2 of k][32 columns][2]. Weights are widened to bf16 or fp32, rounded for bf16 as if
// the checkpoint had been dequantized, and multiplied as such a matrix is: the results have the same bits.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "rows.h"

namespace nextn {

namespace {

constexpr int64_t kColumns = 32;         // of a block
constexpr int64_t kPair = 2 * kColumns;  // codes of two values of k
constexpr int64_t kScales = kColumns * int64_t(sizeof(float));
constexpr int64_t kManyRows = 32;  // more of them read widened weights from memory no slower than from caches
constexpr int64_t kEarly = 8192;   // bytes by which codes are prefetched
constexpr int64_t kFewBlocks = 2, kManyBlocks = 8;  // widened at once

// The value of a code, divided by 256: a half with the same bits in other places.
constexpr std::array<float, 256> table() {
  std::array<float, 256> out{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = float(exponent ? 8 + mantissa : mantissa) / 131072.0f;  // 2^-(9 + 8)
    for (int i = 1; i < exponent; ++i) value *= 2;
    out[code] = code & 128 ? -value : value;
  }
  return out;
}

#if defined(__AVX2__)
// As halves: the sign, the exponent, whose bias is larger by 8, and the mantissa.
inline __m256i halves_of(const uint8_t* codes) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xBFFF)));
}
#endif

inline Sixteen values_of(const uint8_t* codes) {
#if defined(__AVX512F__)
  return (Sixteen)_mm512_cvtph_ps(halves_of(codes));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m256i halves = halves_of(codes);
  return {(Sixteen::Half)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          (Sixteen::Half)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#else
  static constexpr std::array<float, 256> kValues = table();
  float values[kSixteen];
  for (int64_t i = 0; i < kSixteen; ++i) values[i] = kValues[codes[i]];
  return sixteen(values);
#endif
}

// The first `depth` values of k of a block in fp32, in the order of the codes: keep(k, place, sixteen) receives them.
template <typename Keep>
void widen(const char* block, int64_t group, int64_t depth, const Keep& keep) {
  for (int64_t first = 0; first < depth; first += group, block += kScales + group * kColumns) {
    alignas(64) float scales[kPair];
    for (int64_t i = 0; i < kPair; ++i) std::memcpy(scales + i, block + i / 2 * sizeof(float), sizeof(float));
    const auto* codes = reinterpret_cast<const uint8_t*>(block + kScales);
    for (int64_t k = first; k < std::min(first + group, depth); k += 2, codes += kPair)
      for (int64_t i = 0; i < kPair; i += kSixteen) keep(k, i, product(values_of(codes + i), sixteen(scales + i)));
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Sixteen halves as floats.
inline __m512 floats_of_halves(__m512i halves, int place) {
  return _mm512_cvtph_ps(place ? _mm512_extracti64x4_epi64(halves, 1) : _mm512_castsi512_si256(halves));
}

// The weights of a group as bf16, 32 at once, which are `half` of 64 codes.
struct ByScales {
  __m512 scales[4];

  explicit ByScales(const char* block) {
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    for (int i = 0; i < 4; ++i)
      scales[i] = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(i % 2 * 8)),
                                        _mm512_loadu_ps(block + i / 2 * 64));
  }

  __m512i weights(const char* codes, int half) const {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + half));
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(int16_t(0xBFFF)));
    const __m512 low = _mm512_mul_ps(floats_of_halves(halves, 0), scales[2 * half]);
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(floats_of_halves(halves, 1), scales[2 * half + 1]), low);
  }
};

// The same where all columns have one scale: as bf16 rounds, a mantissa times the scale does so with every exponent alike.
// The table has the codes below 8, which have no leading one, then the mantissas of all others.
struct ByTable {
  __m512i table;

  explicit ByTable(const char* block) {
    float scale;
    std::memcpy(&scale, block, sizeof scale);
    alignas(64) float values[kSixteen];
    alignas(64) uint16_t words[2 * kSixteen] = {};
    for (int i = 0; i < kSixteen; ++i) values[i] = float(i) / 131072.0f * scale;  // 2^-(9 + 8)
    put(words, sixteen(values));
    for (int i = 8; i < kSixteen; ++i) words[i] -= 1 << 7;  // the codes' own exponents are added, and these are 1
    table = _mm512_load_si512(words);
  }

  // Whether all scales are one, with which no weight is too large or small for its exponent to be changed alone.
  static bool fits(const char* block) {
    const __m512 first = _mm512_loadu_ps(block), other = _mm512_loadu_ps(block + 64);
    const __m512 scale = _mm512_broadcastss_ps(_mm512_castps512_ps128(first));
    const float one = _mm512_cvtss_f32(first);
    return one > 0x1p-100f && one < 0x1p100f && _mm512_cmpeq_ps_mask(first, scale) == 0xFFFF &&
           _mm512_cmpeq_ps_mask(other, scale) == 0xFFFF;
  }

  __m512i weights(const char* codes, int half) const {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + half));
    const __m512i signs_and_exponents =
        _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(int16_t(0x8780)));
    const __m512i mantissa = _mm512_or_si512(_mm512_and_si512(wide, _mm512_set1_epi16(7)), _mm512_set1_epi16(8));
    const __m512i place = _mm512_min_epu16(_mm512_and_si512(wide, _mm512_set1_epi16(127)), mantissa);
    return _mm512_add_epi16(_mm512_permutexvar_epi16(place, table), signs_and_exponents);
  }
};

// take(form, k, codes) for each pair of k of a block, with what widens the codes of its group.
template <typename Take>
inline __attribute__((always_inline)) void each_pair(const char* block, int64_t group, int64_t depth, Take&& take) {
  for (int64_t first = 0; first < depth; first += group, block += kScales + group * kColumns) {
    __builtin_prefetch(block + kEarly), __builtin_prefetch(block + kEarly + 64);
    const char* codes = block + kScales;
    const int64_t last = std::min(first + group, depth);
    if (ByTable::fits(block)) {
      const ByTable form(block);
      for (int64_t k = first; k < last; k += 2, codes += kPair) take(form, k, codes);
    } else {
      const ByScales form(block);
      for (int64_t k = first; k < last; k += 2, codes += kPair) take(form, k, codes);
    }
  }
}

// A block of columns as a packed matrix of bf16: blocks of kHalfColumns, [pair of k][column][2].
void widen_block(const char* block, int64_t group, int64_t depth, uint16_t* to) {
  constexpr int64_t kHalves = kColumns / kHalfColumns;  // blocks
  each_pair(block, group, depth, [=](const auto& form, int64_t k, const char* codes) {
    for (int half = 0; half < 2; ++half)
      _mm512_storeu_si512(to + k * kHalfColumns + half * (kHalves == 2 ? depth * kHalfColumns : kColumns),
                          form.weights(codes, half));
  });
}
#else
// A block of columns as a packed matrix of bf16: blocks of kHalfColumns, [pair of k][column][2].
void widen_block(const char* block, int64_t group, int64_t depth, uint16_t* to) {
  widen(block, group, depth, [=](int64_t k, int64_t i, Sixteen values) {
    const int64_t column = i / 2, within = column % kHalfColumns;
    put(to + (column - within) * depth + k * kHalfColumns + 2 * within, values);
  });
}
#endif

// And of fp32: [k][column].
void widen_block(const char* block, int64_t group, int64_t depth, float* to) {
  widen(block, group, depth, [=](int64_t k, int64_t i, Sixteen values) {
    float pairs[kSixteen];
    put(pairs, values);
    for (int64_t j = 0; j < kSixteen; ++j)
      if (k + j % 2 < depth) to[(k + j % 2) * kColumns + (i + j) / 2] = pairs[j];
  });
}

// A few blocks at a time are widened into scratch memory, which the kernels of bf16 and fp32 then read.
template <typename T, typename Multiply>
void multiply_widened(const Product& product, int64_t begin, int64_t end, int64_t depth, const Multiply& multiply) {
  static thread_local std::vector<T> room;
  const int64_t bytes = block_bytes(product.type, product.k), group = values_per_group(product.type);
  const int64_t together = product.num_rows > kManyRows ? kManyBlocks : kFewBlocks, values = kColumns * depth;
  constexpr int64_t kLine = 64 / int64_t(sizeof(T));
  if (int64_t(room.size()) < together * values + kLine) room.resize(together * values + kLine);
  T* to = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(room.data()) + 63) & ~uintptr_t(63));
  for (int64_t block = begin; block < end; block += together) {
    const int64_t count = std::min(together, end - block);
    for (int64_t i = 0; i < count; ++i)
      widen_block(product.packed + (block + i) * bytes, group, depth, to + i * values);
    Product part = product;
    part.packed = reinterpret_cast<const char*>(to), part.first += block * kColumns, part.n -= block * kColumns;
    multiply(part, std::min(count * kColumns, part.n));  // the last block may have fewer columns
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(__AMX_BF16__)
constexpr int kMostRows = rows_of(kHalfColumns);

// kCount rows times a block, of which each weight is widened in registers: sums [kCount][32]. The products are those of
// `Halves`, in the same order.
template <int kCount>
void sum_block(const Word* const* x, const char* block, int64_t group, int64_t depth, float* sums) {
  __m512 acc[kCount][2];
#pragma GCC unroll 24
  for (int i = 0; i < 2 * kCount; ++i) acc[i / 2][i % 2] = _mm512_setzero_ps();
  each_pair(block, group, depth, [&](const auto& form, int64_t k, const char* codes) __attribute__((always_inline)) {
    __builtin_prefetch(codes + kEarly);
    const auto low = (__m512bh)form.weights(codes, 0), high = (__m512bh)form.weights(codes, 1);
#pragma GCC unroll 12
    for (int row = 0; row < kCount; ++row) {
      const auto value = (__m512bh)_mm512_set1_epi32(std::bit_cast<int>(x[row][k / 2]));
      acc[row][0] = _mm512_dpbf16_ps(acc[row][0], low, value);
      acc[row][1] = _mm512_dpbf16_ps(acc[row][1], high, value);
    }
  });
#pragma GCC unroll 24
  for (int i = 0; i < 2 * kCount; ++i) _mm512_storeu_ps(sums + 16 * i, acc[i / 2][i % 2]);
}

using SumBlock = void (*)(const Word* const*, const char*, int64_t, int64_t, float*);

template <size_t... kIndex>
constexpr std::array<SumBlock, sizeof...(kIndex)> block_kernels(std::index_sequence<kIndex...>) {
  return {sum_block<int(kIndex) + 1>...};
}

void multiply_few_rows(const Product& product, int64_t begin, int64_t end, int64_t depth) {
  static constexpr auto kTimes = block_kernels(std::make_index_sequence<kMostRows>());
  static thread_local std::vector<Word> room;
  if (int64_t(room.size()) < product.num_rows * depth / 2) room.resize(product.num_rows * depth / 2);
  const Word* rows[kMostRows];
  for (int64_t i = 0; i < product.num_rows; ++i)
    rows[i] = Halves::row(product.in<uint16_t>(i), product.k, depth / 2, room.data() + i * depth / 2);
  const int64_t bytes = block_bytes(product.type, product.k), group = values_per_group(product.type);
  alignas(64) float sums[kMostRows * kColumns];
  for (int64_t block = begin; block < end; ++block) {
    kTimes[product.num_rows - 1](rows, product.packed + block * bytes, group, depth, sums);
    for (int64_t row = 0; row < product.num_rows; ++row)
      product.store(row, block * kColumns, kColumns, sums + row * kColumns);
  }
}
#endif

}  // namespace

void multiply_fp8(const Product& product, int64_t begin, int64_t end) {
  if (multiplied_as(product.type) == F32)
    return multiply_widened<float>(product, begin, end, product.k, [](const Product& part, int64_t columns) {
      multiply_f32(part, 0, pieces(columns, kPanelColumns));
    });
  const int64_t depth = pieces(product.k, kTileDepth) * kTileDepth;
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(__AMX_BF16__)
  if (product.num_rows <= kMostRows) return multiply_few_rows(product, begin, end, depth);
#endif
  multiply_widened<uint16_t>(product, begin, end, depth, [](const Product& part, int64_t columns) {
    multiply_bf16(part, 0, pieces(columns, kHalfColumns));
  });
}

}  // namespace nextn
