// Rows of activations rounded to eight bits, and what the kernels that multiply them with weights of few bits share.
//
// Activations are rounded to int8 in groups of kGroup values of k, each with its own scale. Weights are integers, too,
// so products are sums of integers: exact in any order, hence the same bits in every kernel and beside any other row.
#pragma once

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "product.h"

namespace nextn {

constexpr int64_t kGroup = 128;
constexpr int64_t kLargest = 127;
constexpr int64_t kColumns = 32;  // of a block

// Bytes by which a block that is read once is prefetched, and the cache that it is prefetched into: the first-level
// cache (3), or on Intel's processors, where few lines can be on their way into that, the second-level one (2).
#if defined(__AVX512FP16__)
constexpr int64_t kAhead = 16384;
constexpr int kInto = 2;
#else
constexpr int64_t kAhead = 8192;
constexpr int kInto = 3;
#endif

// Rows that a kernel takes at once: with VNNI, their sums fit the registers, beside the halves of bytes of four bits.
#if defined(__AVX512VNNI__)
constexpr int kMostRows = 12, kMostGroupedRows = 10;
#else
constexpr int kMostRows = 8, kMostGroupedRows = 8;
#endif

// Rows of x in eight bits, in as few batches of similar size as the kernels allow. A value is code * scale of its group.
struct RoundedRows {
  std::vector<int8_t> codes;    // of each batch [depth / 4][rows][4], zeros beyond k
  std::vector<float> scales;    // [num_rows, groups]
  std::vector<int32_t> totals;  // [num_rows, depth / weight_group]: sums of the codes; of K-quants, see `fill`
  int64_t num_rows = 0, depth = 0, groups = 0, batches = 0;
  int64_t weight_group = kGroup;  // values of k with a common zero of the weights

  // The rows of a product. For K-quants, whose groups have minima, totals are of pairs of groups: each has the sums of the
  // first group in its lower half and of the second one in its upper half.
  void fill(const Product& product);

  int64_t first(int64_t batch) const { return num_rows * batch / batches; }
};

// A batch of rows for a kernel: codes, and of each row scales and totals per group.
struct Rows {
  const int8_t* codes;
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

#if defined(__AVX512VNNI__)
// sum += the products of four bytes each, those of `weights` without a sign. Through the intrinsic, GCC keeps each sum
// in two registers, and from nine rows on there are not so many.
inline void add_products(__m512i& sum, __m512i weights, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
}
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

// All rows times the blocks [begin, end), of which a step of 4 of k is `step` bytes; finish(block, sums of a row) is
// called before the sums are stored.
template <template <int> typename Kernel, typename Finish>
void multiply_rounded(const Product& product, int64_t begin, int64_t end, int64_t step, Finish&& finish) {
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
      for (int64_t row = 0; row < count; ++row) {
        finish(block, sums + row * kColumns);
        product.store(first + row, block * kColumns, kColumns, sums + row * kColumns);
      }
    }
  }
}

}  // namespace nextn
