// Products on vector registers: fp32, and bf16 where the machine has no tiles. One pass over k for each row, in order.
#include <algorithm>
#include <array>
#include <bit>
#include <utility>
#include <vector>

#include "product.h"

namespace nextn {

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kSums = 16, kMost = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kSums = 8, kMost = 12;
#else
constexpr int kLanes = 4;
constexpr int kSums = 8, kMost = 8;
#endif
// Registers of sums: kSums keep a machine busy that waits four cycles for each, kMost leave room for what is added.

constexpr int64_t kNear = 16 * 1024;  // bytes of weights that stay in the first-level cache
constexpr int64_t kAhead = 2048;       // bytes by which weights are fetched early

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// Some rows of x, and columns of the packed matrix from `weights` on, in pieces that lie `next` bytes apart.
struct Part {
  const float* const* x;
  const char* weights;
  int64_t depth, next;
};

// One run of weights is fetched early; several that are read at once the machine follows by itself.
template <int kPieces, int kBytes>
void fetch(const char* at) {
  for (int line = 0; kPieces == 1 && line < kBytes; line += 64) __builtin_prefetch(at + kAhead + line);
}

// acc[row][v] += x[row] * weights(v): what there are fewer of stays in registers.
template <int kCount, int kVectors, typename Weights>
inline void add(Floats (&acc)[kCount][kVectors], const float* const* x, int64_t k, Weights&& weights) {
  if constexpr (kCount <= kVectors) {
    float value[kCount];
    for (int row = 0; row < kCount; ++row) value[row] = x[row][k];
    for (int v = 0; v < kVectors; ++v) {
      const Floats w = weights(v);
      for (int row = 0; row < kCount; ++row) acc[row][v] += value[row] * w;
    }
  } else {
    Floats w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = weights(v);
    for (int row = 0; row < kCount; ++row) {
      const Floats value = x[row][k] - Floats{};  // + would be an addition
      for (int v = 0; v < kVectors; ++v) acc[row][v] += value * w[v];
    }
  }
}

// Rows that a kernel takes at most.
constexpr int rows_of(int64_t width) { return std::min(8, kMost * kLanes / int(width)); }

// fp32: pieces [k][32 columns].
struct Panels {
  static constexpr int64_t kWidth = kPanelColumns, kBytes = sizeof(float), kStep = 1;
  static constexpr int kRows = rows_of(kWidth);

  static Floats weights(const char* at, int v, int) { return reinterpret_cast<const Floats*>(at)[v]; }
};

// bf16: pieces [pair of k][16 columns][2]; a pair is one word, the even one its lower half.
struct Blocks {
  static constexpr int64_t kWidth = kTileColumns, kBytes = sizeof(uint16_t), kStep = 2;
  static constexpr int kRows = rows_of(kWidth);

  static Floats weights(const char* at, int v, int odd) {
    const Words pair = reinterpret_cast<const Words*>(at)[v];
    return (Floats)(odd ? pair & 0xFFFF0000 : pair << 16);
  }
};

// sums [kCount, kPieces * width]
template <typename Form, int kCount, int kPieces>
void sum(const Part& part, float* sums) {
  constexpr int kEach = Form::kWidth / kLanes, kVectors = kPieces * kEach;
  constexpr int kRead = Form::kWidth * Form::kStep * Form::kBytes;
  Floats acc[kCount][kVectors] = {};
  const char* w = part.weights;
  for (int64_t k = 0; k < part.depth; k += Form::kStep, w += kRead) {
    fetch<kPieces, kRead>(w);
    for (int one = 0; one < Form::kStep; ++one)
      add(acc, part.x, k + one, [=](int v) { return Form::weights(w + v / kEach * part.next, v % kEach, one); });
  }
  std::memcpy(sums, acc, sizeof acc);
}

// Pieces that a kernel of kCount rows takes together.
template <typename Form, int kCount>
constexpr int kTogether = int(std::bit_floor(unsigned(std::clamp(kSums * kLanes / (kCount * int(Form::kWidth)), 1, 4))));

template <typename Form, int kCount, int kPieces>
void sum_and_store(const Product& product, const Part& part, int64_t first, int64_t piece) {
  alignas(64) float sums[kCount * kPieces * Form::kWidth];
  sum<Form, kCount, kPieces>(part, sums);
  for (int64_t row = 0; row < kCount; ++row)
    product.store(first + row, piece * Form::kWidth, kPieces * Form::kWidth, sums + row * kPieces * Form::kWidth);
}

// kCount rows from `first` on times the pieces [begin, end).
template <typename Form, int kCount>
void rows_times(const Product& product, const float* const* x, int64_t depth, int64_t first, int64_t begin,
                int64_t end) {
  constexpr int kMany = kTogether<Form, kCount>;
  const int64_t next = Form::kWidth * depth * Form::kBytes;
  int64_t piece = begin;
  const auto part = [&] { return Part{x + first, product.packed + piece * next, depth, next}; };
  for (; piece + kMany <= end; piece += kMany) sum_and_store<Form, kCount, kMany>(product, part(), first, piece);
  for (; piece < end; ++piece) sum_and_store<Form, kCount, 1>(product, part(), first, piece);
}

using Rows = void (*)(const Product&, const float* const*, int64_t, int64_t, int64_t, int64_t);

template <typename Form, size_t... kIndex>
constexpr std::array<Rows, Form::kRows> kernels(std::index_sequence<kIndex...>) {
  return {rows_times<Form, int(kIndex) + 1>...};
}

// All rows, in as few groups as kernels take, and of much the same size: pieces that fit the cache for all groups.
template <typename Form>
void multiply(const Product& product, const float* const* x, int64_t depth, int64_t begin, int64_t end) {
  static constexpr auto kKernels = kernels<Form>(std::make_index_sequence<Form::kRows>());
  constexpr int64_t kLeast = kTogether<Form, (Form::kRows + 1) / 2>;
  const int64_t groups = pieces(product.num_rows, Form::kRows), bytes = Form::kWidth * depth * Form::kBytes;
  const int64_t stride = groups == 1 ? end - begin : std::max(kLeast, kNear / bytes);
  for (int64_t piece = begin; piece < end; piece += stride)
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = product.num_rows * group / groups, last = product.num_rows * (group + 1) / groups;
      kKernels[last - first - 1](product, x, depth, first, piece, std::min(piece + stride, end));
    }
}

}  // namespace

void multiply_f32(const Product& product, int64_t begin, int64_t end) {
  static thread_local std::vector<const float*> rows;
  rows.resize(product.num_rows);
  for (int64_t i = 0; i < product.num_rows; ++i) rows[i] = product.in<float>(i);
  multiply<Panels>(product, rows.data(), product.k, begin, end);
}

#if !defined(__AMX_BF16__)
void multiply_bf16(const Product& product, int64_t begin, int64_t end) {
  static thread_local std::vector<float> wide;
  static thread_local std::vector<const float*> rows;
  const int64_t depth = pieces(product.k, kTileDepth) * kTileDepth;
  if (int64_t(wide.size()) < product.num_rows * depth) wide.resize(product.num_rows * depth);
  rows.resize(product.num_rows);
  for (int64_t i = 0; i < product.num_rows; ++i) {
    float* to = wide.data() + i * depth;
    rows[i] = to;
    const uint16_t* from = product.in<uint16_t>(i);
    by_sixteen(product.k, [&](auto load, auto store) { store(to, load(from)); });
    std::fill(to + product.k, to + depth, 0.0f);
  }
  multiply<Blocks>(product, rows.data(), depth, begin, end);
}
#endif

}  // namespace nextn
