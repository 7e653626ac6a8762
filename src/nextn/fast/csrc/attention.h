// One sweep of attention: up to 16 queries over the columns of one row and kv head, in spans with an online softmax.
//
// Everything is laid out by query lane: value i belongs to query i % lanes, so vectors are full for 1 query and for 16.
// A query's result knows no other query: blocks start at multiples of 32, spans at multiples of 512, a column outside a
// query's view adds an exact 0, and a span without such columns multiplies by an exact 1.
#pragma once

#include "attention_lanes.h"

namespace nextn {

constexpr int64_t kBlock = 32;    // columns of a tile product, and of a block of the V slab
constexpr int64_t kSpan = 512;    // columns whose scores are held at once
constexpr int64_t kQueries = 16;  // queries of a sweep

// A call of `attend`, with what stands in its header while it runs.
struct Attention {
  explicit Attention(const Call& call);

  const View &out, &q, &k, &v;
  const int64_t* starts;  // [B]
  const View* sinks;      // [H], or null
  int64_t batch, heads, kv_heads, width, dim_k, dim_v, window;
  float scale, softcap;
  bool tiled;           // whether tiles read the slabs
  char *keys, *values;  // the slabs
  int64_t capacity;

  int64_t group() const { return heads / kv_heads; }
  // Queries per row and kv head, in the order of [token, head of the group]: neighbours see nearly the same columns.
  int64_t queries() const { return width * group(); }
  int64_t sweeps() const { return (queries() + kQueries - 1) / kQueries; }

  // Columns from `column` on, of one row and kv head.
  char* key_slab(int64_t row, int64_t kv_head, int64_t column) const {
    return keys + ((row * kv_heads + kv_head) * capacity + column) * dim_k * bytes_of(k);
  }
  char* value_slab(int64_t row, int64_t kv_head, int64_t column) const {
    return values + ((row * kv_heads + kv_head) * capacity + column) * dim_v * bytes_of(v);
  }
};

// The queries of one sweep, and how far their softmax has come.
struct Sweep {
  Sweep(const Attention& attention, int64_t row, int64_t kv_head, int64_t place);

  const Attention& attention;
  int64_t row, kv_head, first, count;
  int64_t lanes;          // count, as a power of two
  LaneInts low, high;     // the first and last column of each lane's query; padding sees none
  int64_t begin, end;     // columns of all, in whole blocks
  int64_t inner_begin, inner_end;  // columns that every query sees
  Lanes top;              // the largest logit so far (base 2)
  Lanes top_sum;          // what a sink adds to the sum of weights

  int64_t head(int64_t query) const { return kv_head * attention.group() + (first + query) % attention.group(); }
  int64_t token(int64_t query) const { return (first + query) / attention.group(); }
  char* query_at(int64_t query) const { return element(attention.q, row, head(query), token(query)); }
  char* out_at(int64_t query) const { return element(attention.out, row, head(query), token(query)); }

  // From raw products scores [columns, lanes] of the columns from `column` on: `top` as of now. Returns what all sums
  // so far are to be multiplied by. Leaves scores for `weights`.
  Lanes advance(float* scores, int64_t column, int64_t columns);

  // A vector of scores as weights of the softmax, relative to `top`.
  Lanes weights(const float* scores) const { return exp2_of(lanes_at(scores) * slope_ - shown_); }

 private:
  void cap(float* scores, int64_t count) const;
  void mask(float* scores, int64_t column) const;

  float slope_;  // of logits (base 2) over scores
  Lanes shown_;  // top, or 0 before any column is seen
};

// Whether the tile kernel takes these sizes; it then runs one sweep.
bool tiles_take(int64_t dim_k, int64_t dim_v);
void sweep_tiles(Sweep& sweep);

}  // namespace nextn
