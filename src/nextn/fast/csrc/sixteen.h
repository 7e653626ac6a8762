// Sixteen floats at once between memory and registers, for kernels that do several ops' work with those ops' bits.
#pragma once

#include "wide.h"

#include <cstring>
#include <type_traits>

#include "functions.h"
#include "runtime.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace nextn {

using Sixteen = float __attribute__((vector_size(64)));

constexpr int64_t kSixteen = 16;

inline Sixteen sixteen(const float* from) {
  Sixteen out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

#if defined(__AVX512F__)
inline Sixteen unpacked(__m256i halves) { return (Sixteen)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }
#endif

inline Sixteen sixteen(const uint16_t* from) {
#if defined(__AVX512F__)
  return unpacked(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  Sixteen out;
  for (int64_t i = 0; i < kSixteen; ++i) out[i] = widened(from[i]);
  return out;
#endif
}

inline void put(float* to, Sixteen values) { std::memcpy(to, &values, sizeof values); }

// As `narrowed`, but that processors with an instruction for it take what is smaller than 2^-126 for 0.
inline void put(uint16_t* to, Sixteen values) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &halves, sizeof halves);
#else
  // Of a loop over `narrowed` the compiler makes no vectors.
  using Words = uint32_t __attribute__((vector_size(64)));
  using Halves = uint16_t __attribute__((vector_size(32)));
  const Words bits = reinterpret_cast<Words>(values), rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const Halves halves = __builtin_convertvector(values == values ? rounded : Words{} + 0x7FC0, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

template <typename T>
Sixteen rounded(Sixteen values) {
  if constexpr (std::is_same_v<T, float>) return values;
#if defined(__AVX512BF16__)
  return unpacked((__m256i)_mm512_cvtneps_pbh((__m512)values));
#endif
  uint16_t kept[kSixteen];
  put(kept, values);
  return sixteen(kept);
}

// A product that rounds before it is added to: the compiler would take both together.
inline Sixteen product(Sixteen a, Sixteen b) {
  Sixteen out = a * b;
#if defined(__AVX512F__)
  asm("" : "+v"(out));
#else
  asm("" : "+m"(out));  // no register holds all of it
#endif
  return out;
}

inline Sixteen fused(Sixteen a, Sixteen b, Sixteen c) {
#if defined(__AVX512F__)
  return (Sixteen)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  for (int64_t i = 0; i < kSixteen; ++i) c[i] = fused(a[i], b[i], c[i]);
  return c;
#endif
}

// 1 / x to about 1e-7, for x from 1 to 2^126: a division takes five times as long.
inline Sixteen reciprocal(Sixteen x) {
#if defined(__AVX512F__)
  const auto near = (Sixteen)_mm512_rcp14_ps((__m512)x);
  return fused(fused(-x, near, Sixteen{} + 1.0f), near, near);
#else
  return 1.0f / x;
#endif
}

// x / (1 + e^-x) to about 1e-6; 2^y as in attention_lanes.h.
inline Sixteen silu_of(Sixteen x) {
  using Ints = int32_t __attribute__((vector_size(64)));
  const Sixteen most = Sixteen{} + 126.0f, least = Sixteen{} - 127.0f, shift = Sixteen{} + (12582912.0f + 127.0f);
  const Sixteen exponent = x * -1.44269504f;
  Sixteen y = exponent > most ? most : exponent;
  y = y < least ? least : y;
  const Sixteen shifted = y + shift, part = y - (shifted - shift);
  Sixteen power = fused(Sixteen{} + 0.00132647273f, part, Sixteen{} + 0.00967151299f);
  for (const float next : {0.0555073358f, 0.240222424f, 0.693147004f, 1.0f}) power = fused(power, part, Sixteen{} + next);
  const Sixteen scale = reinterpret_cast<Sixteen>(reinterpret_cast<Ints>(shifted) << 23);
  const Sixteen part_of_one = reciprocal(fused(power, scale, Sixteen{} + 1.0f));
  return x * (exponent > most ? Sixteen{} : part_of_one);
}

// The same bits.
inline float silu_of(float x) { return silu_of(Sixteen{} + x)[0]; }

// body(load, store) for each sixteen of a run: load(from) and store(to, values) at from + place, short at the end.
template <typename Body>
void by_sixteen(int64_t count, Body&& body) {
  int64_t place = 0;
  for (; place + kSixteen <= count; place += kSixteen)
    body([&](const auto* from) { return sixteen(from + place); },
         [&](auto* to, Sixteen values) { put(to + place, values); });
  const int64_t rest = count - place;
  if (rest == 0) return;
  body(
      [&](const auto* from) {
        std::remove_cvref_t<decltype(*from)> padded[kSixteen] = {};
        std::memcpy(padded, from + place, rest * sizeof *from);
        return sixteen(padded);
      },
      [&](auto* to, Sixteen values) {
        std::remove_reference_t<decltype(*to)> all[kSixteen];
        put(all, values);
        std::memcpy(to + place, all, rest * sizeof *to);
      });
}

}  // namespace nextn
