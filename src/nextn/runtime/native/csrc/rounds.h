// Inputs and outputs of several rounds in one call. Python fills these structs through ctypes (abi.py).
#pragma once

#include <cstdint>

#include "chain.h"

namespace nextn {

// The programs and buffers that verify blocks of up to `size` positions. verify: null in greedy decoding, where a draft
// is accepted if it is the argmax.
struct Block {
  const Program *forward, *lm_head, *verify;
  int64_t size;              // positions of the forward pass
  int64_t *tokens, *starts;  // [batch, size], [batch]
  const int64_t* best;       // [batch, size]
  const char* states;        // [batch, size, state_bytes]
  int64_t num_positions;     // of `verify`, which reads drafts and uniforms [batch, num_positions]
  int64_t *drafts, *limits;  // limits [batch]
  float* uniforms;
  const int64_t *num_accepted, *next_tokens;  // [batch]
};

// The sequences that are decoded together, and what ends a call.
struct Batch {
  int64_t size;
  int64_t* last_tokens;          // [batch]: the last token, which the trunk has not processed yet
  int64_t *lengths, *remaining;  // [batch]: positions that the trunk has processed; new tokens still allowed
  int64_t max_speculative_tokens, max_length;  // drafts of a sequence per round; tokens of a sequence
  const Pending* pending;                      // null without a head
  int64_t num_eos;
  const int64_t* eos;               // tokens that end a sequence
  int64_t num_uniforms, *num_used;  // random numbers per sequence, and how many are used [batch]
  const float* uniforms;            // [batch, num_uniforms]; null in greedy decoding
  // Drafts that were copied from the text, for the first round of a call; null without any. Sequences without copies
  // are drafted for by the head.
  const int64_t *num_copied, *copied;  // [batch], [batch, max_speculative_tokens of the output]
  float* distributions;                // of all drafts, as those of the chain; null in greedy decoding
  int64_t vocab_size;
};

// Results, round after round: drafts and confidences [rounds, batch, max_speculative_tokens]; num_draft_tokens,
// num_accepted, next_tokens and num_confidences [rounds, batch]; seconds [rounds, 2]: wall time of drafting and of
// verification.
struct RoundOutput {
  int64_t max_speculative_tokens;
  int64_t *drafts, *num_draft_tokens, *num_accepted, *next_tokens, *num_confidences;
  double *confidences, *seconds;
};

}  // namespace nextn
