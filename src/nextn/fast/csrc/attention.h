// What the kernels of the op `attend` share. They sweep: some queries over the columns of one row and kv head, in spans
// with an online softmax.
//
// A query's result knows no other query: blocks start at multiples of 32, spans at multiples of 512, a column outside a
// query's view adds an exact 0, and a span without such columns multiplies by an exact 1.
#pragma once

#include "attention_lanes.h"

namespace nextn {

constexpr int64_t kBlock = 32;  // columns of a block of the slabs
constexpr int64_t kSpan = 512;  // columns whose scores are held at once

// A call of `attend`, with what stands in its header while it runs.
struct Attention {
  // rest: keys, values, starts, the header, sinks where there are any.
  Attention(const View& out, const View& q, const View* rest, const View* sinks);

  const View &out, &q, &k, &v;
  const int64_t* starts;  // [B]
  const View* sinks;      // [H], or null
  int64_t batch, heads, kv_heads, width, dim_k, dim_v, window = 0;
  float scale = 1, softcap = 0;
  char *keys, *values;  // the slabs
  int64_t capacity;

  int64_t group() const { return heads / kv_heads; }
  // Queries per row and kv head, in the order of [token, head of the group]: neighbours see nearly the same columns.
  int64_t queries() const { return width * group(); }

  // What is stored of a block of columns from `column` on, of one row and kv head.
  char* key_slab(int64_t row, int64_t kv_head, int64_t column) const {
    return keys + ((row * kv_heads + kv_head) * capacity + column) * dim_k * bytes_of(k);
  }
  char* value_slab(int64_t row, int64_t kv_head, int64_t column) const {
    return values + ((row * kv_heads + kv_head) * capacity + column) * dim_v * bytes_of(v);
  }

  // The first column that the query at column `high` sees.
  int64_t low_of(int64_t high) const { return window ? std::max<int64_t>(0, high - window + 1) : 0; }
};

// Some queries of one row and kv head.
struct Queries {
  const Attention& attention;
  int64_t row, kv_head, first, count;

  int64_t head(int64_t query) const { return kv_head * attention.group() + (first + query) % attention.group(); }
  int64_t token(int64_t query) const { return (first + query) / attention.group(); }
  int64_t column(int64_t query) const { return attention.starts[row] + token(query); }
  char* query_at(int64_t query) const { return element(attention.q, row, head(query), token(query)); }
  char* out_at(int64_t query) const { return element(attention.out, row, head(query), token(query)); }

  // Columns that any of them sees, in whole blocks.
  int64_t begin() const { return attention.low_of(column(0)) / kBlock * kBlock; }
  int64_t end() const { return (column(count - 1) + kBlock) / kBlock * kBlock; }

  // A query's sink as a logit of base 2; there must be some.
  float sink(int64_t query) const {
    float sink;
    widen(*attention.sinks, element(*attention.sinks, head(query)), 1, &sink, 1);
    return sink * kLog2e;
  }
};

// One way to attend, and to lay out the slabs.
struct Way {
  // The window's keys and values of one row and kv head go into the slabs.
  void (*write)(const Attention& attention, int64_t row, int64_t kv_head);
  void (*sweep)(const Queries& queries);
  int64_t most;  // queries of a sweep
  bool even;     // whether sweeps share them evenly: a few more cost less than full sweeps and a rest
};

// The way that takes these queries and values; null: none.
const Way* way_of_tiles(const View& q, const View& v);
const Way* way_of_rows(const View& q, const View& v);

}  // namespace nextn
