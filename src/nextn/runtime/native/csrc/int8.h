// Weights of eight bits: their packed form, and rows of activations rounded to eight bits.
//
// A matrix is blocks of 32 columns, each a run of [4 of k][32 columns][4], then a float for each column, its scale. A
// weight is (byte - kInt8Zero) * scale. Activations are rounded to int8 in groups of kGroup values of k, each with its
// own scale, so products are sums of integers: exact in any order, hence the same bits in every kernel.
#pragma once

#include <vector>

#include "product.h"

namespace nextn {

constexpr int64_t kInt8Zero = 128;
constexpr int64_t kGroup = 128;
constexpr int64_t kLargest = 127;

// Rows of x in eight bits, in as few batches of similar size as the kernels allow. A value is code * scale of its group.
struct RoundedRows {
  std::vector<int8_t> codes;   // of each batch [depth / 4][rows][4], zeros beyond k
  std::vector<float> scales;   // [num_rows, groups]
  std::vector<int32_t> zeros;  // [num_rows, groups]: -kInt8Zero * sum of the codes
  int64_t num_rows = 0, depth = 0, groups = 0, batches = 0;

  // The rows of a product.
  void fill(const Product& product);

  int64_t first(int64_t batch) const { return num_rows * batch / batches; }
};

}  // namespace nextn
