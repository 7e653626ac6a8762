// What every kernel gets: tensors as views, a call of one op, and the worker that runs a share of it.
//
// No torch headers: this compiles in seconds. Memory belongs to the caller; nothing here allocates while a program runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"

namespace nextn {

enum Type : int64_t { F32 = 0, BF16 = 1, I64 = 2, BOOL = 3 };

constexpr int kMaxDims = 6;

// A strided tensor. Sizes and strides count elements; a stride of 0 repeats. Python fills it through ctypes (abi.py).
struct View {
  char* data;
  int64_t type;
  int64_t ndim;
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];
};

class Team;
struct Program;  // a list of calls
void run(const Program* program, Team* team);

// One thread of the team during a run. All workers run every parallel call, each its share; index 0 is the caller.
struct Worker {
  int index;
  int count;
  Team* team;

  // Waits until every worker is here. Only for parallel calls, in which all workers take part.
  void barrier() const;

  // The share [begin, end) of `total` items that is this worker's.
  void share(int64_t total, int64_t& begin, int64_t& end) const {
    begin = total * index / count;
    end = total * (index + 1) / count;
  }
};

struct Call;
using Kernel = void (*)(const Call&, const Worker&);

// One instruction: an op over views, with whole and real parameters in the op's own order.
struct Call {
  Kernel kernel = nullptr;
#if defined(NEXTN_DEBUG)
  const char* name = "";
#endif
  bool parallel = false;  // false: worker 0 runs it alone
  // Number of independent shards (attention heads) of this call and the one before it. If the workers share them
  // evenly, each reads only what it wrote itself in the call before, so no barrier is needed. 0: not sharded.
  int64_t num_shards = 0;
  std::vector<View> views;
  std::vector<int64_t> ints;
  std::vector<double> reals;
};

// Chooses the kernel for the call's types, sizes and strides, and whether it runs on all workers; false: not supported.
using Select = bool (*)(Call&);

// A static `Op add{"add", select};` registers the op under its name.
struct Op {
  Op(const char* name, Select select);
};

constexpr int64_t kBytes[] = {4, 2, 8, 1};  // of an element of each type

inline int64_t numel(const View& view) {
  int64_t total = 1;
  for (int64_t dim = 0; dim < view.ndim; ++dim) total *= view.size[dim];
  return total;
}

// Memory of bytes, as of packed weights, has the type BOOL.
template <typename T>
T* data(const View& view) {
  NEXTN_CHECK(view.type == BOOL || int64_t(sizeof(T)) == kBytes[view.type], "elements of ", sizeof(T),
              " bytes in a view of type ", view.type);
  return reinterpret_cast<T*>(view.data);
}

#if defined(NEXTN_DEBUG)
// `count` elements from `at` on, `stride` apart, must lie in the view.
inline void check_run(const View& view, size_t place, const char* at, int64_t count, int64_t stride) {
  if (count <= 0) return;
  const int64_t bytes = kBytes[view.type], begin = at - view.data;
  int64_t reach = 1;
  for (int64_t dim = 0; dim < view.ndim; ++dim) reach += (view.size[dim] - 1) * view.stride[dim];
  NEXTN_CHECK(begin >= 0 && begin % bytes == 0 && begin / bytes + (count - 1) * stride < reach, "view ", place, ": ",
              count, " elements, ", stride, " apart, from element ", begin / bytes, " on, of ", reach);
}
#endif

// bf16 is the upper half of fp32; rounding is to nearest even, NaN stays NaN, as torch does.
inline float widened(uint16_t value) {
  uint32_t bits = uint32_t(value) << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t narrowed(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return value == value ? uint16_t(rounded) : uint16_t(0x7FC0);
}

}  // namespace nextn
