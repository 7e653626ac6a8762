// Field offsets of the structs that Python passes, which abi.py compares with its own when the library loads.
#include <initializer_list>
#include <string>
#include <type_traits>

#include "chain.h"
#include "rounds.h"
#include "runtime.h"

namespace nextn {

namespace {

struct Field {
  const char* name;
  size_t offset;
  char letter;
};

// p: pointer, d: floating point, i: integer, a: array.
template <typename T>
constexpr char letter() {
  return std::is_array_v<T> ? 'a' : std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'd' : 'i';
}

#define F(type, name) \
  Field { #name, offsetof(type, name), letter<decltype(type::name)>() }

// One line per struct: "HeadOutput: 32, logits 0p, type 8i, best 16p, confidence 24p".
template <typename T>
std::string layout(const char* name, std::initializer_list<Field> fields) {
  std::string line = std::string(name) + ": " + std::to_string(sizeof(T));
  for (const auto& [field, offset, letter] : fields)
    line += std::string(", ") + field + " " + std::to_string(offset) + letter;
  return line + "\n";
}

std::string layouts() {
  std::string text;
  text += layout<View>("View", {F(View, data), F(View, type), F(View, ndim), F(View, size), F(View, stride)});
  text += layout<HeadOutput>(
      "HeadOutput", {F(HeadOutput, logits), F(HeadOutput, type), F(HeadOutput, best), F(HeadOutput, confidence)});
  text += layout<Pending>("Pending", {F(Pending, batch_size), F(Pending, capacity), F(Pending, state_bytes),
                                      F(Pending, counts), F(Pending, starts), F(Pending, tokens), F(Pending, states)});
  text += layout<Refresh>(
      "Refresh", {F(Refresh, program), F(Refresh, size), F(Refresh, tokens), F(Refresh, starts), F(Refresh, states)});
  text += layout<Chain>("Chain", {F(Chain, batch_size),
                                  F(Chain, vocab_size),
                                  F(Chain, max_speculative_tokens),
                                  F(Chain, mode),
                                  F(Chain, temperature),
                                  F(Chain, top_p),
                                  F(Chain, min_p),
                                  F(Chain, top_k),
                                  F(Chain, num_bins),
                                  F(Chain, edges),
                                  F(Chain, table),
                                  F(Chain, take),
                                  F(Chain, go),
                                  F(Chain, limits),
                                  F(Chain, uniforms),
                                  F(Chain, next_tokens),
                                  F(Chain, num_steps),
                                  F(Chain, drafts),
                                  F(Chain, num_draft_tokens),
                                  F(Chain, num_confidences),
                                  F(Chain, confidences),
                                  F(Chain, distributions),
                                  F(Chain, survival),
                                  F(Chain, ended)});
  text += layout<Steps>(
      "Steps", {F(Steps, refreshes), F(Steps, draft_step), F(Steps, output), F(Steps, starts), F(Steps, states)});
  text += layout<Block>("Block",
                        {F(Block, forward), F(Block, lm_head), F(Block, verify), F(Block, size), F(Block, tokens),
                         F(Block, starts), F(Block, best), F(Block, states), F(Block, num_positions), F(Block, drafts),
                         F(Block, limits), F(Block, uniforms), F(Block, num_accepted), F(Block, next_tokens)});
  text += layout<Batch>(
      "Batch", {F(Batch, size), F(Batch, last_tokens), F(Batch, lengths), F(Batch, remaining),
                F(Batch, max_speculative_tokens), F(Batch, max_length), F(Batch, pending), F(Batch, num_eos),
                F(Batch, eos), F(Batch, num_uniforms), F(Batch, num_used), F(Batch, uniforms), F(Batch, num_copied),
                F(Batch, copied), F(Batch, distributions), F(Batch, vocab_size)});
  text += layout<RoundOutput>(
      "RoundOutput", {F(RoundOutput, max_speculative_tokens), F(RoundOutput, drafts), F(RoundOutput, num_draft_tokens),
                      F(RoundOutput, num_accepted), F(RoundOutput, next_tokens), F(RoundOutput, num_confidences),
                      F(RoundOutput, confidences), F(RoundOutput, seconds)});
  return text;
}

#undef F

}  // namespace

}  // namespace nextn

// The returned text lives as long as the library.
extern "C" const char* nextn_layouts() {
  static const std::string text = nextn::layouts();
  return text.c_str();
}
