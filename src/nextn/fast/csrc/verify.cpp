// The second half of a round as one call: the trunk over last tokens and drafts, what it predicts there, the verdict,
// and the states of the columns that stand, which then wait for the head.
//
// decode.py has the same in Python, the twin of this one.
#include <algorithm>
#include <cstring>

#include "runtime.h"

namespace nextn {

// A size of window and the replays that it runs on. Passed by Python as it is (rounds.py). judge: null in greedy
// decoding, where drafts stand as long as they are the argmax.
struct Window {
  const Program *pass, *readout, *judge;
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

}  // namespace

}  // namespace nextn

// What the window reads of each row is made room for; what stands behind a row's last draft is never looked at.
extern "C" void nextn_verify(const nextn::Window* window, const nextn::Rows* rows, nextn::Team* team) {
  for (int64_t row = 0; row < rows->count; ++row) nextn::fill(*window, *rows, row);
  nextn::run(window->pass, team);
  nextn::run(window->readout, team);
  if (window->judge) nextn::run(window->judge, team);
  for (int64_t row = 0; row < rows->count; ++row) {
    nextn::judge(*window, *rows, row);
    nextn::keep(*window, *rows, row);
  }
}
