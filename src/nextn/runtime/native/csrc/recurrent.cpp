// Ops of linear-attention layers: the gated delta rule and the causal convolution. Neither changes the state before the
// block; commit_state and commit_history then advance it by the accepted tokens.
//
// States [B, Hv, Dk * Dv + max_block * (Dk + Dv + 1)] fp32: the state before the block, then the step of each of its
// tokens: key, delta and decay. A step is a hundredth of a state, which would fill memory if each token kept one.
// Histories [B, C, max_block + K - 1] of the input's type: the K - 1 inputs before the block, then the block's.
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
        steps(state + dim_k * dim_v), dim_k(dim_k), dim_v(dim_v) {}

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

// One token of the rule: from one state to the next. The state's columns are independent, so any number can be
// processed together; each vector has `count` valid columns.
struct Step {
  const float *key, *query;  // [Dk]
  int64_t dim_k, dim_v;
  float decay, beta;

  // delta = beta (v - (decay S)^T k)
  template <int kVectors>
  void correct(const float* from, const float* value, float* delta, int64_t count) const {
    Lanes sum[kVectors]{};
    for (int64_t d = 0; d < dim_k; ++d)
      for (int i = 0; i < kVectors; ++i)
        sum[i] += load<kVectors>(from + d * dim_v + i * kLanes, count) * decay * key[d];
    for (int i = 0; i < kVectors; ++i)
      store<kVectors>(delta + i * kLanes, (lanes_at(value + i * kLanes) - sum[i]) * beta, count);
  }

  // S' = decay S + k delta^T; out = S'^T q. Never inlined, so that a commit rounds as the block did.
  template <int kVectors>
  [[gnu::noinline]] void advance(const float* from, float* to, const float* delta, float* out, int64_t count) const {
    Lanes sum[kVectors]{}, change[kVectors];
    for (int i = 0; i < kVectors; ++i) change[i] = load<kVectors>(delta + i * kLanes, count);
    for (int64_t d = 0; d < dim_k; ++d)
      for (int i = 0; i < kVectors; ++i) {
        const Lanes row = load<kVectors>(from + d * dim_v + i * kLanes, count) * decay + key[d] * change[i];
        store<kVectors>(to + d * dim_v + i * kLanes, row, count);
        sum[i] += row * query[d];
      }
    for (int i = 0; i < kVectors; ++i) put_lanes(out + i * kLanes, sum[i]);
  }

  // Calls run(vectors, first column, valid columns of a vector) for all columns.
  template <typename Run>
  void each_columns(Run run) const {
    constexpr int kTogether = 4;
    int64_t j = 0;
    for (; j + kTogether * kLanes <= dim_v; j += kTogether * kLanes) run(std::integral_constant<int, kTogether>(), j, kLanes);
    for (; j < dim_v; j += kLanes) run(std::integral_constant<int, 1>(), j, std::min(kLanes, dim_v - j));
  }
};

// transformers' l2norm; `factor` is 1, or 1 / sqrt(Dk) for queries.
void normalize(float* x, int64_t count, bool norm, float factor) {
  if (norm) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(sum + 1e-6f);
    for (int64_t i = 0; i < count; ++i) x[i] *= inverse;
  }
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
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
  const int64_t heads = v.size[2], dim_k = k.size[3], dim_v = v.size[3], key_head = head / (heads / k.size[2]);
  float* query = scratch_of(dim_k + 2 * (dim_v + kLanes) + dim_k * dim_v);
  float *value = query + dim_k, *result = value + dim_v + kLanes, *after = result + dim_v + kLanes;
  const HeadState stored(call.views[6], row * heads + head, dim_k, dim_v, call.ints[0]);
  for (int64_t token = 0; token < v.size[1]; ++token) {
    float *key = stored.key(token), *delta = stored.delta(token), decay, rate;
    widen(q, element(q, row, token, key_head), q.stride[3], query, dim_k);
    widen(k, element(k, row, token, key_head), k.stride[3], key, dim_k);
    widen(v, element(v, row, token, head), v.stride[3], value, dim_v);
    widen(g, element(g, row, token, head), 1, &decay, 1);
    widen(beta, element(beta, row, token, head), 1, &rate, 1);
    normalize(query, dim_k, call.ints[1], 1.0f / std::sqrt(float(dim_k)));
    normalize(key, dim_k, call.ints[1], 1.0f);
    stored.decay(token) = std::exp(decay);
    const Step step{key, query, dim_k, dim_v, stored.decay(token), rate};
    const float* before = token ? after : stored.state;
    step.each_columns([&](auto vectors, int64_t j, int64_t count) {
      step.correct<vectors()>(before + j, value + j, delta + j, count);
      step.advance<vectors()>(before + j, after + j, delta + j, result + j, count);
    });
    narrow(out, result, element(out, row, token, head), out.stride[3], dim_v);
  }
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
  if (key_heads == 0 || heads % key_heads || width > call.ints[0] || out.type != q.type) return false;
  if (!sized(out, batch, width, heads) || out.size[3] != v.size[3]) return false;
  if (!sized(q, batch, width, key_heads) || !sized(k, batch, width, key_heads) || q.size[3] != k.size[3]) return false;
  if (!sized(views[4], batch, width, heads) || !sized(views[5], batch, width, heads)) return false;
  call.kernel = delta, call.parallel = true;
  return true;
}

// Advances the states by the first counts[b] tokens of the block, with the bits that they had in it.
// views: counts [B], header; ints: max_block, Hv, Dk, Dv, B.
void commit_state(const Call& call, const Worker& worker) {
  const int64_t max_block = call.ints[0], heads = call.ints[1], dim_k = call.ints[2], dim_v = call.ints[3];
  float* unused = scratch_of(dim_v + kLanes);
  int64_t begin, end;
  worker.share(call.ints[4] * heads, begin, end);
  for (int64_t i = begin; i < end; ++i) {
    const HeadState stored(call.views[1], i, dim_k, dim_v, max_block);
    for (int64_t token = 0; token < data<int64_t>(call.views[0])[i / heads]; ++token) {
      const float *key = stored.key(token), *delta = stored.delta(token);
      const Step step{key, key, dim_k, dim_v, stored.decay(token), 0.0f};
      step.each_columns([&](auto vectors, int64_t j, int64_t count) {
        step.advance<vectors()>(stored.state + j, stored.state + j, delta + j, unused + j, count);
      });
    }
  }
}

bool select_commit_state(Call& call) {
  if (call.views.size() != 2 || call.ints.size() != 5 || !call.reals.empty()) return false;
  if (!is_counts(call.views[0], call.ints[4]) || !is_header(call.views[1])) return false;
  call.kernel = commit_state, call.parallel = true;
  return true;
}

// Sixteen channels at once: [position][channel] in fp32.
struct Channels {
  std::vector<float> inputs, weights, outputs;

  void fit(int64_t kernel, int64_t width) {
    inputs.resize(std::max<size_t>(inputs.size(), (kernel - 1 + width) * kLanes));
    weights.resize(std::max<size_t>(weights.size(), kernel * kLanes));
    outputs.resize(std::max<size_t>(outputs.size(), width * kLanes));
  }
};

template <typename T>
T rounded_to(float value) {
  if constexpr (sizeof(T) == 2)
    return narrowed(value);
  else
    return value;
}

inline float wide_of(float value) { return value; }
inline float wide_of(uint16_t value) { return widened(value); }

// Appends the block to the histories of `count` channels from `channel` on, and gathers the inputs of their sums.
template <typename T>
void gather(const Call& call, int64_t row, int64_t channel, int64_t count, Channels& to) {
  const View &x = call.views[1], &weight = call.views[2];
  const int64_t before = weight.size[1] - 1, width = x.size[2], columns = call.ints[0] + before;
  T* history = reinterpret_cast<T*>(address(call.views.back())) + (row * x.size[1] + channel) * columns;
  const T* input = reinterpret_cast<const T*>(element(x, row, channel));
  for (int64_t lane = 0; lane < count; ++lane, history += columns, input += x.stride[1]) {
    for (int64_t t = 0; t < before; ++t) to.inputs[t * kLanes + lane] = wide_of(history[t]);
    for (int64_t t = 0; t < width; ++t) history[before + t] = input[t * x.stride[2]];
  }
  for (int64_t t = 0; t < width; ++t)
    widen(x, element(x, row, channel, t), x.stride[1], &to.inputs[(before + t) * kLanes], count);
  for (int64_t j = 0; j <= before; ++j)
    widen(weight, element(weight, channel, j), weight.stride[0], &to.weights[j * kLanes], count);
}

// The sum rounds to the input's type before the activation, as it does in transformers (causal_conv1d_fn).
template <typename T>
void convolve(Channels& channels, Lanes bias, int64_t kernel, int64_t width, bool silu) {
  for (int64_t t = 0; t < width; ++t) {
    Lanes sum{};
    for (int64_t j = 0; j < kernel; ++j)
      sum += lanes_at(&channels.weights[j * kLanes]) * lanes_at(&channels.inputs[(t + j) * kLanes]);
    sum += bias;
    alignas(64) float rounded[kLanes];
    put_lanes(rounded, sum);
    for (float& value : rounded) value = wide_of(rounded_to<T>(value));
    sum = lanes_at(rounded);
    put_lanes(&channels.outputs[t * kLanes], silu ? sum * sigmoid_of(sum) : sum);
  }
}

// views: out and x [B, C, m], weight [C, K], bias [C] or none, header.
template <typename T>
void conv(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &x = call.views[1], &weight = call.views[2];
  const int64_t channels = x.size[1], kernel = weight.size[1], width = x.size[2];
  const int64_t blocks = (channels + kLanes - 1) / kLanes;
  thread_local Channels held;
  held.fit(kernel, width);
  int64_t begin, end;
  worker.share(x.size[0] * blocks, begin, end);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i / blocks, channel = i % blocks * kLanes, count = std::min(kLanes, channels - channel);
    gather<T>(call, row, channel, count, held);
    Lanes bias{};
    if (call.views.size() == 5) {
      float values[kLanes] = {};
      widen(call.views[3], element(call.views[3], channel), call.views[3].stride[0], values, count);
      bias = lanes_at(values);
    }
    convolve<T>(held, bias, kernel, width, call.ints[1] == 1);
    for (int64_t t = 0; t < width; ++t)
      narrow(out, &held.outputs[t * kLanes], element(out, row, channel, t), out.stride[1], count);
  }
}

bool select_conv(Call& call) {
  const auto& views = call.views;
  if (views.size() < 4 || views.size() > 5 || call.ints.size() != 2 || !call.reals.empty()) return false;
  const View &out = views[0], &x = views[1], &weight = views[2];
  if (!is_float(x) || out.type != x.type || !is_float(weight) || !is_header(views.back())) return false;
  if (x.ndim != 3 || out.ndim != 3 || weight.ndim != 2) return false;
  if (weight.size[0] != x.size[1] || weight.size[1] < 1) return false;
  if (!sized(out, x.size[0], x.size[1], x.size[2]) || x.size[2] > call.ints[0]) return false;
  if (views.size() == 5 && (!is_float(views[3]) || views[3].ndim != 1 || views[3].size[0] != x.size[1])) return false;
  if (call.ints[1] != 0 && call.ints[1] != 1) return false;
  call.kernel = x.type == BF16 ? conv<uint16_t> : conv<float>, call.parallel = true;
  return true;
}

// Moves the K - 1 inputs before position counts[b] of the block to the front.
// views: counts [B], header; ints: max_block, K, C, B, type.
void commit_history(const Call& call, const Worker& worker) {
  const int64_t before = call.ints[1] - 1, channels = call.ints[2], bytes = call.ints[4] == F32 ? 4 : 2;
  const int64_t columns = call.ints[0] + before;
  int64_t begin, end;
  worker.share(call.ints[3] * channels, begin, end);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t count = data<int64_t>(call.views[0])[i / channels];
    char* history = reinterpret_cast<char*>(address(call.views[1])) + i * columns * bytes;
    std::memmove(history, history + count * bytes, before * bytes);
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
