// Drafts of one round in one call: head steps one after another while the round's plan asks for more.
//
// The Python loop over RoundPlan and DraftChain (speculative/draft_policy.py) is the reference implementation.
#include "chain.h"

#include <algorithm>
#include <cstring>

#include "sampling.h"
#include "strided.h"

namespace nextn {

namespace {

bool continues(const Chain& chain, int64_t row) {
  return !chain.ended[row] && chain.num_draft_tokens[row] < chain.limits[row];
}

bool any_continues(const Chain& chain) {
  for (int64_t row = 0; row < chain.batch_size; ++row)
    if (continues(chain, row)) return true;
  return false;
}

// Whether the sequence drafts from a distribution of this confidence. Decided before the token is sampled, so that the
// decision does not depend on the token.
bool takes(Chain& chain, int64_t row, double confidence) {
  if (!continues(chain, row)) return false;
  NEXTN_CHECK(chain.num_confidences[row] < chain.max_speculative_tokens, "sequence ", row, ": confidence ",
              chain.num_confidences[row], " of ", chain.max_speculative_tokens);
  chain.confidences[row * chain.max_speculative_tokens + chain.num_confidences[row]++] = confidence;
  int64_t bin = chain.num_bins - 1;
  while (bin > 0 && !(chain.edges[bin] <= confidence)) --bin;
  const int64_t depth = chain.num_draft_tokens[row];
  const double survival = chain.survival[row] *= chain.table[bin];
  const bool taken = survival >= chain.take[depth];
  chain.ended[row] = !taken || survival < chain.go[depth];
  chain.num_draft_tokens[row] += taken;
  return taken;
}

int64_t sample(const Chain& chain, const HeadOutput& output, int64_t row, int64_t depth) {
  if (chain.mode == kGreedy) return output.best[row];
  const SamplingParams params{float(chain.temperature), chain.top_k, float(chain.top_p), float(chain.min_p)};
  float* probs = chain.distributions + (depth * chain.batch_size + row) * chain.vocab_size;
  const char* logits = output.logits + row * chain.vocab_size * kBytes[output.type];
  to_probs(params, fetch(scratch(0, chain.vocab_size), logits, output.type, 1, chain.vocab_size), probs,
           chain.vocab_size);
  if (chain.mode == kSampled)
    return sample_at(probs, chain.uniforms[row * chain.max_speculative_tokens + depth], chain.vocab_size);
  const int64_t best = index_of(probs, combined<Maximum>(probs, chain.vocab_size), chain.vocab_size);
  std::fill_n(probs, chain.vocab_size, 0.0f);
  probs[best] = 1;
  return best;
}

void begin(Chain& chain) {
  chain.num_steps = 0;
  std::fill_n(chain.num_draft_tokens, chain.batch_size, 0);
  std::fill_n(chain.num_confidences, chain.batch_size, 0);
  std::fill_n(chain.ended, chain.batch_size, 0);
  std::fill_n(chain.survival, chain.batch_size, 1.0);
}

// Refreshes the head's KV cache with all pending positions of each sequence but the last.
void refresh(const Steps& steps, const Pending& pending, Team* team) {
  const int64_t longest = *std::max_element(pending.counts, pending.counts + pending.batch_size) - 1;
  if (longest <= 0) return;
  const Refresh& refresh = *steps.refreshes[longest];
  for (int64_t row = 0; row < pending.batch_size; ++row) {
    const int64_t count = pending.counts[row] - 1;
    NEXTN_CHECK(count <= refresh.size, "sequence ", row, ": ", count, " positions in a refresh of ", refresh.size);
    refresh.starts[row] = pending.starts[row];
    if (count <= 0) continue;  // what the pass writes for this sequence is overwritten by its next positions
    std::copy_n(pending.tokens + row * pending.capacity, count, refresh.tokens + row * refresh.size);
    std::memcpy(refresh.states + row * refresh.size * pending.state_bytes,
                pending.states + row * pending.capacity * pending.state_bytes, count * pending.state_bytes);
  }
  run(refresh.program, team);
}

// Refreshes all pending positions but the last of each sequence, which become the inputs of the first draft step.
void prepare_first_step(Chain& chain, const Steps& steps, const Pending& pending, Team* team) {
  refresh(steps, pending, team);
  for (int64_t row = 0; row < pending.batch_size; ++row) {
    NEXTN_CHECK(pending.counts[row] > 0 && pending.counts[row] <= pending.capacity, "sequence ", row, ": ",
                pending.counts[row], " pending positions of ", pending.capacity);
    const int64_t last = pending.counts[row] - 1, index = row * pending.capacity + last;
    chain.next_tokens[row] = pending.tokens[index], steps.starts[row] = pending.starts[row] + last;
    std::memcpy(steps.states + row * pending.state_bytes, pending.states + index * pending.state_bytes,
                pending.state_bytes);
    pending.starts[row] += pending.counts[row], pending.counts[row] = 0;
  }
}

}  // namespace

void draft(Chain& chain, const Steps& steps, const Pending& pending, Team* team) {
  NEXTN_CHECKED_OP("draft");
  NEXTN_CHECK(chain.batch_size > 0 && chain.batch_size == pending.batch_size, chain.batch_size, " sequences, ",
              pending.batch_size, " with pending positions");
  for (int64_t row = 0; row < chain.batch_size; ++row)
    NEXTN_CHECK(chain.limits[row] <= chain.max_speculative_tokens, "sequence ", row, ": ", chain.limits[row],
                " drafts, of at most ", chain.max_speculative_tokens);
  begin(chain);
  while (any_continues(chain)) {
    if (!chain.num_steps) prepare_first_step(chain, steps, pending, team);
    run(steps.draft_step, team);
    const HeadOutput& output = *steps.output;
    const int64_t depth = chain.num_steps++;
    bool any = false;
    for (int64_t row = 0; row < chain.batch_size; ++row) {
      if (!takes(chain, row, chain.num_bins == 1 ? 1.0 : output.confidence[row])) continue;
      const int64_t token = sample(chain, output, row, depth);
      chain.drafts[row * chain.max_speculative_tokens + depth] = chain.next_tokens[row] = token;
      any = true;
    }
    if (!any) return;
  }
}

}  // namespace nextn

extern "C" void nextn_chain(nextn::Chain* chain, const nextn::Steps* steps, const nextn::Pending* pending,
                            nextn::Team* team) {
  nextn::draft(*chain, *steps, *pending, team);
}
