// Ops of linear-attention layers: the gated delta rule and the causal convolution. Neither changes the state before the
// block; commit_state and commit_history then advance it by the accepted tokens.
//
// States [B, Hv, Dk * Dv + max_block * (Dk + Dv + 1)] fp32: the state before the block, then the step of each of its
// tokens: key, delta and decay. A step is a hundredth of a state, which would fill memory if each token kept one.
// Histories [B, max_block + K - 1, C] of the input's type: the K - 1 inputs before the block, then the block's.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_lanes.h"

namespace nextn {

namespace {

int64_t address(const View& header) { return data<int64_t>(header)[0]; }

bool is_header(const View& view) { return view.type == I64 && view.ndim == 1 && view.size[0] == 1; }

bool is_counts(const View& view, int64_t batch) {
  return view.type == I64 && view.ndim == 1 && view.size[0] == batch && view.stride[0] == 1;
}

bool sized(const View& view, int64_t a, int64_t b, int64_t c) {
  return view.ndim >= 3 && view.size[0] == a && view.size[1] == b && view.size[2] == c;
}

// What one value head stores.
struct HeadState {
  float* state;  // [Dk, Dv]
  float* steps;
  int64_t dim_k, dim_v;

  HeadState(const View& header, int64_t index, int64_t dim_k, int64_t dim_v, int64_t max_block)
      : state(reinterpret_cast<float*>(address(header)) + index * size(dim_k, dim_v, max_block)),
        steps(state + dim_k * dim_v), dim_k(dim_k), dim_v(dim_v) {
    NEXTN_CHECK(address(header) && index >= 0 && dim_k > 0 && dim_v > 0 && max_block > 0, "state ", index, " of ",
                dim_k, " x ", dim_v, ", blocks of up to ", max_block);
  }

  static int64_t size(int64_t dim_k, int64_t dim_v, int64_t max_block) {
    return dim_k * dim_v + max_block * (dim_k + dim_v + 1);
  }
  float* key(int64_t token) const { return steps + token * (dim_k + dim_v + 1); }  // [Dk]
  float* delta(int64_t token) const { return key(token) + dim_k; }                 // [Dv]
  float& decay(int64_t token) const { return delta(token)[dim_v]; }
};

template <int kVectors>
Lanes load(const float* from, int64_t count) {
  return kVectors > 1 || count == kLanes ? lanes_at(from) : sixteen(from, count);
}

template <int kVectors>
void store(float* to, Lanes values, int64_t count) {
  kVectors > 1 || count == kLanes ? put_lanes(to, values) : put(to, values, count);
}

constexpr int kTogether = kRegister == 64 ? 4 : 2;  // vectors of columns whose sums fit the registers
constexpr int64_t kMostColumns = kTogether * kLanes;

inline Lanes spread(float value) { return value - Lanes{}; }  // 0 + value would be an addition

// S' = decay S + k delta^T, for one k and a vector of columns.
inline Lanes advanced(Lanes state, float decay, float key, Lanes delta) {
  return fused(state, spread(decay), spread(key) * delta);
}

// Calls run(vectors, first column, valid columns of a vector) for all columns, which are independent.
template <typename Run>
void each_columns(int64_t dim_v, Run run) {
  int64_t j = 0;
  for (; j + kTogether * kLanes <= dim_v; j += kTogether * kLanes)
    run(std::integral_constant<int, kTogether>(), j, kLanes);
  for (; j < dim_v; j += kLanes) run(std::integral_constant<int, 1>(), j, std::min(kLanes, dim_v - j));
}

// What the tokens of a block need of one head besides what it stores.
struct BlockInputs {
  float *queries, *values, *results;  // [m, Dk], [m, width], [m, width]
  float *rates, *dots;                // [m]: beta; q k
  float* state;                       // [Dk, columns that are processed together]
  int64_t width;                      // Dv, and room for a whole vector
};

// Some columns of the state S through the tokens of a block, from one to the next:
// delta = beta (v - decay S^T k), S' = decay S + k delta^T, out = S'^T q = decay S^T q + (q k) delta.
// One pass over the state per token: it is advanced by the token before while both products are summed. The state
// stays in the first-level cache, and that after the last token is not made: a commit makes it, with these bits.
template <int kVectors>
void run_columns(const HeadState& stored, const BlockInputs& in, int64_t tokens, int64_t j, int64_t count) {
  const int64_t dim_k = stored.dim_k, dim_v = stored.dim_v;
  const float* from = stored.state + j;
  int64_t stride = dim_v;
  Lanes change[kVectors]{};
  for (int64_t token = 0; token < tokens; ++token) {
    const float *key = stored.key(token), *query = in.queries + token * dim_k;
    const float* last_key = token ? stored.key(token - 1) : nullptr;
    const float last_decay = token ? stored.decay(token - 1) : 0.0f;
    Lanes with_key[kVectors]{}, with_query[kVectors]{};
    const auto add = [&](int64_t d, int i, Lanes row) {
      with_key[i] = fused(row, spread(key[d]), with_key[i]);
      with_query[i] = fused(row, spread(query[d]), with_query[i]);
    };
    if (token == 0) {
      for (int64_t d = 0; d < dim_k; ++d)
        for (int i = 0; i < kVectors; ++i) add(d, i, load<kVectors>(from + d * dim_v + i * kLanes, count));
    } else {
      for (int64_t d = 0; d < dim_k; ++d)
        for (int i = 0; i < kVectors; ++i) {
          const Lanes before = load<kVectors>(from + d * stride + i * kLanes, count);
          const Lanes row = advanced(before, last_decay, last_key[d], change[i]);
          put_lanes(in.state + (d * kVectors + i) * kLanes, row);
          add(d, i, row);
        }
      from = in.state, stride = kVectors * kLanes;
    }
    const Lanes decay = spread(stored.decay(token)), rate = spread(in.rates[token]), dot = spread(in.dots[token]);
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = token * in.width + j + i * kLanes;
      change[i] = product(lanes_at(in.values + at) - product(decay, with_key[i]), rate);
      store<kVectors>(stored.delta(token) + j + i * kLanes, change[i], count);
      put_lanes(in.results + at, fused(change[i], dot, product(decay, with_query[i])));
    }
  }
}

float dot_of(const float* a, const float* b, int64_t count) {
  Lanes sum{};
  by_sixteen(count, [&](auto load, auto) { sum = fused(load(a), load(b), sum); });
  return lane_sum(sum);
}

// transformers' l2norm; `factor` is 1, or 1 / sqrt(Dk) for queries.
void normalize(float* x, int64_t count, bool norm, float factor) {
  const Lanes scale = spread(norm ? factor / std::sqrt(dot_of(x, x, count) + 1e-6f) : factor);
  by_sixteen(count, [&](auto load, auto store) { store(x, load(x) * scale); });
}

// Scratch of a worker, of at least this many floats.
float* scratch_of(int64_t count) {
  thread_local std::vector<float> scratch;
  scratch.resize(std::max<size_t>(scratch.size(), count));
  return scratch.data();
}

// views: out [B, m, Hv, Dv], q and k [B, m, Hk, Dk], v [B, m, Hv, Dv], g and beta [B, m, Hv], header.
void delta_head(const Call& call, int64_t row, int64_t head) {
  const View &out = call.views[0], &q = call.views[1], &k = call.views[2], &v = call.views[3];
  const View &g = call.views[4], &beta = call.views[5];
  const int64_t tokens = v.size[1], heads = v.size[2], dim_k = k.size[3], dim_v = v.size[3],
                key_head = head / (heads / k.size[2]);
  const HeadState stored(call.views[6], row * heads + head, dim_k, dim_v, call.ints[0]);
  BlockInputs in;
  in.width = dim_v + kLanes;
  in.queries = scratch_of(tokens * (dim_k + 2 * in.width + 2) + dim_k * kMostColumns);
  in.values = in.queries + tokens * dim_k, in.results = in.values + tokens * in.width;
  in.rates = in.results + tokens * in.width, in.dots = in.rates + tokens, in.state = in.dots + tokens;
  for (int64_t token = 0; token < tokens; ++token) {
    float *key = stored.key(token), *query = in.queries + token * dim_k, decay;
    widen(q, element(q, row, token, key_head), q.stride[3], query, dim_k);
    widen(k, element(k, row, token, key_head), k.stride[3], key, dim_k);
    widen(v, element(v, row, token, head), v.stride[3], in.values + token * in.width, dim_v);
    widen(g, element(g, row, token, head), 1, &decay, 1);
    widen(beta, element(beta, row, token, head), 1, in.rates + token, 1);
    normalize(query, dim_k, call.ints[1], 1.0f / std::sqrt(float(dim_k)));
    normalize(key, dim_k, call.ints[1], 1.0f);
    stored.decay(token) = std::exp(decay), in.dots[token] = dot_of(query, key, dim_k);
  }
  each_columns(dim_v,
               [&](auto vectors, int64_t j, int64_t count) { run_columns<vectors()>(stored, in, tokens, j, count); });
  for (int64_t token = 0; token < tokens; ++token)
    narrow(out, in.results + token * in.width, element(out, row, token, head), out.stride[3], dim_v);
}

void delta(const Call& call, const Worker& worker) {
  const View& v = call.views[3];
  int64_t begin, end;
  worker.share(v.size[0] * v.size[2], begin, end);
  for (int64_t i = begin; i < end; ++i) delta_head(call, i / v.size[2], i % v.size[2]);
}

bool select_delta(Call& call) {
  const auto& views = call.views;
  if (views.size() != 7 || call.ints.size() != 2 || !call.reals.empty() || !is_header(views[6])) return false;
  for (int i = 0; i < 6; ++i)
    if (!is_float(views[i]) || views[i].ndim != (i < 4 ? 4 : 3)) return false;
  const View &out = views[0], &q = views[1], &k = views[2], &v = views[3];
  const int64_t batch = v.size[0], width = v.size[1], heads = v.size[2], key_heads = k.size[2];
  if (key_heads == 0 || heads % key_heads || width > call.ints[0]) return false;
  if (!sized(out, batch, width, heads) || out.size[3] != v.size[3]) return false;
  if (!sized(q, batch, width, key_heads) || !sized(k, batch, width, key_heads) || q.size[3] != k.size[3]) return false;
  if (!sized(views[4], batch, width, heads) || !sized(views[5], batch, width, heads)) return false;
  call.kernel = delta, call.parallel = true;
  return true;
}

// Some columns of a state by the first `count` tokens of the block: read and written once.
template <int kVectors>
void commit_columns(const HeadState& stored, int64_t tokens, int64_t j, int64_t count) {
  for (int64_t d = 0; d < stored.dim_k; ++d)
    for (int i = 0; i < kVectors; ++i) {
      float* at = stored.state + d * stored.dim_v + j + i * kLanes;
      Lanes row = load<kVectors>(at, count);
      for (int64_t token = 0; token < tokens; ++token) {
        const Lanes delta = load<kVectors>(stored.delta(token) + j + i * kLanes, count);
        row = advanced(row, stored.decay(token), stored.key(token)[d], delta);
      }
      store<kVectors>(at, row, count);
    }
}

// Advances the states by the first counts[b] tokens of the block, with the bits that they had in it.
// views: counts [B], header; ints: max_block, Hv, Dk, Dv, B.
void commit_state(const Call& call, const Worker& worker) {
  const int64_t max_block = call.ints[0], heads = call.ints[1], dim_k = call.ints[2], dim_v = call.ints[3];
  int64_t begin, end;
  worker.share(call.ints[4] * heads, begin, end);
  for (int64_t i = begin; i < end; ++i) {
    const HeadState stored(call.views[1], i, dim_k, dim_v, max_block);
    const int64_t tokens = data<int64_t>(call.views[0])[i / heads];
    NEXTN_CHECK(tokens >= 0 && tokens <= max_block, "sequence ", i / heads, ": ", tokens, " tokens of a block of ",
                max_block);
    if (tokens == 0) continue;
    each_columns(dim_v,
                 [&](auto vectors, int64_t j, int64_t count) { commit_columns<vectors()>(stored, tokens, j, count); });
  }
}

bool select_commit_state(Call& call) {
  if (call.views.size() != 2 || call.ints.size() != 5 || !call.reals.empty()) return false;
  if (!is_counts(call.views[0], call.ints[4]) || !is_header(call.views[1])) return false;
  call.kernel = commit_state, call.parallel = true;
  return true;
}

// Appends the block to the history of `count` channels from `channel` on: history [max_block + K - 1, C] from there.
template <typename T>
void append(const View& x, int64_t row, int64_t channel, int64_t count, T* history, int64_t before) {
  for (int64_t t = 0; t < x.size[2]; ++t) {
    const T* from = reinterpret_cast<const T*>(element(x, row, channel, t));
    T* to = history + (before + t) * x.size[1];
    if (x.stride[1] == 1)
      std::memcpy(to, from, count * sizeof(T));
    else
      for (int64_t lane = 0; lane < count; ++lane) to[lane] = from[lane * x.stride[1]];
  }
}

// A vector of `count` channels of a row of the history.
template <typename T>
Lanes channels_at(const T* from, int64_t count) {
  return count == kLanes ? sixteen(from) : sixteen(from, count);
}

// Sixteen channels of x [B, C, m], weights [K][16].
template <typename T>
void convolve(const Call& call, int64_t row, int64_t channel, int64_t count, const float* weights, Lanes bias) {
  const View &out = call.views[0], &x = call.views[1];
  const int64_t channels = x.size[1], kernel = call.views[2].size[1], slots = call.ints[0] + kernel - 1;
  T* history = reinterpret_cast<T*>(address(call.views.back())) + row * slots * channels + channel;
  append(x, row, channel, count, history, kernel - 1);
  for (int64_t t = 0; t < x.size[2]; ++t) {
    Lanes sum{};
    for (int64_t j = 0; j < kernel; ++j)
      sum = fused(lanes_at(weights + j * kLanes), channels_at(history + (t + j) * channels, count), sum);
    sum += bias;
    alignas(64) float result[kLanes];
    put_lanes(result, call.ints[1] == 1 ? silu_of(sum) : sum);
    narrow(out, result, element(out, row, channel, t), out.stride[1], count);
  }
}

// views: out and x [B, C, m], weight [C, K], bias [C] or none, header.
template <typename T>
void conv(const Call& call, const Worker& worker) {
  const View &x = call.views[1], &weight = call.views[2];
  const int64_t channels = x.size[1], kernel = weight.size[1], blocks = (channels + kLanes - 1) / kLanes;
  float* weights = scratch_of(kernel * kLanes);
  int64_t begin, end;
  worker.share(x.size[0] * blocks, begin, end);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t channel = i % blocks * kLanes, count = std::min(kLanes, channels - channel);
    for (int64_t j = 0; j < kernel; ++j)
      widen(weight, element(weight, channel, j), weight.stride[0], weights + j * kLanes, count);
    alignas(64) float bias[kLanes] = {};
    if (call.views.size() == 5)
      widen(call.views[3], element(call.views[3], channel), call.views[3].stride[0], bias, count);
    convolve<T>(call, i / blocks, channel, count, weights, lanes_at(bias));
  }
}

bool select_conv(Call& call) {
  const auto& views = call.views;
  if (views.size() < 4 || views.size() > 5 || call.ints.size() != 2 || !call.reals.empty()) return false;
  const View &out = views[0], &x = views[1], &weight = views[2];
  if (!is_float(x) || !is_float(out) || !is_float(weight) || !is_header(views.back())) return false;
  if (x.ndim != 3 || out.ndim != 3 || weight.ndim != 2) return false;
  if (weight.size[0] != x.size[1] || weight.size[1] < 1) return false;
  if (!sized(out, x.size[0], x.size[1], x.size[2]) || x.size[2] > call.ints[0]) return false;
  if (views.size() == 5 && (!is_float(views[3]) || views[3].ndim != 1 || views[3].size[0] != x.size[1])) return false;
  if (call.ints[1] != 0 && call.ints[1] != 1) return false;
  call.kernel = x.type == BF16 ? conv<uint16_t> : conv<float>, call.parallel = true;
  return true;
}

// Moves the K - 1 inputs before position counts[b] of the block to the front; workers share the channels.
// views: counts [B], header; ints: max_block, K, C, B, type.
void commit_history(const Call& call, const Worker& worker) {
  const int64_t before = call.ints[1] - 1, channels = call.ints[2], bytes = call.ints[4] == F32 ? 4 : 2;
  const int64_t slots = call.ints[0] + before;
  int64_t begin, end;
  worker.share(channels, begin, end);
  for (int64_t row = 0; row < call.ints[3]; ++row) {
    const int64_t count = data<int64_t>(call.views[0])[row];
    NEXTN_CHECK(count >= 0 && count <= call.ints[0], "sequence ", row, ": ", count, " tokens of a block of ",
                call.ints[0]);
    char* history = reinterpret_cast<char*>(address(call.views[1])) + (row * slots * channels + begin) * bytes;
    for (int64_t t = 0; count && t < before; ++t)
      std::memcpy(history + t * channels * bytes, history + (t + count) * channels * bytes, (end - begin) * bytes);
  }
}

bool select_commit_history(Call& call) {
  if (call.views.size() != 2 || call.ints.size() != 5 || !call.reals.empty() || call.ints[1] < 1) return false;
  if (!is_counts(call.views[0], call.ints[3]) || !is_header(call.views[1])) return false;
  if (call.ints[4] != F32 && call.ints[4] != BF16) return false;
  call.kernel = commit_history, call.parallel = true;
  return true;
}

Op delta_op{"gated_delta_rule", select_delta};
Op commit_state_op{"commit_state", select_commit_state};
Op conv_op{"causal_conv", select_conv};
Op commit_history_op{"commit_history", select_commit_history};

}  // namespace

}  // namespace nextn
