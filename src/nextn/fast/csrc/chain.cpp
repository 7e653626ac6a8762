// The drafts of one round as one call: head steps one behind the other while the plan of the round wants more.
//
// policy.py's RoundPlan and Chain say what the numbers mean; its loop in Python is the twin of this one.
#include "sampling.h"
#include "strided.h"

namespace nextn {

// What a head step leaves: logits [rows, vocab], their argmax and its probability [rows].
struct Told {
  const char* logits;
  int64_t type;
  const int64_t* best;
  const float* confidence;
};

// Passed by Python as it is (chain.py). depths: how many the arrays have room for; they are [rows, depths] but for
// laws [depths, rows, vocab]. draws: 0 drafts the argmax and makes no laws, 1 draws from them, 2 takes their argmax.
struct Chain {
  int64_t rows, vocab, depths, draws;
  double temperature, top_p, min_p;
  int64_t top_k;
  // The plan. A law falls into the last bin whose edge is at most its confidence; edges [bins] begin with 0.
  int64_t bins;
  const double *edges, *table, *take, *go;
  const int64_t* limits;    // [rows]
  const float* uniforms;
  int64_t* eaten;           // [rows]: where the next step reads its tokens; it finds the argmax there
  // Written: head steps, drafts of each row with their number, confidences of all laws that were asked about.
  int64_t ran;
  int64_t *drafts, *counts, *asked;
  double* confidences;
  float* laws;
  double* survival;  // [rows]
  int64_t* ended;    // [rows]
};

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

}  // namespace

}  // namespace nextn

using nextn::Chain, nextn::Program, nextn::Team, nextn::Told;

// first: the head over the columns that it has not seen; next: a step of the chain. Each leaves its argmax and all else
// that the next step eats where that reads it.
extern "C" void nextn_chain(Chain* chain, const Program* first, const Told* first_told, const Program* next,
                            const Told* next_told, Team* team) {
  nextn::begin(*chain);
  while (nextn::any_further(*chain)) {
    const Told& told = *(chain->ran ? next_told : first_told);
    nextn::run(chain->ran ? next : first, team);
    const int64_t depth = chain->ran++;
    bool any = false;
    for (int64_t row = 0; row < chain->rows; ++row) {
      if (!nextn::takes(*chain, row, chain->bins == 1 ? 1.0 : told.confidence[row])) continue;
      const int64_t token = nextn::drawn(*chain, told, row, depth);
      chain->drafts[row * chain->depths + depth] = chain->eaten[row] = token;
      any = true;
    }
    if (!any) return;
  }
}
