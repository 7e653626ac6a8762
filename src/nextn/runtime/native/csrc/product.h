// Rows of activations times one packed matrix: the arguments of the kernels, and how results are stored.
#pragma once

#include <algorithm>

#include "sixteen.h"

namespace nextn {

// Packed bf16: blocks of columns, each a run of [pair of k][column][2]. Of 16 columns, as tile registers read them. Where
// pairs are multiplied on vector registers, of 32: a step of k is two lines that follow each other, of one stream.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr int64_t kHalfColumns = 32;
#else
constexpr int64_t kHalfColumns = 16;
#endif
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileDepth = 32;
constexpr int64_t kTile = kTileColumns * kTileDepth;

// Type of packed weights, besides F32 and BF16: one byte per weight, for bf16 activations. A matrix is blocks of 16
// columns, each a run of [4 of k][16 columns][4], then a float for each column, its scale. A weight is
// (byte - kZero) * scale; bytes are below 128. Of each four values of k, the second and third are swapped.
constexpr int64_t BYTES = 4;
constexpr int64_t kZero = 64;

// Types of packed weights of four and of eight bits, for activations in bf16 and fp32, see grouped.cpp: with a scale and a
// zero for each 32 values of k; the types after them for each 64 and each 128.
constexpr int64_t INT4 = 6, INT8 = 9;

// Types of packed weights in fp8, see fp8.cpp: with a scale for each 32 values of k, and for each 64 and each 128. Those of
// FP8 are multiplied as matrices in bf16, those of FP8_FLOATS in fp32.
constexpr int64_t FP8 = 12, FP8_FLOATS = 21;
constexpr int64_t kFewBitsColumns = 32;

// Types of packed weights of GGUF's K-quants, see kquants.cpp.
constexpr int64_t Q4_K = 15, Q5_K = 16, Q6_K = 17;
constexpr int64_t kSuperblock = 256;

// Types as INT4 and INT8, in groups of 32, with the weight of code 0 instead of the code of weight 0.
constexpr int64_t INT4_MINIMA = 18, INT8_MINIMA = 19;

inline bool has_minima(int64_t type) { return type == INT4_MINIMA || type == INT8_MINIMA; }
inline bool is_int4(int64_t type) { return (type >= INT4 && type < INT4 + 3) || type == INT4_MINIMA; }
inline bool is_grouped(int64_t type) { return (type >= INT4 && type < INT8 + 3) || has_minima(type); }
inline bool is_fp8(int64_t type) {
  return (type >= FP8 && type < FP8 + 3) || (type >= FP8_FLOATS && type < FP8_FLOATS + 3);
}
inline bool is_kquant(int64_t type) { return type >= Q4_K && type <= Q6_K; }
inline int64_t values_per_group(int64_t type) {
  if (is_kquant(type)) return type == Q6_K ? 16 : 32;
  if (has_minima(type)) return 32;
  return int64_t(32) << (type - INT4) % 3;
}

// Whether activations are rounded to sixteen bits for such weights.
inline bool rounds_rows(int64_t type) { return is_grouped(type) || is_kquant(type); }

// Whether bf16 is multiplied as such. Otherwise it is widened to fp32, so activations may be in fp32, too.
#if defined(__AVX512BF16__) || defined(__AMX_BF16__) || defined(NEXTN_MULTIPLY_HALVES)
constexpr bool kMultipliesHalves = true;
#else
constexpr bool kMultipliesHalves = false;
#endif

// The type of the matrix that such weights are multiplied as.
inline int64_t multiplied_as(int64_t type) { return !is_fp8(type) ? type : type < FP8_FLOATS ? BF16 : F32; }

// Whether the kernels for such weights take fp32 activations as fast as bf16, and use all their bits.
inline bool takes_floats(int64_t type) {
  const int64_t as = multiplied_as(type);
  return as == F32 || rounds_rows(type) || (as == BF16 && !kMultipliesHalves);
}

// Rounds a group of values, float or uint16_t for bf16, to codes of eight or sixteen bits; returns its scale (rounded.cpp).
template <typename T, typename Code>
float round_group(const T* from, int64_t count, Code* to);

// Packed fp32: panels [k][32 columns]. Both are padded with zeros beyond n and k.
constexpr int64_t kPanelColumns = 32;

inline int64_t pieces(int64_t total, int64_t size) { return (total + size - 1) / size; }

// Columns of a block.
inline int64_t block_columns(int64_t type) {
  if (type == F32 || is_fp8(type)) return kPanelColumns;
  return type == BF16 ? kHalfColumns : rounds_rows(type) ? kFewBitsColumns : kTileColumns;
}

// Bytes of a block of columns, and of a whole matrix.
inline int64_t block_bytes(int64_t type, int64_t k) {
  if (type == F32) return kPanelColumns * k * int64_t(sizeof(float));
  if (is_kquant(type)) {
    const int64_t factors = kSuperblock / values_per_group(type), codes = kSuperblock * (4 + type - Q4_K) / 8;
    const int64_t of_scales = (type == Q6_K ? 1 : 2) * (factors + int64_t(sizeof(float)));
    return k / kSuperblock * kFewBitsColumns * (codes + of_scales);
  }
  if (is_grouped(type) || is_fp8(type)) {
    const int64_t group = values_per_group(type);
    return pieces(k, group) * kFewBitsColumns * (group / (is_int4(type) ? 2 : 1) + int64_t(sizeof(float)));
  }
  return pieces(k, kTileDepth) * kTileDepth * block_columns(type) * int64_t(type == BF16 ? sizeof(uint16_t) : 1);
}

inline int64_t packed_bytes(int64_t type, int64_t n, int64_t k) {
  const int64_t blocks = pieces(n, block_columns(type));
  const int64_t scales = type == BYTES ? block_columns(type) : 0;
  return blocks * (block_bytes(type, k) + scales * int64_t(sizeof(float)));
}

inline bool is_bytes(const View& view) { return view.ndim == 1 && view.type == BOOL && view.stride[0] == 1; }

inline bool is_float(int64_t type) { return type == BF16 || type == F32; }

struct RoundedRows;  // see rounded.h

// out[r] = W x[r] + bias for some rows r. W [n, k] is packed; sums are fp32, in the order of k, and round once.
//
// Of a gated layer, out[r] = silu(V x[r]) * U x[r]: W is V and U in turn, 16 rows of each, filled up to 16.
struct Product {
  const View* x;
  const View* out;
  const int64_t* order;  // row i is row order[i] of x and out; null: i itself
  int64_t num_rows;
  int64_t n, k;
  const char* packed;
  int64_t type;         // of the packed weights
  const float* scales;  // [n], of weights of a byte
  int64_t first;        // column of out and bias, or of a gated matrix, that the first of these n is
  const char* bias;     // contiguous; null: none
  int64_t bias_type;
  float* gates;  // [num_rows, 16]: scratch for sums of V until those of U are computed; null: not gated
  const RoundedRows* rounded_rows;  // the rows of x in sixteen bits, for weights of four to eight bits

  int64_t row(int64_t i) const { return order ? order[i] : i; }

  template <typename T>
  const T* in(int64_t i) const {
    NEXTN_CHECK(i >= 0 && i < num_rows && row(i) >= 0 && row(i) < x->size[0], "row ", i, " of ", num_rows, " is row ",
                row(i), " of ", x->size[0]);
    return data<const T>(*x) + row(i) * x->stride[0];
  }

  template <typename T>
  static void keep(T* to, const float* sums, int64_t count) {
    by_sixteen(count, [&](auto load, auto store) { store(to, load(sums)); });
  }

  template <typename T>
  static void keep_gated(T* to, const float* gate, const float* sums, int64_t count) {
    by_sixteen(count, [&](auto load, auto store) { store(to, silu_of(load(gate)) * load(sums)); });
  }

  // Stores `width` sums as row i of the columns from `column` on, as far as they exist; overwrites the sums.
  void store(int64_t i, int64_t column, int64_t width, float* sums) const {
    if (gates) return store_gated(i, column, width, sums);
    const int64_t count = column + width <= n ? width : n - column, begin = first + column;
    check_stored(i, begin, count);
    if (bias && bias_type == F32)
      for (int64_t j = 0; j < count; ++j) sums[j] += reinterpret_cast<const float*>(bias)[begin + j];
    else if (bias)
      for (int64_t j = 0; j < count; ++j) sums[j] += widened(reinterpret_cast<const uint16_t*>(bias)[begin + j]);
    const int64_t place = row(i) * out->stride[0] + begin;
    if (out->type == F32)
      keep(data<float>(*out) + place, sums, count);
    else
      keep(data<uint16_t>(*out) + place, sums, count);
  }

  void check_stored([[maybe_unused]] int64_t i, [[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t count) const {
    NEXTN_CHECK(i >= 0 && i < num_rows && row(i) >= 0 && row(i) < out->size[0], "row ", i, " of ", num_rows, " is row ",
                row(i), " of ", out->size[0]);
    NEXTN_CHECK(begin >= 0 && count > 0 && begin + count <= out->size[1], "columns from ", begin, " on, ", count,
                " of them, of ", out->size[1]);
  }

  void store_gated(int64_t i, int64_t column, int64_t width, const float* sums) const {
    float* gate = gates + i * kTileColumns;
    for (int64_t j = 0; j < width; j += kTileColumns) {
      const int64_t block = (first + column + j) / kTileColumns, begin = block / 2 * kTileColumns;
      if (block % 2 == 0) {
        std::copy_n(sums + j, kTileColumns, gate);
        continue;
      }
      const int64_t count = std::min(kTileColumns, out->size[1] - begin), place = row(i) * out->stride[0] + begin;
      check_stored(i, begin, count);
      if (out->type == F32)
        keep_gated(data<float>(*out) + place, gate, sums + j, count);
      else
        keep_gated(data<uint16_t>(*out) + place, gate, sums + j, count);
    }
  }
};

// The kernels: all rows times the blocks (panels) [begin, end) of columns. A row's result does not depend on the other
// rows.
void multiply_bf16(const Product& product, int64_t begin, int64_t end);
void multiply_f32(const Product& product, int64_t begin, int64_t end);
void multiply_bytes(const Product& product, int64_t begin, int64_t end);
void multiply_grouped(const Product& product, int64_t begin, int64_t end);
void multiply_fp8(const Product& product, int64_t begin, int64_t end);
void multiply_kquants(const Product& product, int64_t begin, int64_t end);

}  // namespace nextn
