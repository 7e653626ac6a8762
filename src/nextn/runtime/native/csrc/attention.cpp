// The op `attention` writes the block's keys and values into the KV buffers, then computes attention of its queries
// over all positions that they may see. The op `store_kv` only writes, and `attend_stored` only reads what another layer
// wrote. The first whole parameter of each is the type of the buffers, the second one, without `store_kv`, the sliding
// window.
#include "attention.h"

#include <algorithm>

#include "product.h"

namespace nextn {

namespace {

const AttentionKernel* select_kernel(const View& k, const View& v, int64_t type) {
  if (type != kOfKeys) return type == kCodes ? code_kernel(k, v) : nullptr;
  const AttentionKernel* kernel = tile_kernel(k, v);
  return kernel ? kernel : vector_kernel(k, v);
}

// Queries may have more bits than keys where the kernels widen both.
bool fits_keys(const View& q, const View& k) { return q.type == k.type || (q.type == F32 && !kMultipliesHalves); }

// This worker's streams, each a sequence and a kv head. If workers share the heads evenly, each has the same heads of
// all sequences.
void write(const Attention& a, const AttentionKernel& kernel, const Worker& worker) {
  int64_t begin, end;
  worker.share(a.batch * a.kv_heads, begin, end);
  for (int64_t i = begin; i < end; ++i) kernel.write(a, i % a.batch, i / a.batch);
}

void check(const Attention& a) {
  NEXTN_CHECK(a.keys && a.values && a.capacity % kBlock == 0, "KV buffers of ", a.capacity, " positions");
  for (int64_t row = 0; row < a.batch; ++row)
    NEXTN_CHECK(a.starts[row] >= 0 && a.starts[row] <= a.capacity - a.width, "sequence ", row, ": positions from ",
                a.starts[row], " on, ", a.width, " of them, in KV buffers of ", a.capacity);
}

template <bool kWrites>
void attend(const Call& call, const Worker& worker) {
  const View* sinks = call.views.size() > 6 ? &call.views[6] : nullptr;
  Attention a(call.views[0], call.views[1], &call.views[2], sinks, call.ints[0]);
  a.sliding_window = call.ints[1], a.scale = float(call.reals[0]), a.softcap = float(call.reals[1]);
  const AttentionKernel& kernel = *select_kernel(a.k, a.v, call.ints[0]);
  const int64_t streams = a.batch * a.kv_heads, total = a.queries(), sweeps = (total + kernel.most - 1) / kernel.most;
  const int64_t most = kernel.even ? (total + sweeps - 1) / sweeps : kernel.most;
  int64_t begin, end;
  worker.share(streams, begin, end);
  check(a);
  if (kWrites) write(a, kernel, worker);
  const auto run = [&](int64_t stream, int64_t place) {
    kernel.sweep({a, stream % a.batch, stream / a.batch, place * most, std::min(most, total - place * most)});
  };
  // A worker that reads only what it wrote itself needs no barrier. Otherwise sweeps are dealt out round-robin, as
  // later ones are longer.
  if (kWrites && (sweeps == 1 || streams % worker.count == 0)) {
    for (int64_t i = begin * sweeps; i < end * sweeps; ++i) run(i / sweeps, i % sweeps);
  } else {
    if (kWrites) worker.barrier();
    for (int64_t i = worker.index; i < streams * sweeps; i += worker.count) run(i / sweeps, i % sweeps);
  }
}

// views: keys and values as for `attention`, starts, header.
void store(const Call& call, const Worker& worker) {
  const View* views = call.views.data();
  const Attention a(views[0], views[0], views, nullptr, call.ints[0]);
  check(a);
  write(a, *select_kernel(views[0], views[1], call.ints[0]), worker);
}

bool sized(const View& view, int64_t a, int64_t b, int64_t c, int64_t d) {
  return view.ndim == 4 && view.size[0] == a && view.size[1] == b && view.size[2] == c && view.size[3] == d;
}

bool is_list(const View& view, int64_t count) {
  return view.type == I64 && view.ndim == 1 && view.size[0] == count && view.stride[0] == 1;
}

// views: keys, values, starts, header
bool is_stored(const View* views, int64_t type) {
  const View &k = views[0], &v = views[1];
  if (k.ndim != 4 || !is_float(k) || v.type != k.type || numel(k) == 0 || numel(v) == 0) return false;
  if (!sized(v, k.size[0], k.size[1], k.size[2], v.size[3]) || k.stride[3] != 1 || v.stride[3] != 1) return false;
  return is_list(views[2], k.size[0]) && is_list(views[3], 3) && select_kernel(k, v, type);
}

bool select_store(Call& call) {
  if (call.views.size() != 4 || call.ints.size() != 1 || call.reals.size()) return false;
  if (!is_stored(call.views.data(), call.ints[0])) return false;
  call.kernel = store;
  call.parallel = true;
  return true;
}

template <bool kWrites>
bool select(Call& call) {
  const auto& views = call.views;
  if (views.size() < 6 || views.size() > 7 || call.ints.size() != 2 || call.reals.size() != 2) return false;
  const View &out = views[0], &q = views[1], &k = views[2], &v = views[3];
  if (!is_stored(&views[2], call.ints[0]) || q.ndim != 4 || !fits_keys(q, k) || !is_float(out)) return false;
  const int64_t heads = q.size[1];
  if (heads == 0 || heads % k.size[1] || !sized(q, k.size[0], heads, k.size[2], k.size[3]) || q.stride[3] != 1)
    return false;
  if (!sized(out, k.size[0], heads, k.size[2], v.size[3])) return false;
  if (views.size() == 7 && (!is_float(views[6]) || views[6].ndim != 1 || views[6].size[0] != heads)) return false;
  if (call.ints[1] < 0 || !(call.reals[0] > 0) || !(call.reals[1] >= 0)) return false;
  call.kernel = attend<kWrites>;
  call.parallel = true;
  return true;
}

Op attend_op{"attention", select<true>};
Op read_op{"attend_stored", select<false>};
Op store_op{"store_kv", select_store};

}  // namespace

Attention::Attention(const View& out, const View& q, const View* rest, const View* sinks, int64_t type)
    : out(out), q(q), k(rest[0]), v(rest[1]), starts(data<int64_t>(rest[2])), sinks(sinks), batch(q.size[0]),
      heads(q.size[1]), kv_heads(k.size[1]), width(q.size[2]), dim_k(q.size[3]), dim_v(v.size[3]),
      key_bytes(type == kCodes ? dim_k + kScaleBytes : dim_k * bytes_of(k)),
      value_bytes(type == kCodes ? dim_v : dim_v * bytes_of(v)) {
  const int64_t* header = data<int64_t>(rest[3]);
  keys = reinterpret_cast<char*>(header[0]), values = reinterpret_cast<char*>(header[1]), capacity = header[2];
}

}  // namespace nextn
