// Ops that move values: copy (converts types), fill, where, masked_fill.
#include "strided.h"

namespace nextn {

namespace {

template <typename T>
void copy_same(const Call& call, const Worker& worker) {
  const int64_t to_step = inner_stride(call.views[0]), step = inner_stride(call.views[1]);
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    if (to_step == 1 && step == 1) {
      std::memmove(at[0], at[1], count * sizeof(T));
      return;
    }
    T* to = reinterpret_cast<T*>(at[0]);
    const T* from = reinterpret_cast<const T*>(at[1]);
    for (int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * step];
  });
}

// Between float types in one pass; From and To differ.
template <typename To, typename From>
void copy_float(const Call& call, const Worker& worker) {
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    To* to = reinterpret_cast<To*>(at[0]);
    const From* from = reinterpret_cast<const From*>(at[1]);
    for (int64_t i = 0; i < count; ++i) to[i] = stored<To>(wide(from[i]));
  });
}

template <typename C>
void copy_mixed(const Call& call, const Worker& worker) {
  Operand<C> a;
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    each_chunk<C>(call.views[0], at[0], count, [&](int64_t done, int64_t part, C* to) {
      std::copy_n(a.all(call.views[1], at[1], done, part), part, to);
    });
  });
}

bool copy(Call& call) {
  if (!prepared(call, 2, 0)) return false;
  const View &to = call.views[0], &from = call.views[1];
  const bool dense = inner_stride(to) == 1 && inner_stride(from) == 1;
  constexpr Kernel kSame[] = {copy_same<float>, copy_same<uint16_t>, copy_same<int64_t>, copy_same<uint8_t>};
  if (to.type == from.type)
    call.kernel = kSame[to.type];
  else if (dense && to.type == BF16 && from.type == F32)
    call.kernel = copy_float<uint16_t, float>;
  else if (dense && to.type == F32 && from.type == BF16)
    call.kernel = copy_float<float, uint16_t>;
  else
    call.kernel = floating(to) || floating(from) ? copy_mixed<float> : copy_mixed<int64_t>;
  return true;
}

template <typename C>
void fill_run(const Call& call, const Worker& worker) {
  const C value = converted<C>(call.reals[0]);
  each_run<1>(call, worker, [&](int64_t count, char* const* at) {
    each_chunk<C>(call.views[0], at[0], count, [&](int64_t, int64_t part, C* to) { std::fill_n(to, part, value); });
  });
}

bool fill(Call& call) {
  if (!prepared(call, 1, 1)) return false;
  // A bool is whether the value is not zero, which 0.5 shows only as a float.
  call.kernel = call.views[0].type == I64 ? fill_run<int64_t> : fill_run<float>;
  return true;
}

// Conditions are loaded as floats, where nonzero stays nonzero, to be as wide as the values that they select.
template <typename C>
void where_run(const Call& call, const Worker& worker) {
  Operand<float> chosen;
  Operand<C> a, b;
  each_run<4>(call, worker, [&](int64_t count, char* const* at) {
    each_chunk<C>(call.views[0], at[0], count, [&](int64_t done, int64_t part, C* to) {
      const float* choice = chosen.all(call.views[1], at[1], done, part);
      const C *x = a.all(call.views[2], at[2], done, part), *y = b.all(call.views[3], at[3], done, part);
#pragma GCC ivdep
      for (int64_t i = 0; i < part; ++i) {
        const C yes = x[i], no = y[i];
        to[i] = choice[i] != 0 ? yes : no;
      }
    });
  });
}

bool where(Call& call) {
  if (call.views.size() != 4 || floating(call.views[1]) || !prepared(call, 4, 0)) return false;
  const bool in_float = floating(call.views[0]) || floating(call.views[2]) || floating(call.views[3]);
  call.kernel = in_float ? where_run<float> : where_run<int64_t>;
  return true;
}

template <typename C>
void masked_fill_run(const Call& call, const Worker& worker) {
  const C value = converted<C>(call.reals[0]);
  Operand<C> a;
  Operand<float> mask;
  each_run<3>(call, worker, [&](int64_t count, char* const* at) {
    each_chunk<C>(call.views[0], at[0], count, [&](int64_t done, int64_t part, C* to) {
      const C* x = a.all(call.views[1], at[1], done, part);
      const float* hidden = mask.all(call.views[2], at[2], done, part);
#pragma GCC ivdep
      for (int64_t i = 0; i < part; ++i) {
        const C kept = x[i];
        to[i] = hidden[i] != 0 ? value : kept;
      }
    });
  });
}

bool masked_fill(Call& call) {
  if (call.views.size() != 3 || floating(call.views[2]) || !prepared(call, 3, 1)) return false;
  const bool in_float = floating(call.views[0]) || floating(call.views[1]);
  call.kernel = in_float ? masked_fill_run<float> : masked_fill_run<int64_t>;
  return true;
}

const Op ops[] = {{"copy", copy}, {"fill", fill}, {"where", where}, {"masked_fill", masked_fill}};

}  // namespace

}  // namespace nextn
