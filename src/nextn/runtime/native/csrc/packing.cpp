// Packed weights of the ops of gemm.cpp: the ops pack, pack_bytes and pack_int8, and the op quantize_int4.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
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

// One column of weights of a byte: a scale, and each weight divided by it, rounded to nearest. zero: the code of 0.
template <typename T>
float to_codes(const T* weights, int64_t k, int64_t zero, std::vector<uint8_t>& codes) {
  float largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::abs(as_float(weights[i])));
  const float most = float(zero - 1), scale = largest == 0 ? 1.0f : largest / most;
  for (int64_t i = 0; i < k; ++i)
    codes[i] = uint8_t(int32_t(std::clamp(std::nearbyint(as_float(weights[i]) / scale), -most, most)) + int32_t(zero));
  return scale;
}

// Of BYTES and INT8: kWidth columns are a block. Of BYTES, of each four values of k, the second and third are swapped.
template <typename T, int64_t kWidth, int64_t kZeroCode>
void pack_codes(const Call& call, const Worker& worker) {
  thread_local std::vector<uint8_t> codes;
  const View &blocks = call.views[0], &scales = call.views[1], &weight = call.views[2];
  const int64_t n = weight.size[0], k = weight.size[1], depth = pieces(k, kTileDepth) * kTileDepth;
  int64_t begin, end;
  worker.share(pieces(n, kWidth), begin, end);
  for (int64_t column = begin * kWidth; column < end * kWidth; ++column) {
    auto* to = reinterpret_cast<uint8_t*>(blocks.data) + column / kWidth * kWidth * depth + column % kWidth * 4;
    codes.assign(depth, uint8_t(kZeroCode));
    const bool exists = column < n;
    const float scale = exists ? to_codes(row<T>(weight, column), k, kZeroCode, codes) : 0.0f;
    for (int64_t i = 0; i < depth; i += 4) {
      if (kWidth == kTileColumns) std::swap(codes[i + 1], codes[i + 2]);
      std::memcpy(to + i * kWidth, codes.data() + i, 4);
    }
    data<float>(scales)[column] = scale;
  }
}

// views: blocks (bytes), scales, weight [n, k]; `scales` has a float for each column of whole blocks; those beyond n are 0.
bool fits_codes(const Call& call, int64_t width) {
  if (call.views.size() != 3 || call.ints.size() || call.views[2].ndim != 2) return false;
  const View &blocks = call.views[0], &scales = call.views[1], &weight = call.views[2];
  const int64_t columns = pieces(weight.size[0], width) * width;
  if (!is_bytes(blocks) || weight.stride[1] != 1 || scales.type != F32 || scales.ndim != 1) return false;
  if (scales.stride[0] != 1 || scales.size[0] != columns) return false;
  return blocks.size[0] == columns * pieces(weight.size[1], kTileDepth) * kTileDepth;
}

// Weights of a byte, see product.h.
bool select_pack_bytes(Call& call) {
  if (!fits_codes(call, kTileColumns) || call.views[2].type != BF16) return false;
  call.kernel = pack_codes<uint16_t, kTileColumns, kZero>, call.parallel = true;
  return true;
}

// Weights of eight bits, see int8.cpp.
bool select_pack_int8(Call& call) {
  if (!fits_codes(call, kInt8Columns) || !is_float(call.views[2].type)) return false;
  call.kernel = call.views[2].type == F32 ? pack_codes<float, kInt8Columns, kInt8Zero>
                                          : pack_codes<uint16_t, kInt8Columns, kInt8Zero>;
  call.parallel = true;
  return true;
}

constexpr float kMostCode = 15;
constexpr int64_t kMostGroup = 128;
constexpr float kShrunk[] = {0.95f, 0.9f, 0.85f, 0.8f};  // parts of a group's range that are tried, too

// One group of weights of four bits and how far it is from the weights. A weight is (code - zero) * scale.
struct Int4Group {
  float error, scale, zero;
  alignas(64) float codes[kMostGroup];

  // Rounds `size` values, of which the scale covers from `least` to `largest`; those beyond are clamped.
  Int4Group(const float* values, int64_t size, float least, float largest) {
    // The last eight bits of a scale are those of its zero.
    scale = std::bit_cast<float>((std::bit_cast<int32_t>((largest - least) / kMostCode) + 128) & ~0xFF);
    if (!(scale > 0)) scale = 1;
    const float inverse = 1 / scale;
    zero = std::clamp(std::nearbyint(-least * inverse), 0.0f, kMostCode);
    const float shift = 12582912.0f;  // rounds to a whole number
    const Sixteen most = Sixteen{} + kMostCode;
    Sixteen squares{};
    for (int64_t i = 0; i < size; i += kSixteen) {
      const Sixteen value = sixteen(values + i);
      Sixteen code = (product(value, Sixteen{} + inverse) + (Sixteen{} + shift)) - (Sixteen{} + shift) + zero;
      code = chosen(code > most, most, chosen(code < Sixteen{}, Sixteen{}, code));
      put(codes + i, code);
      const Sixteen off = product(code - zero, Sixteen{} + scale) - value;
      squares = squares + product(off, off);
    }
    float each[kSixteen];
    put(each, squares);
    error = 0;
    for (float square : each) error += square;
  }
};

// views: codes [n, k], scales [n, groups], zeros [n, groups], weight [n, k]; ints: values of k with a common scale.
template <typename T>
void quantize_int4(const Call& call, const Worker& worker) {
  const View &codes = call.views[0], &scales = call.views[1], &zeros = call.views[2], &weight = call.views[3];
  const int64_t size = call.ints[0], k = weight.size[1], groups = scales.size[1];
  int64_t begin, end;
  worker.share(weight.size[0], begin, end);
  for (int64_t column = begin; column < end; ++column)
    for (int64_t group = 0; group < groups; ++group) {
      alignas(64) float values[kMostGroup] = {};
      const int64_t first = group * size, count = std::min(size, k - first);
      for (int64_t i = 0; i < count; ++i) values[i] = as_float(row<T>(weight, column)[first + i]);
      const auto [least, largest] = std::minmax_element(values, values + size);
      const float low = std::min(*least, 0.0f), high = std::max(*largest, 0.0f);
      Int4Group best(values, size, low, high);
      for (float part : kShrunk) {
        const Int4Group tried(values, size, part * low, part * high);
        if (tried.error < best.error) best = tried;
      }
      data<float>(scales)[column * groups + group] = best.scale;
      data<uint8_t>(zeros)[column * groups + group] = uint8_t(best.zero);
      for (int64_t i = 0; i < count; ++i) data<uint8_t>(codes)[column * k + first + i] = uint8_t(best.codes[i]);
    }
}

bool is_dense(const View& view, int64_t type, int64_t rows, int64_t columns) {
  return view.type == type && view.ndim == 2 && view.size[0] == rows && view.size[1] == columns &&
         view.stride[1] == 1 && view.stride[0] == columns;
}

bool select_quantize_int4(Call& call) {
  if (call.views.size() != 4 || call.ints.size() != 1) return false;
  const View& weight = call.views[3];
  const int64_t size = call.ints[0];
  if ((size != 32 && size != 64 && size != 128) || weight.ndim != 2 || !is_float(weight.type) || weight.stride[1] != 1)
    return false;
  const int64_t n = weight.size[0], k = weight.size[1], groups = pieces(k, size);
  if (!is_dense(call.views[0], BOOL, n, k) || !is_dense(call.views[1], F32, n, groups)) return false;
  if (!is_dense(call.views[2], BOOL, n, groups)) return false;
  call.kernel = weight.type == F32 ? quantize_int4<float> : quantize_int4<uint16_t>;
  call.parallel = true;
  return true;
}

const Op pack_op{"pack", select_pack};
const Op pack_bytes_op{"pack_bytes", select_pack_bytes};
const Op pack_int8_op{"pack_int8", select_pack_int8};
const Op quantize_int4_op{"quantize_int4", select_quantize_int4};

}  // namespace

}  // namespace nextn
