// Linear layers over packed weights: the ops linear and expert_linear, and the gated ones.
#include <algorithm>
#include <vector>

#include "rounded.h"

namespace nextn {

namespace {

// Fewer multiplications than this take less time than a barrier of two threads.
constexpr int64_t kWorthSharing = 16384;

// Columns of a packed gated layer.
int64_t gated_columns(int64_t n) { return 2 * pieces(n, kTileColumns) * kTileColumns; }

bool is_matrix(const View& view) { return view.ndim == 2 && (view.stride[1] == 1 || view.size[1] == 1); }

bool is_weight_type(int64_t type) { return is_float(type) || type == BYTES || rounds_rows(type) || is_fp8(type); }

// Whether such weights are multiplied with activations of this type.
bool fits_rows(int64_t type, int64_t rows) {
  return rows == BF16 ? multiplied_as(type) != F32 : rows == F32 && takes_floats(type);
}

void multiply(const Product& product, int64_t begin, int64_t end) {
  if (begin >= end || product.num_rows == 0) return;
  NEXTN_CHECK(begin >= 0 && end <= pieces(product.n, block_columns(product.type)), "blocks from ", begin, " to ", end,
              " of a matrix of ", product.n, " columns");
  NEXTN_CHECK(product.k == product.x->size[1], "rows of ", product.x->size[1], " values times a matrix of ", product.k);
  switch (product.type) {
    case F32:
      return multiply_f32(product, begin, end);
    case BF16:
      return multiply_bf16(product, begin, end);
    case BYTES:
      return multiply_bytes(product, begin, end);
    default:
      if (is_kquant(product.type)) return multiply_kquants(product, begin, end);
      return (is_fp8(product.type) ? multiply_fp8 : multiply_grouped)(product, begin, end);
  }
}

// Rounds the rows of x for weights that need it; valid until this thread's next call.
const RoundedRows* round_rows(const Product& product) {
  static thread_local RoundedRows rows;
  if (!rounds_rows(product.type)) return nullptr;
  rows.fill(product);
  return &rows;
}

// The product with `columns` columns of a packed matrix, from `block` on.
void take(Product& product, const char* packed, int64_t type, int64_t block, int64_t blocks, int64_t columns) {
  const int64_t bytes = block_bytes(type, product.k);
  NEXTN_CHECK(block >= 0 && block + pieces(columns, block_columns(type)) <= blocks, "blocks from ", block, " on, of ",
              columns, " columns, of ", blocks);
  product.packed = packed + block * bytes, product.type = type, product.n = columns;
  product.scales = reinterpret_cast<const float*>(packed + blocks * bytes) + block * block_columns(type);
}

// This worker's share of the columns of a whole matrix. The two halves of a gated layer stay together.
void multiply(Product& product, const char* packed, int64_t type, bool gated, const Worker& worker) {
  static thread_local std::vector<float> gates;
  const int64_t n = product.out->size[1], columns = gated ? gated_columns(n) : n;
  const int64_t blocks = pieces(columns, block_columns(type)),
                together = gated && block_columns(type) == kTileColumns ? 2 : 1;
  take(product, packed, type, 0, blocks, columns);
  if (gated) gates.resize(product.num_rows * kTileColumns), product.gates = gates.data();
  int64_t begin, end;
  worker.share(blocks / together, begin, end);
  if (begin < end) product.rounded_rows = round_rows(product);
  multiply(product, begin * together, end * together);
}

// The views and ints of `linear`: outs [m, n] one by one, x [m, k], the packed matrix, biases [n] or none; each n, k,
// parts, type: the matrix has part 0 of every layer, then part 1 of every layer, ..., each in whole blocks.
struct Layers {
  const Call& call;
  const int64_t count = int64_t(call.ints.size()) - 3;

  int64_t n(int64_t i) const { return call.ints[i]; }
  int64_t k() const { return call.ints[count]; }
  int64_t parts() const { return call.ints[count + 1]; }
  int64_t type() const { return call.ints[count + 2]; }
  const View& out(int64_t i) const { return call.views[i]; }
  const View& x() const { return call.views[count]; }
  const View& packed() const { return call.views[count + 1]; }
  bool has_bias() const { return int64_t(call.views.size()) == 2 * count + 2; }
  const View& bias(int64_t i) const { return call.views[count + 2 + i]; }
  bool fits() const { return count > 0 && (has_bias() || int64_t(call.views.size()) == count + 2); }

  // Of layer i in a part, and of all.
  int64_t blocks(int64_t i) const { return pieces(n(i) / parts(), block_columns(type())); }
  int64_t blocks() const {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += parts() * blocks(i);
    return total;
  }
  bool is_parted(int64_t i) const {
    return parts() == 1 || (parts() > 1 && parts() <= n(i) && n(i) % (parts() * block_columns(type())) == 0);
  }
};

// The workers share the columns of all layers in the order of the packed matrix. If they share the parts evenly, each
// computes whole parts.
void linear(const Call& call, const Worker& worker) {
  const Layers layers{call};
  const int64_t total = layers.blocks();
  int64_t begin, end;
  worker.share(total, begin, end);
  const RoundedRows* rows = nullptr;  // all layers have the same rows
  for (int64_t part = 0, at = 0; part < layers.parts(); ++part)
    for (int64_t i = 0; i < layers.count; at += layers.blocks(i++)) {
      const int64_t columns = layers.n(i) / layers.parts(), blocks = layers.blocks(i);
      Product product{};
      product.out = &layers.out(i), product.x = &layers.x();
      product.num_rows = product.x->size[0], product.k = layers.k(), product.first = part * columns;
      if (layers.has_bias()) product.bias = layers.bias(i).data, product.bias_type = layers.bias(i).type;
      take(product, layers.packed().data, layers.type(), at, total, columns);
      if (!rows && begin < end) rows = round_rows(product);
      product.rounded_rows = rows;
      multiply(product, std::max<int64_t>(begin - at, 0), std::min(end - at, blocks));
    }
}

// views: out [m, n], x [m, k], the packed matrix; ints: n, k, type.
void gated_linear(const Call& call, const Worker& worker) {
  Product product{};
  product.out = &call.views[0], product.x = &call.views[1];
  product.num_rows = product.x->size[0], product.k = call.ints[1];
  multiply(product, call.views[2].data, call.ints[2], true, worker);
}

// Rows grouped by expert: rows [ends[e - 1], ends[e]) of the order are those of expert e.
struct Groups {
  std::vector<int64_t> rows, ends;

  void fill(const View& ids, int64_t num_experts) {
    const int64_t num_rows = ids.size[0];
    const auto expert = [&](int64_t row) { return data<int64_t>(ids)[row * ids.stride[0]]; };
    const auto exists = [&](int64_t row) { return expert(row) >= 0 && expert(row) < num_experts; };
    ends.assign(num_experts + 1, 0);
    rows.resize(num_rows);
    for (int64_t row = 0; row < num_rows; ++row)
      if (exists(row)) ++ends[expert(row) + 1];
    for (int64_t e = 0; e < num_experts; ++e) ends[e + 1] += ends[e];
    for (int64_t row = 0; row < num_rows; ++row)
      if (exists(row)) rows[ends[expert(row)]++] = row;
  }
};

// views: out [s, n], x [s, k], ids [s], packed (one matrix after another), bias [e, n] or none; ints: n, k, type.
// A row whose id names no expert is not written.
template <bool kGated>
void expert_linear(const Call& call, const Worker& worker) {
  static thread_local Groups groups;
  const int64_t n = call.ints[0], k = call.ints[1], type = call.ints[2];
  const int64_t bytes = packed_bytes(type, kGated ? gated_columns(n) : n, k);
  const int64_t num_experts = call.views[3].size[0] / bytes;
  groups.fill(call.views[2], num_experts);
  const View* bias = call.views.size() > 4 ? &call.views[4] : nullptr;
  for (int64_t expert = 0, begin = 0; expert < num_experts; begin = groups.ends[expert++]) {
    Product product{};
    product.out = &call.views[0], product.x = &call.views[1];
    product.order = groups.rows.data() + begin, product.num_rows = groups.ends[expert] - begin;
    product.k = k;
    if (bias) {
      const int64_t size = bias->type == F32 ? sizeof(float) : sizeof(uint16_t);
      product.bias = bias->data + expert * bias->stride[0] * size, product.bias_type = bias->type;
    }
    multiply(product, call.views[3].data + expert * bytes, type, kGated, worker);
  }
}

// Whether the kernels support a layer with these activations.
bool are_rows(const View& out, const View& x, int64_t n, int64_t k, int64_t type) {
  if (n < 1 || k < 1 || !is_weight_type(type) || !fits_rows(type, x.type)) return false;
  if (is_kquant(type) && k % kSuperblock) return false;
  if (!is_matrix(out) || !is_matrix(x) || out.size[0] != x.size[0] || out.size[1] != n || x.size[1] != k) return false;
  return is_float(out.type);
}

bool is_bias(const View& bias, int64_t ndim, int64_t n) {
  return is_float(bias.type) && bias.ndim == ndim && bias.size[ndim - 1] == n && (bias.stride[ndim - 1] == 1 || n == 1);
}

bool select_linear(Call& call) {
  const Layers layers{call};
  if (!layers.fits()) return false;
  int64_t columns = 0;
  for (int64_t i = 0; i < layers.count; columns += layers.n(i++)) {
    if (!are_rows(layers.out(i), layers.x(), layers.n(i), layers.k(), layers.type()) || !layers.is_parted(i))
      return false;
    if (layers.has_bias() && !is_bias(layers.bias(i), 1, layers.n(i))) return false;
  }
  const int64_t bytes = packed_bytes(layers.type(), layers.blocks() * block_columns(layers.type()), layers.k());
  if (!is_bytes(layers.packed()) || layers.packed().size[0] != bytes) return false;
  call.kernel = linear;
  call.parallel = layers.x().size[0] * columns * layers.k() >= kWorthSharing;
  return true;
}

bool select_gated_linear(Call& call) {
  if (call.ints.size() != 3 || call.views.size() != 3) return false;
  const int64_t n = call.ints[0], k = call.ints[1], type = call.ints[2];
  const View &out = call.views[0], &x = call.views[1], &packed = call.views[2];
  if (!are_rows(out, x, n, k, type) || !is_bytes(packed)) return false;
  if (packed.size[0] != packed_bytes(type, gated_columns(n), k)) return false;
  call.kernel = gated_linear;
  call.parallel = x.size[0] * 2 * n * k >= kWorthSharing;
  return true;
}

template <bool kGated>
bool select_expert_linear(Call& call) {
  if (call.ints.size() != 3 || call.views.size() < 4 || call.views.size() > (kGated ? 4 : 5)) return false;
  const int64_t n = call.ints[0], k = call.ints[1], type = call.ints[2];
  const View &x = call.views[1], &ids = call.views[2], &packed = call.views[3];
  if (!are_rows(call.views[0], x, n, k, type)) return false;
  const int64_t columns = kGated ? gated_columns(n) : n, bytes = packed_bytes(type, columns, k);
  if (!is_bytes(packed) || packed.size[0] == 0 || packed.size[0] % bytes) return false;
  if (ids.type != I64 || ids.ndim != 1 || ids.size[0] != x.size[0]) return false;
  if (call.views.size() > 4 && (!is_bias(call.views[4], 2, n) || call.views[4].size[0] != packed.size[0] / bytes))
    return false;
  call.kernel = expert_linear<kGated>;
  call.parallel = x.size[0] * columns * k >= kWorthSharing;
  return true;
}

const Op linear_op{"linear", select_linear};
const Op gated_linear_op{"gated_linear", select_gated_linear};
const Op expert_linear_op{"expert_linear", select_expert_linear<false>};
const Op gated_expert_linear_op{"gated_expert_linear", select_expert_linear<true>};

}  // namespace

}  // namespace nextn

// Whether bf16 is multiplied as pairs on vector registers (no tiles).
extern "C" int nextn_pairs() {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  return 1;
#else
  return 0;
#endif
}

// Whether products with packed weights of a type use all bits of fp32 activations, at no cost.
extern "C" int nextn_takes_floats(int64_t type) { return nextn::takes_floats(type); }

// Columns of a block of packed weights of a type.
extern "C" int64_t nextn_block_columns(int64_t type) { return nextn::block_columns(type); }

// -1 for types that are not packed.
extern "C" int64_t nextn_packed_bytes(int64_t type, int64_t n, int64_t k) {
  return nextn::is_weight_type(type) ? nextn::packed_bytes(type, n, k) : -1;
}
