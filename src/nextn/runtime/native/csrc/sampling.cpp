// Logits to probabilities, sampling, and verification of drafts: the rules of speculative/sampling.py, row by row.
#include "sampling.h"

#include <numeric>

#include "strided.h"
#include "wide.h"

namespace nextn {

namespace {

// Tokens summed in lanes at a time; only the block that contains the sample is then searched token by token.
constexpr int64_t kBlock = 512;

void scale_to_one(float* probs, float total, int64_t vocab) {
  for (int64_t i = 0; i < vocab; ++i) probs[i] /= total;
}

// Keeps the k largest scores and all that tie with the k-th.
void keep_top_k(float* scores, int64_t k, int64_t vocab) {
  // k is small against the vocabulary: one pass, in which few scores enter the k best so far.
  thread_local std::vector<float> best;
  best.resize(k);
  std::partial_sort_copy(scores, scores + vocab, best.begin(), best.end(), std::greater<float>());
  const float lowest = best.back();
  for (int64_t i = 0; i < vocab; ++i) scores[i] = scores[i] < lowest ? -kInf : scores[i];
}

// Keeps the tokens before which less than top_p of the probability lies in descending order; ties go to the lowest
// index.
void keep_top_p(float* probs, float top_p, int64_t vocab) {
  thread_local std::vector<std::pair<float, int64_t>> heap;
  heap.clear();
  // Tokens of at most (1 - top_p) / V are outside the nucleus, even all of them together. Half of that allows for
  // rounding.
  const float threshold = (1 - top_p) / 2 / float(vocab);
  for (int64_t i = 0; i < vocab; ++i)
    if (probs[i] > threshold) heap.emplace_back(probs[i], -i);
  std::make_heap(heap.begin(), heap.end());
  auto tail = heap.end();
  double total = 0;
  while (tail != heap.begin() && total < top_p) {
    total += heap.front().first;
    std::pop_heap(heap.begin(), tail--);
  }
  std::fill_n(probs, vocab, 0.0f);
  for (; tail != heap.end(); ++tail) probs[-tail->second] = tail->first / float(total);
}

void keep_min_p(float* probs, float min_p, int64_t vocab) {
  const float lowest = min_p * combined<Maximum>(probs, vocab);
  for (int64_t i = 0; i < vocab; ++i) probs[i] = probs[i] < lowest ? 0.0f : probs[i];
  scale_to_one(probs, combined<Adding>(probs, vocab), vocab);
}

}  // namespace

void to_probs(const SamplingParams& params, const float* logits, float* probs, int64_t vocab) {
  for (int64_t i = 0; i < vocab; ++i) probs[i] = logits[i] / params.temperature;
  if (params.top_k > 0 && params.top_k < vocab) keep_top_k(probs, params.top_k, vocab);
  scale_to_one(probs, sum_of_exp(probs, combined<Maximum>(probs, vocab), probs, vocab), vocab);
  if (params.top_p < 1) keep_top_p(probs, params.top_p, vocab);
  if (params.min_p > 0) keep_min_p(probs, params.min_p, vocab);
}

int64_t sample_at(const float* probs, float u, int64_t vocab) {
  double total = 0;
  for (int64_t start = 0; start < vocab; start += kBlock)
    total += combined<Adding>(probs + start, std::min(kBlock, vocab - start));
  const double target = double(u) * total;
  double before = 0;
  int64_t last = 0;
  for (int64_t start = 0; start < vocab; start += kBlock) {
    const int64_t count = std::min(kBlock, vocab - start);
    const float block = combined<Adding>(probs + start, count);
    if (before + block <= target) {
      before += block;
      continue;
    }
    // This sum runs in another order than the block's, so it may end at the target: then take the block's last token.
    double sum = before;
    for (int64_t i = start; i < start + count; ++i) {
      if (probs[i] <= 0) continue;
      last = i, sum += probs[i];
      if (sum > target) break;
    }
    break;
  }
  return last;
}

namespace {

SamplingParams params_of(const Call& call) {
  return {float(call.reals[0]), call.ints[0], float(call.reals[1]), float(call.reals[2])};
}

void to_probs_rows(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &logits = call.views[1];
  const SamplingParams params = params_of(call);
  each_row<2>(call, worker, [&](char* const* at) {
    to_probs(params, fetch_row(0, logits, at[1]), reinterpret_cast<float*>(at[0]), row_length(out));
  });
}

// out [..., V] fp32, logits [..., V]; ints top_k; reals temperature, top_p, min_p.
bool select_to_probs(Call& call) {
  if (call.views.size() != 2 || call.ints.size() != 1 || call.reals.size() != 3) return false;
  const View &out = call.views[0], &logits = call.views[1];
  if (out.ndim == 0 || !same_shapes(call) || row_length(out) == 0) return false;
  call.kernel = to_probs_rows;
  call.parallel = numel(out) >= kParallel;
  return out.type == F32 && inner_stride(out) == 1 && floating(logits) && params_of(call).temperature > 0;
}

void sample_rows(const Call& call, const Worker& worker) {
  const View& probs = call.views[2];
  each_row<3>(call, worker, [&](char* const* at) {
    const float* row = reinterpret_cast<const float*>(at[2]);
    *reinterpret_cast<int64_t*>(at[0]) = sample_at(row, *reinterpret_cast<const float*>(at[1]), row_length(probs));
  });
}

// out [...] int64, u [...], probs [..., V] fp32.
bool select_sample(Call& call) {
  if (call.views.size() != 3 || !agree_in_rows(call.views)) return false;
  const View &out = call.views[0], &u = call.views[1], &probs = call.views[2];
  call.kernel = sample_rows;
  call.parallel = numel(probs) >= kParallel;
  return out.type == I64 && u.type == F32 && probs.type == F32 && row_length(out) == 1 && row_length(u) == 1 &&
         inner_stride(probs) == 1 && row_length(probs) > 0;
}

// A sequence's part of a round: p after 0..limit drafts, q of each draft, and the uniforms.
struct DraftedSequence {
  const float *p, *q;
  int64_t p_step, q_step, vocab, limit;
  const int64_t* drafts;
  const float* u;

  const float* target(int64_t depth) const { return p + depth * p_step; }
  const float* draft(int64_t depth) const { return q + depth * q_step; }

  // Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
  int64_t accept() const {
    int64_t num_accepted = 0;
    for (int64_t depth = 0; depth < limit; ++depth)
      if (!(u[depth] * draft(depth)[drafts[depth]] < target(depth)[drafts[depth]])) return depth;
    return limit;
  }

  // Sun et al. 2024 (arXiv 2403.10444), algorithm 2. scale: of the accepted prefix.
  int64_t accept_block(float& scale) const {
    int64_t num_accepted = 0;
    float joint = 1;
    for (int64_t depth = 1; depth <= limit; ++depth) {
      const int64_t token = drafts[depth - 1];
      joint = std::min(joint * target(depth - 1)[token] / draft(depth - 1)[token], 1.0f);
      const float chance = depth == limit ? joint : residual(depth, joint);
      const float doubt = depth == limit ? 1 : chance + 1 - joint;
      // The longest accepted prefix counts. At scale 1 the rule is 0 / 0 where p = q.
      if (u[depth - 1] * doubt < chance || joint == 1) num_accepted = depth, scale = joint;
    }
    return num_accepted;
  }

  // The sum of max(scale * p - q, 0); the terms are written to `out` unless that is null.
  float residual(int64_t depth, float scale, float* out = nullptr) const {
    const float *p_at = target(depth), *q_at = draft(depth);
    Lanes<Adding> lanes;
    float buffer[kBlock];
    for (int64_t start = 0; start < vocab; start += kBlock) {
      const int64_t count = std::min(kBlock, vocab - start);
      float* to = out ? out + start : buffer;
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) {
        const float more = scale * p_at[start + i] - q_at[start + i];
        to[i] = more > 0 ? more : 0.0f;
      }
      lanes.feed(to, count);
    }
    return lanes.result();
  }
};

const float* floats(const View& view, int64_t row) { return data<float>(view) + row * view.stride[0]; }

void verify_rows(const Call& call, const Worker& worker) {
  const View &num_accepted = call.views[0], &next = call.views[1], &residual = call.views[2], &p = call.views[3];
  const View &q = call.views[4], &drafts = call.views[5], &limits = call.views[6], &u = call.views[7];
  int64_t begin = 0, end = numel(num_accepted);
  if (call.parallel) worker.share(end, begin, end);
  for (int64_t row = begin; row < end; ++row) {
    const DraftedSequence sequence{floats(p, row),
                                   floats(q, row),
                                   p.stride[1],
                                   q.stride[1],
                                   p.size[2],
                                   data<int64_t>(limits)[row],
                                   data<int64_t>(drafts) + row * drafts.stride[0],
                                   floats(u, row)};
#if defined(NEXTN_DEBUG)
    NEXTN_CHECK(sequence.limit >= 0 && sequence.limit < p.size[1], "sequence ", row, ": ", sequence.limit,
                " drafts, of at most ", p.size[1] - 1);
    for (int64_t i = 0; i < sequence.limit; ++i)
      NEXTN_CHECK(sequence.drafts[i] >= 0 && sequence.drafts[i] < sequence.vocab, "sequence ", row, ": draft ", i,
                  " is ", sequence.drafts[i], " of ", sequence.vocab, " tokens");
#endif
    float scale = 1;
    const int64_t count = call.ints[0] ? sequence.accept_block(scale) : sequence.accept();
    float* probs = data<float>(residual) + row * residual.stride[0];
    // The residual is empty where p and q differ by rounding only; the token is then sampled from p.
    if (count == sequence.limit || !(sequence.residual(count, scale, probs) > 0))
      std::copy_n(sequence.target(count), sequence.vocab, probs);
    data<int64_t>(num_accepted)[row] = count;
    data<int64_t>(next)[row] = sample_at(probs, sequence.u[sequence.limit], sequence.vocab);
  }
}

// num_accepted, next [B] int64; residual [B, V]: the weights that `next` is sampled from; p [B, K+1, V], q [B, K, V],
// drafts [B, K], limits [B] int64, u [B, K+1], of which u[b, limit] samples `next`; ints: 1 for block verification.
bool select_verify(Call& call) {
  if (call.views.size() != 8 || call.ints.size() != 1) return false;
  const View &num_accepted = call.views[0], &next = call.views[1], &residual = call.views[2], &p = call.views[3];
  const View &q = call.views[4], &drafts = call.views[5], &limits = call.views[6], &u = call.views[7];
  for (const View* view : {&num_accepted, &next, &limits})
    if (view->type != I64 || view->ndim != 1 || view->size[0] != p.size[0] || view->stride[0] != 1) return false;
  for (const View* view : {&residual, &p, &q, &u})
    if (view->type != F32 || view->size[0] != p.size[0] || inner_stride(*view) != 1) return false;
  if (residual.ndim != 2 || p.ndim != 3 || q.ndim != 3 || drafts.ndim != 2 || u.ndim != 2) return false;
  const int64_t depths = p.size[1] - 1, vocab = p.size[2];
  call.kernel = verify_rows;
  call.parallel = numel(p) >= kParallel && p.size[0] > 1;
  return drafts.type == I64 && drafts.size[0] == p.size[0] && (depths == 0 || drafts.stride[1] == 1) &&
         q.size[1] >= depths && drafts.size[1] >= depths && u.size[1] > depths && residual.size[1] == vocab &&
         q.size[2] == vocab && vocab > 0;
}

const Op ops[] = {{"to_probs", select_to_probs}, {"sample", select_sample}, {"verify", select_verify}};

}  // namespace

}  // namespace nextn
