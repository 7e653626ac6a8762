// Packed weights of the ops of gemm.cpp: the ops pack and pack_bytes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "product.h"

namespace nextn {

namespace {

template <typename T>
const T* row(const View& weight, int64_t index) {
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
        for (int64_t k = 0; k < kTileDepth; k += 2) std::memcpy(pairs + k * kHalfColumns, from + k, 2 * sizeof(uint16_t));
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

// One column of weights of a byte: a scale, and each weight divided by it, rounded to nearest.
float pack_codes(const uint16_t* weights, int64_t k, int64_t depth, uint8_t* to) {
  thread_local std::vector<uint8_t> codes;
  codes.assign(depth, uint8_t(kZero));
  float largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::abs(widened(weights[i])));
  const float most = float(kZero - 1), scale = largest == 0 ? 1.0f : largest / most;
  uint8_t* code = codes.data();
  for (int64_t i = 0; i < k; ++i)
    code[i] = uint8_t(int32_t(std::clamp(std::nearbyint(widened(weights[i]) / scale), -most, most)) + int32_t(kZero));
  for (int64_t i = 0; i < depth; i += 4) {
    std::swap(code[i + 1], code[i + 2]);
    std::memcpy(to + i * kTileColumns, code + i, 4);
  }
  return scale;
}

// views: blocks (bytes), scales, weight [n, k]: weights of a byte, see product.h. `scales` has a float for each column
// of whole blocks; those beyond n are zero.
void pack_bytes(const Call& call, const Worker& worker) {
  const View &blocks = call.views[0], &scales = call.views[1], &weight = call.views[2];
  const int64_t n = weight.size[0], k = weight.size[1], depth = pieces(k, kTileDepth) * kTileDepth;
  int64_t begin, end;
  worker.share(pieces(n, kTileColumns), begin, end);
  for (int64_t column = begin * kTileColumns; column < end * kTileColumns; ++column) {
    auto* to = reinterpret_cast<uint8_t*>(blocks.data) + column / kTileColumns * kTileColumns * depth;
    to += column % kTileColumns * 4;
    const bool exists = column < n;
    const float scale = pack_codes(exists ? row<uint16_t>(weight, column) : nullptr, exists ? k : 0, depth, to);
    data<float>(scales)[column] = exists ? scale : 0.0f;
  }
}

bool select_pack_bytes(Call& call) {
  if (call.views.size() != 3 || call.ints.size() || call.views[2].ndim != 2) return false;
  const View &blocks = call.views[0], &scales = call.views[1], &weight = call.views[2];
  const int64_t columns = pieces(weight.size[0], kTileColumns) * kTileColumns;
  if (!is_bytes(blocks) || weight.type != BF16 || weight.stride[1] != 1 || scales.type != F32 || scales.ndim != 1) return false;
  if (scales.stride[0] != 1 || scales.size[0] != columns) return false;
  if (blocks.size[0] != columns * pieces(weight.size[1], kTileDepth) * kTileDepth) return false;
  call.kernel = pack_bytes, call.parallel = true;
  return true;
}

const Op pack_op{"pack", select_pack};
const Op pack_bytes_op{"pack_bytes", select_pack_bytes};

}  // namespace

}  // namespace nextn
