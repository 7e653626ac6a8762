// Sixteen floats or whole numbers as one value: a register of 512 bits, or as many smaller ones as hold them.
//
// GCC takes a vector that is larger than a register apart, for comparisons, choices and conversions one value at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "functions.h"
#include "wide.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nextn {

constexpr int64_t kSixteen = 16;

#if defined(__AVX512F__)
constexpr int kRegister = 64;  // bytes
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

template <typename T, int kBytes>
struct Native {
  typedef T type __attribute__((vector_size(kBytes)));
};

template <typename T, int kBytes>
struct Pair;

// A register, or a pair of halves.
template <typename T, int kBytes>
using Wide = typename std::conditional_t<kBytes <= kRegister, Native<T, kBytes>, Pair<T, kBytes>>::type;

template <typename T, int kBytes>
struct Pair {
  using type = Pair;
  using Half = Wide<T, kBytes / 2>;
  using Mask = Pair<int32_t, kBytes>;
  static constexpr int64_t kMiddle = kBytes / 2 / int(sizeof(T));
  Half low, high;

  Pair() : low{}, high{} {}
  Pair(T value) : low(value - Half{}), high(value - Half{}) {}  // adding to 0 would turn -0 to 0
  Pair(Half low, Half high) : low(low), high(high) {}

  T operator[](int64_t i) const { return i < kMiddle ? low[i] : high[i - kMiddle]; }

  friend Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
  friend Pair operator-(Pair a, Pair b) { return {a.low - b.low, a.high - b.high}; }
  friend Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
  friend Pair operator/(Pair a, Pair b) { return {a.low / b.low, a.high / b.high}; }
  friend Pair operator&(Pair a, Pair b) { return {a.low & b.low, a.high & b.high}; }
  friend Pair operator|(Pair a, Pair b) { return {a.low | b.low, a.high | b.high}; }
  friend Pair operator>>(Pair a, int bits) { return {a.low >> bits, a.high >> bits}; }
  friend Pair operator<<(Pair a, int bits) { return {a.low << bits, a.high << bits}; }
  friend Pair operator-(Pair a) { return {-a.low, -a.high}; }
  Pair& operator+=(Pair b) { return *this = *this + b; }

  friend Mask operator<(Pair a, Pair b) { return {a.low < b.low, a.high < b.high}; }
  friend Mask operator>(Pair a, Pair b) { return {a.low > b.low, a.high > b.high}; }
  friend Mask operator==(Pair a, Pair b) { return {a.low == b.low, a.high == b.high}; }
  friend Mask operator!=(Pair a, Pair b) { return {a.low != b.low, a.high != b.high}; }
};

template <typename V>
constexpr bool kIsPair = requires(V value) { value.low; };

using Sixteen = Wide<float, 64>;
using SixteenInts = Wide<int32_t, 64>;

template <typename V>
V loaded(const void* from) {
  if constexpr (kIsPair<V>) {
    using Half = typename V::Half;
    return {loaded<Half>(from), loaded<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    V out;
    std::memcpy(&out, from, sizeof out);
    return out;
  }
}

template <typename V>
void kept(void* to, V values) {
  if constexpr (kIsPair<V>) {
    kept(to, values.low);
    kept(static_cast<char*>(to) + sizeof values.low, values.high);
  } else {
    std::memcpy(to, &values, sizeof values);
  }
}

// The same bits as another type.
template <typename To, typename V>
To as(V values) {
  if constexpr (kIsPair<V>)
    return {as<typename To::Half>(values.low), as<typename To::Half>(values.high)};
  else
    return (To)values;
}

// mask ? a : b, each place by itself.
template <typename M, typename V>
V chosen(M mask, V a, V b) {
  if constexpr (kIsPair<V>)
    return {chosen(mask.low, a.low, b.low), chosen(mask.high, a.high, b.high)};
  else
    return mask ? a : b;
}

// a * b + c, rounded once.
template <typename V>
V multiplied(V a, V b, V c) {
  if constexpr (kIsPair<V>) return {multiplied(a.low, b.low, c.low), multiplied(a.high, b.high, c.high)};
#if defined(__AVX512F__)
  else if constexpr (sizeof(V) == 64)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__AVX2__) && defined(__FMA__)
  else if constexpr (sizeof(V) == 32)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
  else {
    for (size_t i = 0; i < sizeof(V) / sizeof(float); ++i) c[i] = fused(a[i], b[i], c[i]);
    return c;
  }
}

// Hides the origin of the values from the optimizer.
template <typename V>
void hide(V& values) {
  if constexpr (kIsPair<V>)
    hide(values.low), hide(values.high);
  else
#if defined(__AVX512F__)
    asm("" : "+v"(values));
#elif defined(__x86_64__)
    asm("" : "+x"(values));
#elif defined(__aarch64__)
    asm("" : "+w"(values));
#else
    asm("" : "+m"(values));
#endif
}

inline SixteenInts bits_of(Sixteen values) { return as<SixteenInts>(values); }
inline Sixteen floats_of(SixteenInts bits) { return as<Sixteen>(bits); }
inline Sixteen sixteen(const float* from) { return loaded<Sixteen>(from); }
inline void put(float* to, Sixteen values) { kept(to, values); }
inline Sixteen fused(Sixteen a, Sixteen b, Sixteen c) { return multiplied(a, b, c); }

// A product that is rounded before it is added to: the compiler would fuse the two.
inline Sixteen product(Sixteen a, Sixteen b) {
  Sixteen out = a * b;
  hide(out);
  return out;
}

}  // namespace nextn
