// sum, mean and amax over any dims, and cumsum. Elements count in row-major order over the reduced dims, whatever their
// strides, and combine as lanes.h says.
#include "lanes.h"
#include "strided.h"

namespace nextn {

namespace {

// After select the views are: out and a over the kept dims, and a over the reduced ones; reals end with the divisor.
constexpr int kOut = 0, kKept = 1, kReduced = 2;

// One kept element: the reduced run from `at` goes through the lanes in pieces.
template <typename R>
float along(const View& reduced, const char* at) {
  const int64_t inner = reduced.ndim - 1, length = reduced.size[inner], stride = reduced.stride[inner];
  if (inner == 0) {
    Lanes<R> lanes;
    float buffer[kChunk];
    for (int64_t done = 0; done < length; done += kChunk) {
      const int64_t part = std::min(kChunk, length - done);
      lanes.feed(fetch(buffer, at + done * stride * kBytes[reduced.type], reduced.type, stride, part), part);
    }
    return lanes.result();
  }
  const int64_t num_runs = leading(reduced, inner);
  float* row = scratch(0, num_runs * length);
  Odometer<1> run(&reduced, inner, 0);
  for (int64_t i = 0; i < num_runs; ++i, run.next())
    load(row + i * length, at + (run.at[0] - reduced.data), reduced.type, stride, length);
  return combined<R>(row, num_runs * length);
}

template <typename R>
void reduce_rows(const Call& call, const Worker& worker) {
  const View &out = call.views[kOut], &kept = call.views[kKept];
  const int64_t to_bytes = inner_stride(out) * kBytes[out.type], bytes = inner_stride(kept) * kBytes[kept.type];
  const float divisor = float(call.reals.back());
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    for (int64_t i = 0; i < count; ++i)
      store_one(at[0] + i * to_bytes, out.type, along<R>(call.views[kReduced], at[1] + i * bytes) / divisor);
  });
}

// Kept elements side by side in memory go 16 at a time, each with its own 64 lanes: the same sums as along().
constexpr int64_t kColumns = 16;

template <typename T>
Vector columns_at(const T* from, int64_t width) {
  float values[kColumns] = {};
  if (width == kColumns)
    for (int64_t i = 0; i < kColumns; ++i) values[i] = float(wide(from[i]));
  else
    for (int64_t i = 0; i < width; ++i) values[i] = float(wide(from[i]));
  return vector_at(values);
}

template <typename R, typename T>
Vector down(const View& reduced, const T* at, int64_t width) {
  const int64_t length = reduced.size[0], stride = reduced.stride[0];
  // Lanes beyond the length hold nothing and change nothing.
  int64_t num_lanes = kLanes;
  while (num_lanes / 2 >= length && num_lanes > 1) num_lanes /= 2;
  Vector lane[kLanes];
  std::fill_n(lane, num_lanes, Vector{} + R::kStart);
  for (int64_t j = 0; j < length; ++j) {
    Vector& sum = lane[j % kLanes];
    sum = R::with(sum, columns_at(at + j * stride, width));
  }
  for (int64_t half = num_lanes / 2; half; half /= 2)
    for (int64_t j = 0; j < half; ++j) lane[j] = R::with(lane[j], lane[j + half]);
  return lane[0];
}

template <typename R, typename T>
void reduce_columns(const Call& call, const Worker& worker) {
  const View& out = call.views[kOut];
  const int64_t to_stride = inner_stride(out);
  const float divisor = float(call.reals.back());
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    for (int64_t i = 0; i < count; i += kColumns) {
      const int64_t width = std::min(kColumns, count - i);
      const T* from = reinterpret_cast<const T*>(at[1]) + i;
      const Vector results = down<R>(call.views[kReduced], from, width) / (Vector{} + divisor);
      float values[kColumns];
      put(values, results);
      store(at[0] + i * to_stride * kBytes[out.type], out.type, to_stride, values, width);
    }
  });
}

int64_t whole_with(Adding, int64_t a, int64_t b) { return fused(a, int64_t(1), b); }
int64_t whole_with(Maximum, int64_t a, int64_t b) { return std::max(a, b); }

template <typename R>
void reduce_whole(const Call& call, const Worker& worker) {
  const View &out = call.views[kOut], &kept = call.views[kKept], &reduced = call.views[kReduced];
  const int64_t inner = reduced.ndim - 1;
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    for (int64_t i = 0; i < count; ++i) {
      int64_t total = std::is_same_v<R, Adding> ? 0 : INT64_MIN, value;
      Odometer<1> run(&reduced, inner + 1, 0);
      for (int64_t left = numel(reduced); left > 0; --left, run.next()) {
        const char* from = at[1] + i * inner_stride(kept) * kBytes[kept.type] + (run.at[0] - reduced.data);
        load(&value, from, reduced.type, 1, 1);
        total = whole_with(R{}, total, value);
      }
      store_one(at[0] + i * inner_stride(out) * kBytes[out.type], out.type, total);
    }
  });
}

// Gives `out` the dims of `a` with size 1 where reduced, if it was made without them; false where the shapes disagree.
bool kept_dims(View& out, const View& a, int64_t mask) {
  const View old = out;
  const bool dropped = old.ndim != a.ndim;
  int64_t from = 0;
  for (int64_t dim = 0; dim < a.ndim; ++dim) {
    const bool is_reduced = mask >> dim & 1;
    if (is_reduced && dropped) {
      out.size[dim] = out.stride[dim] = 1;
    } else {
      if (from == old.ndim || old.size[from] != (is_reduced ? 1 : a.size[dim])) return false;
      out.size[dim] = old.size[from], out.stride[dim] = old.stride[from++];
    }
  }
  out.ndim = a.ndim;
  return from == old.ndim;
}

// Splits the views into kept and reduced dims.
void split(Call& call, int64_t mask) {
  int kept[kMaxDims], reduced[kMaxDims], num_kept = 0, num_reduced = 0;
  const View a = call.views[1];
  for (int dim = 0; dim < a.ndim; ++dim) (mask >> dim & 1 ? reduced[num_reduced++] : kept[num_kept++]) = dim;
  std::vector<View> inside{a};
  merge(inside, reduced, num_reduced);
  for (int i = 0; i < num_kept; ++i) call.views[0].size[kept[i]] = a.size[kept[i]];
  collapse(call.views, kept, num_kept);
  call.views.push_back(inside[0]);
}

template <typename R>
Kernel in_float_kernel(const View& kept, const View& reduced) {
  const bool columns = inner_stride(kept) == 1 && row_length(kept) > 1 && reduced.ndim == 1;
  if (columns && kept.type == F32) return reduce_columns<R, float>;
  if (columns && kept.type == BF16) return reduce_columns<R, uint16_t>;
  return reduce_rows<R>;
}

template <typename R, bool IsMean>
bool reduce(Call& call) {
  if (call.views.size() != 2 || call.ints.size() != 1 || !call.reals.empty()) return false;
  const int64_t mask = call.ints[0], num_elements = numel(call.views[1]);
  if (mask >> call.views[1].ndim || !kept_dims(call.views[0], call.views[1], mask)) return false;
  const bool in_float = floating(call.views[0]) || floating(call.views[1]);
  split(call, mask);
  const View &kept = call.views[kKept], &reduced = call.views[kReduced];
  const int64_t length = numel(reduced);
  if ((length == 0 && std::is_same_v<R, Maximum>) || (IsMean && !in_float)) return false;
  call.reals.push_back(IsMean ? double(length) : 1.0);
  call.parallel = num_elements >= kParallel;
  call.kernel = in_float ? in_float_kernel<R>(kept, reduced) : reduce_whole<R>;
  return true;
}

// Sums in double, as torch does: the order is the elements' own.
template <typename C>
void cumsum_rows(const Call& call, const Worker& worker) {
  using Sum = std::conditional_t<std::is_same_v<C, float>, double, int64_t>;
  const View &out = call.views[0], &a = call.views[1];
  each_row<2>(call, worker, [&](char* const* at) {
    Sum sum = 0;
    for (int64_t i = 0; i < row_length(a); ++i) {
      C value;
      load(&value, at[1] + i * inner_stride(a) * kBytes[a.type], a.type, 1, 1);
      sum = fused(Sum(1), sum, Sum(value));
      store_one(at[0] + i * inner_stride(out) * kBytes[out.type], out.type, C(sum));
    }
  });
}

bool cumsum(Call& call) {
  if (call.views.size() != 2 || !same_shapes(call) || call.views[0].ndim == 0) return false;
  call.parallel = numel(call.views[0]) >= kParallel;
  call.kernel = floating(call.views[0]) || floating(call.views[1]) ? cumsum_rows<float> : cumsum_rows<int64_t>;
  return true;
}

const Op ops[] = {{"sum", reduce<Adding, false>},
                  {"mean", reduce<Adding, true>},
                  {"amax", reduce<Maximum, false>},
                  {"cumsum", cumsum}};

}  // namespace

}  // namespace nextn
