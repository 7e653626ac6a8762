// The op `attend`: the window's keys and values go into the slabs, then its queries attend to all columns they may see.
#include "attention.h"

#include <algorithm>

namespace nextn {

namespace {

const Way* way_of(const View& q, const View& v) {
  const Way* way = way_of_tiles(q, v);
  return way ? way : way_of_rows(q, v);
}

void attend(const Call& call, const Worker& worker) {
  const Attention a(call);
  const Way& way = *way_of(a.q, a.v);
  const int64_t streams = a.batch * a.kv_heads, total = a.queries(), sweeps = (total + way.most - 1) / way.most;
  const int64_t most = way.even ? (total + sweeps - 1) / sweeps : way.most;
  int64_t begin, end;
  worker.share(streams, begin, end);
  for (int64_t i = begin; i < end; ++i) way.write(a, i / a.kv_heads, i % a.kv_heads);
  const auto run = [&](int64_t stream, int64_t place) {
    way.sweep({a, stream / a.kv_heads, stream % a.kv_heads, place * most, std::min(most, total - place * most)});
  };
  // A worker that reads only what it wrote waits for nobody; else sweeps are dealt out in turn: late ones are longer.
  if (sweeps == 1 || streams % worker.count == 0) {
    for (int64_t i = begin * sweeps; i < end * sweeps; ++i) run(i / sweeps, i % sweeps);
  } else {
    worker.barrier();
    for (int64_t i = worker.index; i < streams * sweeps; i += worker.count) run(i / sweeps, i % sweeps);
  }
}

bool select(Call& call) {
  const auto& views = call.views;
  if (views.size() < 6 || views.size() > 7 || call.ints.size() != 1 || call.reals.size() != 2) return false;
  const View &out = views[0], &q = views[1], &k = views[2], &v = views[3], &starts = views[4], &header = views[5];
  for (int i = 0; i < 4; ++i)
    if (views[i].ndim != 4 || views[i].type != q.type || !is_float(q) || numel(views[i]) == 0) return false;
  const int64_t batch = q.size[0], heads = q.size[1], width = q.size[2], kv_heads = k.size[1];
  const auto sized = [](const View& view, int64_t a, int64_t b, int64_t c, int64_t d) {
    return view.size[0] == a && view.size[1] == b && view.size[2] == c && view.size[3] == d;
  };
  if (heads % kv_heads || !sized(out, batch, heads, width, v.size[3])) return false;
  if (!sized(k, batch, kv_heads, width, q.size[3]) || !sized(v, batch, kv_heads, width, v.size[3])) return false;
  if (q.stride[3] != 1 || k.stride[3] != 1 || v.stride[3] != 1) return false;
  if (starts.type != I64 || starts.ndim != 1 || starts.size[0] != batch || starts.stride[0] != 1) return false;
  if (header.type != I64 || header.ndim != 1 || header.size[0] != 3 || header.stride[0] != 1) return false;
  if (views.size() == 7 && (!is_float(views[6]) || views[6].ndim != 1 || views[6].size[0] != heads)) return false;
  if (call.ints[0] < 0 || !(call.reals[0] > 0) || !(call.reals[1] >= 0)) return false;
  if (!way_of(q, v)) return false;
  call.kernel = attend;
  call.parallel = true;
  return true;
}

Op op{"attend", select};

}  // namespace

Attention::Attention(const Call& call)
    : out(call.views[0]), q(call.views[1]), k(call.views[2]), v(call.views[3]), starts(data<int64_t>(call.views[4])),
      sinks(call.views.size() > 6 ? &call.views[6] : nullptr), batch(q.size[0]), heads(q.size[1]), kv_heads(k.size[1]),
      width(q.size[2]), dim_k(q.size[3]), dim_v(v.size[3]), window(call.ints[0]), scale(float(call.reals[0])),
      softcap(float(call.reals[1])) {
  const int64_t* header = data<int64_t>(call.views[5]);
  keys = reinterpret_cast<char*>(header[0]), values = reinterpret_cast<char*>(header[1]), capacity = header[2];
}

}  // namespace nextn
