// RMS and layer norms over the last dim. rms_norm gives the same bits as the ops it replaces with float32 between them:
// pow 2, mean, add eps, rsqrt, mul, and the norm weight; add_rms_norm those of add and rms_norm.
#include "norms.h"

namespace nextn {

namespace {

template <typename T>
void rms_norm_rows(const Call& call, const Worker& worker) {
  const View& a = call.views[1];
  const float* weight = call.views.size() > 2 ? fetch_vector(2, call.views[2]) : nullptr;
  each_row<2>(call, worker, [&](char* const* at) {
    const float* row = fetch_row(0, a, at[1]);
    rms_norm_row(reinterpret_cast<T*>(at[0]), row, weight, float(call.reals[0]), row_length(a));
  });
}

bool are_norm_views(const Call& call, size_t num_vectors) {
  if (call.views.size() != 2 + num_vectors || !same_shape(call.views[0], call.views[1]) || call.views[0].ndim == 0)
    return false;
  for (size_t i = 0; i < call.views.size(); ++i) {
    const View& view = call.views[i];
    if (!floating(view) || (i >= 2 && (view.ndim != 1 || view.size[0] != row_length(call.views[0])))) return false;
  }
  return true;
}

bool rms_norm(Call& call) {
  if (call.views.size() < 2 || !are_norm_views(call, call.views.size() == 3) || call.reals.size() != 1) return false;
  call.kernel = call.views[0].type == F32 ? rms_norm_rows<float> : rms_norm_rows<uint16_t>;
  call.parallel = numel(call.views[0]) >= kParallel;
  return inner_stride(call.views[0]) == 1 && call.ints.empty();
}

// views: out of type T, sum = a + b of type Sum, a, b, weight [D].
template <typename T, typename Sum>
void add_rms_norm_rows(const Call& call, const Worker& worker) {
  const int64_t length = row_length(call.views[0]);
  const float* weight = fetch_vector(2, call.views[4]);
  each_row<4>(call, worker, [&](char* const* at) {
    auto* sum = reinterpret_cast<Sum*>(at[1]);
    const float *a = fetch_row(0, call.views[2], at[2]), *b = fetch_row(1, call.views[3], at[3]);
    float* row = scratch(3, length);
    by_sixteen(length, [&](auto load, auto store) {
      const Sixteen both = rounded<Sum>(load(a) + load(b));
      store(sum, both), store(row, both);
    });
    rms_norm_row(reinterpret_cast<T*>(at[0]), row, weight, float(call.reals[0]), length);
  });
}

bool add_rms_norm(Call& call) {
  if (call.views.size() != 5 || !call.ints.empty() || call.reals.size() != 1 || call.views[0].ndim == 0) return false;
  const View &out = call.views[0], &sum = call.views[1], &weight = call.views[4];
  for (int i = 0; i < 4; ++i) {
    const View& view = call.views[i];
    if (!same_shape(view, out) || !floating(view) || inner_stride(view) != 1) return false;
  }
  if (!floating(weight) || weight.ndim != 1 || weight.size[0] != row_length(out)) return false;
  call.kernel = out.type == F32
                    ? (sum.type == F32 ? add_rms_norm_rows<float, float> : add_rms_norm_rows<float, uint16_t>)
                : sum.type == F32 ? add_rms_norm_rows<uint16_t, float>
                                  : add_rms_norm_rows<uint16_t, uint16_t>;
  call.parallel = numel(out) >= kParallel;
  return true;
}

void layer_norm_rows(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &a = call.views[1];
  const int64_t length = row_length(a);
  const float *weight = fetch_vector(2, call.views[2]), *bias = fetch_vector(3, call.views[3]);
  const float eps = float(call.reals[0]);
  each_row<2>(call, worker, [&](char* const* at) {
    const float* row = fetch_row(0, a, at[1]);
    float* to = scratch(1, length);
    const float mean = combined<Adding>(row, length) / float(length);
    for (int64_t i = 0; i < length; ++i) to[i] = row[i] - mean;
    const float scale = 1.0f / std::sqrt(mean_square(to, length) + eps);
    for (int64_t i = 0; i < length; ++i) to[i] = fused(to[i] * scale, weight[i], bias[i]);
    store(at[0], out.type, inner_stride(out), to, length);
  });
}

bool layer_norm(Call& call) {
  if (!are_norm_views(call, 2) || call.reals.size() != 1) return false;
  call.kernel = layer_norm_rows;
  call.parallel = numel(call.views[0]) >= kParallel;
  return true;
}

const Op ops[] = {{"rms_norm", rms_norm}, {"add_rms_norm", add_rms_norm}, {"native_layer_norm", layer_norm}};

}  // namespace

}  // namespace nextn
