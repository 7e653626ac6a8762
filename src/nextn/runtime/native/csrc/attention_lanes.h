// Sixteen floats at once in the compiler's vector types: the same sums in the same order on every machine.
#pragma once

#include <cstring>

#include "sixteen.h"

namespace nextn {

constexpr int64_t kLanes = kSixteen;
using Lanes = Sixteen;
using LaneInts = SixteenInts;

inline Lanes lanes_at(const float* from) { return sixteen(from); }
inline void put_lanes(float* to, Lanes value) { put(to, value); }

// a > b ? a : b: b where either is NaN.
inline Lanes larger(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#else
  return chosen(a > b, a, b);
#endif
}

constexpr int32_t kPlaces[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline LaneInts places() { return loaded<LaneInts>(kPlaces); }

#if defined(__AVX512F__)
inline Lanes permuted(Lanes x, LaneInts from) { return (Lanes)_mm512_permutexvar_ps((__m512i)from, (__m512)x); }
#endif

// Lane i of the result is lane (i + step) % 16.
inline Lanes rotated(Lanes x, int step) {
#if defined(__AVX512F__)
  return permuted(x, (places() + step) & int32_t(kLanes - 1));
#else
  float twice[2 * kLanes];
  put_lanes(twice, x), put_lanes(twice + kLanes, x);
  return lanes_at(twice + step);
#endif
}

// Where `of`, a power of two, is 4: {0, 1, 2, 3, 0, 1, ...}, and {0, 0, 0, 0, 1, 1, ...}.
inline LaneInts lane_modulo(int64_t of) { return places() & int32_t(of - 1); }
inline LaneInts lane_quotient(int64_t of) { return places() >> __builtin_ctz(uint32_t(of)); }

using Four = float __attribute__((vector_size(16)));

// Lanes i, i + 4, i + 8 and i + 12 in one.
inline Four quarter_sum(Lanes x) {
  using Eight = Wide<float, 32>;
  Eight half[2];
  std::memcpy(static_cast<void*>(half), &x, sizeof half);
  half[0] = half[0] + half[1];
  Four quarter[2];
  std::memcpy(quarter, half, sizeof quarter);
  return quarter[0] + quarter[1];
}

// The sum of sixteen lanes.
inline float lane_sum(Lanes x) {
  const Four sum = quarter_sum(x);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// 2^x for x < 128 to about 1e-7; exactly 1 for 0, exactly 0 below 2^-126; NaN stays NaN. Minimax of (2^x - 1) / x.
inline Lanes exp2_of(Lanes x) {
  // Adding it rounds to a whole number, and leaves that number's exponent field in the lowest bits.
  const Lanes shift = Lanes{} + (12582912.0f + 127.0f);
  x = larger(Lanes{} - 127.0f, x);
  const Lanes shifted = x + shift;
  const Lanes part = x - (shifted - shift);
  const LaneInts power = bits_of(shifted) << 23;
  Lanes sum = part * 0.00132647273f + 0.00967151299f;
  sum = sum * part + 0.0555073358f;
  sum = sum * part + 0.240222424f;
  sum = sum * part + 0.693147004f;
  return (sum * part + 1.0f) * floats_of(power);
}

constexpr float kLog2e = 1.44269504f;

inline Lanes sigmoid_of(Lanes x) {
  const Lanes most = Lanes{} + 127.0f;
  const Lanes power = x * -kLog2e;
  return 1.0f / (1.0f + exp2_of(chosen(power > most, most, power)));
}

// x keeps its accuracy near 0 only in absolute terms (about 1e-7).
inline Lanes tanh_of(Lanes x) { return 2.0f * sigmoid_of(2.0f * x) - 1.0f; }

// Copies between types; a stride counts elements.
inline void widen(const View& view, const char* from, int64_t stride, float* to, int64_t count) {
  const auto copy = [=](const auto* values, auto convert) {
    if (stride == 1) return by_sixteen(count, [=](auto load, auto store) { store(to, load(values)); });
    for (int64_t i = 0; i < count; ++i) to[i] = convert(values[i * stride]);
  };
  if (view.type == F32)
    copy(reinterpret_cast<const float*>(from), [](float value) { return value; });
  else
    copy(reinterpret_cast<const uint16_t*>(from), widened);
}

inline void narrow(const View& view, const float* from, char* to, int64_t stride, int64_t count) {
  const auto copy = [=](auto* values, auto convert) {
    if (stride == 1) return by_sixteen(count, [=](auto load, auto store) { store(values, load(from)); });
    for (int64_t i = 0; i < count; ++i) values[i * stride] = convert(from[i]);
  };
  if (view.type == F32)
    copy(reinterpret_cast<float*>(to), [](float value) { return value; });
  else
    copy(reinterpret_cast<uint16_t*>(to), narrowed);
}

inline bool is_float(const View& view) { return view.type == F32 || view.type == BF16; }
inline int64_t bytes_of(const View& view) { return view.type == F32 ? 4 : 2; }

// The address of an element of a view of floats, by its leading indices.
template <typename... Index>
char* element(const View& view, Index... index) {
  int64_t offset = 0, dim = 0;
  const auto step = [&](int64_t at) {
    NEXTN_CHECK(dim < view.ndim && at >= 0 && at < view.size[dim], "dim ", dim, " of ", view.ndim, ": index ", at,
                " of size ", view.size[dim]);
    offset += at * view.stride[dim++];
  };
  (step(int64_t(index)), ...);
  return view.data + offset * bytes_of(view);
}

}  // namespace nextn
