// Linear layers with weights of eight bits, and embeddings of such weights.
#include "int8.h"

#include "strided.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

namespace nextn {

namespace {

constexpr int64_t kColumns = kInt8Columns;
constexpr int64_t kStep = 4 * kColumns;  // bytes of four values of k
constexpr int64_t kAhead = 8192;         // bytes by which a block that is read once is prefetched

#if defined(__AVX512VNNI__)
constexpr int kMostRows = 12;
#else
constexpr int kMostRows = 8;
#endif

// Rounds one group of values; returns its scale. The same operations as `round_rows` in quantization.py.
template <typename T>
float round_group(const T* from, int64_t count, int8_t* to, int32_t& total) {
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
  SixteenInts sums{};
  int64_t place = 0;
  by_sixteen(count, [&](auto load, auto) {
    const SixteenInts codes = bits_of(product(load(from), Sixteen{} + inverse) + (Sixteen{} + shift)) - bits_of(Sixteen{} + shift);
    const int64_t width = std::min(kSixteen, count - place);
    sums = sums + codes;
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)codes);
    std::memcpy(to + place, &bytes, width);
#else
    kept(all, codes);
    for (int64_t i = 0; i < width; ++i) to[place + i] = int8_t(all[i]);
#endif
    place += width;
  });
  kept(all, sums);
  total = 0;
  for (int32_t each : all) total += each;
  return largest / float(kLargest);
}

Sixteen floats(const int32_t* from) {
#if defined(__AVX512F__)
  return (Sixteen)_mm512_cvtepi32_ps(_mm512_loadu_si512(from));
#else
  alignas(64) float wide[kSixteen];
  for (int64_t i = 0; i < kSixteen; ++i) wide[i] = float(from[i]);
  return sixteen(wide);
#endif
}

// A batch of rows for a kernel: codes, and of each row scales and zeros per group.
struct Rows {
  const int8_t* codes;
  const float* scales;
  const int32_t* zeros;
  int64_t depth, groups;
};

// What is prefetched: from `next` on, `pace` bytes a step of k.
struct Early {
  const char* next;
  int64_t pace;

  void fetch() {
    __builtin_prefetch(next);
    if (pace > 64) __builtin_prefetch(next + 64);
    next += pace;
  }
};

// The integer sums of one group, values [begin, end) of k: sums [kCount][32].
#if defined(__AVX512VNNI__)
// sum += the products of four bytes each, those of `weights` without a sign. Through the intrinsic, GCC keeps each sum
// in two registers, and from nine rows on there are not so many.
inline void add_products(__m512i& sum, __m512i weights, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
}

template <int kCount>
void sum_group(const Rows& x, int64_t group, int64_t begin, int64_t end, const char* weights, Early early, int32_t* sums) {
  constexpr int kApart = kCount <= 2 ? 2 : 1;  // a sum waits for the one before it
  __m512i acc[kApart][2 * kCount];  // in registers, which needs loops that are unrolled
#pragma GCC unroll 32
  for (int i = 0; i < 2 * kCount; ++i) {
    acc[0][i] = _mm512_set1_epi32(x.zeros[i / 2 * x.groups + group]);
#pragma GCC unroll 4
    for (int part = 1; part < kApart; ++part) acc[part][i] = _mm512_setzero_si512();
  }
  const int8_t* codes = x.codes + begin * kCount;
  for (int64_t k = begin; k < end; k += 4 * kApart)
#pragma GCC unroll 4
    for (int part = 0; part < kApart; ++part, weights += kStep, codes += 4 * kCount) {
      early.fetch();
      const __m512i low = _mm512_loadu_si512(weights), high = _mm512_loadu_si512(weights + 64);
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
void sum_group(const Rows& x, int64_t, int64_t begin, int64_t end, const char* weights, Early early, int32_t* sums) {
  const __m256i ones = _mm256_set1_epi16(1), zero = _mm256_set1_epi8(char(kInt8Zero));
  for (int64_t column = 0; column < kColumns; column += 8) {
    __m256i acc[kCount];
    for (auto& each : acc) each = _mm256_setzero_si256();
    const char* at = weights + 4 * column;
    for (int64_t k = begin; k < end; k += 4, at += kStep) {
      if (column == 0) early.fetch();
      // Products of bytes are of one with a sign and one without, and two of them must fit 16 bits: |w| and sign(w) x.
      const __m256i w = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), zero);
      const __m256i size = _mm256_abs_epi8(w);
      for (int row = 0; row < kCount; ++row) {
        int32_t four;
        std::memcpy(&four, x.codes + k * kCount + 4 * row, sizeof four);
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(four), w));
        acc[row] = _mm256_add_epi32(acc[row], _mm256_madd_epi16(pairs, ones));
      }
    }
    for (int row = 0; row < kCount; ++row)
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + row * kColumns + column), acc[row]);
  }
}
#else
template <int kCount>
void sum_group(const Rows& x, int64_t, int64_t begin, int64_t end, const char* weights, Early early, int32_t* sums) {
  std::fill_n(sums, kCount * kColumns, 0);
  for (int64_t k = begin; k < end; k += 4, weights += kStep) {
    early.fetch();
    const auto* four = reinterpret_cast<const uint8_t*>(weights);
    for (int row = 0; row < kCount; ++row) {
      const int8_t* value = x.codes + k * kCount + 4 * row;
      for (int64_t column = 0; column < kColumns; ++column)
        for (int i = 0; i < 4; ++i)
          sums[row * kColumns + column] += (int32_t(four[4 * column + i]) - int32_t(kInt8Zero)) * value[i];
    }
  }
}
#endif

// sums [kCount][32] += one group: its integer sums times the scales of the rows.
template <int kCount>
void add_group(const Rows& x, int64_t group, int64_t begin, int64_t end, const char* weights, Early early, float* sums) {
  alignas(64) int32_t totals[kCount * kColumns];
  sum_group<kCount>(x, group, begin, end, weights, early, totals);
  for (int row = 0; row < kCount; ++row) {
    const Sixteen scale = Sixteen{} + x.scales[row * x.groups + group];
    for (int64_t j = row * kColumns; j < (row + 1) * kColumns; j += kSixteen)
      put(sums + j, fused(floats(totals + j), scale, sixteen(sums + j)));
  }
}

// kCount rows times one block: sums [kCount][32], without the scales of the weights.
template <int kCount>
void block_times(const Rows& x, const char* weights, Early early, float* sums) {
  std::fill_n(sums, kCount * kColumns, 0.0f);
  for (int64_t group = 0; group < x.groups; ++group) {
    const int64_t begin = group * kGroup, end = std::min(begin + kGroup, x.depth);
    add_group<kCount>(x, group, begin, end, weights + begin * kColumns, {early.next + begin / 4 * early.pace, early.pace}, sums);
  }
}

using Times = void (*)(const Rows&, const char*, Early, float*);

template <size_t... kIndex>
constexpr std::array<Times, sizeof...(kIndex)> counted(std::index_sequence<kIndex...>) {
  return {block_times<int(kIndex) + 1>...};
}

constexpr auto kTimes = counted(std::make_index_sequence<kMostRows>());

// views: out [T, D], packed [V, D], ids [T]; ints: V, D. A row whose id is none of the V is zero.
void int8_embedding(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  const int64_t num = call.ints[0], k = call.ints[1], bytes = block_bytes(INT8, k);
  const auto* scales = reinterpret_cast<const float*>(packed.data + pieces(num, kColumns) * bytes);
  int64_t begin, end;
  worker.share(out.size[0], begin, end);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = data<int64_t>(ids)[row * ids.stride[0]];
    const bool exists = id >= 0 && id < num;
    const auto* from = reinterpret_cast<const uint8_t*>(packed.data + (exists ? id / kColumns * bytes : 0)) + id % kColumns * 4;
    for (int64_t i = 0; i < k; ++i) {
      const float value =
          exists ? float(int32_t(from[i / 4 * kStep + i % 4]) - int32_t(kInt8Zero)) * scales[id] : 0.0f;
      store_one(out.data + (row * out.stride[0] + i) * (out.type == F32 ? 4 : 2), out.type, value);
    }
  }
}

bool select_int8_embedding(Call& call) {
  if (call.views.size() != 3 || call.ints.size() != 2) return false;
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  if (!is_float(out.type) || out.ndim != 2 || out.stride[1] != 1 || out.size[1] != call.ints[1]) return false;
  if (ids.type != I64 || ids.ndim != 1 || ids.size[0] != out.size[0] || !is_bytes(packed)) return false;
  if (call.ints[0] < 1 || call.ints[1] < 1 || packed.size[0] != packed_bytes(INT8, call.ints[0], call.ints[1])) return false;
  call.kernel = int8_embedding;
  call.parallel = out.size[0] * out.size[1] >= kParallel;
  return true;
}

const Op int8_embedding_op{"int8_embedding", select_int8_embedding};

}  // namespace

void RoundedRows::fill(const Product& product) {
  static thread_local std::vector<int8_t> row;
  num_rows = product.num_rows, batches = pieces(num_rows, kMostRows);
  depth = pieces(product.k, kTileDepth) * kTileDepth, groups = pieces(depth, kGroup);
  codes.resize(num_rows * depth), scales.resize(num_rows * groups), zeros.resize(num_rows * groups);
  row.assign(depth, int8_t(0));
  for (int64_t batch = 0; batch < batches; ++batch) {
    const int64_t begin = first(batch), end = first(batch + 1), count = end - begin;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t group = 0, k = 0; group < groups; ++group, k += kGroup) {
        const int64_t length = std::clamp<int64_t>(product.k - k, 0, kGroup), at = i * groups + group;
        int32_t total;
        scales[at] = product.x->type == F32 ? round_group(product.in<float>(i) + k, length, row.data() + k, total)
                                            : round_group(product.in<uint16_t>(i) + k, length, row.data() + k, total);
        zeros[at] = -int32_t(kInt8Zero) * total;
      }
      int8_t* to = codes.data() + begin * depth + 4 * (i - begin);
      for (int64_t k = 0; k < depth; k += 4, to += 4 * count) std::memcpy(to, row.data() + k, 4);
    }
  }
}

void multiply_int8(const Product& product, int64_t begin, int64_t end) {
  const RoundedRows& x = *product.int8_rows;
  const int64_t bytes = block_bytes(INT8, product.k);
  alignas(64) float sums[kMostRows * kColumns];
  for (int64_t block = begin; block < end; ++block) {
    const char* weights = product.packed + block * bytes;
    for (int64_t batch = 0; batch < x.batches; ++batch) {
      const int64_t first = x.first(batch), count = x.first(batch + 1) - first;
      const Rows rows{x.codes.data() + first * x.depth, x.scales.data() + first * x.groups,
                      x.zeros.data() + first * x.groups, x.depth, x.groups};
      // Of several batches, each prefetches its share of the next block, so that memory does not idle.
      const Early early = x.batches == 1 ? Early{weights + kAhead, kStep}
                                         : Early{weights + bytes + bytes * batch / x.batches, pieces(kStep, x.batches)};
      kTimes[count - 1](rows, weights, early, sums);
      for (int64_t row = 0; row < count; ++row) {
        float* at = sums + row * kColumns;
        for (int64_t j = 0; j < kColumns; j += kSixteen)
          put(at + j, sixteen(at + j) * sixteen(product.scales + block * kColumns + j));
        product.store(first + row, block * kColumns, kColumns, at);
      }
    }
  }
}

}  // namespace nextn
