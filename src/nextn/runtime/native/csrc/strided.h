// Walking views: dims merged once at select time, then runs along the innermost dim; conversions at loads and stores.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "runtime.h"
#include "wide.h"

namespace nextn {

// From this many elements on, the work is worth a barrier of all workers.
constexpr int64_t kParallel = 1 << 11;

// Elements that are converted at a time, to and from buffers on the stack.
constexpr int64_t kChunk = 512;

inline bool floating(const View& view) { return view.type == F32 || view.type == BF16; }

inline bool same_shape(const View& a, const View& b) {
  return a.ndim == b.ndim && std::equal(a.size, a.size + a.ndim, b.size);
}

inline bool same_shapes(const Call& call) {
  return std::all_of(call.views.begin(), call.views.end(), [&](const View& v) { return same_shape(v, call.views[0]); });
}

// Rewrites views of one shape to the given dims, in that order, adjacent ones merged where all views' strides allow it.
inline void merge(std::vector<View>& views, const int* dims, int num_dims) {
  const std::vector<View> old = views;
  for (View& view : views) view.ndim = 0;
  for (int place = 0; place < num_dims; ++place) {
    const int dim = dims[place];
    const int64_t last = views[0].ndim - 1;
    if (old[0].size[dim] == 1) continue;
    bool merges = last >= 0;
    for (size_t i = 0; i < old.size() && merges; ++i)
      merges = views[i].stride[last] == old[i].stride[dim] * old[i].size[dim];
    for (size_t i = 0; i < old.size(); ++i) {
      const int64_t to = merges ? last : views[i].ndim++;
      views[i].size[to] = merges ? views[i].size[to] * old[i].size[dim] : old[i].size[dim];
      views[i].stride[to] = old[i].stride[dim];
    }
  }
  for (View& view : views)
    if (view.ndim == 0) view.size[0] = view.stride[0] = view.ndim = 1;
}

// The fewest dims that visit the same elements, in whatever order: the first view's nearest elements come innermost.
inline void collapse(std::vector<View>& views, const int* dims, int num_dims) {
  const View first = views[0];
  std::vector<int> order(dims, dims + num_dims);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return first.stride[a] > first.stride[b]; });
  merge(views, order.data(), num_dims);
}

inline void collapse(std::vector<View>& views) {
  constexpr int kAll[kMaxDims] = {0, 1, 2, 3, 4, 5};
  collapse(views, kAll, int(views[0].ndim));
}

// Steps N views of one shape through all dims but the innermost ones that the body walks itself.
template <size_t N>
struct Odometer {
  const View* views;
  int64_t num_dims;
  int64_t index[kMaxDims] = {};
  char* at[N];

  Odometer(const View* views, int64_t num_dims, int64_t start) : views(views), num_dims(num_dims) {
    for (size_t i = 0; i < N; ++i) at[i] = views[i].data;
    for (int64_t dim = num_dims - 1; dim >= 0 && start; --dim) {
      index[dim] = start % views[0].size[dim];
      start /= views[0].size[dim];
      for (size_t i = 0; i < N; ++i) at[i] += index[dim] * views[i].stride[dim] * kBytes[views[i].type];
    }
    NEXTN_CHECK(start == 0, "view 0: a run ", start, " rounds past its last");
    check();
  }

  // All views have an element at the index: they have the first one's sizes, but may be larger.
  void check() const {
#if defined(NEXTN_DEBUG)
    for (size_t i = 0; i < N; ++i)
      for (int64_t dim = 0; dim < num_dims; ++dim)
        NEXTN_CHECK(index[dim] < views[i].size[dim], "view ", i, ", dim ", dim, ": index ", index[dim], " of size ",
                    views[i].size[dim]);
#endif
  }

  void next() {
    for (int64_t dim = num_dims - 1; dim >= 0; --dim) {
      const bool wraps = ++index[dim] == views[0].size[dim];
      const int64_t steps = wraps ? 1 - index[dim] : 1;
      for (size_t i = 0; i < N; ++i) at[i] += steps * views[i].stride[dim] * kBytes[views[i].type];
      if (!wraps) return check();
      index[dim] = 0;
    }
  }
};

inline int64_t leading(const View& view, int64_t num_dims) {
  int64_t total = 1;
  for (int64_t dim = 0; dim < num_dims; ++dim) total *= view.size[dim];
  return total;
}

// body(length, at): a run of `length` elements along the innermost dim of all N views, from the bytes at[i].
template <size_t N, typename Body>
void each_run(const Call& call, const Worker& worker, Body&& body) {
  const View* views = call.views.data();
  const int64_t inner = views[0].ndim - 1, length = views[0].size[inner];
  const int64_t num_runs = leading(views[0], inner);
  if (length == 0) return;
  int64_t begin = 0, end = length * num_runs;
  if (call.parallel) worker.share(end, begin, end);
  if (begin == end) return;
  Odometer<N> run(views, inner, begin / length);
  for (int64_t skip = begin % length; begin < end; skip = 0) {
    const int64_t count = std::min(length - skip, end - begin);
    char* at[N];
    for (size_t i = 0; i < N; ++i) at[i] = run.at[i] + skip * views[i].stride[inner] * kBytes[views[i].type];
#if defined(NEXTN_DEBUG)
    for (size_t i = 0; i < N; ++i) check_run(views[i], i, at[i], count, views[i].stride[inner]);
#endif
    body(count, at);
    begin += count;
    if (begin < end) run.next();
  }
}

// Conversions between the stored type and the compute type (float or int64_t); bf16 lies as uint16_t, bool as uint8_t.
inline float wide(float value) { return value; }
inline float wide(uint16_t value) { return widened(value); }
inline int64_t wide(int64_t value) { return value; }
inline int64_t wide(uint8_t value) { return value; }

template <typename T, typename C>
inline T stored(C value) {
  if constexpr (std::is_same_v<T, uint16_t>)
    return narrowed(float(value));
  else if constexpr (std::is_same_v<T, uint8_t>)
    return value != 0;
  else
    return T(value);
}

template <typename C, typename T>
void load_as(C* to, const T* from, int64_t stride, int64_t count) {
  if (stride == 1)
    for (int64_t i = 0; i < count; ++i) to[i] = C(wide(from[i]));
  else if (stride == 0)
    std::fill_n(to, count, C(wide(*from)));
  else
    for (int64_t i = 0; i < count; ++i) to[i] = C(wide(from[i * stride]));
}

template <typename C>
void load(C* to, const char* from, int64_t type, int64_t stride, int64_t count) {
  if (type == F32)
    load_as(to, reinterpret_cast<const float*>(from), stride, count);
  else if (type == BF16)
    load_as(to, reinterpret_cast<const uint16_t*>(from), stride, count);
  else if (type == I64)
    load_as(to, reinterpret_cast<const int64_t*>(from), stride, count);
  else
    load_as(to, reinterpret_cast<const uint8_t*>(from), stride, count);
}

template <typename T, typename C>
void store_as(T* to, const C* from, int64_t stride, int64_t count) {
  if (stride == 1)
    for (int64_t i = 0; i < count; ++i) to[i] = stored<T>(from[i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i * stride] = stored<T>(from[i]);
}

template <typename C>
void store(char* to, int64_t type, int64_t stride, const C* from, int64_t count) {
  if (type == F32)
    store_as(reinterpret_cast<float*>(to), from, stride, count);
  else if (type == BF16)
    store_as(reinterpret_cast<uint16_t*>(to), from, stride, count);
  else if (type == I64)
    store_as(reinterpret_cast<int64_t*>(to), from, stride, count);
  else
    store_as(reinterpret_cast<uint8_t*>(to), from, stride, count);
}

template <typename C>
constexpr int64_t kOwnType = std::is_same_v<C, float> ? F32 : I64;

// The elements as C: in place if they are stored as C, else converted into `buffer`.
template <typename C>
const C* fetch(C* buffer, const char* from, int64_t type, int64_t stride, int64_t count) {
  if (type == kOwnType<C> && stride == 1) return reinterpret_cast<const C*>(from);
  load(buffer, from, type, stride, count);
  return buffer;
}

inline int64_t inner_stride(const View& view) { return view.stride[view.ndim - 1]; }

// One operand of a run with any type and stride: as C, in place or in the buffer; a repeated one is loaded once.
template <typename C>
struct Operand {
  C buffer[kChunk];
  const C* at = buffer;
  int64_t step = 1;

  void take(const View& view, const char* from, int64_t done, int64_t count) {
    const int64_t stride = inner_stride(view);
    step = stride != 0;
    if (step || done == 0)
      at = fetch(buffer, from + done * stride * kBytes[view.type], view.type, stride, step ? count : 1);
  }

  // The same with a repeated element written out: for ops that loop one way only.
  const C* all(const View& view, const char* from, int64_t done, int64_t count) {
    const int64_t stride = inner_stride(view);
    if (stride || done == 0) at = fetch(buffer, from + done * stride * kBytes[view.type], view.type, stride, count);
    return at;
  }
};

// Calls body(done, count, to) for the chunks of a run, and stores what it left in `to` where that is not the out view.
template <typename C, typename Body>
void each_chunk(const View& out, char* at, int64_t count, Body&& body) {
  const int64_t stride = inner_stride(out);
  const bool direct = out.type == kOwnType<C> && stride == 1;
  C buffer[kChunk];
  for (int64_t done = 0; done < count; done += kChunk) {
    const int64_t part = std::min(kChunk, count - done);
    char* to = at + done * stride * kBytes[out.type];
    C* results = direct ? reinterpret_cast<C*>(to) : buffer;
    body(done, part, results);
    if (!direct) store(to, out.type, stride, results, part);
  }
}

// Checks what all elementwise ops require and prepares the views; false: not supported.
inline bool prepared(Call& call, size_t num_views, size_t num_reals) {
  if (call.views.size() != num_views || call.reals.size() != num_reals || !same_shapes(call)) return false;
  collapse(call.views);
  call.parallel = numel(call.views[0]) >= kParallel;
  return true;
}

// A parameter in the type that the op computes in, saturated.
template <typename C>
C converted(double real) {
  if constexpr (std::is_same_v<C, int64_t>) {
    constexpr double kEnd = 9223372036854775808.0;
    return real >= kEnd ? INT64_MAX : real < -kEnd ? INT64_MIN : int64_t(real);
  }
  return C(real);
}

// This thread's buffer for a converted row; it only grows. `which` separates rows in use at once.
inline float* scratch(int which, int64_t count) {
  thread_local std::vector<float> rows[5];
  NEXTN_CHECK(which >= 0 && which < 5 && count >= 0, "row ", which, " of 5, of ", count, " floats");
  if (int64_t(rows[which].size()) < count) rows[which].resize(count);
  return rows[which].data();
}

// The rows along the last dim of N views that agree in the others, this worker's share of them: body(at) for each.
template <size_t N, typename Body>
void each_row(const View* views, const Worker& worker, Body&& body) {
  const int64_t outer = views[0].ndim - 1;
  int64_t begin, end;
  worker.share(leading(views[0], outer), begin, end);
  if (begin == end) return;
  for (Odometer<N> row(views, outer, begin); begin < end; ++begin, row.next()) {
#if defined(NEXTN_DEBUG)
    for (size_t i = 0; i < N; ++i) check_run(views[i], i, row.at[i], views[i].size[outer], views[i].stride[outer]);
#endif
    body(row.at);
  }
}

template <size_t N, typename Body>
void each_row(const Call& call, const Worker& worker, Body&& body) {
  each_row<N>(call.views.data(), worker, body);
}

// Whether the views agree in all dims but the last; an out with one value per row may lack its last dim, and gets it.
inline bool agree_in_rows(std::vector<View>& views) {
  const int64_t ndim = views.back().ndim;
  for (View& view : views) {
    if (view.ndim + 1 == ndim) view.size[view.ndim] = 1, view.stride[view.ndim++] = 1;
    if (view.ndim != ndim || ndim == 0 || !std::equal(view.size, view.size + ndim - 1, views[0].size)) return false;
  }
  return true;
}

inline int64_t row_length(const View& view) { return view.size[view.ndim - 1]; }

// A row as floats, in place or in scratch.
inline const float* fetch_row(int which, const View& view, const char* at) {
  const int64_t length = row_length(view), stride = inner_stride(view);
  if (view.type == F32 && stride == 1) return reinterpret_cast<const float*>(at);
  return fetch(scratch(which, length), at, view.type, stride, length);
}

template <typename C>
void store_one(char* to, int64_t type, C value) {
  store(to, type, 1, &value, 1);
}

}  // namespace nextn
