// The op `attend`: the window's keys and values go into the slabs, then its queries attend to all columns they may see.
//
// Slabs: K [B, Hk, capacity, D]; V [B, Hk, capacity, Dv], or as operands of tiles [B, Hk, capacity / 32, Dv, 32].
#include "attention.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace nextn {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

bool tiles_read(const View& q, const View& v) { return q.type == BF16 && tiles_take(q.size[3], v.size[3]); }

// The window's keys and values of one row and kv head.
void write_columns(const Attention& a, int64_t row, int64_t kv_head) {
  for (int64_t i = 0; i < a.width; ++i) {
    const int64_t column = a.starts[row] + i;
    std::memcpy(a.key_slab(row, kv_head, column), element(a.k, row, kv_head, i), a.dim_k * bytes_of(a.k));
    const char* from = element(a.v, row, kv_head, i);
    if (!a.tiled) {
      std::memcpy(a.value_slab(row, kv_head, column), from, a.dim_v * bytes_of(a.v));
      continue;
    }
    const auto* source = reinterpret_cast<const uint16_t*>(from);
    auto* block = reinterpret_cast<uint16_t*>(a.value_slab(row, kv_head, column / kBlock * kBlock)) + column % kBlock;
    for (int64_t j = 0; j < a.dim_v; ++j) block[j * kBlock] = source[j];
  }
}

// The products of a query with four keys that lie one behind the other.
Four dots(const float* query, const float* keys, int64_t dim) {
  Lanes sum[4]{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const Lanes part = lanes_at(query + i);
    for (int64_t key = 0; key < 4; ++key) sum[key] += part * lanes_at(keys + key * dim + i);
  }
  Four total = lane_sums(sum);
  for (; i < dim; ++i)
    for (int64_t key = 0; key < 4; ++key) total[key] += query[i] * keys[key * dim + i];
  return total;
}

// What the plain kernel holds; a thread's grows to the largest sizes it has met.
struct Scratch {
  std::vector<float> queries, scores, sums, keys, values;

  void fit(int64_t dim_k, int64_t dim_v) {
    queries.resize(std::max<size_t>(queries.size(), kQueries * dim_k));
    scores.resize(kSpan * kQueries);
    sums.resize(std::max<size_t>(sums.size(), kQueries * dim_v));
    keys.resize(std::max<size_t>(keys.size(), kBlock * dim_k));
    values.resize(std::max<size_t>(values.size(), kBlock * dim_v));
  }
};

// A block of columns in fp32, [32, size]: where they lie or in the buffer.
const float* block_of(const View& view, const char* slab, int64_t size, float* buffer) {
  if (view.type == F32) return reinterpret_cast<const float*>(slab);
  widen(view, slab, 1, buffer, kBlock * size);
  return buffer;
}

// sums += weights [32] (a stride apart) times so many vectors of values [32, Dv], column by column.
template <int kVectors>
void weigh(float* sums, const float* weights, int64_t stride, const float* values, int64_t dim_v) {
  Lanes sum[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = lanes_at(sums + v * kLanes);
  for (int64_t i = 0; i < kBlock; ++i, weights += stride, values += dim_v)
    for (int v = 0; v < kVectors; ++v) sum[v] += *weights * lanes_at(values + v * kLanes);
  for (int v = 0; v < kVectors; ++v) put_lanes(sums + v * kLanes, sum[v]);
}

// sums [Dv] += weights times values [32, Dv]; returns the weights' sum.
float weigh_block(float* sums, const float* weights, int64_t stride, const float* values, int64_t dim_v) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= dim_v; j += 4 * kLanes) weigh<4>(sums + j, weights, stride, values + j, dim_v);
  for (; j + kLanes <= dim_v; j += kLanes) weigh<1>(sums + j, weights, stride, values + j, dim_v);
  for (; j < dim_v; ++j)
    for (int64_t i = 0; i < kBlock; ++i) sums[j] += weights[i * stride] * values[i * dim_v + j];
  float total = 0;
  for (int64_t i = 0; i < kBlock; i += 4, weights += 4 * stride)
    total += (weights[0] + weights[stride]) + (weights[2 * stride] + weights[3 * stride]);
  return total;
}

// One span of columns, in fp32.
void plain_span(Sweep& sweep, Scratch& scratch, int64_t column, int64_t columns, float* totals) {
  const Attention& a = sweep.attention;
  const int64_t lanes = sweep.lanes;
  float* scores = scratch.scores.data();
  std::fill_n(scores, columns * lanes, 0.0f);
  for (int64_t i = 0; i < columns; i += kBlock) {
    const char* slab = a.key_slab(sweep.row, sweep.kv_head, column + i);
    const float* keys = block_of(a.k, slab, a.dim_k, scratch.keys.data());
    for (int64_t j = 0; j < kBlock; j += 4)
      for (int64_t query = 0; query < sweep.count; ++query) {
        const Four found = dots(&scratch.queries[query * a.dim_k], keys + j * a.dim_k, a.dim_k);
        for (int64_t key = 0; key < 4; ++key) scores[(i + j + key) * lanes + query] = found[key];
      }
  }
  const Lanes factor = sweep.advance(scores, column, columns);
  for (int64_t i = 0; i < columns * lanes; i += kLanes) put_lanes(scores + i, sweep.weights(scores + i));
  for (int64_t query = 0; query < sweep.count; ++query) {
    totals[query] *= factor[query];
    for (int64_t j = 0; j < a.dim_v; ++j) scratch.sums[query * a.dim_v + j] *= factor[query];
  }
  for (int64_t i = 0; i < columns; i += kBlock) {
    const char* slab = a.value_slab(sweep.row, sweep.kv_head, column + i);
    const float* values = block_of(a.v, slab, a.dim_v, scratch.values.data());
    for (int64_t query = 0; query < sweep.count; ++query)
      totals[query] += weigh_block(&scratch.sums[query * a.dim_v], scores + i * lanes + query, lanes, values, a.dim_v);
  }
}

void sweep_plain(Sweep& sweep) {
  const Attention& a = sweep.attention;
  thread_local Scratch scratch;
  scratch.fit(a.dim_k, a.dim_v);
  float totals[kQueries];
  for (int64_t query = 0; query < sweep.count; ++query) {
    widen(a.q, sweep.query_at(query), 1, &scratch.queries[query * a.dim_k], a.dim_k);
    totals[query] = sweep.top_sum[query];
  }
  std::fill_n(scratch.sums.data(), sweep.count * a.dim_v, 0.0f);
  for (int64_t column = sweep.begin, next; column < sweep.end; column = next) {
    next = std::min(column / kSpan * kSpan + kSpan, sweep.end);
    plain_span(sweep, scratch, column, next - column, totals);
  }
  for (int64_t query = 0; query < sweep.count; ++query) {
    float* sums = &scratch.sums[query * a.dim_v];
    for (int64_t j = 0; j < a.dim_v; ++j) sums[j] /= totals[query];
    narrow(a.out, sums, sweep.out_at(query), a.out.stride[3], a.dim_v);
  }
}

template <void (*kSweep)(Sweep&)>
void attend(const Call& call, const Worker& worker) {
  const Attention a(call);
  const int64_t streams = a.batch * a.kv_heads, sweeps = a.sweeps();
  int64_t begin, end;
  worker.share(streams, begin, end);
  for (int64_t i = begin; i < end; ++i) write_columns(a, i / a.kv_heads, i % a.kv_heads);
  const auto run = [&](int64_t stream, int64_t place) {
    Sweep sweep(a, stream / a.kv_heads, stream % a.kv_heads, place);
    kSweep(sweep);
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
  call.kernel = tiles_read(q, v) ? attend<sweep_tiles> : attend<sweep_plain>;
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
  tiled = tiles_read(q, v);
  keys = reinterpret_cast<char*>(header[0]), values = reinterpret_cast<char*>(header[1]), capacity = header[2];
}

Sweep::Sweep(const Attention& attention, int64_t row, int64_t kv_head, int64_t place)
    : attention(attention), row(row), kv_head(kv_head), first(place * kQueries),
      count(std::min(kQueries, attention.queries() - first)), lanes(std::bit_ceil(uint64_t(count))),
      slope_(attention.softcap > 0 ? kLog2e : attention.scale * kLog2e) {
  const int64_t start = attention.starts[row];
  const int64_t window = attention.window ? attention.window : std::numeric_limits<int32_t>::max();
  const auto low_of = [=](int64_t high) { return std::max<int64_t>(0, high - window + 1); };
  inner_end = start + token(0) + 1, inner_begin = low_of(start + token(count - 1));
  begin = low_of(start + token(0)) / kBlock * kBlock;
  end = (start + token(count - 1) + kBlock) / kBlock * kBlock;
  int32_t highs[kLanes], lows[kLanes];
  float tops[kLanes], sums[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t query = lane % lanes, column = query < count ? start + token(query) : -1;
    highs[lane] = int32_t(column), lows[lane] = int32_t(low_of(column));
    const bool sinks = attention.sinks && query < count;
    tops[lane] = kLowest, sums[lane] = sinks ? 1.0f : 0.0f;
    if (sinks) {
      float sink;
      widen(*attention.sinks, element(*attention.sinks, head(query)), 1, &sink, 1);
      tops[lane] = sink * kLog2e;
    }
  }
  high = loaded<LaneInts>(highs), low = loaded<LaneInts>(lows);
  top = lanes_at(tops), top_sum = lanes_at(sums);
}

void Sweep::cap(float* scores, int64_t count) const {
  const float inside = attention.scale / attention.softcap;
  for (int64_t i = 0; i < count; i += kLanes)
    put_lanes(scores + i, attention.softcap * tanh_of(lanes_at(scores + i) * inside));
}

// One block from `column` on.
void Sweep::mask(float* scores, int64_t column) const {
  const Lanes lowest = Lanes{} + kLowest;
  LaneInts place = lane_quotient(lanes) + int32_t(column);
  for (int64_t i = 0; i < kBlock * lanes; i += kLanes, place += int32_t(kLanes / lanes))
    put_lanes(scores + i, chosen((place < low) | (place > high), lowest, lanes_at(scores + i)));
}

Lanes Sweep::advance(float* scores, int64_t column, int64_t columns) {
  if (attention.softcap > 0) cap(scores, columns * lanes);
  for (int64_t i = 0; i < columns; i += kBlock)
    if (column + i < inner_begin || column + i + kBlock > inner_end) mask(scores + i * lanes, column + i);
  const Lanes lowest = Lanes{} + kLowest;
  Lanes best[2] = {lowest, lowest};
  for (int64_t i = 0; i < columns * lanes; i += 2 * kLanes) {
    best[0] = larger(lanes_at(scores + i), best[0]);
    best[1] = larger(lanes_at(scores + i + kLanes), best[1]);
  }
  Lanes most = larger(best[0], best[1]);
  for (int64_t step = lanes; step < kLanes; step *= 2) most = larger(most, rotated(most, int(step)));
  const Lanes before = top;
  top = larger(most * slope_, before);
  shown_ = chosen(top == lowest, Lanes{}, top);
  return exp2_of(before - shown_);
}

}  // namespace nextn
