// Packed weights of the ops of gemm.cpp: the ops pack and pack_bytes, and the op quantize_groups.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "product.h"

namespace nextn {

namespace {

template <typename T>
const T* row(const View& weight, int64_t index) {
  NEXTN_CHECK(index >= 0 && index < weight.size[0], "row ", index, " of a weight of ", weight.size[0]);
  return data<const T>(weight) + index * weight.stride[0];
}

// Whether the matrix has all columns of this block and its rows are contiguous, so that no element needs a check.
bool is_whole(const View& weight, int64_t column, int64_t count) {
  return column + count <= weight.size[0] && weight.stride[1] == 1;
}

// A block of columns from `column` on: [pair of k][column][2].
void pack_halves(const View& weight, int64_t column, uint16_t* to) {
  const int64_t depth = pieces(weight.size[1], kTileDepth) * kTileDepth;
  // Line by line of each row: the rows of a matrix are often a power of two apart, and then evict each other.
  int64_t done = 0;
  if (is_whole(weight, column, kHalfColumns))
    for (; done + kTileDepth <= weight.size[1]; done += kTileDepth)
      for (int64_t j = 0; j < kHalfColumns; ++j) {
        const uint16_t* from = row<uint16_t>(weight, column + j) + done;
        uint16_t* pairs = to + done * kHalfColumns + 2 * j;
        for (int64_t k = 0; k < kTileDepth; k += 2)
          std::memcpy(pairs + k * kHalfColumns, from + k, 2 * sizeof(uint16_t));
      }
  for (int64_t k = done; k < depth; ++k)
    for (int64_t j = 0; j < kHalfColumns; ++j) {
      const bool exists = column + j < weight.size[0] && k < weight.size[1];
      const int64_t from = (column + j) * weight.stride[0] + k * weight.stride[1];
      to[k / 2 * 2 * kHalfColumns + 2 * j + k % 2] = exists ? data<uint16_t>(weight)[from] : uint16_t(0);
    }
}

// A panel of 32 columns from `column` on: [k][column].
void pack_panel(const View& weight, int64_t column, float* to) {
  constexpr int64_t kLine = 64 / sizeof(float);
  int64_t done = 0;
  if (is_whole(weight, column, kPanelColumns))
    for (; done + kLine <= weight.size[1]; done += kLine)
      for (int64_t j = 0; j < kPanelColumns; ++j) {
        const float* from = row<float>(weight, column + j) + done;
        for (int64_t k = 0; k < kLine; ++k) to[(done + k) * kPanelColumns + j] = from[k];
      }
  for (int64_t k = done; k < weight.size[1]; ++k)
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      const bool exists = column + j < weight.size[0];
      const int64_t from = (column + j) * weight.stride[0] + k * weight.stride[1];
      to[k * kPanelColumns + j] = exists ? data<float>(weight)[from] : 0.0f;
    }
}

// views: dst (bytes), weight [n, k]
void pack(const Call& call, const Worker& worker) {
  const View &dst = call.views[0], &weight = call.views[1];
  const int64_t width = block_columns(weight.type);
  const int64_t bytes = packed_bytes(weight.type, width, weight.size[1]);
  int64_t begin, end;
  worker.share(pieces(weight.size[0], width), begin, end);
  for (int64_t block = begin; block < end; ++block)
    if (weight.type == BF16)
      pack_halves(weight, block * width, reinterpret_cast<uint16_t*>(dst.data + block * bytes));
    else
      pack_panel(weight, block * width, reinterpret_cast<float*>(dst.data + block * bytes));
}

bool select_pack(Call& call) {
  if (call.views.size() != 2 || call.ints.size() || call.views[1].ndim != 2) return false;
  const View &dst = call.views[0], &weight = call.views[1];
  if (!is_bytes(dst) || !is_float(weight.type)) return false;
  if (dst.size[0] != packed_bytes(weight.type, weight.size[0], weight.size[1])) return false;
  call.kernel = pack, call.parallel = true;
  return true;
}

float as_float(float value) { return value; }
float as_float(uint16_t value) { return widened(value); }

// One column of weights of a byte: a scale, and each weight divided by it, rounded to nearest.
float to_codes(const uint16_t* weights, int64_t k, std::vector<uint8_t>& codes) {
  float largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::abs(as_float(weights[i])));
  const float most = float(kZero - 1), scale = largest == 0 ? 1.0f : largest / most;
  for (int64_t i = 0; i < k; ++i)
    codes[i] = uint8_t(int32_t(std::clamp(std::nearbyint(as_float(weights[i]) / scale), -most, most)) + int32_t(kZero));
  return scale;
}

// views: blocks (bytes), scales, weight [n, k]. Of each four values of k, the second and third are swapped.
void pack_bytes(const Call& call, const Worker& worker) {
  thread_local std::vector<uint8_t> codes;
  const View &blocks = call.views[0], &scales = call.views[1], &weight = call.views[2];
  const int64_t n = weight.size[0], k = weight.size[1], depth = pieces(k, kTileDepth) * kTileDepth;
  int64_t begin, end;
  worker.share(pieces(n, kTileColumns), begin, end);
  for (int64_t column = begin * kTileColumns; column < end * kTileColumns; ++column) {
    auto* to = reinterpret_cast<uint8_t*>(blocks.data) + column / kTileColumns * kTileColumns * depth +
               column % kTileColumns * 4;
    codes.assign(depth, uint8_t(kZero));
    const bool exists = column < n;
    const float scale = exists ? to_codes(row<uint16_t>(weight, column), k, codes) : 0.0f;
    for (int64_t i = 0; i < depth; i += 4) {
      std::swap(codes[i + 1], codes[i + 2]);
      std::memcpy(to + i * kTileColumns, codes.data() + i, 4);
    }
    data<float>(scales)[column] = scale;
  }
}

// `scales` has a float for each column of whole blocks; those beyond n are 0.
bool select_pack_bytes(Call& call) {
  if (call.views.size() != 3 || call.ints.size() || call.views[2].ndim != 2) return false;
  const View &blocks = call.views[0], &scales = call.views[1], &weight = call.views[2];
  const int64_t columns = pieces(weight.size[0], kTileColumns) * kTileColumns;
  if (!is_bytes(blocks) || weight.stride[1] != 1 || weight.type != BF16) return false;
  if (scales.type != F32 || scales.ndim != 1 || scales.stride[0] != 1 || scales.size[0] != columns) return false;
  if (blocks.size[0] != columns * pieces(weight.size[1], kTileDepth) * kTileDepth) return false;
  call.kernel = pack_bytes, call.parallel = true;
  return true;
}

constexpr int64_t kMostGroup = 128;

// One group of weights in whole numbers of few bits. A weight is (code - zero) * scale.
struct Group {
  float scale, zero;
  alignas(64) float codes[kMostGroup];
};

// A scale as a checkpoint of such weights stores it.
template <typename T>
float stored(float scale) {
  if constexpr (std::is_same_v<T, float>) return scale;
  return widened(narrowed(scale));
}

// The codes of a scale's inverse, from -middle to middle - 1, rounded to nearest.
Sixteen nearest_codes(const float* values, float inverse, float middle) {
  const Sixteen shift = Sixteen{} + 12582912.0f, least = Sixteen{} - middle, most = Sixteen{} + (middle - 1);
  const Sixteen code = (product(sixteen(values), Sixteen{} + inverse) + shift) - shift;
  return chosen(code > most, most, chosen(code < least, least, code));
}

float total(Sixteen lanes) {
  float each[kSixteen], sum = 0;
  put(each, lanes);
  for (float value : each) sum += value;
  return sum;
}

// The scale with the least squared error of those that are tried, with the operations of `round_to_nearest` in
// quantized_weights.py. extreme: the value of the largest size.
float best_scale(const float* values, int64_t size, float extreme) {
  float best = -1, scale = 0;
  for (int i = 0; i < 9; ++i) {
    const float inverse = (-9 + 0.25f * float(i)) / extreme;
    Sixteen above{}, below{};
    for (int64_t j = 0; j < size; j += kSixteen) {
      const Sixteen code = nearest_codes(values + j, inverse, 8);
      above = above + product(code, sixteen(values + j)), below = below + product(code, code);
    }
    const float sum = total(above), squares = total(below), less = sum * sum / squares;
    if (less > best) best = less, scale = sum / squares;
  }
  return scale;
}

template <typename T>
void round_values(const float* values, int64_t size, int64_t bits, Group& group) {
  const auto [least, largest] = std::minmax_element(values, values + size);
  const bool is_above = *largest >= -*least;
  group.zero = bits == 4 ? 8 : 128;
  group.scale = stored<T>(bits == 4 ? best_scale(values, size, is_above ? *largest : *least)
                                    : (is_above ? *largest : -*least) / 127);
  if (group.scale == 0) group.scale = 1;
  const float inverse = 1 / group.scale;
  for (int64_t i = 0; i < size; i += kSixteen)
    put(group.codes + i, nearest_codes(values + i, inverse, group.zero) + group.zero);
  // The last eight bits of a scale are those of its zero.
  group.scale = std::bit_cast<float>((std::bit_cast<int32_t>(group.scale) + 128) & ~0xFF);
}

// views: codes [n, k], scales [n, groups], zeros [n, groups], weight [n, k]; ints: bits, values of k with a common scale.
template <typename T>
void quantize_groups(const Call& call, const Worker& worker) {
  const View &codes = call.views[0], &scales = call.views[1], &zeros = call.views[2], &weight = call.views[3];
  const int64_t bits = call.ints[0], size = call.ints[1], k = weight.size[1], groups = scales.size[1];
  int64_t begin, end;
  worker.share(weight.size[0], begin, end);
  for (int64_t column = begin; column < end; ++column)
    for (int64_t i = 0; i < groups; ++i) {
      alignas(64) float values[kMostGroup] = {};
      const int64_t first = i * size, count = std::min(size, k - first);
      for (int64_t j = 0; j < count; ++j) values[j] = as_float(row<T>(weight, column)[first + j]);
      Group group;
      round_values<T>(values, size, bits, group);
      data<float>(scales)[column * groups + i] = group.scale;
      data<uint8_t>(zeros)[column * groups + i] = uint8_t(group.zero);
      for (int64_t j = 0; j < count; ++j) data<uint8_t>(codes)[column * k + first + j] = uint8_t(group.codes[j]);
    }
}

bool is_dense(const View& view, int64_t type, int64_t rows, int64_t columns) {
  return view.type == type && view.ndim == 2 && view.size[0] == rows && view.size[1] == columns &&
         view.stride[1] == 1 && view.stride[0] == columns;
}

bool select_quantize_groups(Call& call) {
  if (call.views.size() != 4 || call.ints.size() != 2) return false;
  const View& weight = call.views[3];
  const int64_t bits = call.ints[0], size = call.ints[1];
  if ((bits != 4 && bits != 8) || (size != 32 && size != 64 && size != 128)) return false;
  if (weight.ndim != 2 || !is_float(weight.type) || weight.stride[1] != 1) return false;
  const int64_t n = weight.size[0], k = weight.size[1], groups = pieces(k, size);
  if (!is_dense(call.views[0], BOOL, n, k) || !is_dense(call.views[1], F32, n, groups)) return false;
  if (!is_dense(call.views[2], BOOL, n, groups)) return false;
  call.kernel = weight.type == F32 ? quantize_groups<float> : quantize_groups<uint16_t>;
  call.parallel = true;
  return true;
}

const Op pack_op{"pack", select_pack};
const Op pack_bytes_op{"pack_bytes", select_pack_bytes};
const Op quantize_groups_op{"quantize_groups", select_quantize_groups};

}  // namespace

}  // namespace nextn
