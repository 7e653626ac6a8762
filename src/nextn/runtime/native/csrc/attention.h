// Shared by the kernels of the op `attention`. A sweep takes some queries over the positions of one sequence and kv
// head, span by span with an online softmax.
//
// A query's result does not depend on the other queries: blocks start at multiples of 32 and spans at multiples of 512,
// a masked position adds an exact 0, and a span in which the query sees nothing multiplies by an exact 1.
#pragma once

#include "attention_lanes.h"

namespace nextn {

constexpr int64_t kBlock = 32;  // positions of a block of the buffers
constexpr int64_t kSpan = 512;  // positions whose scores are held at once

// Types of the KV buffers: that of keys and values, or int8 with a scale for each position and kv head. Both scales of a
// position, of its key and of its value, are with the keys.
constexpr int64_t kOfKeys = 0, kCodes = 1;
constexpr int64_t kScaleBytes = 2 * sizeof(float);

// A call of `attention`, with the KV buffers that its header points to when it runs.
struct Attention {
  // rest: keys, values, starts, header. sinks may be null. type: of the buffers.
  Attention(const View& out, const View& q, const View* rest, const View* sinks, int64_t type);

  const View &out, &q, &k, &v;
  const int64_t* starts;  // [B]
  const View* sinks;      // [H], or null
  int64_t batch, heads, kv_heads, width, dim_k, dim_v, sliding_window = 0;
  int64_t key_bytes, value_bytes;  // of a position and kv head in the buffers
  float scale = 1, softcap = 0;
  char *keys, *values;  // the buffers
  int64_t capacity;

  int64_t group() const { return heads / kv_heads; }
  // Queries per sequence and kv head, in the order [token, head of the group]: neighbors see nearly the same positions.
  int64_t queries() const { return width * group(); }

  // Where the block that starts at `position` is stored, for one sequence and kv head.
  char* key_buffer(int64_t row, int64_t kv_head, int64_t position) const {
    check_place(row, kv_head, position);
    return keys + ((row * kv_heads + kv_head) * capacity + position) * key_bytes;
  }
  char* value_buffer(int64_t row, int64_t kv_head, int64_t position) const {
    check_place(row, kv_head, position);
    return values + ((row * kv_heads + kv_head) * capacity + position) * value_bytes;
  }

  void check_place([[maybe_unused]] int64_t row, [[maybe_unused]] int64_t kv_head,
                   [[maybe_unused]] int64_t position) const {
    NEXTN_CHECK(row >= 0 && row < batch && kv_head >= 0 && kv_head < kv_heads, "KV buffers: sequence ", row, " of ",
                batch, ", head ", kv_head, " of ", kv_heads);
    NEXTN_CHECK(position >= 0 && position < capacity, "KV buffers: position ", position, " of ", capacity);
  }

  // The first position that the query at position `high` sees.
  int64_t low_of(int64_t high) const { return sliding_window ? std::max<int64_t>(0, high - sliding_window + 1) : 0; }
};

// Some queries of one sequence and kv head.
struct Queries {
  const Attention& attention;
  int64_t row, kv_head, first, count;

  int64_t head(int64_t query) const { return kv_head * attention.group() + (first + query) % attention.group(); }
  int64_t token(int64_t query) const { return (first + query) / attention.group(); }
  int64_t position(int64_t query) const { return attention.starts[row] + token(query); }
  char* query_at(int64_t query) const { return element(attention.q, row, head(query), token(query)); }
  char* out_at(int64_t query) const { return element(attention.out, row, head(query), token(query)); }

  // The positions that any of them sees, rounded to whole blocks.
  int64_t begin() const { return attention.low_of(position(0)) / kBlock * kBlock; }
  int64_t end() const { return (position(count - 1) + kBlock) / kBlock * kBlock; }

  // A query's attention sink as a logit of base 2; there must be sinks.
  float sink(int64_t query) const {
    float sink;
    widen(*attention.sinks, element(*attention.sinks, head(query)), 1, &sink, 1);
    return sink * kLog2e;
  }
};

// An implementation of attention, with its own layout of the KV buffers.
struct AttentionKernel {
  // Writes the block's keys and values of one sequence and kv head into the buffers.
  void (*write)(const Attention& attention, int64_t row, int64_t kv_head);
  void (*sweep)(const Queries& queries);
  int64_t most;  // queries of a sweep at most
  bool even;     // whether to share queries evenly among sweeps: cheaper here than full sweeps and a short last one
};

// The implementation if it supports these keys and values, else null.
const AttentionKernel* tile_kernel(const View& k, const View& v);
const AttentionKernel* vector_kernel(const View& k, const View& v);
const AttentionKernel* code_kernel(const View& k, const View& v);

}  // namespace nextn
