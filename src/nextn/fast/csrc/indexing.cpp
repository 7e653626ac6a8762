// Ops that move elements by index: embedding, index_select, gather, scatter. No index reads or writes outside its tensor.
#include "strided.h"

namespace nextn {

namespace {

int64_t index_at(const View& ids, int64_t place) { return data<int64_t>(ids)[place * ids.stride[0]]; }

// out [T, D], weight [V, D], ids [T]. A row of zeros for an id that the table lacks.
void embedding_rows(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &weight = call.views[1], &ids = call.views[2];
  const int64_t bytes = kBytes[out.type];
  int64_t begin = 0, end = ids.size[0];
  if (call.parallel) worker.share(ids.size[0], begin, end);
  for (; begin < end; ++begin) {
    const int64_t id = index_at(ids, begin);
    char* to = out.data + begin * out.stride[0] * bytes;
    if (id >= 0 && id < weight.size[0])
      std::memcpy(to, weight.data + id * weight.stride[0] * bytes, out.size[1] * bytes);
    else
      std::memset(to, 0, out.size[1] * bytes);
  }
}

bool embedding(Call& call) {
  if (call.views.size() != 3) return false;
  const View &out = call.views[0], &weight = call.views[1], &ids = call.views[2];
  if (out.ndim != 2 || weight.ndim != 2 || ids.ndim != 1 || ids.type != I64 || out.type != weight.type) return false;
  call.kernel = embedding_rows;
  call.parallel = numel(out) >= kParallel;
  return out.size[0] == ids.size[0] && out.size[1] == weight.size[1] && out.stride[1] == 1 && weight.stride[1] == 1;
}

const Op ops[] = {{"embedding", embedding}};

}  // namespace

}  // namespace nextn
