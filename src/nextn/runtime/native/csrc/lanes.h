// Sums and maxima over a run in a fixed order: element j belongs to lane j % 64, and the lanes meet in a fixed tree.
//
// The order depends on the run's length alone, so a row's result does not depend on the other rows.
#pragma once

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace nextn {

constexpr int64_t kLanes = 64;

// Sixteen lanes as one value, on any machine; its halves, and theirs.
using Vector = Sixteen;
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

inline Vector vector_at(const float* from) { return sixteen(from); }

struct Adding {
  static constexpr float kStart = 0.0f;
  template <typename V>
  static V with(V a, V b) {
    return a + b;
  }
};

// NaN wins, as in torch.
struct Maximum {
  static constexpr float kStart = -kInf;
  template <typename V>
  static V with(V a, V b) {
    return chosen((a > b) | (a != a), a, b);
  }
};

struct Itself {
  Vector operator()(Vector values) const { return values; }
};

// Combines a run fed in pieces; all pieces but the last are multiples of kLanes.
template <typename R>
struct Lanes {
  static constexpr int kVectors = 4;
  Vector lane[kVectors];

  Lanes() {
    for (Vector& vector : lane) vector = Vector{} + R::kStart;
  }

  // map: of each vector before it is combined.
  template <typename Map = Itself>
  void feed(const float* from, int64_t count, Map map = {}) {
    Vector a = lane[0], b = lane[1], c = lane[2], d = lane[3];
    for (; count >= kLanes; count -= kLanes, from += kLanes) {
      a = R::with(a, map(vector_at(from))), b = R::with(b, map(vector_at(from + 16)));
      c = R::with(c, map(vector_at(from + 32))), d = R::with(d, map(vector_at(from + 48)));
    }
    lane[0] = a, lane[1] = b, lane[2] = c, lane[3] = d;
    if (count) feed_tail(from, count, map);
  }

  float result() const {
    const Vector all = R::with(R::with(lane[0], lane[2]), R::with(lane[1], lane[3]));
    Half eight[2];
    kept(eight, all);
    eight[0] = R::with(eight[0], eight[1]);
    Quarter part[2];
    std::memcpy(part, eight, sizeof part);
    const Quarter four = R::with(part[0], part[1]);
    return R::with(R::with(four[0], four[2]), R::with(four[1], four[3]));
  }

 private:
  template <typename Map>
  void feed_tail(const float* from, int64_t count, Map map) {
    float padded[kLanes];
    std::fill_n(padded, kLanes, R::kStart);
    std::memcpy(padded, from, count * sizeof(float));
    for (int v = 0; v < kVectors; ++v) lane[v] = R::with(lane[v], map(vector_at(padded + 16 * v)));
  }
};

// map(start) must be start again: tails are filled with it.
template <typename R, typename Map = Itself>
float combined(const float* from, int64_t count, Map map = {}) {
  Lanes<R> lanes;
  lanes.feed(from, count, map);
  return lanes.result();
}

}  // namespace nextn
