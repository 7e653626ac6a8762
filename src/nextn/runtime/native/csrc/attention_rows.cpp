// Attention on vector registers: queries times keys, then weights times values, both as rows times packed pieces.
//
// KV buffers in fp32: K [B, Hk, capacity / 16, D, 16], V [B, Hk, capacity, Dv]; in bf16 pairs along the
// summed dim: K [B, Hk, capacity / 16, D / 2, 16, 2], V [B, Hk, capacity / 2, Dv, 2]. In int8 K [B, Hk, capacity / 16, 128 +
// D * 16]: sixteen scales of keys and of values in fp32, then [D / 4, 16, 4]; V [B, Hk, capacity / 4, Dv, 4]. Scores are
// multiplied by the keys' scales, weights by the values'.
#include <algorithm>
#include <limits>
#include <vector>

#include "attention.h"
#include "rows.h"

namespace nextn {

namespace {

constexpr int64_t kColumns = 16;  // of a piece
constexpr int64_t kDepth = 64;    // of a sum for scores
// Queries of a sweep at most: with more, their addresses would not stay in registers.
constexpr int64_t kQueries = std::min(10, rows_of(kColumns));
typedef uint32_t Word32 __attribute__((aligned(2), may_alias));  // a float, or a pair of bf16
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Keys are read by several sweeps, so prefetched lines should stay in the caches.
template <typename Form>
struct Staying : Form {
  static constexpr int kStays = 3;
};

// Codes of eight bits: [4 of k][16 columns][4], the second and third of four swapped, as in `Bytes`. They are widened when
// they are read.
template <typename T>
struct Codes : Singles {
  using In = T;
  static constexpr int64_t kWidth = kColumns, kStep = 4, kRead = kWidth * kStep;

  static Floats weights(const char* at, int v, int one) {
    typedef int32_t Ints __attribute__((vector_size(4 * kFloats), aligned(4), may_alias));
    const int place = one == 1 || one == 2 ? 3 - one : one;
    return __builtin_convertvector((reinterpret_cast<const Ints*>(at)[v] << (24 - 8 * place)) >> 24, Floats);
  }

  template <typename Query>
  static const float* row(const Query* from, int64_t k, int64_t, float* room) {
    by_sixteen(k, [&](auto load, auto store) { store(room, load(from)); });
    return room;
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
// The lower and the upper byte of each magnitude as bf16.
struct Magnitudes {
  alignas(64) uint8_t low[128], high[128];

  constexpr Magnitudes() : low{}, high{} {
    for (int i = 0; i < 128; ++i) {
      const auto bits = std::bit_cast<uint32_t>(float(i));
      low[i] = uint8_t(bits >> 16), high[i] = uint8_t(bits >> 24);
    }
  }
};
constexpr Magnitudes kMagnitudes{};

// Pairs of bf16.
template <>
struct Codes<uint16_t> : Bf16 {
  static constexpr int64_t kStep = 2;

  static Words weights(const char* at, int, int odd) {
    const auto found = [](__m512i index, const uint8_t* table) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
    };
    const __m512i codes = _mm512_loadu_si512(at), index = _mm512_abs_epi8(codes);
    const Words low = (Words)found(index, kMagnitudes.low);
    const Words high = (Words)found(index, kMagnitudes.high) | ((Words)codes & 0x80808080);
    return odd ? ((low >> 8) & 0x00FF00FF) | (high & 0xFF00FF00) : (low & 0x00FF00FF) | ((high << 8) & 0xFF00FF00);
  }
};
#endif

// Layouts of keys and of values. kKeyBytes: of a channel of a key; kValueBytes: of a channel in a step of values.
struct Floats16 : Fp32<kColumns> {
  using Keys = Streamed<Staying<Fp32<kColumns>>, 1>;
  using Values = Beside<Fp32<kColumns>>;
  static constexpr int64_t kKeyBytes = sizeof(float), kValueBytes = sizeof(float);
  static constexpr bool kScaled = false;
};
struct Halves16 : Bf16 {
  using Keys = Streamed<Staying<Bf16>, 1>;
  using Values = Beside<Bf16>;
  static constexpr int64_t kKeyBytes = sizeof(uint16_t), kValueBytes = sizeof(Word);
  static constexpr bool kScaled = false;
};
template <typename T>
struct Codes16 : Codes<T> {
  using Keys = Streamed<Staying<Codes<T>>, 1>;
  using Values = Beside<Codes<T>>;
  static constexpr int64_t kKeyBytes = 1, kValueBytes = 4;
  static constexpr bool kScaled = true;
};

// Where one of each four codes is.
inline int64_t place_of_four(int64_t i) { return i % 4 == 1 || i % 4 == 2 ? 3 - i % 4 : i % 4; }

template <typename T>
void write_codes(const Attention& a, int64_t row, int64_t kv_head) {
  thread_local std::vector<int8_t> codes;
  codes.resize(std::max(a.dim_k, a.dim_v));
  for (int64_t i = 0; i < a.width; ++i) {
    const int64_t position = a.starts[row] + i, place = position % kColumns;
    char* piece = a.key_buffer(row, kv_head, position - place);
    auto* scales = reinterpret_cast<float*>(piece) + place;
    scales[0] = round_group(reinterpret_cast<const T*>(element(a.k, row, kv_head, i)), a.dim_k, codes.data());
    char* keys = piece + kColumns * kScaleBytes + 4 * place;
    for (int64_t d = 0; d < a.dim_k; ++d) keys[d / 4 * 4 * kColumns + place_of_four(d)] = char(codes[d]);
    scales[kColumns] = round_group(reinterpret_cast<const T*>(element(a.v, row, kv_head, i)), a.dim_v, codes.data());
    char* values = a.value_buffer(row, kv_head, position / 4 * 4) + place_of_four(position);
    for (int64_t j = 0; j < a.dim_v; ++j) values[4 * j] = char(codes[j]);
  }
}

template <typename T>
void write(const Attention& a, int64_t row, int64_t kv_head) {
  constexpr int64_t kPair = int64_t(sizeof(float) / sizeof(T));  // values of what is summed, beside each other
  for (int64_t i = 0; i < a.width; ++i) {
    const int64_t position = a.starts[row] + i, block = position / kBlock * kBlock, place = position - block;
    const auto* key = reinterpret_cast<const Word32*>(element(a.k, row, kv_head, i));
    auto* keys =
        reinterpret_cast<Word32*>(a.key_buffer(row, kv_head, block)) + place / kColumns * kColumns * a.dim_k / kPair;
    for (int64_t d = 0; d < a.dim_k / kPair; ++d) keys[d * kColumns + place % kColumns] = key[d];
    const auto* value = reinterpret_cast<const T*>(element(a.v, row, kv_head, i));
    auto* values =
        reinterpret_cast<T*>(a.value_buffer(row, kv_head, block)) + place / kPair * a.dim_v * kPair + place % kPair;
    for (int64_t j = 0; j < a.dim_v; ++j) values[j * kPair] = value[j];
  }
}

// Stores into rows [kQueries] of `size` floats each; `adds`: adds to the values that are there.
struct Keep {
  float* rows;
  int64_t size;
  bool adds = false;

  void operator()(int64_t row, int64_t column, int64_t width, const float* sums) const {
    float* to = rows + row * size + column;
    if (!adds)
      std::memcpy(to, sums, width * sizeof(float));
    else
      for (int64_t i = 0; i < width; ++i) to[i] += sums[i];
  }
};

// A thread's scratch memory; it grows to the largest sizes seen.
template <typename X>
struct Room {
  std::vector<X> queries, weights;
  std::vector<float> scores, sums, more, values;

  // channels: of sums, a piece at least.
  void fit(int64_t dim_k, int64_t channels) {
    queries.resize(std::max<size_t>(queries.size(), kQueries * dim_k));
    weights.resize(kQueries * kSpan);
    scores.resize(kQueries * kSpan);
    sums.resize(std::max<size_t>(sums.size(), kQueries * channels));
    more.resize(sums.size());
    values.resize(kSpan * kColumns);
  }
};

// State of a query's online softmax. Logits have base 2.
struct Softmax {
  int64_t low, high;  // the positions that the query sees, `high` included
  Lanes top, total;   // the largest logit so far in every lane; sums of weights relative to it
};

// Stores a vector of weights as the products read them; returns the rounded weights.
inline Lanes put_weights(float* to, Lanes weights) {
  put(to, weights);
  return weights;
}

inline Lanes put_weights(Word* to, Lanes weights) {
  put(reinterpret_cast<uint16_t*>(to), weights);
  return rounded<uint16_t>(weights);
}

template <typename Form>
class Sweep {
 public:
  using X = typename Form::X;

  explicit Sweep(const Queries& queries)
      : queries_(queries), a_(queries.attention), channels_(std::max(a_.dim_v, kColumns)) {
    room_.fit(a_.dim_k, channels_);
    for (int64_t query = 0; query < queries_.count; ++query) {
      query_[query] = row_of(query, a_.dim_k / Form::kValues);
      weights_[query] = room_.weights.data() + query * kSpan;
      const int64_t high = queries_.position(query);
      softmax_[query] = {a_.low_of(high), high, Lanes{} + kLowest, Lanes{}};
      if (!a_.sinks) continue;
      const float one[kLanes] = {1.0f};
      softmax_[query].top = Lanes{} + queries_.sink(query), softmax_[query].total = lanes_at(one);
    }
    std::fill_n(room_.sums.data(), queries_.count * channels_, 0.0f);
  }

  void run() {
    for (int64_t position = queries_.begin(), next; position < queries_.end(); position = next) {
      next = std::min(position / kSpan * kSpan + kSpan, queries_.end());
      span(position, next - position);
    }
    for (int64_t query = 0; query < queries_.count; ++query) {
      float* sums = &room_.sums[query * channels_];
      const float inverse = 1.0f / lane_sum(softmax_[query].total);
      for (int64_t j = 0; j < a_.dim_v; ++j) sums[j] *= inverse;
      narrow(a_.out, sums, queries_.out_at(query), a_.out.stride[3], a_.dim_v);
    }
  }

 private:
  void span(int64_t position, int64_t positions) {
    score(position, positions);
    float factor[kQueries];
    for (int64_t query = 0; query < queries_.count; ++query) factor[query] = soften(query, position, positions);
    weigh(position, positions);
    for (int64_t query = 0; query < queries_.count; ++query) {
      float* sums = &room_.sums[query * channels_];
      const float* more = &room_.more[query * channels_];
      for (int64_t j = 0; j < a_.dim_v; ++j) sums[j] = sums[j] * factor[query] + more[j];
    }
  }

  // A query as the products read it. Where they multiply floats, it may be in fp32 although keys are not.
  const X* row_of(int64_t query, int64_t depth) {
    X* room = room_.queries.data() + query * depth;
    if constexpr (std::is_same_v<X, float>)
      if (a_.q.type == F32)
        return Form::row(reinterpret_cast<const float*>(queries_.query_at(query)), a_.dim_k, depth, room);
    return Form::row(reinterpret_cast<const typename Form::In*>(queries_.query_at(query)), a_.dim_k, depth, room);
  }

  // In pieces of k, as one long sum would be less exact.
  void score(int64_t position, int64_t positions) {
    const int64_t piece = kColumns * a_.key_bytes, codes = kColumns * a_.dim_k * Form::kKeyBytes;
    const char* keys = a_.key_buffer(queries_.row, queries_.kv_head, position) + piece - codes;
    for (int64_t k = 0; k < a_.dim_k; k += kDepth) {
      const X* x[kQueries];
      for (int64_t query = 0; query < queries_.count; ++query) x[query] = query_[query] + k / Form::kValues;
      const Part<X> part{x, keys + k * kColumns * Form::kKeyBytes, std::min(kDepth, a_.dim_k - k) / Form::kValues,
                         piece, Form::kRead};
      kKernels<typename Form::Keys, Keep>[queries_.count - 1](part, 0, positions / kColumns,
                                                              {room_.scores.data(), kSpan, k > 0});
    }
    if constexpr (Form::kScaled)
      for (int64_t query = 0; query < queries_.count; ++query) scale(&room_.scores[query * kSpan], position, positions);
  }

  // The scales of sixteen positions: of their keys, or of their values.
  Lanes scales(int64_t position, bool of_values) const {
    const auto* piece = reinterpret_cast<const float*>(a_.key_buffer(queries_.row, queries_.kv_head, position));
    return lanes_at(piece + (of_values ? kColumns : 0));
  }

  void scale(float* scores, int64_t position, int64_t positions) const {
    for (int64_t i = 0; i < positions; i += kLanes)
      put_lanes(scores + i, lanes_at(scores + i) * scales(position + i, false));
  }

  // more [count, channels] = weights times values. If the last channels fill no whole piece, the piece overlaps the one
  // before it.
  void weigh(int64_t position, int64_t positions) {
    Part<X> part{weights_, a_.value_buffer(queries_.row, queries_.kv_head, position), positions / Form::kValues,
                 kColumns * Form::kValueBytes, a_.dim_v * Form::kValueBytes};
    if (a_.dim_v < kColumns) widen_values(part);
    const auto& kernel = kKernels<typename Form::Values, Keep>[queries_.count - 1];
    const Keep keep{room_.more.data(), channels_};
    kernel(part, 0, channels_ / kColumns, keep);
    if (channels_ % kColumns == 0) return;
    const int64_t channel = channels_ - kColumns;
    part.weights += channel * Form::kValueBytes;
    kernel(part, 0, 1, {keep.rows + channel, keep.size});
  }

  // Fewer channels than a piece has: each position (or pair of positions) is a row of its own.
  void widen_values(Part<X>& part) {
    auto* to = reinterpret_cast<char*>(room_.values.data());
    const int64_t rows = part.depth / Form::kStep, step = kColumns * Form::kValueBytes;
    for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * step, part.weights + i * part.step, part.step);
    part.weights = to, part.step = step;
  }

  // Turns a query's scores from `position` on into weights; returns the factor for its earlier sums.
  float soften(int64_t query, int64_t position, int64_t positions) {
    Softmax& softmax = softmax_[query];
    float* scores = &room_.scores[query * kSpan];
    const int64_t begin = std::clamp<int64_t>(softmax.low - position, 0, positions);
    const int64_t end = std::clamp<int64_t>(softmax.high + 1 - position, 0, positions);
    if (a_.softcap > 0) cap(scores, positions);
    std::fill(scores, scores + begin, kLowest);
    std::fill(scores + end, scores + positions, kLowest);
    Lanes most = Lanes{} + kLowest;
    for (int64_t i = 0; i < positions; i += kLanes) most = larger(lanes_at(scores + i), most);
    for (int64_t step = 1; step < kLanes; step *= 2) most = larger(most, rotated(most, int(step)));
    const float slope = a_.softcap > 0 ? kLog2e : a_.scale * kLog2e;
    const Lanes before = softmax.top, lowest = Lanes{} + kLowest;
    softmax.top = larger(most * slope, before);
    const Lanes shown = chosen(softmax.top == lowest, Lanes{}, softmax.top);
    const Lanes factor = exp2_of(before - shown);
    Lanes total = softmax.total * factor;
    for (int64_t i = 0; i < positions; i += kLanes) {
      const Lanes weights = exp2_of(lanes_at(scores + i) * slope - shown);
      X* to = weights_[query] + i / Form::kValues;
      if constexpr (Form::kScaled)
        put_weights(to, weights * scales(position + i, true)), total += weights;
      else
        total += put_weights(to, weights);
    }
    softmax.total = total;
    return factor[0];
  }

  void cap(float* scores, int64_t positions) const {
    const float inside = a_.scale / a_.softcap;
    for (int64_t i = 0; i < positions; i += kLanes)
      put_lanes(scores + i, a_.softcap * tanh_of(lanes_at(scores + i) * inside));
  }

  static Room<X>& room() {
    thread_local Room<X> room;
    return room;
  }

  const Queries& queries_;
  const Attention& a_;
  const int64_t channels_;
  Room<X>& room_ = room();
  const X* query_[kQueries];
  X* weights_[kQueries];
  Softmax softmax_[kQueries];
};

template <typename Form>
void sweep(const Queries& queries) {
  Sweep<Form>(queries).run();
}

constexpr AttentionKernel kFloats16{write<float>, sweep<Floats16>, kQueries, true};
constexpr AttentionKernel kHalves16{write<uint16_t>, sweep<Halves16>, kQueries, true};
constexpr AttentionKernel kCodesOfFloats{write_codes<float>, sweep<Codes16<float>>, kQueries, true};
constexpr AttentionKernel kCodesOfHalves{write_codes<uint16_t>, sweep<Codes16<uint16_t>>, kQueries, true};

}  // namespace

// A pair of bf16 cannot be split.
const AttentionKernel* vector_kernel(const View& k, const View&) {
  if (k.type == F32) return &kFloats16;
  return k.size[3] % 2 ? nullptr : &kHalves16;
}

// Four codes cannot be split.
const AttentionKernel* code_kernel(const View& k, const View& v) {
  if (k.size[3] % 4 || v.size[3] % 4) return nullptr;
  return k.type == F32 ? &kCodesOfFloats : &kCodesOfHalves;
}

}  // namespace nextn
