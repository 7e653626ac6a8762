// Fused elementwise ops of a decoder layer: SwiGLU, rotary embeddings in rotate-half form, and RMSNorm per head
// followed by a rotary embedding. Each computes in float32 and rounds once, to the type of its out: it gives the same bits
// as the ops that it replaces with float32 between them.
#include "norms.h"

namespace nextn {

namespace {

// Calls body with the floats at a place, by their type.
template <typename Body>
void typed(int64_t type, char* at, const Body& body) {
  if (type == F32)
    body(reinterpret_cast<float*>(at));
  else
    body(reinterpret_cast<uint16_t*>(at));
}

// out = silu(a) * b
void silu_mul_runs(const Call& call, const Worker& worker) {
  const auto& views = call.views;
  each_run<3>(call, worker, [&](int64_t count, char* const* at) {
    typed(views[0].type, at[0], [&](auto* out) {
      typed(views[1].type, at[1], [&](const auto* a) {
        typed(views[2].type, at[2], [&](const auto* b) {
          by_sixteen(count, [&](auto load, auto store) { store(out, silu_of(load(a)) * load(b)); });
        });
      });
    });
  });
}

bool is_dense(const View& view) { return floating(view) && inner_stride(view) == 1; }

bool silu_mul(Call& call) {
  if (!prepared(call, 3, 0) || !std::all_of(call.views.begin(), call.views.end(), is_dense)) return false;
  call.kernel = silu_mul_runs;
  return true;
}

// One half of a row: x * cosine + sign * turned * sine.
template <typename T>
void turn(T* out, const float* x, const float* cosine, const float* turned, const float* sine, float sign,
          int64_t count) {
  by_sixteen(count, [&](auto load, auto store) {
    store(out, product(load(x), load(cosine)) + product(sign * load(turned), load(sine)));
  });
}

// out [2 * half] = x * cosine + [-x's upper half, x's lower half] * sine.
template <typename T>
void turn_row(T* out, const float* x, const float* cosine, const float* sine, int64_t half) {
  turn(out, x, cosine, x + half, sine, -1.0f, half);
  turn(out + half, x + half, cosine + half, x, sine + half, 1.0f, half);
}

// views: out of type T, x, cosines, sines, all [..., 2 * half].
template <typename T>
void rope_rows(const Call& call, const Worker& worker) {
  const View *x = &call.views[1], *cosine = &call.views[2], *sine = &call.views[3];
  each_row<4>(call, worker, [&](char* const* at) {
    const float *of_cosine = fetch_row(3, *cosine, at[2]), *of_sine = fetch_row(4, *sine, at[3]);
    turn_row(reinterpret_cast<T*>(at[0]), fetch_row(0, *x, at[1]), of_cosine, of_sine, row_length(*x) / 2);
  });
}

bool rope(Call& call) {
  const auto& views = call.views;
  if (views.size() != 4 || !same_shapes(call) || views[0].ndim == 0 || row_length(views[0]) % 2) return false;
  if (!std::all_of(views.begin(), views.end(), is_dense)) return false;
  call.kernel = views[0].type == F32 ? rope_rows<float> : rope_rows<uint16_t>;
  call.parallel = numel(views[0]) >= kParallel;
  return true;
}

// Five views of `norm_rope` and their number: those of the queries, or of the keys.
struct Heads {
  const View *out, *x, *cosine, *sine, *weight;
  float eps;

  static int64_t count(const Call& call) { return int64_t(call.reals.size()); }

  Heads(const Call& call, int64_t place)
      : out(&call.views[5 * place]), x(out + 1), cosine(out + 2), sine(out + 3), weight(out + 4),
        eps(float(call.reals[place])) {}

  bool fits() const {
    for (const View* view : {out, x, cosine, sine})
      if (!is_dense(*view) || view->ndim != out->ndim || !std::equal(out->size, out->size + out->ndim - 1, view->size))
        return false;
    const int64_t turned = row_length(*cosine);
    return row_length(*x) == row_length(*out) && row_length(*sine) == turned && turned % 2 == 0 &&
           turned <= row_length(*out) && floating(*weight) && weight->ndim == 1 && weight->size[0] == row_length(*x);
  }

  // Into out of type T: rms_norm of the rows of x, turned.
  template <typename T>
  void run(const Worker& worker) const {
    const int64_t length = row_length(*x), turned = row_length(*cosine);
    const float* weights = fetch_vector(2, *weight);
    float* scaled = scratch(1, length);
    each_row<4>(out, worker, [&](char* const* at) {
      auto* to = reinterpret_cast<T*>(at[0]);
      rms_norm_row(scaled, fetch_row(0, *x, at[1]), weights, eps, length);
      turn_row(to, scaled, fetch_row(3, *cosine, at[2]), fetch_row(4, *sine, at[3]), turned / 2);
      by_sixteen(length - turned, [&](auto load, auto store) { store(to + turned, load(scaled + turned)); });
    });
  }
};

// views: one or several times out [..., D], x [..., D], cosines and sines [..., d], weight [D]: rms_norm of x, of whose
// first d channels are rotated; the others are copied.
void norm_rope_rows(const Call& call, const Worker& worker) {
  for (int64_t place = 0; place < Heads::count(call); ++place) {
    const Heads heads(call, place);
    heads.out->type == F32 ? heads.run<float>(worker) : heads.run<uint16_t>(worker);
  }
}

bool norm_rope(Call& call) {
  const int64_t count = Heads::count(call);
  if (count == 0 || int64_t(call.views.size()) != 5 * count || !call.ints.empty()) return false;
  int64_t total = 0;
  for (int64_t place = 0; place < count; ++place) {
    const Heads heads(call, place);
    if (heads.out->ndim == 0 || !heads.fits()) return false;
    total += numel(*heads.out);
  }
  call.kernel = norm_rope_rows;
  call.parallel = total >= kParallel;
  return true;
}

const Op ops[] = {{"silu_mul", silu_mul}, {"rope", rope}, {"norm_rope", norm_rope}};

}  // namespace

}  // namespace nextn
