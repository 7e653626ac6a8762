// The k largest of a row, in descending order, equal ones by lowest index; NaN counts as the largest, as in torch.
#include "functions.h"
#include "strided.h"

namespace nextn {

namespace {

// An integer in the order of the float values; -0 and 0 are equal.
inline int32_t key_of(float value) {
  const int32_t bits = to_bits(value + 0.0f);
  const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
  return value == value ? key : INT32_MAX;
}

struct Candidate {
  int32_t key;
  int64_t index;
};

inline bool before(const Candidate& a, const Candidate& b) {
  return a.key > b.key || (a.key == b.key && a.index < b.index);
}

// Most blocks hold nothing that enters the list: one comparison each.
constexpr int64_t kBlock = 64;

bool any_enters(const float* row, int64_t count, float last) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found |= !(row[i] <= last);
  return found;
}

// A sorted list of the best so far; good for a small k.
void insert_all(const float* row, int64_t count, Candidate* best, int64_t k) {
  int64_t held = 0;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t end = std::min(count, start + kBlock);
    if (held == k && !any_enters(row + start, end - start, row[best[k - 1].index])) continue;
    for (int64_t i = start; i < end; ++i) {
      const Candidate next{key_of(row[i]), i};
      if (held == k && !before(next, best[k - 1])) continue;
      int64_t place = held < k ? held++ : k - 1;
      for (; place > 0 && before(next, best[place - 1]); --place) best[place] = best[place - 1];
      best[place] = next;
    }
  }
}

constexpr int64_t kInserted = 64;

const Candidate* best_of(const float* row, int64_t count, int64_t k) {
  thread_local std::vector<Candidate> candidates;
  const bool inserts = k <= kInserted;
  candidates.resize(inserts ? k : count);
  if (inserts) {
    insert_all(row, count, candidates.data(), k);
  } else {
    for (int64_t i = 0; i < count; ++i) candidates[i] = {key_of(row[i]), i};
    std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(), before);
  }
  return candidates.data();
}

void topk_rows(const Call& call, const Worker& worker) {
  const View &values = call.views[0], &indices = call.views[1], &a = call.views[2];
  const int64_t k = call.ints[0], bytes = inner_stride(values) * kBytes[values.type];
  each_row<3>(call, worker, [&](char* const* at) {
    const float* row = fetch_row(0, a, at[2]);
    const Candidate* best = best_of(row, row_length(a), k);
    int64_t* to = reinterpret_cast<int64_t*>(at[1]);
    for (int64_t i = 0; i < k; ++i) {
      store_one(at[0] + i * bytes, values.type, row[best[i].index]);
      to[i * inner_stride(indices)] = best[i].index;
    }
  });
}

bool topk(Call& call) {
  if (call.views.size() != 3 || call.ints.size() != 1) return false;
  const int64_t k = call.ints[0];
  const View &values = call.views[0], &indices = call.views[1], &a = call.views[2];
  if (a.ndim == 0 || values.ndim != a.ndim || indices.ndim != a.ndim || !agree_in_rows(call.views)) return false;
  call.kernel = topk_rows;
  call.parallel = numel(a) >= kParallel;
  return k > 0 && k <= row_length(a) && row_length(values) == k && row_length(indices) == k && floating(values) &&
         floating(a) && indices.type == I64;
}

const Op ops[] = {{"topk", topk}};

}  // namespace

}  // namespace nextn
