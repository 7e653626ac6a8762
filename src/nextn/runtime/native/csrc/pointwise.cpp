// Elementwise ops: a function of one or two values over views of one shape, with conversions at the loads and stores.
//
// A function is a lambda (x, p) or (x, y, p); p holds the call's reals. It computes in float if any view is floating or
// a scalar is not whole, else in int64_t; outputs may be an input's own memory, never a part of it.
#include "sixteen.h"
#include "strided.h"

namespace nextn {

namespace {

// A call's first two reals in the type that the op computes in.
template <typename C>
struct Parameters {
  C first{}, second{};
};

template <typename C>
Parameters<C> parameters(const Call& call, size_t from) {
  Parameters<C> p;
  if (call.reals.size() > from) p.first = converted<C>(call.reals[from]);
  if (call.reals.size() > from + 1) p.second = converted<C>(call.reals[from + 1]);
  return p;
}

// The type that an op computes in: either, depending on its operands; float only; int64_t only.
enum Domain { kEither, kReal, kWhole };

template <typename T, typename C>
void fill_with(T* out, C value, int64_t count) {
  const T copy = stored<T>(value);
  for (int64_t i = 0; i < count; ++i) out[i] = copy;
}

template <auto F, typename T, typename C>
void map_one(T* out, const T* a, int64_t step, const Parameters<C> p, int64_t count) {
  if (step == 0) return fill_with(out, F(C(wide(*a)), p), count);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = stored<T>(F(C(wide(a[i])), p));
}

// B may be wider than T: a scalar operand is not rounded to the tensor's type.
template <auto F, typename T, typename B, typename C>
void map_two(T* out, const T* a, int64_t a_step, const B* b, int64_t b_step, const Parameters<C> p, int64_t count) {
  if (b_step == 0) {
    const C y = wide(*b);
    if (a_step == 0) return fill_with(out, F(C(wide(*a)), y, p), count);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = stored<T>(F(C(wide(a[i])), y, p));
  } else if (a_step == 0) {
    const C x = wide(*a);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = stored<T>(F(x, C(wide(b[i])), p));
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = stored<T>(F(C(wide(a[i])), C(wide(b[i])), p));
  }
}

template <auto F, typename T, typename C>
void unary_same(const Call& call, const Worker& worker) {
  const Parameters<C> p = parameters<C>(call, 0);
  const int64_t step = inner_stride(call.views[1]);
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    map_one<F>(reinterpret_cast<T*>(at[0]), reinterpret_cast<const T*>(at[1]), step, p, count);
  });
}

template <auto F, typename C>
void unary_mixed(const Call& call, const Worker& worker) {
  const Parameters<C> p = parameters<C>(call, 0);
  Operand<C> a;
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    each_chunk<C>(call.views[0], at[0], count, [&](int64_t done, int64_t part, C* to) {
      a.take(call.views[1], at[1], done, part);
      map_one<F>(to, a.at, a.step, p, part);
    });
  });
}

template <auto F, typename T, typename C>
void binary_same(const Call& call, const Worker& worker) {
  const Parameters<C> p = parameters<C>(call, 0);
  const int64_t a_step = inner_stride(call.views[1]), b_step = inner_stride(call.views[2]);
  each_run<3>(call, worker, [&](int64_t count, char* const* at) {
    map_two<F>(reinterpret_cast<T*>(at[0]), reinterpret_cast<const T*>(at[1]), a_step,
               reinterpret_cast<const T*>(at[2]), b_step, p, count);
  });
}

template <auto F, typename T, typename C>
void scalar_same(const Call& call, const Worker& worker) {
  const Parameters<C> p = parameters<C>(call, 1);
  const C b = converted<C>(call.reals[0]);
  const int64_t step = inner_stride(call.views[1]);
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    map_two<F>(reinterpret_cast<T*>(at[0]), reinterpret_cast<const T*>(at[1]), step, &b, 0, p, count);
  });
}

template <auto F, typename C>
void binary_mixed(const Call& call, const Worker& worker) {
  const Parameters<C> p = parameters<C>(call, 0);
  Operand<C> a, b;
  each_run<3>(call, worker, [&](int64_t count, char* const* at) {
    each_chunk<C>(call.views[0], at[0], count, [&](int64_t done, int64_t part, C* to) {
      a.take(call.views[1], at[1], done, part);
      b.take(call.views[2], at[2], done, part);
      map_two<F>(to, a.at, a.step, b.at, b.step, p, part);
    });
  });
}

template <auto F, typename C>
void scalar_mixed(const Call& call, const Worker& worker) {
  const Parameters<C> p = parameters<C>(call, 1);
  const C b = converted<C>(call.reals[0]);
  Operand<C> a;
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    each_chunk<C>(call.views[0], at[0], count, [&](int64_t done, int64_t part, C* to) {
      a.take(call.views[1], at[1], done, part);
      map_two<F>(to, a.at, a.step, &b, 0, p, part);
    });
  });
}

// Whether all views have one type, the out is dense and the inputs are dense or repeated: no conversions are needed.
bool plain(const Call& call, Type type) {
  for (size_t i = 0; i < call.views.size(); ++i) {
    const int64_t stride = inner_stride(call.views[i]);
    if (call.views[i].type != type || (stride != 1 && (i == 0 || stride != 0))) return false;
  }
  return true;
}

bool is_whole(double real) { return real == std::floor(real); }

bool computes_in_float(const Call& call) {
  return std::any_of(call.views.begin(), call.views.end(), floating) ||
         !std::all_of(call.reals.begin(), call.reals.end(), is_whole);
}

template <Domain D, auto F, size_t R>
bool unary(Call& call) {
  if (!prepared(call, 2, R)) return false;
  const bool in_float = computes_in_float(call);
  if constexpr (D != kWhole) {
    call.kernel = plain(call, F32)    ? unary_same<F, float, float>
                  : plain(call, BF16) ? unary_same<F, uint16_t, float>
                                      : unary_mixed<F, float>;
    if (in_float) return true;
  }
  if constexpr (D != kReal) call.kernel = unary_mixed<F, int64_t>;
  return in_float == (D == kReal);
}

template <Domain D, auto F, size_t R>
bool binary(Call& call) {
  const bool scalar = call.views.size() == 2;
  if (!prepared(call, 3 - scalar, R + scalar)) return false;
  const bool in_float = computes_in_float(call);
  if constexpr (D != kWhole) {
    if (plain(call, F32))
      call.kernel = scalar ? scalar_same<F, float, float> : binary_same<F, float, float>;
    else if (plain(call, BF16))
      call.kernel = scalar ? scalar_same<F, uint16_t, float> : binary_same<F, uint16_t, float>;
    else
      call.kernel = scalar ? scalar_mixed<F, float> : binary_mixed<F, float>;
    if (in_float) return true;
  }
  if constexpr (D != kReal) call.kernel = scalar ? scalar_mixed<F, int64_t> : binary_mixed<F, int64_t>;
  return in_float == (D == kReal);
}

template <Domain D, auto F, size_t R = 0>
constexpr Select of_one = unary<D, F, R>;
template <Domain D, auto F, size_t R = 0>
constexpr Select of_two = binary<D, F, R>;

// Floor division. Integers divided by zero give 0, as nothing may trap.
float floor_divided(float a, float b) {
  if (b == 0) return a / b;
  const float rest = std::fmod(a, b);
  float quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(0.0f, a / b);
  const float whole = std::floor(quotient);
  return quotient - whole > 0.5f ? whole + 1 : whole;
}

int64_t floor_divided(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return fused(a, b, int64_t(0));
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

float product_of(float a, float b) { return a * b; }
int64_t product_of(int64_t a, int64_t b) { return fused(a, b, int64_t(0)); }
float negated(float a) { return -a; }
int64_t negated(int64_t a) { return fused(a, int64_t(-1), int64_t(0)); }

// The remainder has the divisor's sign.
float remainder_of(float a, float b) {
  const float rest = std::fmod(a, b);
  return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}

int64_t remainder_of(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}

// NaN in either wins, as in torch.
constexpr auto kMinimum = [](auto x, auto y, auto) { return x < y || x != x ? x : y; };
constexpr auto kMaximum = [](auto x, auto y, auto) { return x > y || x != x ? x : y; };

const Op binary_ops[] = {
    {"add", of_two<kEither, [](auto x, auto y, auto p) { return fused(p.first, y, x); }, 1>},
    {"sub", of_two<kEither, [](auto x, auto y, auto p) { return fused(negated(p.first), y, x); }, 1>},
    {"mul", of_two<kEither, [](auto x, auto y, auto) { return product_of(x, y); }>},
    {"div", of_two<kReal, [](float x, float y, auto) { return x / y; }>},
    {"minimum", of_two<kEither, kMinimum>},
    {"maximum", of_two<kEither, kMaximum>},
    {"eq", of_two<kEither, [](auto x, auto y, auto) { return decltype(x)(x == y); }>},
    {"ne", of_two<kEither, [](auto x, auto y, auto) { return decltype(x)(x != y); }>},
    {"lt", of_two<kEither, [](auto x, auto y, auto) { return decltype(x)(x < y); }>},
    {"le", of_two<kEither, [](auto x, auto y, auto) { return decltype(x)(x <= y); }>},
    {"gt", of_two<kEither, [](auto x, auto y, auto) { return decltype(x)(x > y); }>},
    {"ge", of_two<kEither, [](auto x, auto y, auto) { return decltype(x)(x >= y); }>},
    {"bitwise_and", of_two<kWhole, [](int64_t x, int64_t y, auto) { return x & y; }>},
    {"bitwise_or", of_two<kWhole, [](int64_t x, int64_t y, auto) { return x | y; }>},
    {"bitwise_xor", of_two<kWhole, [](int64_t x, int64_t y, auto) { return x ^ y; }>},
    {"floor_divide", of_two<kEither, [](auto x, auto y, auto) { return floor_divided(x, y); }>},
    {"remainder", of_two<kEither, [](auto x, auto y, auto) { return remainder_of(x, y); }>},
};

constexpr auto kGeluErf = [](float x, auto) { return 0.5f * x * (1.0f + erf_of(x * 0.70710678f)); };
constexpr auto kGeluTanh = [](float x, auto) {
  return 0.5f * x * (1.0f + tanh_of(0.79788456f * fused(0.044715f * x * x, x, x)));
};
constexpr auto kSoftplus = [](float x, auto p) {
  return x * p.first > p.second ? x : softplus_of(x * p.first) / p.first;
};
constexpr auto kAbs = [](auto x, auto) {
  if constexpr (std::is_same_v<decltype(x), float>) return std::abs(x);
  return x < 0 ? negated(x) : x;
};
constexpr auto kSin = [](float x, auto) { return sin_of(x, 0); };
constexpr auto kCos = [](float x, auto) { return sin_of(x, 1); };
constexpr auto kClamp = [](auto x, auto p) {
  const auto raised = x < p.first ? p.first : x;
  return raised > p.second ? p.second : raised;
};

bool gelu(Call& call) {
  if (call.ints.size() != 1) return false;
  return call.ints[0] ? unary<kReal, kGeluTanh, 0>(call) : unary<kReal, kGeluErf, 0>(call);
}

template <typename T>
void silu_same(const Call& call, const Worker& worker) {
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    by_sixteen(count, [&](auto load, auto store) {
      store(reinterpret_cast<T*>(at[0]), silu_of(load(reinterpret_cast<const T*>(at[1]))));
    });
  });
}

bool silu(Call& call) {
  if (!unary<kReal, [](float x, auto) { return silu_of(x); }, 0>(call)) return false;
  if (inner_stride(call.views[1]) == 1 && plain(call, F32)) call.kernel = silu_same<float>;
  if (inner_stride(call.views[1]) == 1 && plain(call, BF16)) call.kernel = silu_same<uint16_t>;
  return true;
}

bool bitwise_not(Call& call) {
  const bool logical = !call.views.empty() && call.views[0].type == BOOL;
  return logical ? unary<kWhole, [](int64_t x, auto) { return int64_t(!x); }, 0>(call)
                 : unary<kWhole, [](int64_t x, auto) { return ~x; }, 0>(call);
}

constexpr auto kPower = [](auto x, auto p) {
  if constexpr (std::is_same_v<decltype(x), int64_t>) {
    int64_t product = 1;
    for (int64_t rest = p.first; rest > 0; rest /= 2, x = product_of(x, x))
      if (rest % 2) product = product_of(product, x);
    return product;
  } else {
    return float(std::pow(x, p.first));
  }
};

// Scalar exponents only.
bool power(Call& call) {
  if (call.reals.size() != 1) return false;
  const double exponent = call.reals[0];
  if (exponent == 2) return unary<kEither, [](auto x, auto) { return product_of(x, x); }, 1>(call);
  if (exponent == 3) return unary<kEither, [](auto x, auto) { return product_of(product_of(x, x), x); }, 1>(call);
  if (exponent == 0.5) return unary<kReal, [](float x, auto) { return std::sqrt(x); }, 1>(call);
  if (exponent == -0.5) return unary<kReal, [](float x, auto) { return 1.0f / std::sqrt(x); }, 1>(call);
  const bool whole = !call.views.empty() && !floating(call.views[0]);
  return (!whole || exponent >= 0) && unary<kEither, kPower, 1>(call);
}

const Op unary_ops[] = {
    {"neg", of_one<kEither, [](auto x, auto) { return negated(x); }>},
    {"exp", of_one<kReal, [](float x, auto) { return exp_of(x); }>},
    {"log", of_one<kReal, [](float x, auto) { return log_of(x); }>},
    {"sqrt", of_one<kReal, [](float x, auto) { return std::sqrt(x); }>},
    {"rsqrt", of_one<kReal, [](float x, auto) { return 1.0f / std::sqrt(x); }>},
    {"reciprocal", of_one<kReal, [](float x, auto) { return 1.0f / x; }>},
    {"abs", of_one<kEither, kAbs>},
    {"sign", of_one<kEither, [](auto x, auto) { return decltype(x)((x > 0) - (x < 0)); }>},
    {"silu", silu},
    {"sigmoid", of_one<kReal, [](float x, auto) { return sigmoid_of(x); }>},
    {"tanh", of_one<kReal, [](float x, auto) { return tanh_of(x); }>},
    {"relu", of_one<kEither, [](auto x, auto) { return x < 0 ? decltype(x)(0) : x; }>},
    {"cos", of_one<kReal, kCos>},
    {"sin", of_one<kReal, kSin>},
    {"log_sigmoid", of_one<kReal, [](float x, auto) { return -softplus_of(-x); }>},
    {"softplus", of_one<kReal, kSoftplus, 2>},
    {"clamp", of_one<kEither, kClamp, 2>},
    {"gelu", gelu},
    {"bitwise_not", bitwise_not},
    {"pow", power},
};

}  // namespace

}  // namespace nextn
