// Fused elementwise ops of a decoder layer: SwiGLU, rotary embeddings in rotate-half form, and RMSNorm per head
// followed by a rotary embedding. Each gives the same bits as the ops that it replaces, with their roundings.
#include "norms.h"

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
void rope_rows(const Call& call, const Worker& worker) {
  const int64_t half = row_length(call.views[0]) / 2;
  each_row<4>(call, worker, [&](char* const* at) {
    auto* out = reinterpret_cast<T*>(at[0]);
    const auto *x = reinterpret_cast<const T*>(at[1]), *cosine = reinterpret_cast<const T*>(at[2]);
    const auto* sine = reinterpret_cast<const T*>(at[3]);
    turn(out, x, cosine, x + half, sine, -1.0f, half);
    turn(out + half, x + half, cosine + half, x, sine + half, 1.0f, half);
  });
}

bool rope(Call& call) {
  if (call.views.size() != 4 || !same_shapes(call) || call.views[0].ndim == 0 || row_length(call.views[0]) % 2)
    return false;
  call.kernel = call.views[0].type == F32 ? rope_rows<float> : rope_rows<uint16_t>;
  call.parallel = numel(call.views[0]) >= kParallel;
  return dense_of(call, F32) || dense_of(call, BF16);
}

// Five views of `norm_rope` and their numbers: those of the queries, or of the keys.
struct Heads {
  const View *out, *x, *cosine, *sine, *weight;
  int64_t gain;
  float eps;

  static int64_t count(const Call& call) { return int64_t(call.ints.size()); }

  Heads(const Call& call, int64_t place)
      : out(&call.views[5 * place]), x(out + 1), cosine(out + 2), sine(out + 3), weight(out + 4),
        gain(call.ints[place]), eps(float(call.reals[place])) {}

  bool fits(Type type) const {
    for (const View* view : {out, x, cosine, sine})
      if (view->type != type || view->ndim != out->ndim || inner_stride(*view) != 1 ||
          !std::equal(out->size, out->size + out->ndim - 1, view->size))
        return false;
    const int64_t turned = row_length(*cosine);
    return row_length(*x) == row_length(*out) && row_length(*sine) == turned && turned % 2 == 0 &&
           turned <= row_length(*out) && floating(*weight) && weight->ndim == 1 && weight->size[0] == row_length(*x) &&
           is_gain(gain);
  }
};

// views: one or several times out [..., D], x [..., D], cosines and sines [..., d], weight [D]: rms_norm of x, of whose
// first d channels are rotated; the others are copied.
template <typename T>
void norm_rope_rows(const Call& call, const Worker& worker) {
  static thread_local std::vector<T> room;
  for (int64_t place = 0; place < Heads::count(call); ++place) {
    const Heads heads(call, place);
    const int64_t length = row_length(*heads.x), turned = row_length(*heads.cosine), half = turned / 2;
    const float* weight = fetch_vector(2, *heads.weight);
    room.resize(length);
    each_row<4>(heads.out, worker, [&](char* const* at) {
      auto* out = reinterpret_cast<T*>(at[0]);
      const auto *cosine = reinterpret_cast<const T*>(at[2]), *sine = reinterpret_cast<const T*>(at[3]);
      T* normed = room.data();
      rms_norm_row(normed, fetch_row(0, *heads.x, at[1]), weight, heads.gain, heads.eps, length);
      turn(out, normed, cosine, normed + half, sine, -1.0f, half);
      turn(out + half, normed + half, cosine + half, normed, sine + half, 1.0f, half);
      std::copy_n(normed + turned, length - turned, out + turned);
    });
  }
}

bool norm_rope(Call& call) {
  const int64_t count = Heads::count(call);
  if (count == 0 || int64_t(call.views.size()) != 5 * count || int64_t(call.reals.size()) != count) return false;
  const auto type = Type(call.views[0].type);
  int64_t total = 0;
  for (int64_t place = 0; place < count; ++place) {
    const Heads heads(call, place);
    if (heads.out->ndim == 0 || !heads.fits(type)) return false;
    total += numel(*heads.out);
  }
  call.kernel = type == F32 ? norm_rope_rows<float> : norm_rope_rows<uint16_t>;
  call.parallel = total >= kParallel;
  return type == F32 || type == BF16;
}

const Op ops[] = {{"silu_mul", silu_mul}, {"rope", rope}, {"norm_rope", norm_rope}};

}  // namespace

}  // namespace nextn
