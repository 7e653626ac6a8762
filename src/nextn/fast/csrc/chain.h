// What the drafts of a round are made from; Python passes both structs as they are (chain.py).
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

// depths: how many the arrays have room for; they are [rows, depths] but for
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

// The programs of a chain. first: the head over the columns that it has not seen; next: a step of the chain. Each leaves
// its argmax and all else that the next step eats where that reads it.
struct Steps {
  const Program* first;
  const Told* first_told;
  const Program* next;
  const Told* next_told;
};

void draft(Chain& chain, const Steps& steps, Team* team);

}  // namespace nextn
