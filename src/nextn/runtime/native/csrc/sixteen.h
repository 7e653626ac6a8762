// Sixteen floats at once between memory and registers, for kernels that do several ops' work with those ops' bits.
#pragma once

#include <cstring>
#include <type_traits>

#include "runtime.h"
#include "vectors.h"

namespace nextn {

#if defined(__AVX512F__)
inline Sixteen unpacked(__m256i halves) { return (Sixteen)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }
#endif

inline Sixteen sixteen(const uint16_t* from) {
#if defined(__AVX512F__)
  return unpacked(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  const auto eight = [=](int half) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + half);
    return (SixteenInts::Half)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
  };
  return floats_of({eight(0), eight(1)});
#else
  float values[kSixteen];
  for (int64_t i = 0; i < kSixteen; ++i) values[i] = widened(from[i]);
  return sixteen(values);
#endif
}

#if !defined(__AVX512BF16__)
// The nearest bf16 values in the upper halves, as `narrowed` rounds.
inline SixteenInts nearest(Sixteen values) {
  const SixteenInts bits = bits_of(values), nan = SixteenInts{} + 0x7FC00000;
  return chosen(values == values, bits + 0x7FFF + ((bits >> 16) & 1), nan) & int32_t(0xFFFF0000);
}
#endif

// As `narrowed`, but that processors with an instruction for it take what is smaller than 2^-126 for 0.
inline void put(uint16_t* to, Sixteen values) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &halves, sizeof halves);
#else
  const SixteenInts bits = nearest(values);
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)bits, 16));
  std::memcpy(to, &halves, sizeof halves);
#elif defined(__AVX2__)
  // What packs two registers goes by halves of each.
  const __m256i low = _mm256_srli_epi32((__m256i)bits.low, 16), high = _mm256_srli_epi32((__m256i)bits.high, 16);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
  std::memcpy(to, &halves, sizeof halves);
#else
  for (int64_t i = 0; i < kSixteen; ++i) to[i] = uint16_t(uint32_t(bits[i]) >> 16);
#endif
#endif
}

template <typename T>
Sixteen rounded(Sixteen values) {
  if constexpr (std::is_same_v<T, float>) return values;
#if defined(__AVX512BF16__)
  return unpacked((__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
  return floats_of(nearest(values));
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
  const Sixteen most = Sixteen{} + 126.0f, least = Sixteen{} - 127.0f, shift = Sixteen{} + (12582912.0f + 127.0f);
  const Sixteen exponent = x * -1.44269504f;
  Sixteen y = chosen(exponent > most, most, exponent);
  y = chosen(y < least, least, y);
  const Sixteen shifted = y + shift, part = y - (shifted - shift);
  Sixteen power = fused(Sixteen{} + 0.00132647273f, part, Sixteen{} + 0.00967151299f);
  for (const float next : {0.0555073358f, 0.240222424f, 0.693147004f, 1.0f})
    power = fused(power, part, Sixteen{} + next);
  const Sixteen scale = floats_of(bits_of(shifted) << 23);
  const Sixteen part_of_one = reciprocal(fused(power, scale, Sixteen{} + 1.0f));
  return x * chosen(exponent > most, Sixteen{}, part_of_one);
}

// The same bits.
inline float silu_of(float x) { return silu_of(Sixteen{} + x)[0]; }

// The first `count` of sixteen; the others are 0, or not written.
template <typename T>
Sixteen sixteen(const T* from, int64_t count) {
  T padded[kSixteen] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return sixteen(padded);
}

template <typename T>
void put(T* to, Sixteen values, int64_t count) {
  T all[kSixteen];
  put(all, values);
  std::memcpy(to, all, count * sizeof(T));
}

// body(load, store) for each sixteen of a run: load(from) and store(to, values) at from + place, short at the end.
template <typename Body>
void by_sixteen(int64_t count, Body&& body) {
  int64_t place = 0;
  for (; place + kSixteen <= count; place += kSixteen)
    body([&](const auto* from) { return sixteen(from + place); },
         [&](auto* to, Sixteen values) { put(to + place, values); });
  const int64_t rest = count - place;
  if (rest == 0) return;
  body([&](const auto* from) { return sixteen(from + place, rest); },
       [&](auto* to, Sixteen values) { put(to + place, values, rest); });
}

}  // namespace nextn
