// Logits to a law, picks from it, and the verdict over the drafts of a round: sampling.py's rules, one row at a time.
#include "wide.h"

#include <numeric>

#include "sampling.h"
#include "strided.h"

namespace nextn {

namespace {

// How many tokens are summed in lanes before a pick looks at them one by one.
constexpr int64_t kBlock = 512;

void scale_to_one(float* law, float total, int64_t vocab) {
  for (int64_t i = 0; i < vocab; ++i) law[i] /= total;
}

// Keeps the k largest scores and all that equal the last of them.
void keep_best(float* scores, int64_t k, int64_t vocab) {
  thread_local std::vector<float> sorted;
  sorted.assign(scores, scores + vocab);
  std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), std::greater<float>());
  const float least = sorted[k - 1];
  for (int64_t i = 0; i < vocab; ++i) scores[i] = scores[i] < least ? -kInf : scores[i];
}

// Keeps the tokens whose betters weigh less than top_p together; of equals, the lowest comes first.
void keep_nucleus(float* law, float top_p, int64_t vocab) {
  thread_local std::vector<std::pair<float, int64_t>> heap;
  heap.clear();
  // Tokens of at most (1 - top_p) / V are out, even all of them together; half of that leaves room for rounding.
  const float rim = (1 - top_p) / 2 / float(vocab);
  for (int64_t i = 0; i < vocab; ++i)
    if (law[i] > rim) heap.emplace_back(law[i], -i);
  std::make_heap(heap.begin(), heap.end());
  auto rest = heap.end();
  double total = 0;
  while (rest != heap.begin() && total < top_p) {
    total += heap.front().first;
    std::pop_heap(heap.begin(), rest--);
  }
  std::fill_n(law, vocab, 0.0f);
  for (; rest != heap.end(); ++rest) law[-rest->second] = rest->first / float(total);
}

void keep_likely(float* law, float min_p, int64_t vocab) {
  const float least = min_p * combined<Maximum>(law, vocab);
  for (int64_t i = 0; i < vocab; ++i) law[i] = law[i] < least ? 0.0f : law[i];
  scale_to_one(law, combined<Adding>(law, vocab), vocab);
}

}  // namespace

void law_of(const Rule& rule, const float* logits, float* law, int64_t vocab) {
  for (int64_t i = 0; i < vocab; ++i) law[i] = logits[i] / rule.temperature;
  if (rule.top_k > 0 && rule.top_k < vocab) keep_best(law, rule.top_k, vocab);
  scale_to_one(law, sum_of_exp(law, combined<Maximum>(law, vocab), law, vocab), vocab);
  if (rule.top_p < 1) keep_nucleus(law, rule.top_p, vocab);
  if (rule.min_p > 0) keep_likely(law, rule.min_p, vocab);
}

int64_t picked(const float* law, float u, int64_t vocab) {
  double total = 0;
  for (int64_t start = 0; start < vocab; start += kBlock)
    total += combined<Adding>(law + start, std::min(kBlock, vocab - start));
  const double target = double(u) * total;
  double before = 0;
  int64_t last = 0;
  for (int64_t start = 0; start < vocab; start += kBlock) {
    const int64_t count = std::min(kBlock, vocab - start);
    const float block = combined<Adding>(law + start, count);
    if (before + block <= target) {
      before += block;
      continue;
    }
    // The block's own sum, in another order, may end at the target: then its last token is the one.
    double sum = before;
    for (int64_t i = start; i < start + count; ++i) {
      if (law[i] <= 0) continue;
      last = i, sum += law[i];
      if (sum > target) break;
    }
    break;
  }
  return last;
}

namespace {

Rule rule_of(const Call& call) {
  return {float(call.reals[0]), call.ints[0], float(call.reals[1]), float(call.reals[2])};
}

void law_rows(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &logits = call.views[1];
  const Rule rule = rule_of(call);
  each_row<2>(call, worker, [&](char* const* at) {
    law_of(rule, fetch_row(0, logits, at[1]), reinterpret_cast<float*>(at[0]), row_length(out));
  });
}

// out [..., V] fp32, logits [..., V]; ints top_k; reals temperature, top_p, min_p.
bool law(Call& call) {
  if (call.views.size() != 2 || call.ints.size() != 1 || call.reals.size() != 3) return false;
  const View &out = call.views[0], &logits = call.views[1];
  if (out.ndim == 0 || !same_shapes(call) || row_length(out) == 0) return false;
  call.kernel = law_rows;
  call.parallel = numel(out) >= kParallel;
  return out.type == F32 && inner_stride(out) == 1 && floating(logits) && rule_of(call).temperature > 0;
}

void pick_rows(const Call& call, const Worker& worker) {
  const View& law = call.views[2];
  each_row<3>(call, worker, [&](char* const* at) {
    const float* row = reinterpret_cast<const float*>(at[2]);
    *reinterpret_cast<int64_t*>(at[0]) = picked(row, *reinterpret_cast<const float*>(at[1]), row_length(law));
  });
}

// out [...] int64, u [...], law [..., V] fp32.
bool pick(Call& call) {
  if (call.views.size() != 3 || !agree_in_rows(call.views)) return false;
  const View &out = call.views[0], &u = call.views[1], &law = call.views[2];
  call.kernel = pick_rows;
  call.parallel = numel(law) >= kParallel;
  return out.type == I64 && u.type == F32 && law.type == F32 && row_length(out) == 1 && row_length(u) == 1 &&
         inner_stride(law) == 1 && row_length(law) > 0;
}

// One row of a round: p after 0..limit drafts, q of each draft, and its uniforms.
struct Judged {
  const float *p, *q;
  int64_t p_step, q_step, vocab, limit;
  const int64_t* drafts;
  const float* u;

  const float* trunk(int64_t depth) const { return p + depth * p_step; }
  const float* head(int64_t depth) const { return q + depth * q_step; }

  // Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
  int64_t one_by_one() const {
    int64_t kept = 0;
    while (kept < limit && u[kept] * head(kept)[drafts[kept]] < trunk(kept)[drafts[kept]]) ++kept;
    return kept;
  }

  // Sun et al. 2024 (arXiv 2403.10444), algorithm 2; worth: of what is kept.
  int64_t as_block(float& worth) const {
    int64_t kept = 0;
    float each = 1;
    for (int64_t depth = 1; depth <= limit; ++depth) {
      const int64_t token = drafts[depth - 1];
      each = std::min(each * trunk(depth - 1)[token] / head(depth - 1)[token], 1.0f);
      const float chance = depth == limit ? each : left(depth, each);
      const float doubt = depth == limit ? 1 : chance + 1 - each;
      // The longest prefix that stands is kept. At worth 1 the rule is 0 / 0 where p = q.
      if (u[depth - 1] * doubt < chance || each == 1) kept = depth, worth = each;
    }
    return kept;
  }

  // What is left of p, times worth, where q is taken off: its sum, and itself into `rest` where that is not null.
  float left(int64_t depth, float worth, float* rest = nullptr) const {
    const float *p_at = trunk(depth), *q_at = head(depth);
    Lanes<Adding> lanes;
    float buffer[kBlock];
    for (int64_t start = 0; start < vocab; start += kBlock) {
      const int64_t count = std::min(kBlock, vocab - start);
      float* to = rest ? rest + start : buffer;
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) {
        const float more = worth * p_at[start + i] - q_at[start + i];
        to[i] = more > 0 ? more : 0.0f;
      }
      lanes.feed(to, count);
    }
    return lanes.result();
  }
};

const float* floats(const View& view, int64_t row) { return data<float>(view) + row * view.stride[0]; }

void judge_rows(const Call& call, const Worker& worker) {
  const View &kept = call.views[0], &next = call.views[1], &rest = call.views[2], &p = call.views[3];
  const View &q = call.views[4], &drafts = call.views[5], &limits = call.views[6], &u = call.views[7];
  int64_t begin = 0, end = numel(kept);
  if (call.parallel) worker.share(end, begin, end);
  for (int64_t row = begin; row < end; ++row) {
    const Judged judged{floats(p, row), floats(q, row), p.stride[1], q.stride[1], p.size[2], data<int64_t>(limits)[row],
                        data<int64_t>(drafts) + row * drafts.stride[0], floats(u, row)};
    float worth = 1;
    const int64_t count = call.ints[0] ? judged.as_block(worth) : judged.one_by_one();
    float* law = data<float>(rest) + row * rest.stride[0];
    // Nothing is left where p and q differ by a rounding only.
    if (count == judged.limit || !(judged.left(count, worth, law) > 0))
      std::copy_n(judged.trunk(count), judged.vocab, law);
    data<int64_t>(kept)[row] = count;
    data<int64_t>(next)[row] = picked(law, judged.u[judged.limit], judged.vocab);
  }
}

// kept, next [B] int64, rest [B, V]: the weights that `next` was picked from; p [B, K+1, V], q [B, K, V], drafts [B, K],
// limits [B] int64, u [B, K+1], of which u[b, limit] is for the pick; ints whether as a block.
bool judge(Call& call) {
  if (call.views.size() != 8 || call.ints.size() != 1) return false;
  const View &kept = call.views[0], &next = call.views[1], &rest = call.views[2], &p = call.views[3];
  const View &q = call.views[4], &drafts = call.views[5], &limits = call.views[6], &u = call.views[7];
  for (const View* view : {&kept, &next, &limits})
    if (view->type != I64 || view->ndim != 1 || view->size[0] != p.size[0] || view->stride[0] != 1) return false;
  for (const View* view : {&rest, &p, &q, &u})
    if (view->type != F32 || view->size[0] != p.size[0] || inner_stride(*view) != 1) return false;
  if (rest.ndim != 2 || p.ndim != 3 || q.ndim != 3 || drafts.ndim != 2 || u.ndim != 2) return false;
  const int64_t depths = p.size[1] - 1, vocab = p.size[2];
  call.kernel = judge_rows;
  call.parallel = numel(p) >= kParallel && p.size[0] > 1;
  return drafts.type == I64 && drafts.size[0] == p.size[0] && (depths == 0 || drafts.stride[1] == 1) &&
         q.size[1] >= depths && drafts.size[1] >= depths && u.size[1] > depths && rest.size[1] == vocab &&
         q.size[2] == vocab && vocab > 0;
}

const Op ops[] = {{"law", law}, {"pick", pick}, {"judge", judge}};

}  // namespace

}  // namespace nextn
