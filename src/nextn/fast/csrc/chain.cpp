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

// The first widths[row] - left columns of each row that wait stand in the head then.
void fill(const Steps& steps, const Waiting& waiting, int64_t left, Team* team) {
  const int64_t most = *std::max_element(waiting.widths, waiting.widths + waiting.rows) - left;
  if (most <= 0) return;
  const Feed& feed = *steps.feeds[most];
  for (int64_t row = 0; row < waiting.rows; ++row) {
    const int64_t width = waiting.widths[row] - left;
    feed.starts[row] = waiting.starts[row];
    if (width <= 0) continue;  // what it writes there the columns to come overwrite
    std::copy_n(waiting.eaten + row * waiting.room, width, feed.tokens + row * feed.size);
    std::memcpy(feed.states + row * feed.size * waiting.bytes, waiting.states + row * waiting.room * waiting.bytes,
                width * waiting.bytes);
  }
  run(feed.program, team);
}

void none_waits(const Waiting& waiting) {
  for (int64_t row = 0; row < waiting.rows; ++row) waiting.starts[row] += waiting.widths[row], waiting.widths[row] = 0;
}

// All columns that wait but the last of each row stand in the head; the step of the chain is about to take that.
void catch_up(Chain& chain, const Steps& steps, const Waiting& waiting, Team* team) {
  fill(steps, waiting, 1, team);
  for (int64_t row = 0; row < waiting.rows; ++row) {
    const int64_t last = waiting.widths[row] - 1, place = row * waiting.room + last;
    chain.eaten[row] = waiting.eaten[place], steps.starts[row] = waiting.starts[row] + last;
    std::memcpy(steps.states + row * waiting.bytes, waiting.states + place * waiting.bytes, waiting.bytes);
  }
  none_waits(waiting);
}

}  // namespace

void feed(const Steps& steps, const Waiting& waiting, Team* team) {
  fill(steps, waiting, 0, team);
  none_waits(waiting);
}

void draft(Chain& chain, const Steps& steps, const Waiting& waiting, Team* team) {
  begin(chain);
  while (any_further(chain)) {
    if (!chain.ran) catch_up(chain, steps, waiting, team);
    run(steps.next, team);
    const Told& told = *steps.told;
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
