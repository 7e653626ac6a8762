// Rounds in one call, each as decode.py and drafting.py have it in Python, the twin of this one: the drafts, the trunk
// over last tokens and drafts, what it predicts there, the verdict, and the columns that stand, which then wait for the
// head.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "chain.h"
#include "rounds.h"

namespace nextn {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One round of them.
class Round {
 public:
  Round(const Rows& rows, const Found& found, int64_t round)
      : rows_(rows), depths_(found.depths), drafts_(found.drafts + round * rows.count * depths_),
        counts_(found.counts + round * rows.count), kept_(found.kept + round * rows.count),
        next_(found.next + round * rows.count), asked_(found.asked + round * rows.count),
        confidences_(found.confidences + round * rows.count * depths_) {}

  // No more than a row may still get with the token behind them; none may leave the context.
  void draft(Chain* given, const Steps* steps, Team* team) const {
    const int64_t longest = *std::max_element(rows_.lengths, rows_.lengths + rows_.count) + 1;
    const int64_t most = *std::max_element(rows_.missing, rows_.missing + rows_.count) - 1;
    if (!given || std::min({rows_.drafts, most, rows_.context - longest}) <= 0) return draft_nothing();
    Chain& chain = *given;
    chain.drafts = drafts_, chain.counts = counts_, chain.asked = asked_, chain.confidences = confidences_;
    for (int64_t row = 0; row < rows_.count; ++row)
      chain.limits[row] = std::min({rows_.drafts, rows_.missing[row] - 1, rows_.context - longest});
    for (int64_t row = 0; row < rows_.count && rows_.used; ++row) {
      std::copy_n(numbers(row), chain.limits[row], chain.uniforms + row * chain.depths);
      rows_.used[row] += chain.limits[row];
    }
    nextn::draft(chain, *steps, *rows_.waiting, team);
  }

  int64_t columns() const { return 1 + *std::max_element(counts_, counts_ + rows_.count); }

  // What the window reads of each row is made room for; what stands behind a row's last draft is never looked at.
  void verify(const Window& window, Team* team) const {
    for (int64_t row = 0; row < rows_.count; ++row) fill(window, row);
    run(window.passed, team);
    run(window.readout, team);
    if (window.judge) run(window.judge, team);
    for (int64_t row = 0; row < rows_.count; ++row) {
      judge(window, row);
      keep(window, row);
    }
  }

  // Whether a row has met a token that ends it, or has no room for another.
  bool ends() const {
    for (int64_t row = 0; row < rows_.count; ++row)
      if (rows_.missing[row] <= 0 || rows_.lengths[row] + 1 >= rows_.context || is_end(next_[row]) || std::any_of(drafts(row), drafts(row) + kept_[row], [&](auto each) { return is_end(each); }))
        return true;
    return false;
  }

 private:
  void draft_nothing() const {
    std::fill_n(counts_, rows_.count, 0);
    std::fill_n(asked_, rows_.count, 0);
  }

  const int64_t* drafts(int64_t row) const { return drafts_ + row * depths_; }
  const float* numbers(int64_t row) const { return rows_.uniforms + row * rows_.numbers + rows_.used[row]; }
  bool is_end(int64_t token) const { return std::count(rows_.ends, rows_.ends + rows_.num_ends, token); }

  void fill(const Window& window, int64_t row) const {
    int64_t* tokens = window.tokens + row * window.size;
    tokens[0] = rows_.last[row];
    std::copy_n(drafts(row), counts_[row], tokens + 1);
    window.starts[row] = rows_.lengths[row];
    if (!window.judge) return;
    window.limits[row] = counts_[row];
    std::copy_n(drafts(row), counts_[row], window.drafts + row * window.columns);
    std::copy_n(numbers(row), counts_[row] + 1, window.uniforms + row * window.columns);
    rows_.used[row] += counts_[row] + 1;
  }

  void judge(const Window& window, int64_t row) const {
    const int64_t* best = window.best + row * window.size;
    int64_t kept = 0;
    while (kept < counts_[row] && best[kept] == drafts(row)[kept]) ++kept;
    kept_[row] = window.judge ? window.kept[row] : kept;
    next_[row] = window.judge ? window.next[row] : best[kept];
  }

  void keep(const Window& window, int64_t row) const {
    const int64_t kept = kept_[row], stand = kept + 1;
    if (const Waiting* waiting = rows_.waiting) {
      const int64_t place = row * waiting->room + waiting->widths[row], bytes = waiting->bytes;
      std::memcpy(waiting->states + place * bytes, window.states + row * window.size * bytes, stand * bytes);
      std::copy_n(drafts(row), kept, waiting->eaten + place);
      waiting->eaten[place + kept] = next_[row];
      waiting->widths[row] += stand;
    }
    rows_.lengths[row] += stand, rows_.missing[row] -= stand;
    rows_.last[row] = next_[row];
  }

  const Rows& rows_;
  const int64_t depths_;
  int64_t *drafts_, *counts_, *kept_, *next_, *asked_;
  double* confidences_;
};

}  // namespace

}  // namespace nextn

// chain: null in rounds without drafts. windows: by their columns. Ends with the round in which a row meets its end, or
// after `most` -> how many rounds there were.
extern "C" int64_t nextn_rounds(nextn::Chain* chain, const nextn::Steps* steps, const nextn::Window* const* windows,
                                const nextn::Rows* rows, const nextn::Found* found, int64_t most, nextn::Team* team) {
  for (int64_t place = 0; place < most; ++place) {
    const nextn::Round round(*rows, *found, place);
    const double started = nextn::now();
    round.draft(chain, steps, team);
    const double drafted = nextn::now();
    round.verify(*windows[round.columns()], team);
    found->seconds[2 * place] = drafted - started, found->seconds[2 * place + 1] = nextn::now() - drafted;
    if (round.ends()) return place + 1;
  }
  return most;
}
