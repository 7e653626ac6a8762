// Inputs and outputs of drafting. Python fills these structs through ctypes (abi.py); layout.cpp lists their fields.
#pragma once

#include <cstdint>

#include "runtime.h"

namespace nextn {

// Output of a head step: logits [batch, vocab], their argmax and its probability [batch].
struct HeadOutput {
  const char* logits;
  int64_t type;
  const int64_t* best;
  const float* confidence;
};

// Positions that the trunk has processed and the head has not, up to `capacity` for each sequence: the trunk's states
// [batch, capacity, state_bytes] and the tokens after them [batch, capacity]. counts [batch]: number of such positions;
// starts [batch]: number of positions that the head's KV cache already holds.
struct Pending {
  int64_t batch_size, capacity, state_bytes;
  int64_t *counts, *starts, *tokens;
  char* states;
};

// A head pass that only refreshes the KV cache, over `size` positions of each sequence. It reads tokens [batch, size],
// states [batch, size, state_bytes] and starts [batch].
struct Refresh {
  const Program* program;
  int64_t size, *tokens, *starts;
  char* states;
};

// How a token is drafted: the argmax of the logits, without distributions; sampled from the distribution; the argmax of
// the distribution, which becomes the one-hot vector of that token.
enum DraftMode : int64_t { kGreedy = 0, kSampled = 1, kArgmax = 2 };

// Draft settings, the round's plan and the drafts. Arrays are [batch, max_speculative_tokens] unless noted.
struct Chain {
  int64_t batch_size, vocab_size, max_speculative_tokens;
  int64_t mode;  // a DraftMode
  double temperature, top_p, min_p;
  int64_t top_k;
  // The plan. A distribution falls into the last bin whose edge is at most its confidence; edges [num_bins] start at 0.
  int64_t num_bins;
  const double *edges, *table, *take, *go;
  int64_t* limits;  // [batch]
  float* uniforms;
  int64_t* next_tokens;  // [batch]: input tokens of the next step, which leaves its argmax there
  // Written: head steps run, drafts and their number [batch], and the confidence of every distribution that the plan
  // was asked about, with their number [batch].
  int64_t num_steps;
  int64_t *drafts, *num_draft_tokens, *num_confidences;
  double* confidences;
  float* distributions;  // [max_speculative_tokens, batch, vocab]
  double* survival;      // [batch]
  int64_t* ended;        // [batch]
};

// The programs of a chain. refreshes: indexed by the largest number of positions of a sequence. draft_step: a step over
// one position, which writes the inputs of the next step (next_tokens, starts [batch], states [batch, state_bytes]).
struct Steps {
  const Refresh* const* refreshes;
  const Program* draft_step;
  const HeadOutput* output;
  int64_t* starts;
  char* states;
};

// Refreshes the head's KV cache, then drafts. Cache entries of the drafts themselves are provisional.
void draft(Chain& chain, const Steps& steps, const Pending& pending, Team* team);

}  // namespace nextn
