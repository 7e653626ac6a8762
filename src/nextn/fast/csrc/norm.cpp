// RMS and layer norms over the last dim. rms_norm gives the bits of the ops it stands for: copy to float, pow 2, mean,
// add eps, rsqrt, mul, and the gain.
#include "lanes.h"
#include "sixteen.h"
#include "strided.h"

namespace nextn {

namespace {

enum Gain { kAfterRounding = 0, kOnePlus = 1, kInFloat = 2 };

float mean_square(const float* row, int64_t count) {
  return combined<Adding>(row, count, [](Vector values) { return product(values, values); }) / float(count);
}

// to = the row times `scale` times its gain; the first rounding of kAfterRounding is to the out type T.
template <typename T>
void apply_gain(T* to, const float* row, float scale, const float* weight, int64_t gain, int64_t count) {
  by_sixteen(count, [&](auto load, auto store) {
    const Sixteen scaled = load(row) * scale;
    if (weight == nullptr)
      store(to, scaled);
    else if (gain == kOnePlus)
      store(to, scaled * (load(weight) + 1.0f));
    else
      store(to, (gain == kInFloat ? scaled : rounded<T>(scaled)) * load(weight));
  });
}

// A weight or bias [D] as floats.
const float* fetch_vector(int which, const Call& call, size_t place) {
  return place < call.views.size() ? fetch_row(which, call.views[place], call.views[place].data) : nullptr;
}

template <typename T>
void rms_norm_rows(const Call& call, const Worker& worker) {
  const View& a = call.views[1];
  const int64_t length = row_length(a);
  const float* weight = fetch_vector(2, call, 2);
  const float eps = float(call.reals[0]);
  each_row<2>(call, worker, [&](char* const* at) {
    const float* row = fetch_row(0, a, at[1]);
    const float scale = 1.0f / std::sqrt(mean_square(row, length) + eps);
    apply_gain(reinterpret_cast<T*>(at[0]), row, scale, weight, call.ints[0], length);
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
  return inner_stride(call.views[0]) == 1 && call.ints.size() == 1 && call.ints[0] >= kAfterRounding &&
         call.ints[0] <= kInFloat;
}

void layer_norm_rows(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &a = call.views[1];
  const int64_t length = row_length(a);
  const float *weight = fetch_vector(2, call, 2), *bias = fetch_vector(3, call, 3);
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

const Op ops[] = {{"rms_norm", rms_norm}, {"native_layer_norm", layer_norm}};

}  // namespace

}  // namespace nextn
