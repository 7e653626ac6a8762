// Parts of an RMSNorm, for the ops that fuse one with other work.
#pragma once

#include "lanes.h"
#include "sixteen.h"
#include "strided.h"

namespace nextn {

enum Gain { kAfterRounding = 0, kOnePlus = 1, kInFloat = 2 };

inline bool is_gain(int64_t gain) { return gain >= kAfterRounding && gain <= kInFloat; }

inline float mean_square(const float* row, int64_t count) {
  return combined<Adding>(row, count, [](Vector values) { return product(values, values); }) / float(count);
}

// to = the row over its root mean square, times the norm weight; kAfterRounding first rounds to the out type T.
template <typename T>
void rms_norm_row(T* to, const float* row, const float* weight, int64_t gain, float eps, int64_t count) {
  const float scale = 1.0f / std::sqrt(mean_square(row, count) + eps);
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

// A vector [D] as floats.
inline const float* fetch_vector(int which, const View& view) { return fetch_row(which, view, view.data); }

}  // namespace nextn
