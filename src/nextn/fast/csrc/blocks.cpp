// Runs of operations of a decoder block in one: the gate of an MLP, and rotary embeddings by halves. Each gives the bits
// of the ops that it stands for, which round to the tensors' type one by one.
#include "sixteen.h"
#include "strided.h"

namespace nextn {

namespace {

// out = silu(a) * b
template <typename T>
void silu_mul_runs(const Call& call, const Worker& worker) {
  each_run<3>(call, worker, [&](int64_t count, char* const* at) {
    auto* out = reinterpret_cast<T*>(at[0]);
    const auto *a = reinterpret_cast<const T*>(at[1]), *b = reinterpret_cast<const T*>(at[2]);
    by_sixteen(count, [&](auto load, auto store) { store(out, rounded<T>(silu_of(load(a))) * load(b)); });
  });
}

bool dense_of(const Call& call, Type type) {
  return std::all_of(call.views.begin(), call.views.end(),
                     [&](const View& view) { return view.type == type && inner_stride(view) == 1; });
}

bool silu_mul(Call& call) {
  if (!prepared(call, 3, 0)) return false;
  call.kernel = call.views[0].type == F32 ? silu_mul_runs<float> : silu_mul_runs<uint16_t>;
  return dense_of(call, F32) || dense_of(call, BF16);
}

// One half of a row: x * cosine + sign * turned * sine.
template <typename T>
void turn(T* out, const T* x, const T* cosine, const T* turned, const T* sine, float sign, int64_t count) {
  by_sixteen(count, [&](auto load, auto store) {
    store(out, rounded<T>(product(load(x), load(cosine))) + rounded<T>(product(sign * load(turned), load(sine))));
  });
}

// views: out, x, cosines, sines, all [..., 2 * half]: x * cos + [-x's upper half, x's lower half] * sin.
template <typename T>
void rotate_rows(const Call& call, const Worker& worker) {
  const int64_t half = row_length(call.views[0]) / 2;
  each_row<4>(call, worker, [&](char* const* at) {
    auto* out = reinterpret_cast<T*>(at[0]);
    const auto *x = reinterpret_cast<const T*>(at[1]), *cosine = reinterpret_cast<const T*>(at[2]);
    const auto* sine = reinterpret_cast<const T*>(at[3]);
    turn(out, x, cosine, x + half, sine, -1.0f, half);
    turn(out + half, x + half, cosine + half, x, sine + half, 1.0f, half);
  });
}

bool rotate(Call& call) {
  if (call.views.size() != 4 || !same_shapes(call) || call.views[0].ndim == 0 || row_length(call.views[0]) % 2)
    return false;
  call.kernel = call.views[0].type == F32 ? rotate_rows<float> : rotate_rows<uint16_t>;
  call.parallel = numel(call.views[0]) >= kParallel;
  return dense_of(call, F32) || dense_of(call, BF16);
}

const Op ops[] = {{"silu_mul", silu_mul}, {"rotate", rotate}};

}  // namespace

}  // namespace nextn
