// Probabilities over a vocabulary, shared by softmax, sampling and drafting. One row at a time, in one order of sums.
#pragma once

#include "lanes.h"
#include "runtime.h"

namespace nextn {

// The sum of exp(x - shift), in the order of lanes.h; the terms are written to `terms` unless that is null.
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

// The lowest index of the largest value; 0 in a row of NaN. Blocks without it are skipped with vector comparisons.
inline int64_t index_of(const float* row, float largest, int64_t count) {
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

// Sampling parameters (speculative/sampling.py). Off: top_k 0, top_p 1, min_p 0. temperature is above 0.
struct SamplingParams {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
};

// logits [vocab] -> probs [vocab], which may be the same memory.
void to_probs(const SamplingParams& params, const float* logits, float* probs, int64_t vocab);

// Inverts the cumulative distribution of probs, or of weights with any sum, at u in [0, 1); never returns a token of
// weight zero.
int64_t sample_at(const float* probs, float u, int64_t vocab);

}  // namespace nextn
