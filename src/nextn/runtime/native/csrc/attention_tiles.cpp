// Attention on tile registers (Intel AMX, bf16): keys times queries, then values times weights. Both are transposed, so
// that keys and values are read in place and only the few queries and weights are rearranged.
//
// KV buffers: K [B, Hk, capacity, D]; V, laid out as tile operands, [B, Hk, capacity / 32, Dv, 32]. Scores and weights are
// laid out by query lane: value i belongs to query i % lanes, so vectors are full for 1 query and for 16.
#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "attention.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace nextn {

#if defined(__AMX_BF16__)

namespace {

constexpr int64_t kRows = 16;     // of a tile
constexpr int64_t kDepth = 32;    // bf16 values in a row of a tile
constexpr int64_t kGroups = 4;    // tiles of 16 value channels summed at once
constexpr int64_t kQueries = 16;  // of a sweep
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The queries of one sweep and the state of their online softmax.
struct Sweep : Queries {
  explicit Sweep(const Queries& queries);

  int64_t lanes;                   // count, as a power of two
  LaneInts low, high;              // the first and last position of each lane's query; padding sees none
  int64_t inner_begin, inner_end;  // positions that every query sees
  Lanes top;                       // the largest logit so far (base 2)
  Lanes top_sum;                   // what a sink adds to the sum of weights

  // Masks and caps the raw scores [positions, lanes] from `position` on and updates `top`. Returns the factor for all
  // earlier sums.
  Lanes advance(float* scores, int64_t position, int64_t positions);

  // A vector of scores as weights of the softmax, relative to `top`.
  Lanes weights(const float* scores) const { return exp2_of(lanes_at(scores) * slope_ - shown_); }

 private:
  void cap(float* scores, int64_t count) const;
  void mask(float* scores, int64_t position) const;

  float slope_;  // of logits (base 2) over scores
  Lanes shown_;  // top, or 0 before any position is seen
};

Sweep::Sweep(const Queries& queries)
    : Queries(queries), lanes(std::bit_ceil(uint64_t(count))),
      slope_(attention.softcap > 0 ? kLog2e : attention.scale * kLog2e) {
  inner_end = position(0) + 1, inner_begin = attention.low_of(position(count - 1));
  int32_t highs[kLanes], lows[kLanes];
  float tops[kLanes], sums[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t query = lane % lanes, last = query < count ? position(query) : -1;
    highs[lane] = int32_t(last), lows[lane] = int32_t(attention.low_of(last));
    const bool sinks = attention.sinks && query < count;
    tops[lane] = sinks ? sink(query) : kLowest, sums[lane] = sinks ? 1.0f : 0.0f;
  }
  high = loaded<LaneInts>(highs), low = loaded<LaneInts>(lows);
  top = lanes_at(tops), top_sum = lanes_at(sums);
}

void Sweep::cap(float* scores, int64_t count) const {
  const float inside = attention.scale / attention.softcap;
  for (int64_t i = 0; i < count; i += kLanes)
    put_lanes(scores + i, attention.softcap * tanh_of(lanes_at(scores + i) * inside));
}

// One block from `position` on.
void Sweep::mask(float* scores, int64_t position) const {
  const Lanes lowest = Lanes{} + kLowest;
  LaneInts place = lane_quotient(lanes) + int32_t(position);
  for (int64_t i = 0; i < kBlock * lanes; i += kLanes, place += int32_t(kLanes / lanes))
    put_lanes(scores + i, chosen((place < low) | (place > high), lowest, lanes_at(scores + i)));
}

Lanes Sweep::advance(float* scores, int64_t position, int64_t positions) {
  if (attention.softcap > 0) cap(scores, positions * lanes);
  for (int64_t i = 0; i < positions; i += kBlock)
    if (position + i < inner_begin || position + i + kBlock > inner_end) mask(scores + i * lanes, position + i);
  const Lanes lowest = Lanes{} + kLowest;
  Lanes best[2] = {lowest, lowest};
  for (int64_t i = 0; i < positions * lanes; i += 2 * kLanes) {
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

// 0 to 3: sums [16, lanes]; 4, 5: keys or values [16, 32]; 6: queries or weights [16 pairs, lanes, 2]; for `weigh`
// 7: the weights' sums [1, lanes], and 5 a row of ones.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig(int64_t lanes, bool weighs) {
    for (int tile = 0; tile < 8; ++tile) {
      bytes[tile] = tile == 4 || tile == 5 ? 64 : uint16_t(lanes * 4);
      rows[tile] = weighs && (tile == 5 || tile == 7) ? 1 : kRows;
    }
  }
};

struct alignas(64) Buffers {
  float scores[kSpan * kQueries];
  uint32_t weights[kSpan / 2 * kQueries];  // [pair of positions, lanes, 2] bf16
  float totals[kQueries];
};

// GCC's tile load intrinsics do not declare that they read memory.
inline void finish_stores() { asm volatile("" ::: "memory"); }

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Scores of kTiles * 16 positions: [positions, lanes].
template <int kTiles>
void score(const uint16_t* keys, int64_t dim, const uint32_t* queries, int64_t lanes, float* scores) {
  const int64_t row = lanes * 4, tile = kRows * dim;
  zero_sums();
  for (int64_t d = 0; d < dim; d += kDepth, keys += kDepth, queries += kRows * lanes) {
    _tile_loadd(6, queries, row);
    _tile_loadd(4, keys, dim * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, keys + tile, dim * 2);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kTiles == 4) {
      _tile_loadd(4, keys + 2 * tile, dim * 2);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, keys + 3 * tile, dim * 2);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, scores, row);
  _tile_stored(1, scores + kRows * lanes, row);
  if constexpr (kTiles == 4) {
    _tile_stored(2, scores + 2 * kRows * lanes, row);
    _tile_stored(3, scores + 3 * kRows * lanes, row);
  }
}

// Sums of kTiles * 16 value channels over blocks of positions: [channels, lanes]; of the weights alone into totals.
template <int kTiles>
void weigh(const uint16_t* values, int64_t dim, int64_t blocks, const uint32_t* weights, int64_t lanes, float* sums,
           float* totals) {
  const int64_t row = lanes * 4, tile = kRows * kBlock;
  zero_sums();
  _tile_zero(7);
  for (int64_t block = 0; block < blocks; ++block, values += kBlock * dim, weights += kRows * lanes) {
    _tile_loadd(6, weights, row);
    _tile_dpbf16ps(7, 5, 6);
    _tile_loadd(4, values, kBlock * 2);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTiles > 1) {
      _tile_loadd(4, values + tile, kBlock * 2);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(4, values + 2 * tile, kBlock * 2);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(4, values + 3 * tile, kBlock * 2);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, sums, row);
  if constexpr (kTiles > 1) _tile_stored(1, sums + kRows * lanes, row);
  if constexpr (kTiles > 2) _tile_stored(2, sums + 2 * kRows * lanes, row);
  if constexpr (kTiles > 3) _tile_stored(3, sums + 3 * kRows * lanes, row);
  _tile_stored(7, totals, row);
}

using Weigh = void (*)(const uint16_t*, int64_t, int64_t, const uint32_t*, int64_t, float*, float*);
constexpr Weigh kWeigh[] = {weigh<1>, weigh<2>, weigh<3>, weigh<4>};

// [pair of d, lanes, 2] as the second operand wants it.
void pack_queries(const Sweep& sweep, uint32_t* packed) {
  const int64_t lanes = sweep.lanes, pairs = sweep.attention.dim_k / 2;
  if (sweep.count < lanes) std::fill_n(packed, pairs * lanes, 0u);
  for (int64_t query = 0; query < sweep.count; ++query) {
    const char* from = sweep.query_at(query);
    for (int64_t pair = 0; pair < pairs; ++pair) std::memcpy(packed + pair * lanes + query, from + pair * 4, 4);
  }
}

// Two vectors hold the scores of an even number of positions, at 16 lanes of two: each pair's weights side by side.
void pack_weights(const Sweep& sweep, const float* scores, int64_t positions, uint32_t* packed) {
  const int64_t lanes = sweep.lanes;
  // Indices of the first and, in the upper half, the second position of each pair.
  const LaneInts place = lane_quotient(lanes) * int32_t(2 * lanes) + lane_modulo(lanes);
  const auto index = (__m512i)(place | (place + int32_t(lanes)) << 16);
  for (int64_t i = 0; i < positions * lanes; i += 2 * kLanes) {
    const Lanes first = sweep.weights(scores + i), second = sweep.weights(scores + i + kLanes);
    const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_store_si512(packed + i / 2, _mm512_permutexvar_epi16(index, both));
  }
}

// sums [channels, lanes] = sums * factor + more
void add_scaled(float* sums, const float* more, int64_t count, Lanes factor) {
  for (int64_t i = 0; i < count; i += kLanes) put_lanes(sums + i, lanes_at(sums + i) * factor + lanes_at(more + i));
}

// Span by span: [Dv, lanes] sums, relative to the largest logit so far.
Lanes sum_spans(Sweep& sweep, const uint32_t* queries, float* sums, float* more) {
  const Attention& a = sweep.attention;
  thread_local Buffers buffers;
  const int64_t lanes = sweep.lanes;
  const LaneInts replicate = lane_modulo(lanes);
  Lanes totals = sweep.top_sum;
  const TileConfig scores(lanes, false), weights(lanes, true);
  uint16_t ones[kDepth];
  std::fill_n(ones, kDepth, uint16_t(0x3F80));
  for (int64_t position = sweep.begin(), next; position < sweep.end(); position = next) {
    next = std::min(position / kSpan * kSpan + kSpan, sweep.end());
    const int64_t positions = next - position;
    finish_stores();
    _tile_loadconfig(&scores);
    const auto* keys = reinterpret_cast<const uint16_t*>(a.key_buffer(sweep.row, sweep.kv_head, position));
    int64_t i = 0;
    for (; i + 2 * kBlock <= positions; i += 2 * kBlock)
      score<4>(keys + i * a.dim_k, a.dim_k, queries, lanes, buffers.scores + i * lanes);
    if (i < positions) score<2>(keys + i * a.dim_k, a.dim_k, queries, lanes, buffers.scores + i * lanes);
    const Lanes factor = sweep.advance(buffers.scores, position, positions);
    pack_weights(sweep, buffers.scores, positions, buffers.weights);
    finish_stores();
    _tile_loadconfig(&weights);
    _tile_loadd(5, ones, 64);
    const auto* values = reinterpret_cast<const uint16_t*>(a.value_buffer(sweep.row, sweep.kv_head, position));
    for (int64_t j = 0; j < a.dim_v; j += kGroups * kRows)
      kWeigh[std::min(kGroups, (a.dim_v - j) / kRows) - 1](values + j * kBlock, a.dim_v, positions / kBlock,
                                                           buffers.weights, lanes, more + j * lanes, buffers.totals);
    add_scaled(sums, more, a.dim_v * lanes, factor);
    totals = totals * factor + permuted(lanes_at(buffers.totals), replicate);
  }
  return totals;
}

// Multiplies by 1 / the weights' sums and turns [channels, lanes] into rows.
void store_out(const Sweep& sweep, const float* sums, Lanes inverse) {
  const View& out = sweep.attention.out;
  const int64_t lanes = sweep.lanes, stride = out.stride[3];
  const auto index = (__m512i)(places() * int32_t(lanes));
  for (int64_t query = 0; query < sweep.count; ++query)
    for (int64_t j = 0; j < sweep.attention.dim_v; j += kLanes) {
      const auto sum = (Lanes)_mm512_i32gather_ps(index, sums + j * lanes + query, 4);
      alignas(64) float row[kLanes];
      put_lanes(row, sum * inverse[query]);
      narrow(out, row, sweep.out_at(query) + j * stride * bytes_of(out), stride, kLanes);
    }
}

// Writes the block's keys and values of one sequence and kv head.
void write(const Attention& a, int64_t row, int64_t kv_head) {
  for (int64_t i = 0; i < a.width; ++i) {
    const int64_t position = a.starts[row] + i;
    std::memcpy(a.key_buffer(row, kv_head, position), element(a.k, row, kv_head, i), a.dim_k * sizeof(uint16_t));
    const auto* from = reinterpret_cast<const uint16_t*>(element(a.v, row, kv_head, i));
    auto* block =
        reinterpret_cast<uint16_t*>(a.value_buffer(row, kv_head, position / kBlock * kBlock)) + position % kBlock;
    for (int64_t j = 0; j < a.dim_v; ++j) block[j * kBlock] = from[j];
  }
}

void run(const Queries& some) {
  Sweep sweep(some);
  const Attention& a = sweep.attention;
  thread_local std::vector<uint32_t> queries;
  thread_local std::vector<float> sums, more;
  queries.resize(std::max<size_t>(queries.size(), a.dim_k / 2 * kQueries));
  sums.resize(std::max<size_t>(sums.size(), a.dim_v * kQueries));
  more.resize(sums.size());
  std::fill_n(sums.data(), a.dim_v * sweep.lanes, 0.0f);
  pack_queries(sweep, queries.data());
  const Lanes totals = sum_spans(sweep, queries.data(), sums.data(), more.data());
  _tile_release();
  store_out(sweep, sums.data(), 1.0f / totals);
}

constexpr AttentionKernel kTiles{write, run, kQueries, false};

}  // namespace

const AttentionKernel* tile_kernel(const View& k, const View& v) {
  return k.type == BF16 && k.size[3] % kDepth == 0 && v.size[3] % kRows == 0 ? &kTiles : nullptr;
}

#else

const AttentionKernel* tile_kernel(const View&, const View&) { return nullptr; }

#endif

}  // namespace nextn
