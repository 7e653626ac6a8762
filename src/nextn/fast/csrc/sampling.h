// Laws over a vocabulary: what softmax, sampling and the chain of drafts share. A row at a time, in one order of sums.
#pragma once

#include "lanes.h"

#include "runtime.h"

namespace nextn {

// The sum of exp(x - shift), the terms into `terms` where that is not null; both in the order of lanes.h.
inline float sum_of_exp(const float* row, float shift, float* terms, int64_t count) {
  Lanes<Adding> lanes;
  constexpr int64_t kPart = 512;
  float buffer[kPart];
  for (int64_t done = 0; done < count; done += kPart) {
    const int64_t part = std::min(kPart, count - done);
    float* to = terms ? terms + done : buffer;
#pragma GCC ivdep
    for (int64_t i = 0; i < part; ++i) to[i] = exp_of(row[done + i] - shift);
    lanes.feed(to, part);
  }
  return lanes.result();
}

// The lowest place of the largest; 0 in a row of NaN. Blocks without it are passed over in vectors.
inline int64_t place_of(const float* row, float largest, int64_t count) {
  constexpr int64_t kBlock = 64;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t end = std::min(count, start + kBlock);
    int32_t found = 0;
    for (int64_t i = start; i < end; ++i) found |= row[i] == largest;
    for (int64_t i = start; found && i < end; ++i)
      if (row[i] == largest) return i;
  }
  return 0;
}

// How a law is made from logits (sampling.py). Off: top_k 0, top_p 1, min_p 0. temperature is above 0.
struct Rule {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
};

// logits [vocab] -> law [vocab], which may be the same place.
void law_of(const Rule& rule, const float* logits, float* law, int64_t vocab);

// Inverts the distribution function of a law, or of weights with any sum, at u in [0, 1); never a token of weight zero.
int64_t picked(const float* law, float u, int64_t vocab);

}  // namespace nextn
