// Linear layers with weights of eight bits, and embeddings of such weights. A matrix is blocks of 32 columns, each a run
// of [4 of k][32 columns][4], then a float for each column, its scale. A weight is (byte - kInt8Zero) * scale.
#include <algorithm>

#include "rounded.h"
#include "strided.h"

namespace nextn {

namespace {

constexpr int64_t kStep = 4 * kColumns;  // bytes of four values of k

// The integer sums of one group, values [begin, end) of k: sums [kCount][32].
#if defined(__AVX512VNNI__)
template <int kCount>
void sum_group(const Rows& x, int64_t group, int64_t begin, int64_t end, const char* weights, Early early,
               int32_t* sums) {
  constexpr int kApart = kCount <= 2 ? 2 : 1;  // a sum waits for the one before it
  __m512i acc[kApart][2 * kCount];             // in registers, which needs loops that are unrolled
#pragma GCC unroll 32
  for (int i = 0; i < 2 * kCount; ++i) {
    acc[0][i] = _mm512_set1_epi32(-int32_t(kInt8Zero) * x.totals[i / 2 * x.totals_of_row + group]);
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
void add_group(const Rows& x, int64_t group, int64_t begin, int64_t end, const char* weights, Early early,
               float* sums) {
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
struct Int8Block {
  static constexpr int kMost = kMostRows;

  static void run(const Rows& x, const char* weights, Early early, float* sums) {
    std::fill_n(sums, kCount * kColumns, 0.0f);
    for (int64_t group = 0; group < x.groups; ++group) {
      const int64_t begin = group * kGroup, end = std::min(begin + kGroup, x.depth);
      add_group<kCount>(x, group, begin, end, weights + begin * kColumns, early.after(begin / 4), sums);
    }
  }
};

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
    const auto* from =
        reinterpret_cast<const uint8_t*>(packed.data + (exists ? id / kColumns * bytes : 0)) + id % kColumns * 4;
    for (int64_t i = 0; i < k; ++i) {
      const float value = exists ? float(int32_t(from[i / 4 * kStep + i % 4]) - int32_t(kInt8Zero)) * scales[id] : 0.0f;
      store_one(out.data + (row * out.stride[0] + i) * (out.type == F32 ? 4 : 2), out.type, value);
    }
  }
}

bool select_int8_embedding(Call& call) {
  if (call.views.size() != 3 || call.ints.size() != 2) return false;
  const View &out = call.views[0], &packed = call.views[1], &ids = call.views[2];
  if (!is_float(out.type) || out.ndim != 2 || out.stride[1] != 1 || out.size[1] != call.ints[1]) return false;
  if (ids.type != I64 || ids.ndim != 1 || ids.size[0] != out.size[0] || !is_bytes(packed)) return false;
  if (call.ints[0] < 1 || call.ints[0] > packed.size[0] || call.ints[1] < 1 ||
      packed.size[0] != packed_bytes(INT8, call.ints[0], call.ints[1]))
    return false;
  call.kernel = int8_embedding;
  call.parallel = out.size[0] * out.size[1] >= kParallel;
  return true;
}

const Op int8_embedding_op{"int8_embedding", select_int8_embedding};

}  // namespace

void multiply_int8(const Product& product, int64_t begin, int64_t end) {
  multiply_rounded<Int8Block>(product, begin, end, kStep, [&](int64_t block, float* sums) {
    for (int64_t j = 0; j < kColumns; j += kSixteen)
      put(sums + j, sixteen(sums + j) * sixteen(product.scales + block * kColumns + j));
  });
}

}  // namespace nextn
