// Parts of an RMSNorm, for the ops that fuse one with other work.
#pragma once

#include "lanes.h"
#include "sixteen.h"
#include "strided.h"

namespace nextn {

inline float mean_square(const float* row, int64_t count) {
  return combined<Adding>(row, count, [](Vector values) { return product(values, values); }) / float(count);
}

// to = the row over its root mean square, times the norm weight if there is one; it rounds once, to the out type T.
template <typename T>
void rms_norm_row(T* to, const float* row, const float* weight, float eps, int64_t count) {
  const float scale = 1.0f / std::sqrt(mean_square(row, count) + eps);
  by_sixteen(count, [&](auto load, auto store) {
    const Sixteen scaled = load(row) * scale;
    store(to, weight ? scaled * load(weight) : scaled);
  });
}

// A vector [D] as floats.
inline const float* fetch_vector(int which, const View& view) { return fetch_row(which, view, view.data); }

}  // namespace nextn
