// Ops that move elements by index: embedding, index_select, gather, scatter.
//
// No index reads or writes outside its tensor: out-of-range reads give 0, out-of-range writes are dropped.
#include "strided.h"

namespace nextn {

namespace {

// The indexed tensor takes part as if it had the index's shape, with stride 0 along the indexed dim; after select the
// ints are that dim's true size and stride.
constexpr int kSize = 0, kStride = 1;

void spread(Call& call, View& indexed, const View& index, int64_t dim) {
  call.ints = {indexed.size[dim], indexed.stride[dim]};
  std::copy_n(index.size, index.ndim, indexed.size);
  indexed.stride[dim] = 0;
}

bool fits_inside(const View& small, const View& large, int64_t except) {
  if (small.ndim != large.ndim || except < 0 || except >= small.ndim) return false;
  for (int64_t dim = 0; dim < small.ndim; ++dim)
    if (dim != except && small.size[dim] > large.size[dim]) return false;
  return true;
}

// One index for the whole run.
template <typename T>
void gather_run(T* out, int64_t out_step, const T* src, int64_t src_step, int64_t count) {
  if (out_step == 1 && src_step == 1)
    std::memcpy(out, src, count * sizeof(T));
  else
    for (int64_t i = 0; i < count; ++i) out[i * out_step] = src[i * src_step];
}

template <typename T>
void gather_all(const Call& call, const Worker& worker) {
  const int64_t size = call.ints[kSize], stride = call.ints[kStride];
  const int64_t out_step = inner_stride(call.views[0]), src_step = inner_stride(call.views[1]);
  const int64_t index_step = inner_stride(call.views[2]);
  each_run<3>(call, worker, [&](int64_t count, char* const* at) {
    T* out = reinterpret_cast<T*>(at[0]);
    const T* src = reinterpret_cast<const T*>(at[1]);
    const int64_t* index = reinterpret_cast<const int64_t*>(at[2]);
    if (index_step == 0 && *index >= 0 && *index < size)
      return gather_run(out, out_step, src + *index * stride, src_step, count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = index[i * index_step];
      out[i * out_step] = id >= 0 && id < size ? src[i * src_step + id * stride] : T(0);
    }
  });
}

// views [out, src, index], all of out's shape but src's indexed dim.
bool gathered(Call& call, int64_t dim) {
  constexpr Kernel kKernels[] = {gather_all<float>, gather_all<uint16_t>, gather_all<int64_t>, gather_all<uint8_t>};
  View &out = call.views[0], &src = call.views[1], &index = call.views[2];
  if (index.type != I64 || out.type != src.type || !same_shape(out, index)) return false;
  spread(call, src, index, dim);
  collapse(call.views);
  call.kernel = kKernels[call.views[0].type];
  call.parallel = numel(call.views[0]) >= kParallel;
  return true;
}

bool gather(Call& call) {
  return call.views.size() == 3 && call.ints.size() == 1 && fits_inside(call.views[2], call.views[1], call.ints[0]) &&
         gathered(call, call.ints[0]);
}

// Rows of a table [V, D] in bf16 as fp32.
void widen_rows(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &table = call.views[1], &ids = call.views[2];
  int64_t begin, end;
  worker.share(out.size[0], begin, end);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = data<int64_t>(ids)[row * ids.stride[0]];
    char* to = out.data + row * out.stride[0] * kBytes[F32];
    if (id >= 0 && id < table.size[0])
      load(reinterpret_cast<float*>(to), table.data + id * table.stride[0] * kBytes[BF16], BF16, table.stride[1],
           out.size[1]);
    else
      std::fill_n(reinterpret_cast<float*>(to), out.size[1], 0.0f);
  }
}

bool widened_rows(Call& call) {
  const View &out = call.views[0], &table = call.views[1], &ids = call.views[2];
  if (out.ndim != 2 || inner_stride(out) != 1 || out.size[1] != table.size[1]) return false;
  if (ids.type != I64 || ids.ndim != 1 || ids.size[0] != out.size[0]) return false;
  call.kernel = widen_rows;
  call.parallel = numel(out) >= kParallel;
  return true;
}

// A list of ids is an index that repeats along all other dims.
bool selected(Call& call, int64_t dim) {
  if (call.views.size() != 3) return false;
  const View &out = call.views[0], &src = call.views[1], ids = call.views[2];
  if (ids.ndim != 1 || !fits_inside(out, src, dim) || ids.size[0] != out.size[dim]) return false;
  View& index = call.views[2];
  index.ndim = out.ndim;
  for (int64_t i = 0; i < out.ndim; ++i) {
    if (i != dim && out.size[i] != src.size[i]) return false;
    index.size[i] = out.size[i], index.stride[i] = i == dim ? ids.stride[0] : 0;
  }
  return gathered(call, dim);
}

bool index_select(Call& call) { return call.ints.size() == 1 && selected(call, call.ints[0]); }

// out [T, D], weight [V, D], ids [T]
bool embedding(Call& call) {
  if (call.views.size() != 3 || call.views[1].ndim != 2) return false;
  const bool widens = call.views[0].type == F32 && call.views[1].type == BF16;
  return widens ? widened_rows(call) : selected(call, 0);
}

template <typename T>
void scatter_all(const Call& call, const Worker& worker) {
  const int64_t size = call.ints[kSize], stride = call.ints[kStride];
  const int64_t out_step = inner_stride(call.views[0]), index_step = inner_stride(call.views[1]);
  const int64_t src_step = inner_stride(call.views[2]);
  each_run<3>(call, worker, [&](int64_t count, char* const* at) {
    T* out = reinterpret_cast<T*>(at[0]);
    const int64_t* index = reinterpret_cast<const int64_t*>(at[1]);
    const T* src = reinterpret_cast<const T*>(at[2]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = index[i * index_step];
      if (id >= 0 && id < size) out[i * out_step + id * stride] = src[i * src_step];
    }
  });
}

template <typename T>
void scatter_one_value(const Call& call, const Worker& worker) {
  const int64_t size = call.ints[kSize], stride = call.ints[kStride];
  const int64_t out_step = inner_stride(call.views[0]), index_step = inner_stride(call.views[1]);
  const int64_t type = call.views[0].type;
  char bytes[8];
  if (type == I64)
    store_one(bytes, type, converted<int64_t>(call.reals[0]));
  else
    store_one(bytes, type, float(call.reals[0]));
  T value;
  std::memcpy(&value, bytes, sizeof value);
  each_run<2>(call, worker, [&](int64_t count, char* const* at) {
    T* out = reinterpret_cast<T*>(at[0]);
    const int64_t* index = reinterpret_cast<const int64_t*>(at[1]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = index[i * index_step];
      if (id >= 0 && id < size) out[i * out_step + id * stride] = value;
    }
  });
}

// Worker 0 alone, in the index's order: where an index repeats, the last value wins.
bool scattered(Call& call, const Kernel* kernels) {
  constexpr int kAll[kMaxDims] = {0, 1, 2, 3, 4, 5};
  if (call.ints.size() != 1 || call.views[1].type != I64) return false;
  if (!fits_inside(call.views[1], call.views[0], call.ints[0])) return false;
  spread(call, call.views[0], call.views[1], call.ints[0]);
  merge(call.views, kAll, int(call.views[0].ndim));
  call.kernel = kernels[call.views[0].type];
  return true;
}

bool scatter(Call& call) {
  constexpr Kernel kKernels[] = {scatter_all<float>, scatter_all<uint16_t>, scatter_all<int64_t>, scatter_all<uint8_t>};
  if (call.views.size() != 3 || call.views[2].type != call.views[0].type) return false;
  return same_shape(call.views[1], call.views[2]) && scattered(call, kKernels);
}

bool scatter_value(Call& call) {
  constexpr Kernel kKernels[] = {scatter_one_value<float>, scatter_one_value<uint16_t>, scatter_one_value<int64_t>,
                                 scatter_one_value<uint8_t>};
  return call.views.size() == 2 && call.reals.size() == 1 && scattered(call, kKernels);
}

const Op ops[] = {{"embedding", embedding},
                  {"index_select", index_select},
                  {"gather", gather},
                  {"scatter", scatter},
                  {"scatter_value", scatter_value}};

}  // namespace

}  // namespace nextn
