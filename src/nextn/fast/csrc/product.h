// Rows of activations times one packed matrix: what the linear ops hand to the kernels, and how results are stored.
#pragma once

#include "sixteen.h"

namespace nextn {

// Packed bf16, as tile registers read it: blocks of 16 columns, each a run of tiles [16 pairs of k][16 columns][2].
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileDepth = 32;
constexpr int64_t kTile = kTileColumns * kTileDepth;

// What packed weights are, beside F32 and BF16: a byte each, for rows of bf16. A matrix is blocks of 16 columns, each a
// run of [4 of k][16 columns][4], then a float for each column, its scale. A weight is (byte - kZero) * scale; bytes are
// below 128. Of four values of k the second and third have changed places.
constexpr int64_t BYTES = 4;
constexpr int64_t kZero = 64;

// Packed fp32: panels [k][32 columns]. Both are filled with zeros beyond n and k.
constexpr int64_t kPanelColumns = 32;

inline int64_t pieces(int64_t total, int64_t size) { return (total + size - 1) / size; }

// out[r] = W x[r] + bias for some rows r. W [n, k] is packed; sums are fp32, in the order of k, and round once.
struct Product {
  const View* x;
  const View* out;
  const int64_t* order;  // row i is row order[i] of x and out; null: i itself
  int64_t num_rows;
  int64_t n, k;
  const char* packed;
  const char* bias;  // [n], contiguous; null: none
  int64_t bias_type;

  int64_t row(int64_t i) const { return order ? order[i] : i; }

  template <typename T>
  const T* in(int64_t i) const {
    return data<const T>(*x) + row(i) * x->stride[0];
  }

  template <typename T>
  static void keep(T* to, const float* sums, int64_t count) {
    by_sixteen(count, [&](auto load, auto store) { store(to, load(sums)); });
  }

  // Stores `width` sums as row i of the columns from `column` on, as far as they exist; spoils the sums.
  void store(int64_t i, int64_t column, int64_t width, float* sums) const {
    const int64_t count = column + width <= n ? width : n - column;
    if (bias && bias_type == F32)
      for (int64_t j = 0; j < count; ++j) sums[j] += reinterpret_cast<const float*>(bias)[column + j];
    else if (bias)
      for (int64_t j = 0; j < count; ++j) sums[j] += widened(reinterpret_cast<const uint16_t*>(bias)[column + j]);
    const int64_t place = row(i) * out->stride[0] + column;
    if (out->type == F32)
      keep(data<float>(*out) + place, sums, count);
    else
      keep(data<uint16_t>(*out) + place, sums, count);
  }
};

// The kernels: what blocks (panels) [begin, end) of the columns give for all rows. A row's result knows no other row.
void multiply_bf16(const Product& product, int64_t begin, int64_t end);
void multiply_f32(const Product& product, int64_t begin, int64_t end);
void multiply_bytes(const Product& product, int64_t begin, int64_t end);

}  // namespace nextn
