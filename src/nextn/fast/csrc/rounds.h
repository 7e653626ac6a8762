// What several rounds in one call work on; Python passes all structs as they are (structures.py).
#pragma once

#include <cstdint>

#include "chain.h"

namespace nextn {

// A size of window and the replays that it runs on. judge: null in greedy decoding, where drafts stand as
// long as they are the argmax.
struct Window {
  const Program *passed, *readout, *judge;
  int64_t size;                // columns of the replay
  int64_t *tokens, *starts;    // [rows, size], [rows]
  const int64_t* best;         // [rows, size]
  const char* states;          // [rows, size, bytes]
  int64_t columns;             // of the verdict, which reads drafts and uniforms [rows, columns] and limits [rows]
  int64_t *drafts, *limits;
  float* uniforms;
  const int64_t *kept, *next;  // [rows]
};

// The rows of a decode, and what decides when several rounds end.
struct Rows {
  int64_t count;
  int64_t *last, *lengths, *missing;  // [rows]: the token that the trunk has not seen, the columns that it has, and the
                                      // tokens that the row may still get
  int64_t drafts, context;            // at most of a row in a round; tokens of a row
  const Waiting* waiting;             // null without a head
  // Tokens that end a row.
  int64_t num_ends;
  const int64_t* ends;
  // Random numbers [rows, numbers]; used [rows]: how many are. None in greedy decoding.
  int64_t numbers, *used;
  const float* uniforms;
};

// What rounds leave, each behind the last: drafts and confidences [rounds, rows, depths]; counts, kept, next and asked
// [rounds, rows]; seconds [rounds, 2]: what drafts took, and what came behind them. asked, confidences: see Chain.
struct Found {
  int64_t depths;
  int64_t *drafts, *counts, *kept, *next, *asked;
  double *confidences, *seconds;
};

}  // namespace nextn
