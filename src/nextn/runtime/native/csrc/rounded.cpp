// Rounding of activations to eight bits.
#include "rounded.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace nextn {

namespace {

// The low bytes of whole numbers.
void put_bytes(int8_t* to, SixteenInts values) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)values));
#else
  alignas(64) int32_t all[kSixteen];
  kept(all, values);
  for (int64_t i = 0; i < kSixteen; ++i) to[i] = int8_t(all[i]);
#endif
}

int32_t largest_of(SixteenInts values) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)values);
#else
  alignas(64) int32_t all[kSixteen];
  kept(all, values);
  return *std::max_element(all, all + kSixteen);
#endif
}

// The sum of `count` codes, a multiple of 16.
int32_t sum_of(const int8_t* codes, int64_t count) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  if (count % 32) return std::accumulate(codes, codes + count, int32_t(0));
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; i += 32)
    sums =
        _mm256_dpbusd_epi32(sums, _mm256_set1_epi8(1), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
#else
  return std::accumulate(codes, codes + count, int32_t(0));
#endif
}

// At least this many elements, which are not set.
template <typename T>
T* room(std::vector<T>& values, int64_t count) {
  if (int64_t(values.size()) < count) values.resize(count);
  return values.data();
}

}  // namespace

// The same operations as `round_rows` in quantization.py.
template <typename T>
float round_group(const T* from, int64_t count, int8_t* to) {
  const SixteenInts magnitude = SixteenInts{} + 0x7FFFFFFF;
  SixteenInts most{};  // bits of magnitudes are ordered as these are, NaN last
  by_sixteen(count, [&](auto load, auto) {
    const SixteenInts bits = bits_of(load(from)) & magnitude;
    most = chosen(bits > most, bits, most);
  });
  const float largest = std::bit_cast<float>(largest_of(most));
  const Sixteen inverse = Sixteen{} + (largest < 1e-30f ? 0.0f : float(kLargest) / largest);
  const Sixteen shift = Sixteen{} + 12582912.0f;  // rounds to a whole number, which the low bits then hold
  const auto codes_of = [&](Sixteen values) { return bits_of(product(values, inverse) + shift) - bits_of(shift); };
  int64_t place = 0;
  for (; place + kSixteen <= count; place += kSixteen) put_bytes(to + place, codes_of(sixteen(from + place)));
  if (place < count) {
    int8_t rest[kSixteen];
    put_bytes(rest, codes_of(sixteen(from + place, count - place)));
    std::memcpy(to + place, rest, count - place);
  }
  return largest / float(kLargest);
}

template float round_group(const float*, int64_t, int8_t*);
template float round_group(const uint16_t*, int64_t, int8_t*);

void RoundedRows::fill(const Product& product) {
  static thread_local std::vector<int8_t> row;
  const bool in_pairs = is_kquant(product.type), in_groups = is_grouped(product.type) || in_pairs;
  weight_group = in_groups ? values_per_group(product.type) * (in_pairs ? 2 : 1) : kGroup;
  const int64_t multiple = in_pairs ? kSuperblock : in_groups ? weight_group : kTileDepth;
  num_rows = product.num_rows, batches = pieces(num_rows, in_groups ? kMostGroupedRows : kMostRows);
  depth = pieces(product.k, multiple) * multiple, groups = pieces(depth, kGroup);
  const int64_t num_totals = pieces(depth, weight_group);
  room(codes, num_rows * depth), room(scales, num_rows * groups), room(totals, num_rows * num_totals);
  const int64_t padded = num_totals * weight_group;
  int8_t* all = room(row, padded);
  std::fill(all + product.k, all + padded, int8_t(0));
  for (int64_t batch = 0; batch < batches; ++batch) {
    const int64_t begin = first(batch), end = first(batch + 1), count = end - begin;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t group = 0, k = 0; group < groups; ++group, k += kGroup) {
        const int64_t length = std::clamp<int64_t>(product.k - k, 0, kGroup);
        scales[i * groups + group] = product.x->type == F32 ? round_group(product.in<float>(i) + k, length, all + k)
                                                            : round_group(product.in<uint16_t>(i) + k, length, all + k);
      }
      for (int64_t group = 0; group < num_totals; ++group) {
        const int8_t* begins = all + group * weight_group;
        const auto half = [=](int64_t place) { return sum_of(begins + place * weight_group / 2, weight_group / 2); };
        totals[i * num_totals + group] = in_pairs ? (half(0) & 0xFFFF) | half(1) << 16 : sum_of(begins, weight_group);
      }
      int8_t* to = codes.data() + begin * depth + 4 * (i - begin);
      for (int64_t k = 0; k < depth; k += 4, to += 4 * count) std::memcpy(to, all + k, 4);
    }
  }
}

}  // namespace nextn
