// Several rounds in one call. Each drafts with the head, runs the trunk over the last token and the drafts, verifies
// them and queues the states of the new positions for the head. Python may give the first round drafts that it copied
// from the text. decoding/batch.py and decoding/drafter.py are the reference implementation.
#include "rounds.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "chain.h"

namespace nextn {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class Round {
 public:
  Round(const Batch& batch, const RoundOutput& output, int64_t round)
      : batch_(batch), max_speculative_tokens_(output.max_speculative_tokens),
        drafts_(output.drafts + round * batch.size * max_speculative_tokens_),
        num_draft_tokens_(output.num_draft_tokens + round * batch.size),
        num_accepted_(output.num_accepted + round * batch.size), next_tokens_(output.next_tokens + round * batch.size),
        num_confidences_(output.num_confidences + round * batch.size),
        confidences_(output.confidences + round * batch.size * max_speculative_tokens_) {}

  // A sequence drafts at most one token fewer than it has remaining, as a round always adds one more token; no position
  // may lie beyond the context.
  void draft(Chain* given, const Steps* steps, Team* team) const {
    const int64_t longest = *std::max_element(batch_.lengths, batch_.lengths + batch_.size) + 1;
    const int64_t most = *std::max_element(batch_.remaining, batch_.remaining + batch_.size) - 1;
    const int64_t limit = std::min(batch_.max_speculative_tokens, batch_.max_length - longest);
    draft_nothing();
    if (given && std::min(limit, most) > 0) draft_by_head(*given, *steps, limit, team);
    for (int64_t row = 0; row < batch_.size; ++row) copy_drafts(row);
  }

  int64_t num_positions() const { return 1 + *std::max_element(num_draft_tokens_, num_draft_tokens_ + batch_.size); }

  // The block is as long as the longest draft; positions after a sequence's last draft are computed and ignored.
  void verify(const Block& block, Team* team) const {
    for (int64_t row = 0; row < batch_.size; ++row) fill(block, row);
    run(block.forward, team);
    run(block.lm_head, team);
    if (block.verify) run(block.verify, team);
    for (int64_t row = 0; row < batch_.size; ++row) {
      read_result(block, row);
      commit(block, row);
    }
  }

  // Whether any sequence has met a token that ends it, or cannot grow further.
  bool ends() const {
    for (int64_t row = 0; row < batch_.size; ++row)
      if (batch_.remaining[row] <= 0 || batch_.lengths[row] + 1 >= batch_.max_length || is_end(next_tokens_[row]) ||
          std::any_of(drafts(row), drafts(row) + num_accepted_[row], [&](auto token) { return is_end(token); }))
        return true;
    return false;
  }

 private:
  void draft_by_head(Chain& chain, const Steps& steps, int64_t limit, Team* team) const {
    chain.drafts = drafts_, chain.num_draft_tokens = num_draft_tokens_;
    chain.num_confidences = num_confidences_, chain.confidences = confidences_;
    for (int64_t row = 0; row < batch_.size; ++row)
      chain.limits[row] = num_copied(row) ? 0 : std::min(limit, batch_.remaining[row] - 1);
    for (int64_t row = 0; row < batch_.size && batch_.num_used; ++row) {
      check_uniforms(row, chain.limits[row]);
      std::copy_n(uniforms(row), chain.limits[row], chain.uniforms + row * chain.max_speculative_tokens);
      batch_.num_used[row] += chain.limits[row];
    }
    nextn::draft(chain, steps, *batch_.pending, team);
  }

  int64_t num_copied(int64_t row) const { return batch_.num_copied ? batch_.num_copied[row] : 0; }

  // A copied token has probability 1 under its proposal.
  void copy_drafts(int64_t row) const {
    const int64_t count = num_copied(row);
    if (!count) return;
    const int64_t* tokens = batch_.copied + row * max_speculative_tokens_;
    NEXTN_CHECK(count <= max_speculative_tokens_, "sequence ", row, ": ", count, " copied tokens, of at most ",
                max_speculative_tokens_);
    num_draft_tokens_[row] = count;
    std::copy_n(tokens, count, drafts_ + row * max_speculative_tokens_);
    for (int64_t depth = 0; depth < count && batch_.distributions; ++depth) {
      float* probs = batch_.distributions + (depth * batch_.size + row) * batch_.vocab_size;
      std::fill_n(probs, batch_.vocab_size, 0.0f);
      probs[tokens[depth]] = 1;
    }
  }

  void draft_nothing() const {
    std::fill_n(num_draft_tokens_, batch_.size, 0);
    std::fill_n(num_confidences_, batch_.size, 0);
  }

  const int64_t* drafts(int64_t row) const { return drafts_ + row * max_speculative_tokens_; }
  const float* uniforms(int64_t row) const {
    return batch_.uniforms + row * batch_.num_uniforms + batch_.num_used[row];
  }
  void check_uniforms([[maybe_unused]] int64_t row, [[maybe_unused]] int64_t count) const {
    NEXTN_CHECK(batch_.num_used[row] + count <= batch_.num_uniforms, "sequence ", row, ": ", count,
                " random numbers after ", batch_.num_used[row], " of ", batch_.num_uniforms);
  }
  bool is_end(int64_t token) const { return std::count(batch_.eos, batch_.eos + batch_.num_eos, token); }

  void fill(const Block& block, int64_t row) const {
    NEXTN_CHECK(num_draft_tokens_[row] < block.size && num_draft_tokens_[row] <= max_speculative_tokens_, "sequence ",
                row, ": ", num_draft_tokens_[row], " drafts in a block of ", block.size, " positions");
    int64_t* tokens = block.tokens + row * block.size;
    tokens[0] = batch_.last_tokens[row];
    std::copy_n(drafts(row), num_draft_tokens_[row], tokens + 1);
    block.starts[row] = batch_.lengths[row];
    if (!block.verify) return;
    NEXTN_CHECK(num_draft_tokens_[row] < block.num_positions, "sequence ", row, ": ", num_draft_tokens_[row],
                " drafts, verified in ", block.num_positions, " positions");
    check_uniforms(row, num_draft_tokens_[row] + 1);
    block.limits[row] = num_draft_tokens_[row];
    std::copy_n(drafts(row), num_draft_tokens_[row], block.drafts + row * block.num_positions);
    std::copy_n(uniforms(row), num_draft_tokens_[row] + 1, block.uniforms + row * block.num_positions);
    batch_.num_used[row] += num_draft_tokens_[row] + 1;
  }

  void read_result(const Block& block, int64_t row) const {
    const int64_t* best = block.best + row * block.size;
    int64_t matching = 0;
    while (matching < num_draft_tokens_[row] && best[matching] == drafts(row)[matching]) ++matching;
    num_accepted_[row] = block.verify ? block.num_accepted[row] : matching;
    next_tokens_[row] = block.verify ? block.next_tokens[row] : best[matching];
  }

  void commit(const Block& block, int64_t row) const {
    const int64_t num_accepted = num_accepted_[row], num_new = num_accepted + 1;
    NEXTN_CHECK(num_accepted >= 0 && num_accepted <= num_draft_tokens_[row], "sequence ", row, ": ", num_accepted,
                " accepted of ", num_draft_tokens_[row], " drafts");
    if (const Pending* pending = batch_.pending) {
      NEXTN_CHECK(pending->counts[row] >= 0 && pending->counts[row] + num_new <= pending->capacity, "sequence ", row,
                  ": ", num_new, " pending positions after ", pending->counts[row], " of ", pending->capacity);
      const int64_t index = row * pending->capacity + pending->counts[row], bytes = pending->state_bytes;
      std::memcpy(pending->states + index * bytes, block.states + row * block.size * bytes, num_new * bytes);
      std::copy_n(drafts(row), num_accepted, pending->tokens + index);
      pending->tokens[index + num_accepted] = next_tokens_[row];
      pending->counts[row] += num_new;
    }
    batch_.lengths[row] += num_new, batch_.remaining[row] -= num_new;
    batch_.last_tokens[row] = next_tokens_[row];
  }

  const Batch& batch_;
  const int64_t max_speculative_tokens_;
  int64_t *drafts_, *num_draft_tokens_, *num_accepted_, *next_tokens_, *num_confidences_;
  double* confidences_;
};

}  // namespace

}  // namespace nextn

// Runs up to `max_rounds` rounds and stops after one in which a sequence ends; returns how many ran. chain: null for
// rounds without drafts. blocks: indexed by number of positions.
extern "C" int64_t nextn_rounds(nextn::Chain* chain, const nextn::Steps* steps, const nextn::Block* const* blocks,
                                const nextn::Batch* batch, const nextn::RoundOutput* output, int64_t max_rounds,
                                nextn::Team* team) {
  NEXTN_CHECKED_OP("rounds");
  NEXTN_CHECK(batch->size > 0 && (!batch->pending || batch->pending->batch_size == batch->size), batch->size,
              " sequences");
  for (int64_t index = 0; index < max_rounds; ++index) {
    const nextn::Round round(*batch, *output, index);
    const double started = nextn::now();
    round.draft(chain, steps, team);
    const double drafted = nextn::now();
    round.verify(*blocks[round.num_positions()], team);
    output->seconds[2 * index] = drafted - started, output->seconds[2 * index + 1] = nextn::now() - drafted;
    if (round.ends()) return index + 1;
  }
  return max_rounds;
}
