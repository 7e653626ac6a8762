// What the drafts of a round are made from; Python passes all structs as they are (chain.py).
#pragma once

#include <cstdint>

#include "runtime.h"

namespace nextn {

// What a head step leaves: logits [rows, vocab], their argmax and its probability [rows].
struct Told {
  const char* logits;
  int64_t type;
  const int64_t* best;
  const float* confidence;
};

// Columns that the trunk has seen and the head has not, with room for `room` of each row: their states
// [rows, room, bytes] and the tokens behind them, eaten [rows, room]. widths, starts [rows]: how many, behind how many
// that stand in the head.
struct Waiting {
  int64_t rows, room, bytes;
  int64_t *widths, *starts, *eaten;
  char* states;
};

// A pass that brings columns into the head's cache, `size` of each row: tokens [rows, size], states [rows, size, bytes]
// and starts [rows] are what it reads.
struct Feed {
  const Program* program;
  int64_t size, *tokens, *starts;
  char* states;
};

// depths: how many the arrays have room for; they are [rows, depths] but for
// laws [depths, rows, vocab]. draws: 0 drafts the argmax and makes no laws, 1 draws from them, 2 takes their argmax.
struct Chain {
  int64_t rows, vocab, depths, draws;
  double temperature, top_p, min_p;
  int64_t top_k;
  // The plan. A law falls into the last bin whose edge is at most its confidence; edges [bins] begin with 0.
  int64_t bins;
  const double *edges, *table, *take, *go;
  int64_t* limits;          // [rows]
  float* uniforms;
  int64_t* eaten;           // [rows]: where the next step reads its tokens; it finds the argmax there
  // Written: head steps, drafts of each row with their number, confidences of all laws that were asked about.
  int64_t ran;
  int64_t *drafts, *counts, *asked;
  double* confidences;
  float* laws;
  double* survival;  // [rows]
  int64_t* ended;    // [rows]
};

// The passes of a chain. feeds: by the most columns of a row; next: a step over one column, which leaves its argmax and
// all else that the step behind it eats where that reads it: the chain's `eaten`, starts [rows], states [rows, bytes].
struct Steps {
  const Feed* const* feeds;
  const Program* next;
  const Told* told;
  int64_t* starts;
  char* states;
};

// The columns that wait stand in the head then, and nothing is drafted.
void feed(const Steps& steps, const Waiting& waiting, Team* team);

// The same, and the drafts behind them. What waited stands in the head then; of the drafts nothing does.
void draft(Chain& chain, const Steps& steps, const Waiting& waiting, Team* team);

}  // namespace nextn
