// exp, log, tanh, erf, sin and cos that GCC vectorizes: no branches, no calls, the same bits in lanes and in tails.
//
// Polynomials of Cephes (expf, logf, tanhf, sinf, cosf), for erf of N. Juffa. A fused multiply-add is written as such.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "wide.h"

namespace nextn {

constexpr float kInf = std::numeric_limits<float>::infinity();

inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline double fused(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Whole numbers wrap, as in torch; signed ones must not.
inline int64_t fused(int64_t a, int64_t b, int64_t c) { return int64_t(uint64_t(a) * uint64_t(b) + uint64_t(c)); }

inline float from_bits(int32_t bits) { return __builtin_bit_cast(float, bits); }
inline int32_t to_bits(float value) { return __builtin_bit_cast(int32_t, value); }

// c[0] x^(N-1) + ... + c[N-1]
template <int N>
inline float polynomial(float x, const float (&c)[N]) {
  float sum = c[0];
#pragma GCC unroll 16
  for (int i = 1; i < N; ++i) sum = fused(sum, x, c[i]);
  return sum;
}

inline float exp_of(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float n = std::floor(fused(x, 1.44269504f, 0.5f));
  float r = fused(n, -0.693359375f, x);
  r = fused(n, 2.12194440e-4f, r);
  const float p = polynomial(
      r, {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f});
  // 2^n in two factors: n = 128 and the subnormals need both.
  const int32_t whole = int32_t(n), half = whole >> 1;
  const float scale = from_bits((half + 127) << 23), rest = from_bits((whole - half + 127) << 23);
  return (fused(p, r * r, r) + 1.0f) * scale * rest;
}

inline float log_of(float x) {
  const bool subnormal = x < 1.17549435e-38f;
  const float scaled = subnormal ? x * 8388608.0f : x;
  // The mantissa in [sqrt(1/2), sqrt(2)), the exponent with it.
  const int32_t shifted = int32_t(uint32_t(to_bits(scaled)) - 0x3f3504f3u);  // of any sign
  const float exponent = float(shifted >> 23) - (subnormal ? 23.0f : 0.0f);
  const float m = from_bits((shifted & 0x7fffff) + 0x3f3504f3) - 1.0f;
  const float p =
      polynomial(m, {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                     -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f});
  const float square = m * m;
  float y = fused(exponent, -2.12194440e-4f, p * (m * square));
  y = fused(square, -0.5f, y);
  y = fused(exponent, 0.693359375f, m + y);
  y = x == 0.0f ? -kInf : y;
  y = x < 0.0f ? std::numeric_limits<float>::quiet_NaN() : y;
  return x < kInf ? y : x;
}

// log(1 + y) for y >= 0, with the digits of y that 1 + y loses.
inline float log1p_of(float y) {
  const float u = 1.0f + y;
  return log_of(u) + (y - (u - 1.0f)) / u;
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

inline float tanh_of(float x) {
  const float size = std::fabs(x), square = x * x;
  const float p = polynomial(
      square, {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f});
  const float large = std::copysign(1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f), x);
  return size < 0.625f ? fused(p * square, x, x) : large;
}

inline float erf_of(float x) {
  const float size = std::fabs(x), square = x * x;
  const float p = polynomial(
      square, {-5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f});
  const float t = size > 4.0f ? 4.0f : size;
  const float power = polynomial(t, {-1.72853470e-5f, 3.83197126e-4f, -3.88396438e-3f, 2.42546219e-2f, -1.06777877e-1f,
                                     -6.34846687e-1f, -1.28717512e-1f});
  const float large = std::copysign(1.0f - exp_of(fused(power, t, -t)), x);
  return size < 0.927734375f ? fused(p, x, x) : x == x ? large : x;
}

// log(1 + exp(x)), exact in both tails.
inline float softplus_of(float x) { return (x > 0.0f ? x : 0.0f) + log1p_of(exp_of(-std::fabs(x))); }

// sin(x + quarter * pi/2). Rotary angles of far positions need the reduction in double; past 1e16 that fails, too.
inline float sin_of(float x, double quarter) {
  const double n = std::floor(double(x) * 0.63661977236758134 + 0.5), at = n + quarter;
  const float r = float(fused(n, -6.0771005065061922e-11, fused(n, -1.5707963267341256, double(x))));
  const int32_t turn = int32_t(at - 4.0 * std::floor(at * 0.25));
  const float square = r * r;
  const float s = polynomial(square, {-1.9515295891e-4f, 8.3321608736e-3f, -1.6666654611e-1f});
  const float c = polynomial(square, {2.443315711809948e-5f, -1.388731625493765e-3f, 4.166664568298827e-2f});
  const float sine = fused(s * square, r, r), cosine = fused(c, square * square, fused(square, -0.5f, 1.0f));
  const float value = turn & 1 ? cosine : sine;
  const float turned = turn & 2 ? -value : value;
  return std::fabs(x) < 1e16f ? turned : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace nextn
