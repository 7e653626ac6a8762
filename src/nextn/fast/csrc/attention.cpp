// The op `attend`: the window's keys and values go into the slabs, then its queries attend to all columns they may see.
// The op `store` does the first alone.
#include "attention.h"

#include <algorithm>

namespace nextn {

namespace {

const Way* way_of(const View& q, const View& v) {
  const Way* way = way_of_tiles(q, v);
  return way ? way : way_of_rows(q, v);
}

// This worker's streams, a row and kv head each: where workers share the heads evenly, each has its own of all rows.
void write(const Attention& a, const Way& way, const Worker& worker) {
  int64_t begin, end;
  worker.share(a.batch * a.kv_heads, begin, end);
  for (int64_t i = begin; i < end; ++i) way.write(a, i % a.batch, i / a.batch);
}

void attend(const Call& call, const Worker& worker) {
  Attention a(call.views[0], call.views[1], &call.views[2], call.views.size() > 6 ? &call.views[6] : nullptr);
  a.window = call.ints[0], a.scale = float(call.reals[0]), a.softcap = float(call.reals[1]);
  const Way& way = *way_of(a.q, a.v);
  const int64_t streams = a.batch * a.kv_heads, total = a.queries(), sweeps = (total + way.most - 1) / way.most;
  const int64_t most = way.even ? (total + sweeps - 1) / sweeps : way.most;
  int64_t begin, end;
  worker.share(streams, begin, end);
  write(a, way, worker);
  const auto run = [&](int64_t stream, int64_t place) {
    way.sweep({a, stream % a.batch, stream / a.batch, place * most, std::min(most, total - place * most)});
  };
  // A worker that reads only what it wrote waits for nobody; else sweeps are dealt out in turn: late ones are longer.
  if (sweeps == 1 || streams % worker.count == 0) {
    for (int64_t i = begin * sweeps; i < end * sweeps; ++i) run(i / sweeps, i % sweeps);
  } else {
    worker.barrier();
    for (int64_t i = worker.index; i < streams * sweeps; i += worker.count) run(i / sweeps, i % sweeps);
  }
}

// views: keys and values as of `attend`, starts, header. They go into the slabs.
void store(const Call& call, const Worker& worker) {
  const View* views = call.views.data();
  write({views[0], views[0], views, nullptr}, *way_of(views[0], views[1]), worker);
}

bool sized(const View& view, int64_t a, int64_t b, int64_t c, int64_t d) {
  return view.ndim == 4 && view.size[0] == a && view.size[1] == b && view.size[2] == c && view.size[3] == d;
}

bool is_list(const View& view, int64_t count) {
  return view.type == I64 && view.ndim == 1 && view.size[0] == count && view.stride[0] == 1;
}

// views: keys, values, starts, header
bool is_stored(const View* views) {
  const View &k = views[0], &v = views[1];
  if (k.ndim != 4 || !is_float(k) || v.type != k.type || numel(k) == 0 || numel(v) == 0) return false;
  if (!sized(v, k.size[0], k.size[1], k.size[2], v.size[3]) || k.stride[3] != 1 || v.stride[3] != 1) return false;
  return is_list(views[2], k.size[0]) && is_list(views[3], 3) && way_of(k, v);
}

bool select_store(Call& call) {
  if (call.views.size() != 4 || call.ints.size() || call.reals.size() || !is_stored(call.views.data())) return false;
  call.kernel = store;
  call.parallel = true;
  return true;
}

bool select(Call& call) {
  const auto& views = call.views;
  if (views.size() < 6 || views.size() > 7 || call.ints.size() != 1 || call.reals.size() != 2) return false;
  const View &out = views[0], &q = views[1], &k = views[2], &v = views[3];
  if (!is_stored(&views[2]) || q.ndim != 4 || q.type != k.type || out.type != k.type) return false;
  const int64_t heads = q.size[1];
  if (heads == 0 || heads % k.size[1] || !sized(q, k.size[0], heads, k.size[2], k.size[3]) || q.stride[3] != 1) return false;
  if (!sized(out, k.size[0], heads, k.size[2], v.size[3])) return false;
  if (views.size() == 7 && (!is_float(views[6]) || views[6].ndim != 1 || views[6].size[0] != heads)) return false;
  if (call.ints[0] < 0 || !(call.reals[0] > 0) || !(call.reals[1] >= 0)) return false;
  call.kernel = attend;
  call.parallel = true;
  return true;
}

Op attend_op{"attend", select};
Op store_op{"store", select_store};

}  // namespace

Attention::Attention(const View& out, const View& q, const View* rest, const View* sinks)
    : out(out), q(q), k(rest[0]), v(rest[1]), starts(data<int64_t>(rest[2])), sinks(sinks), batch(q.size[0]),
      heads(q.size[1]), kv_heads(k.size[1]), width(q.size[2]), dim_k(q.size[3]), dim_v(v.size[3]) {
  const int64_t* header = data<int64_t>(rest[3]);
  keys = reinterpret_cast<char*>(header[0]), values = reinterpret_cast<char*>(header[1]), capacity = header[2];
}

}  // namespace nextn
