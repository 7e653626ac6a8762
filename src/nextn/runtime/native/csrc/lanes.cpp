// Linear layers on vector registers: fp32, weights of a byte, and bf16 where the machine has no tiles.
#include <vector>

#include "rows.h"

namespace nextn {

namespace {

constexpr int64_t kNear = 16 * 1024;  // bytes of weights that stay in the first-level cache

using Panels = Fp32<kPanelColumns>;
using Blocks = Halves;

struct Store {
  const Product* product;
  int64_t first;

  void operator()(int64_t row, int64_t column, int64_t width, float* sums) const {
    product->store(first + row, column, width, sums);
  }
};

// Of weights that are bytes: sums of (offset + byte) * x. scales: of each column; totals: of each row of x.
struct Scaled {
  Store store;
  const float *scales, *totals;

  void operator()(int64_t row, int64_t column, int64_t width, float* sums) const {
    const Sixteen more = Sixteen{} + totals[store.first + row] * (Bytes::kOffset + kZero);
    for (int64_t j = 0; j < width; j += kSixteen)
      put(sums + j, (sixteen(sums + j) - more) * sixteen(scales + column + j));
    store(row, column, width, sums);
  }
};

// All rows, in as few groups of similar size as the kernels allow; pieces fit the cache for all groups. keep(first):
// returns the receiver of results for the rows from there on.
template <typename Form, typename Keep>
void multiply(const Product& product, const typename Form::X* const* x, int64_t depth, int64_t begin, int64_t end,
              const Keep& keep) {
  using Kept = decltype(keep(0));
  constexpr auto &alone = kKernels<Streamed<Form>, Kept>, &in_turns = kKernels<InTurns<Form>, Kept>;
  constexpr int64_t kRows = alone.size(), kLeast = kTogether<Form, (kRows + 1) / 2>;
  const int64_t groups = pieces(product.num_rows, kRows), bytes = depth / Form::kStep * Form::kRead;
  const auto& kernels = groups == 1 ? alone : in_turns;
  const int64_t stride = groups == 1 ? end - begin : std::max(kLeast, kNear / bytes);
  for (int64_t piece = begin; piece < end; piece += stride)
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = product.num_rows * group / groups, last = product.num_rows * (group + 1) / groups;
      const int64_t ahead = stride * bytes + bytes * group / groups, pace = pieces(Form::kRead, groups);
      const Part<typename Form::X> part{x + first, product.packed, depth, bytes, 0, ahead, pace};
      kernels[last - first - 1](part, piece, std::min(piece + stride, end), keep(first));
    }
}

// In: type of x. depth: length of a row of x, padded with zeros beyond its k values.
template <typename Form, typename In, typename Keep>
void multiply(const Product& product, int64_t depth, int64_t begin, int64_t end, const Keep& keep) {
  static thread_local std::vector<typename Form::X> room;
  static thread_local std::vector<const typename Form::X*> rows;
  if (int64_t(room.size()) < product.num_rows * depth) room.resize(product.num_rows * depth);
  rows.resize(product.num_rows);
  for (int64_t i = 0; i < product.num_rows; ++i)
    rows[i] = Form::row(product.in<In>(i), product.k, depth, room.data() + i * depth);
  multiply<Form>(product, rows.data(), depth, begin, end, keep);
}

// Length of a padded row of bf16: whole tiles.
int64_t padded(const Product& product) { return pieces(product.k, kTileDepth) * kTileDepth; }

float total(const uint16_t* values, int64_t count) {
  Sixteen sums{};
  by_sixteen(count, [&](auto load, auto) { sums += load(values); });
  alignas(64) float all[kSixteen];
  put(all, sums);
  float out = 0;
  for (float each : all) out += each;
  return out;
}

}  // namespace

void multiply_f32(const Product& product, int64_t begin, int64_t end) {
  multiply<Panels, float>(product, product.k, begin, end, [&](int64_t first) { return Store{&product, first}; });
}

void multiply_bytes(const Product& product, int64_t begin, int64_t end) {
  static thread_local std::vector<float> totals;
  totals.resize(product.num_rows);
  for (int64_t i = 0; i < product.num_rows; ++i) totals[i] = total(product.in<uint16_t>(i), product.k);
  const int64_t depth = padded(product);
  multiply<Bytes, uint16_t>(product, depth / Bytes::kValues, begin, end,
                            [&](int64_t first) { return Scaled{{&product, first}, product.scales, totals.data()}; });
}

#if !defined(__AMX_BF16__)
void multiply_bf16(const Product& product, int64_t begin, int64_t end) {
  const int64_t depth = padded(product) / Blocks::kValues;
  const auto keep = [&](int64_t first) { return Store{&product, first}; };
  if constexpr (!kMultipliesHalves)
    if (product.x->type == F32) return multiply<Blocks, float>(product, depth, begin, end, keep);
  multiply<Blocks, uint16_t>(product, depth, begin, end, keep);
}
#endif

}  // namespace nextn
