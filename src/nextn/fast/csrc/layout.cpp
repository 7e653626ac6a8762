// What the compiler made of the structs that Python passes, for structures.py to compare with its own.
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

// Pointer, real, whole number or array.
template <typename T>
constexpr char letter() {
  return std::is_array_v<T> ? 'a' : std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'd' : 'i';
}

#define F(type, name) Field{#name, offsetof(type, name), letter<decltype(type::name)>()}

// A line: "Told: 32, logits 0p, type 8i, best 16p, confidence 24p".
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
  text += layout<Told>("Told", {F(Told, logits), F(Told, type), F(Told, best), F(Told, confidence)});
  text += layout<Waiting>("Waiting", {
      F(Waiting, rows), F(Waiting, room), F(Waiting, bytes), F(Waiting, widths), F(Waiting, starts),
      F(Waiting, eaten), F(Waiting, states)});
  text += layout<Feed>("Feed", {F(Feed, program), F(Feed, size), F(Feed, tokens), F(Feed, starts), F(Feed, states)});
  text += layout<Chain>("Chain", {
      F(Chain, rows), F(Chain, vocab), F(Chain, depths), F(Chain, draws), F(Chain, temperature), F(Chain, top_p),
      F(Chain, min_p), F(Chain, top_k), F(Chain, bins), F(Chain, edges), F(Chain, table), F(Chain, take),
      F(Chain, go), F(Chain, limits), F(Chain, uniforms), F(Chain, eaten), F(Chain, ran), F(Chain, drafts),
      F(Chain, counts), F(Chain, asked), F(Chain, confidences), F(Chain, laws), F(Chain, survival), F(Chain, ended)});
  text += layout<Steps>("Steps", {F(Steps, feeds), F(Steps, next), F(Steps, told), F(Steps, starts), F(Steps, states)});
  text += layout<Window>("Window", {
      F(Window, passed), F(Window, readout), F(Window, judge), F(Window, size), F(Window, tokens), F(Window, starts),
      F(Window, best), F(Window, states), F(Window, columns), F(Window, drafts), F(Window, limits),
      F(Window, uniforms), F(Window, kept), F(Window, next)});
  text += layout<Rows>("Rows", {
      F(Rows, count), F(Rows, last), F(Rows, lengths), F(Rows, missing), F(Rows, drafts), F(Rows, context),
      F(Rows, waiting), F(Rows, num_ends), F(Rows, ends), F(Rows, numbers), F(Rows, used), F(Rows, uniforms)});
  text += layout<Found>("Found", {
      F(Found, depths), F(Found, drafts), F(Found, counts), F(Found, kept), F(Found, next), F(Found, asked),
      F(Found, confidences), F(Found, seconds)});
  return text;
}

#undef F

}  // namespace

}  // namespace nextn

// The text lives as long as the library.
extern "C" const char* nextn_layouts() {
  static const std::string text = nextn::layouts();
  return text.c_str();
}
