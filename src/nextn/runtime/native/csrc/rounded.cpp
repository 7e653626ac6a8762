// Rounding of activations to eight bits.
#include "rounded.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace nextn {

// The same operations as `round_rows` in quantization.py.
template <typename T>
float round_group(const T* from, int64_t count, int8_t* to) {
  const SixteenInts magnitude = SixteenInts{} + 0x7FFFFFFF;
  SixteenInts most{};  // bits of magnitudes are ordered as these are, NaN last
  by_sixteen(count, [&](auto load, auto) {
    const SixteenInts bits = bits_of(load(from)) & magnitude;
    most = chosen(bits > most, bits, most);
  });
  alignas(64) int32_t all[kSixteen];
  kept(all, most);
  const float largest = std::bit_cast<float>(*std::max_element(all, all + kSixteen));
  const float inverse = largest < 1e-30f ? 0.0f : float(kLargest) / largest;
  const float shift = 12582912.0f;  // rounds to a whole number, which the low bits then hold
  int64_t place = 0;
  by_sixteen(count, [&](auto load, auto) {
    const SixteenInts codes = bits_of(product(load(from), Sixteen{} + inverse) + (Sixteen{} + shift)) - bits_of(Sixteen{} + shift);
    const int64_t width = std::min(kSixteen, count - place);
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)codes);
    std::memcpy(to + place, &bytes, width);
#else
    kept(all, codes);
    for (int64_t i = 0; i < width; ++i) to[place + i] = int8_t(all[i]);
#endif
    place += width;
  });
  return largest / float(kLargest);
}

template float round_group(const float*, int64_t, int8_t*);
template float round_group(const uint16_t*, int64_t, int8_t*);

void RoundedRows::fill(const Product& product) {
  static thread_local std::vector<int8_t> row;
  const bool in_groups = is_grouped(product.type);
  weight_group = in_groups ? values_per_group(product.type) : kGroup;
  const int64_t multiple = in_groups ? weight_group : kTileDepth;
  num_rows = product.num_rows, batches = pieces(num_rows, in_groups ? kMostGroupedRows : kMostRows);
  depth = pieces(product.k, multiple) * multiple, groups = pieces(depth, kGroup);
  const int64_t num_totals = pieces(depth, weight_group);
  codes.resize(num_rows * depth), scales.resize(num_rows * groups), totals.resize(num_rows * num_totals);
  row.assign(num_totals * weight_group, int8_t(0));
  for (int64_t batch = 0; batch < batches; ++batch) {
    const int64_t begin = first(batch), end = first(batch + 1), count = end - begin;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t group = 0, k = 0; group < groups; ++group, k += kGroup) {
        const int64_t length = std::clamp<int64_t>(product.k - k, 0, kGroup);
        scales[i * groups + group] = product.x->type == F32 ? round_group(product.in<float>(i) + k, length, row.data() + k)
                                                            : round_group(product.in<uint16_t>(i) + k, length, row.data() + k);
      }
      for (int64_t group = 0; group < num_totals; ++group) {
        const int8_t* from = row.data() + group * weight_group;
        totals[i * num_totals + group] = std::accumulate(from, from + weight_group, int32_t(0));
      }
      int8_t* to = codes.data() + begin * depth + 4 * (i - begin);
      for (int64_t k = 0; k < depth; k += 4, to += 4 * count) std::memcpy(to, row.data() + k, 4);
    }
  }
}

}  // namespace nextn
