// Rows of activations rounded to sixteen bits, and what the kernels that multiply them with weights of few bits share.
//
// Activations are rounded to int16 in groups of kGroup values of k, each with its own scale. Weights are integers of up to
// eight bits, so products of a group are sums of integers below 2^31: exact in any order, hence the same bits in every
// kernel and beside any other row. Eight bits of activations cost as much where there is no VNNI, and ten times the error.
#pragma once

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "product.h"

namespace nextn {

constexpr int64_t kGroup = 128;
constexpr int64_t kColumns = 32;         // of a block
constexpr int kPlaces[] = {0, 2, 1, 3};  // of four values of k among their codes: pairs are multiplied at once

// Bytes by which a block that is read once is prefetched, and the cache that it is prefetched into: the first-level
// cache (3), or on Intel's processors, where few lines can be on their way into that, the second-level one (2).
#if defined(__AVX512FP16__)
constexpr int64_t kAhead = 16384;
constexpr int kInto = 2;
#else
constexpr int64_t kAhead = 8192;
constexpr int kInto = 3;
#endif

// Rows that a kernel takes at once: with VNNI, their sums fit the registers, beside the weights.
#if defined(__AVX512VNNI__)
constexpr int kMostRows = 10;
#else
constexpr int kMostRows = 8;
#endif

// Rows of x in sixteen bits, in as few batches of similar size as the kernels allow. A value is code * scale of its group.
struct RoundedRows {
  std::vector<int16_t> codes;   // of each batch [depth / 4][rows][4] at `kPlaces`, zeros beyond k
  std::vector<float> scales;    // [num_rows, groups]
  std::vector<int32_t> totals;  // [num_rows, depth / weight_group]: sums of the codes
  int64_t num_rows = 0, depth = 0, groups = 0, batches = 0;
  int64_t weight_group = kGroup;  // values of k with a common zero, or minimum, of the weights

  void fill(const Product& product);

  int64_t first(int64_t batch) const { return num_rows * batch / batches; }
};

// A batch of rows for a kernel: codes, and of each row scales and totals per group.
struct Rows {
  const int16_t* codes;
  const float* scales;
  const int32_t* totals;
  int64_t depth, groups, totals_of_row;
};

// What is prefetched: from `next` on, `pace` bytes a step: of k, or a line of the weights.
struct Early {
  const char* next;
  int64_t pace;

  void fetch() {
    fetch(0);
    if (pace > 64) fetch(64);
    next += pace;
  }

  void fetch(int64_t place) const { __builtin_prefetch(next + place, 0, kInto); }

  Early after(int64_t steps) const { return {next + steps * pace, pace}; }
};

inline Sixteen floats(const int32_t* from) {
#if defined(__AVX512F__)
  return (Sixteen)_mm512_cvtepi32_ps(_mm512_loadu_si512(from));
#else
  alignas(64) float wide[kSixteen];
  for (int64_t i = 0; i < kSixteen; ++i) wide[i] = float(from[i]);
  return sixteen(wide);
#endif
}

// The bytes of four values of k as two pairs of 16 bits: the first and third, the second and fourth.
#if defined(__AVX512VNNI__)
struct Pairs {
  __m512i even, odd;

  explicit Pairs(__m512i bytes)
      : even(_mm512_and_si512(bytes, _mm512_set1_epi16(0xFF))), odd(_mm512_srli_epi16(bytes, 8)) {}
};

// sum += the products of two pairs. Through the intrinsic, GCC keeps each sum in two registers, and from nine rows on there
// are not so many; as an operand of the instruction itself, an element of an array stays in memory.
inline void add_products(__m512i& sum, __m512i weights, __m512i x) {
  __m512i in_register = sum;
  asm("vpdpwssd %2, %1, %0" : "+v"(in_register) : "v"(weights), "v"(x));
  sum = in_register;
}

inline __m512i broadcast(const int16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return _mm512_set1_epi32(both);
}

// The integer sums of some rows and 32 columns, in registers, which needs loops that are unrolled.
template <int kCount>
struct Sums {
  static constexpr int kApart = kCount <= 4 ? 2 : 1;  // a sum waits for the one before it
  __m512i of[kApart][2 * kCount];

  // start(row, half): what they begin with, of 16 columns.
  template <typename Start>
  explicit Sums(Start&& start) {
#pragma GCC unroll 32
    for (int i = 0; i < 2 * kCount; ++i) {
      of[0][i] = start(i / 2, i % 2);
      if (kApart == 2) of[kApart - 1][i] = _mm512_setzero_si512();
    }
  }

  // Adds the products of four values of k of all rows with the bytes of the first and of the last 16 columns.
  void add(const int16_t* codes, __m512i first, __m512i last) {
    const Pairs low(first), high(last);
#pragma GCC unroll 16
    for (int row = 0; row < kCount; ++row) {
      const __m512i even = broadcast(codes + 4 * row), odd = broadcast(codes + 4 * row + 2);
      add_products(of[0][2 * row], low.even, even);
      add_products(of[0][2 * row + 1], high.even, even);
      add_products(of[kApart - 1][2 * row], low.odd, odd);
      add_products(of[kApart - 1][2 * row + 1], high.odd, odd);
    }
  }

  void keep(int32_t* sums) {
#pragma GCC unroll 32
    for (int i = 0; i < 2 * kCount; ++i) {
      if (kApart == 2) of[0][i] = _mm512_add_epi32(of[0][i], of[kApart - 1][i]);
      _mm512_store_si512(sums + 16 * i, of[0][i]);
    }
  }
};
#elif defined(__AVX2__)
struct Pairs {
  __m256i even, odd;

  explicit Pairs(__m256i bytes)
      : even(_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF))), odd(_mm256_srli_epi16(bytes, 8)) {}
};

inline __m256i products(__m256i weights, const int16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
  return _mm256_madd_epi16(weights, _mm256_set1_epi32(both));
}

// The integer sums of some rows and eight columns, in registers.
template <int kCount>
struct Sums {
  __m256i of[kCount];

  // Adds the products of four values of k of all rows with their bytes of eight columns.
  void add(const int16_t* codes, __m256i bytes) {
    const Pairs weights(bytes);
#pragma GCC unroll 8
    for (int row = 0; row < kCount; ++row) {
      of[row] = _mm256_add_epi32(of[row], products(weights.even, codes + 4 * row));
      of[row] = _mm256_add_epi32(of[row], products(weights.odd, codes + 4 * row + 2));
    }
  }

  void keep(int32_t* sums) const {
    for (int row = 0; row < kCount; ++row)
      _mm256_store_si256(reinterpret_cast<__m256i*>(sums + row * kColumns), of[row]);
  }
};

inline __m256i bytes_at(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
#endif

// The sums of some rows and one block: [rows][32].
using Times = void (*)(const Rows&, const char*, Early, float*);

// kernels[n - 1] is Kernel<n>::run.
template <template <int> typename Kernel, size_t... kIndex>
constexpr std::array<Times, sizeof...(kIndex)> counted(std::index_sequence<kIndex...>) {
  return {Kernel<int(kIndex) + 1>::run...};
}

template <template <int> typename Kernel>
constexpr auto kTimes = counted<Kernel>(std::make_index_sequence<Kernel<1>::kMost>());

// All rows times the blocks [begin, end), of which a step of 4 of k is `step` bytes.
template <template <int> typename Kernel>
void multiply_rounded(const Product& product, int64_t begin, int64_t end, int64_t step) {
  const RoundedRows& x = *product.rounded_rows;
  const int64_t bytes = block_bytes(product.type, product.k), totals = pieces(x.depth, x.weight_group);
  alignas(64) float sums[kMostRows * kColumns];
  for (int64_t block = begin; block < end; ++block) {
    const char* weights = product.packed + block * bytes;
    for (int64_t batch = 0; batch < x.batches; ++batch) {
      const int64_t first = x.first(batch), count = x.first(batch + 1) - first;
      const Rows rows{x.codes.data() + first * x.depth,
                      x.scales.data() + first * x.groups,
                      x.totals.data() + first * totals,
                      x.depth,
                      x.groups,
                      totals};
      // Of several batches, each prefetches its share of the next block, so that memory does not idle.
      const Early early = x.batches == 1 ? Early{weights + kAhead, step}
                                         : Early{weights + bytes + bytes * batch / x.batches, pieces(step, x.batches)};
      kTimes<Kernel>[count - 1](rows, weights, early, sums);
      for (int64_t row = 0; row < count; ++row)
        product.store(first + row, block * kColumns, kColumns, sums + row * kColumns);
    }
  }
}

}  // namespace nextn
