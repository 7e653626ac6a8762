// Products on vector registers: fp32, and bf16 where the machine has no tiles. One pass over k for each row, in order.
#include <array>
#include <utility>
#include <vector>

#include "product.h"

namespace nextn {

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRows = 8;  // rows whose sums fit the registers
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRows = 3;
#else
constexpr int kLanes = 4;
constexpr int kRows = 2;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// Adds weights [32] of one k, times x[r][k], to the sums of each row.
template <int kCount>
void panel(const float* const* x, const char* weights, int64_t depth, float* sums) {
  constexpr int kVectors = kPanelColumns / kLanes;
  Floats acc[kCount][kVectors] = {};
  const Floats* w = reinterpret_cast<const Floats*>(weights);
  for (int64_t k = 0; k < depth; ++k, w += kVectors) {
    __builtin_prefetch(w + 16 * kVectors);
    for (int row = 0; row < kCount; ++row)
      for (int v = 0; v < kVectors; ++v) acc[row][v] += x[row][k] * w[v];
  }
  for (int row = 0; row < kCount; ++row)
    for (int v = 0; v < kVectors; ++v) reinterpret_cast<Floats*>(sums + row * kPanelColumns)[v] = acc[row][v];
}

#if !defined(__AMX_BF16__)
// A pair of k is one word: the even one is its lower half.
template <int kCount>
void block(const float* const* x, const char* weights, int64_t depth, float* sums) {
  constexpr int kVectors = kTileColumns / kLanes;
  Floats acc[kCount][kVectors] = {};
  const Words* w = reinterpret_cast<const Words*>(weights);
  for (int64_t k = 0; k < depth; k += 2, w += kVectors)
    for (int v = 0; v < kVectors; ++v) {
      const Floats even = (Floats)(w[v] << 16), odd = (Floats)(w[v] & 0xFFFF0000);
      for (int row = 0; row < kCount; ++row) {
        acc[row][v] += x[row][k] * even;
        acc[row][v] += x[row][k + 1] * odd;
      }
    }
  for (int row = 0; row < kCount; ++row)
    for (int v = 0; v < kVectors; ++v) reinterpret_cast<Floats*>(sums + row * kTileColumns)[v] = acc[row][v];
}
#endif

// Kernels for 1 to kRows rows.
using Kernel = void (*)(const float* const* x, const char* weights, int64_t depth, float* sums);
using Kernels = std::array<Kernel, kRows>;

template <size_t... kIndex>
constexpr Kernels panels(std::index_sequence<kIndex...>) {
  return {panel<int(kIndex) + 1>...};
}

// All rows, kRows at a time, for each piece of the columns.
void multiply(const Product& product, const float* const* x, const Kernels& kernels, int64_t width, int64_t depth,
              int64_t begin, int64_t end) {
  alignas(64) float sums[kRows * kPanelColumns];
  const int64_t bytes = width * depth * (width == kPanelColumns ? sizeof(float) : sizeof(uint16_t));
  for (int64_t piece = begin; piece < end; ++piece)
    for (int64_t i = 0; i < product.num_rows; i += kRows) {
      const int64_t count = i + kRows < product.num_rows ? kRows : product.num_rows - i;
      kernels[count - 1](x + i, product.packed + piece * bytes, depth, sums);
      for (int64_t row = 0; row < count; ++row) product.store(i + row, piece * width, width, sums + row * width);
    }
}

}  // namespace

void multiply_f32(const Product& product, int64_t begin, int64_t end) {
  static thread_local std::vector<const float*> rows;
  static constexpr Kernels kKernels = panels(std::make_index_sequence<kRows>());
  rows.resize(product.num_rows);
  for (int64_t i = 0; i < product.num_rows; ++i) rows[i] = product.in<float>(i);
  multiply(product, rows.data(), kKernels, kPanelColumns, product.k, begin, end);
}

#if !defined(__AMX_BF16__)
namespace {

template <size_t... kIndex>
constexpr Kernels blocks(std::index_sequence<kIndex...>) {
  return {block<int(kIndex) + 1>...};
}

}  // namespace

void multiply_bf16(const Product& product, int64_t begin, int64_t end) {
  static thread_local std::vector<float> wide;
  static thread_local std::vector<const float*> rows;
  static constexpr Kernels kKernels = blocks(std::make_index_sequence<kRows>());
  const int64_t depth = pieces(product.k, kTileDepth) * kTileDepth;
  wide.assign(product.num_rows * depth, 0.0f);
  rows.resize(product.num_rows);
  for (int64_t i = 0; i < product.num_rows; ++i) {
    rows[i] = wide.data() + i * depth;
    for (int64_t k = 0; k < product.k; ++k) wide[i * depth + k] = widened(product.in<uint16_t>(i)[k]);
  }
  multiply(product, rows.data(), kKernels, kTileColumns, depth, begin, end);
}
#endif

}  // namespace nextn
