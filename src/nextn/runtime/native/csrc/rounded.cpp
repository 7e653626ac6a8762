// Rounding of activations to eight and to sixteen bits.
#include "rounded.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

namespace nextn {

namespace {

// Whole numbers as codes.
template <typename Code>
void put_codes(Code* to, SixteenInts values) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Code) == 1)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)values));
  else
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)values));
#else
  alignas(64) int32_t all[kSixteen];
  kept(all, values);
  for (int64_t i = 0; i < kSixteen; ++i) to[i] = Code(all[i]);
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

// At least this many elements, which are not set.
template <typename T>
T* room(std::vector<T>& values, int64_t count) {
  if (int64_t(values.size()) < count) values.resize(count);
  return values.data();
}

}  // namespace

// The same operations as `round_rows` in quantization.py.
template <typename T, typename Code>
float round_group(const T* from, int64_t count, Code* to) {
  constexpr float kMost = std::numeric_limits<Code>::max();
  const SixteenInts magnitude = SixteenInts{} + 0x7FFFFFFF;
  SixteenInts most{};  // bits of magnitudes are ordered as these are, NaN last
  by_sixteen(count, [&](auto load, auto) {
    const SixteenInts bits = bits_of(load(from)) & magnitude;
    most = chosen(bits > most, bits, most);
  });
  const float largest = std::bit_cast<float>(largest_of(most));
  const Sixteen inverse = Sixteen{} + (largest < 1e-30f ? 0.0f : kMost / largest);
  const Sixteen shift = Sixteen{} + 12582912.0f;  // rounds to a whole number, which the low bits then hold
  const auto codes_of = [&](Sixteen values) { return bits_of(product(values, inverse) + shift) - bits_of(shift); };
  int64_t place = 0;
  for (; place + kSixteen <= count; place += kSixteen) put_codes(to + place, codes_of(sixteen(from + place)));
  if (place < count) {
    Code rest[kSixteen];
    put_codes(rest, codes_of(sixteen(from + place, count - place)));
    std::copy_n(rest, count - place, to + place);
  }
  return largest / kMost;
}

template float round_group(const float*, int64_t, int8_t*);
template float round_group(const uint16_t*, int64_t, int8_t*);

void RoundedRows::fill(const Product& product) {
  static thread_local std::vector<int16_t> row;
  weight_group = values_per_group(product.type);
  const int64_t multiple = is_kquant(product.type) ? kSuperblock : weight_group;
  num_rows = product.num_rows, batches = pieces(num_rows, kMostRows);
  depth = pieces(product.k, multiple) * multiple, groups = pieces(depth, kGroup);
  const int64_t num_totals = depth / weight_group;
  room(codes, num_rows * depth), room(scales, num_rows * groups), room(totals, num_rows * num_totals);
  int16_t* all = room(row, depth);
  std::fill(all + product.k, all + depth, int16_t(0));
  for (int64_t batch = 0; batch < batches; ++batch) {
    const int64_t begin = first(batch), end = first(batch + 1), count = end - begin;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t group = 0, k = 0; group < groups; ++group, k += kGroup) {
        const int64_t length = std::clamp<int64_t>(product.k - k, 0, kGroup);
        scales[i * groups + group] = product.x->type == F32 ? round_group(product.in<float>(i) + k, length, all + k)
                                                            : round_group(product.in<uint16_t>(i) + k, length, all + k);
      }
      for (int64_t group = 0; group < num_totals; ++group) {
        const int16_t* of_group = all + group * weight_group;
        totals[i * num_totals + group] = std::accumulate(of_group, of_group + weight_group, int32_t(0));
      }
      int16_t* to = codes.data() + begin * depth + 4 * (i - begin);
      for (int64_t k = 0; k < depth; k += 4, to += 4 * count)
        for (int place = 0; place < 4; ++place) to[place] = all[k + kPlaces[place]];
    }
  }
}

}  // namespace nextn
