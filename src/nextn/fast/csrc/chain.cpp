// The drafts of one round as one call: head steps one behind the other while the plan of the round wants more.
//
// policy.py's RoundPlan and Chain say what the numbers mean; its loop in Python is the twin of this one.
#include "chain.h"

#include <algorithm>
#include <cstring>

#include "sampling.h"
#include "strided.h"

namespace nextn {

namespace {

bool further(const Chain& chain, int64_t row) { return !chain.ended[row] && chain.counts[row] < chain.limits[row]; }

bool any_further(const Chain& chain) {
  for (int64_t row = 0; row < chain.rows; ++row)
    if (further(chain, row)) return true;
  return false;
}

// Whether the row drafts from the law of this confidence; asked before the draft is drawn.
bool takes(Chain& chain, int64_t row, double confidence) {
  if (!further(chain, row)) return false;
  chain.confidences[row * chain.depths + chain.asked[row]++] = confidence;
  int64_t bin = chain.bins - 1;
  while (bin > 0 && !(chain.edges[bin] <= confidence)) --bin;
  const int64_t depth = chain.counts[row];
  const double survival = chain.survival[row] *= chain.table[bin];
  const bool taken = survival >= chain.take[depth];
  chain.ended[row] = !taken || survival < chain.go[depth];
  chain.counts[row] += taken;
  return taken;
}

int64_t drawn(const Chain& chain, const Told& told, int64_t row, int64_t depth) {
  if (chain.draws == 0) return told.best[row];
  const Rule rule{float(chain.temperature), chain.top_k, float(chain.top_p), float(chain.min_p)};
  float* law = chain.laws + (depth * chain.rows + row) * chain.vocab;
  const char* at = told.logits + row * chain.vocab * kBytes[told.type];
  law_of(rule, fetch(scratch(0, chain.vocab), at, told.type, 1, chain.vocab), law, chain.vocab);
  if (chain.draws == 1) return picked(law, chain.uniforms[row * chain.depths + depth], chain.vocab);
  const int64_t best = place_of(law, combined<Maximum>(law, chain.vocab), chain.vocab);
  std::fill_n(law, chain.vocab, 0.0f);
  law[best] = 1;
  return best;
}

void begin(Chain& chain) {
  chain.ran = 0;
  std::fill_n(chain.counts, chain.rows, 0);
  std::fill_n(chain.asked, chain.rows, 0);
  std::fill_n(chain.ended, chain.rows, 0);
  std::fill_n(chain.survival, chain.rows, 1.0);
}

// The columns that wait go through the pass that takes them; then none do.
const First& run_first(const Steps& steps, const Waiting& waiting, Team* team) {
  const First& first = *steps.firsts[*std::max_element(waiting.widths, waiting.widths + waiting.rows)];
  for (int64_t row = 0; row < waiting.rows; ++row) {
    const int64_t width = waiting.widths[row];
    std::copy_n(waiting.eaten + row * waiting.room, width, first.tokens + row * first.size);
    std::memcpy(first.states + row * first.size * waiting.bytes, waiting.states + row * waiting.room * waiting.bytes,
                width * waiting.bytes);
    first.starts[row] = waiting.starts[row], first.widths[row] = width;
    waiting.starts[row] += width, waiting.widths[row] = 0;
  }
  run(first.program, team);
  return first;
}

}  // namespace

void feed(const Steps& steps, const Waiting& waiting, Team* team) { run_first(steps, waiting, team); }

void draft(Chain& chain, const Steps& steps, const Waiting& waiting, Team* team) {
  begin(chain);
  while (any_further(chain)) {
    if (chain.ran) run(steps.next, team);
    const Told& told = chain.ran ? *steps.next_told : *run_first(steps, waiting, team).told;
    const int64_t depth = chain.ran++;
    bool any = false;
    for (int64_t row = 0; row < chain.rows; ++row) {
      if (!takes(chain, row, chain.bins == 1 ? 1.0 : told.confidence[row])) continue;
      const int64_t token = drawn(chain, told, row, depth);
      chain.drafts[row * chain.depths + depth] = chain.eaten[row] = token;
      any = true;
    }
    if (!any) return;
  }
}

}  // namespace nextn

extern "C" void nextn_chain(nextn::Chain* chain, const nextn::Steps* steps, const nextn::Waiting* waiting,
                            nextn::Team* team) {
  nextn::draft(*chain, *steps, *waiting, team);
}

extern "C" void nextn_feed(const nextn::Steps* steps, const nextn::Waiting* waiting, nextn::Team* team) {
  nextn::feed(*steps, *waiting, team);
}
