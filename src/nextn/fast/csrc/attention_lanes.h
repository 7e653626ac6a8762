// Sixteen floats at once in the compiler's vector types: the same sums in the same order on every machine.
#pragma once

#include <cstring>

#include "runtime.h"

namespace nextn {

constexpr int64_t kLanes = 16;
using Lanes = float __attribute__((vector_size(64)));
using LaneInts = int32_t __attribute__((vector_size(64)));

inline Lanes lanes_at(const float* from) {
  Lanes out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline void put_lanes(float* to, Lanes value) { std::memcpy(to, &value, sizeof value); }

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// Where `of` is 4: {0, 1, 2, 3, 0, 1, ...}, and {0, 0, 0, 0, 1, 1, ...}.
inline LaneInts lane_modulo(int64_t of) {
  LaneInts out;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = int32_t(lane % of);
  return out;
}

inline LaneInts lane_quotient(int64_t of) {
  LaneInts out;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = int32_t(lane / of);
  return out;
}

inline float lane_sum(Lanes x) {
  for (int step = kLanes / 2; step; step /= 2)
    for (int lane = 0; lane < step; ++lane) x[lane] += x[lane + step];
  return x[0];
}

// 2^x for x < 128 to about 1e-7; exactly 1 for 0, exactly 0 below 2^-126; NaN stays NaN. Minimax of (2^x - 1) / x.
inline Lanes exp2_of(Lanes x) {
  // Adding it rounds to a whole number, and leaves that number's exponent field in the lowest bits.
  const Lanes shift = Lanes{} + (12582912.0f + 127.0f);
  const Lanes least = Lanes{} - 127.0f;
  x = x < least ? least : x;
  const Lanes shifted = x + shift;
  const Lanes part = x - (shifted - shift);
  const LaneInts power = reinterpret_cast<LaneInts>(shifted) << 23;
  Lanes sum = part * 0.00132647273f + 0.00967151299f;
  sum = sum * part + 0.0555073358f;
  sum = sum * part + 0.240222424f;
  sum = sum * part + 0.693147004f;
  return (sum * part + 1.0f) * reinterpret_cast<Lanes>(power);
}

constexpr float kLog2e = 1.44269504f;

inline Lanes sigmoid_of(Lanes x) {
  const Lanes most = Lanes{} + 127.0f;
  const Lanes power = x * -kLog2e;
  return 1.0f / (1.0f + exp2_of(power > most ? most : power));
}

// x keeps its accuracy near 0 only in absolute terms (about 1e-7).
inline Lanes tanh_of(Lanes x) { return 2.0f * sigmoid_of(2.0f * x) - 1.0f; }

// Row copies between types; a stride counts elements.
inline void widen(const View& view, const char* from, int64_t stride, float* to, int64_t count) {
  if (view.type == F32) {
    const float* values = reinterpret_cast<const float*>(from);
    for (int64_t i = 0; i < count; ++i) to[i] = values[i * stride];
  } else {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < count; ++i) to[i] = widened(values[i * stride]);
  }
}

inline void narrow(const View& view, const float* from, char* to, int64_t stride, int64_t count) {
  if (view.type == F32) {
    float* values = reinterpret_cast<float*>(to);
    for (int64_t i = 0; i < count; ++i) values[i * stride] = from[i];
  } else {
    uint16_t* values = reinterpret_cast<uint16_t*>(to);
    for (int64_t i = 0; i < count; ++i) values[i * stride] = narrowed(from[i]);
  }
}

inline bool is_float(const View& view) { return view.type == F32 || view.type == BF16; }
inline int64_t bytes_of(const View& view) { return view.type == F32 ? 4 : 2; }

// The address of an element of a view of floats, by its leading indices.
template <typename... Index>
char* element(const View& view, Index... index) {
  int64_t offset = 0, dim = 0;
  ((offset += int64_t(index) * view.stride[dim++]), ...);
  return view.data + offset * bytes_of(view);
}

}  // namespace nextn
