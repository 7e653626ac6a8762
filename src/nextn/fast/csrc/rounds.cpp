// A round as one call: the drafts, the trunk over last tokens and drafts, what it predicts there, the verdict, and the
// states of the columns that stand, which then wait for the head.
//
// decode.py and drafting.py have the same in Python, the twin of this one.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "chain.h"

namespace nextn {

// A size of window and the replays that it runs on. Passed by Python as it is (rounds.py), like Rows. judge: null in
// greedy decoding, where drafts stand as long as they are the argmax.
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

// The rows of a decode. widths [rows]: columns that wait for the head, with room for `room`: their states
// [rows, room, bytes] and the tokens behind them, eaten [rows, room]. states: null without a head.
struct Rows {
  int64_t count, depths, numbers, room, bytes;
  const int64_t *drafts, *counts;  // [rows, depths], [rows]
  const float* uniforms;           // [rows, numbers]
  int64_t *last, *lengths;         // [rows]: the token that the trunk has not seen, and the columns that it has
  int64_t *widths, *eaten;
  char* states;
  int64_t *kept, *next;            // the verdict
};

namespace {

void fill(const Window& window, const Rows& rows, int64_t row) {
  const int64_t *drafts = rows.drafts + row * rows.depths, count = rows.counts[row];
  int64_t* tokens = window.tokens + row * window.size;
  tokens[0] = rows.last[row];
  std::copy_n(drafts, count, tokens + 1);
  window.starts[row] = rows.lengths[row];
  if (!window.judge) return;
  window.limits[row] = count;
  std::copy_n(drafts, count, window.drafts + row * window.columns);
  std::copy_n(rows.uniforms + row * rows.numbers, count + 1, window.uniforms + row * window.columns);
}

void judge(const Window& window, const Rows& rows, int64_t row) {
  const int64_t *drafts = rows.drafts + row * rows.depths, *best = window.best + row * window.size;
  int64_t kept = 0;
  while (kept < rows.counts[row] && best[kept] == drafts[kept]) ++kept;
  rows.kept[row] = window.judge ? window.kept[row] : kept;
  rows.next[row] = window.judge ? window.next[row] : best[kept];
}

void keep(const Window& window, const Rows& rows, int64_t row) {
  const int64_t kept = rows.kept[row], stand = kept + 1;
  if (rows.states) {
    const int64_t place = row * rows.room + rows.widths[row];
    std::memcpy(rows.states + place * rows.bytes, window.states + row * window.size * rows.bytes, stand * rows.bytes);
    std::copy_n(rows.drafts + row * rows.depths, kept, rows.eaten + place);
    rows.eaten[place + kept] = rows.next[row];
    rows.widths[row] += stand;
  }
  rows.lengths[row] += stand;
  rows.last[row] = rows.next[row];
}

// What the window reads of each row is made room for; what stands behind a row's last draft is never looked at.
void verify(const Window& window, const Rows& rows, Team* team) {
  for (int64_t row = 0; row < rows.count; ++row) fill(window, rows, row);
  run(window.passed, team);
  run(window.readout, team);
  if (window.judge) run(window.judge, team);
  for (int64_t row = 0; row < rows.count; ++row) {
    judge(window, rows, row);
    keep(window, rows, row);
  }
}

// Where the rows' drafts are from now on, and no column waits for the head.
void take(Rows& rows, const Chain& chain) {
  rows.drafts = chain.drafts, rows.counts = chain.counts, rows.depths = chain.depths;
  std::fill_n(rows.widths, rows.count, 0);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

}  // namespace nextn

using nextn::Chain, nextn::Rows, nextn::Steps, nextn::Team, nextn::Window;

// chain: null in a round without drafts, whose rows have none. windows: by their columns, null where there is none yet:
// so many columns are to be verified then, else 0 are. seconds: what the drafts took.
extern "C" int64_t nextn_round(Chain* chain, const Steps* steps, const Window* const* windows, Rows* rows, Team* team,
                               double* seconds) {
  const double started = nextn::now();
  if (chain) {
    nextn::draft(*chain, *steps, team);
    nextn::take(*rows, *chain);
  }
  *seconds = nextn::now() - started;
  const int64_t columns = 1 + *std::max_element(rows->counts, rows->counts + rows->count);
  if (!windows[columns]) return columns;
  nextn::verify(*windows[columns], *rows, team);
  return 0;
}

extern "C" void nextn_verify(const Window* window, const Rows* rows, Team* team) {
  nextn::verify(*window, *rows, team);
}
