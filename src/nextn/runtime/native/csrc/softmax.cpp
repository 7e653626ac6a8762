// softmax, log_softmax and logsumexp over the last dim, and the argmax with its probability.
#include "sampling.h"
#include "strided.h"

namespace nextn {

namespace {

template <typename Row>
void each_result(const Call& call, const Worker& worker, Row&& write) {
  const View &out = call.views[0], &a = call.views[1];
  const int64_t length = row_length(a);
  const bool direct = out.type == F32 && inner_stride(out) == 1;
  each_row<2>(call, worker, [&](char* const* at) {
    const float* row = fetch_row(0, a, at[1]);
    float* to = direct ? reinterpret_cast<float*>(at[0]) : scratch(1, length);
    write(to, row, combined<Maximum>(row, length));
    if (!direct) store(at[0], out.type, inner_stride(out), to, length);
  });
}

void softmax_rows(const Call& call, const Worker& worker) {
  const int64_t length = row_length(call.views[1]);
  each_result(call, worker, [&](float* to, const float* row, float shift) {
    const float scale = 1.0f / sum_of_exp(row, shift, to, length);
    for (int64_t i = 0; i < length; ++i) to[i] *= scale;
  });
}

void log_softmax_rows(const Call& call, const Worker& worker) {
  const int64_t length = row_length(call.views[1]);
  each_result(call, worker, [&](float* to, const float* row, float shift) {
    const float rest = std::log(sum_of_exp(row, shift, nullptr, length));
#pragma GCC ivdep
    for (int64_t i = 0; i < length; ++i) to[i] = row[i] - shift - rest;
  });
}

void logsumexp_rows(const Call& call, const Worker& worker) {
  const View &out = call.views[0], &a = call.views[1];
  each_row<2>(call, worker, [&](char* const* at) {
    const float* row = fetch_row(0, a, at[1]);
    const float largest = combined<Maximum>(row, row_length(a));
    const float shift = std::isinf(largest) ? 0.0f : largest;
    store_one(at[0], out.type, shift + std::log(sum_of_exp(row, shift, nullptr, row_length(a))));
  });
}

template <Kernel K>
bool over_rows(Call& call) {
  if (call.views.size() != 2 || call.views[0].ndim == 0 || !same_shapes(call)) return false;
  call.kernel = K;
  call.parallel = numel(call.views[1]) >= kParallel;
  return floating(call.views[0]) && floating(call.views[1]);
}

bool logsumexp(Call& call) {
  if (call.views.size() != 2 || !agree_in_rows(call.views) || row_length(call.views[0]) != 1) return false;
  call.kernel = logsumexp_rows;
  call.parallel = numel(call.views[1]) >= kParallel;
  return floating(call.views[0]) && floating(call.views[1]);
}

void argmax_rows(const Call& call, const Worker& worker) {
  const View& a = call.views[1];
  const int64_t length = row_length(a);
  each_row<2>(call, worker, [&](char* const* at) {
    const float* row = fetch_row(0, a, at[1]);
    *reinterpret_cast<int64_t*>(at[0]) = index_of(row, combined<Maximum>(row, length), length);
  });
}

bool argmax(Call& call) {
  if (call.views.size() != 2 || !agree_in_rows(call.views) || row_length(call.views[0]) != 1) return false;
  call.kernel = argmax_rows;
  call.parallel = numel(call.views[1]) >= kParallel;
  return call.views[0].type == I64 && floating(call.views[1]) && row_length(call.views[1]) > 0;
}

void confidence_rows(const Call& call, const Worker& worker) {
  const View& logits = call.views[2];
  const int64_t length = row_length(logits);
  each_row<3>(call, worker, [&](char* const* at) {
    const float* row = fetch_row(0, logits, at[2]);
    const float largest = combined<Maximum>(row, length);
    *reinterpret_cast<int64_t*>(at[0]) = index_of(row, largest, length);
    *reinterpret_cast<float*>(at[1]) = 1.0f / sum_of_exp(row, largest, nullptr, length);
  });
}

bool confidence(Call& call) {
  if (call.views.size() != 3 || !agree_in_rows(call.views)) return false;
  const View &best = call.views[0], &prob = call.views[1], &logits = call.views[2];
  call.kernel = confidence_rows;
  call.parallel = numel(logits) >= kParallel;
  return best.type == I64 && prob.type == F32 && row_length(best) == 1 && row_length(prob) == 1 && floating(logits) &&
         row_length(logits) > 0;
}

const Op ops[] = {{"softmax", over_rows<softmax_rows>},
                  {"log_softmax", over_rows<log_softmax_rows>},
                  {"logsumexp", logsumexp},
                  {"argmax", argmax},
                  {"confidence", confidence}};

}  // namespace

}  // namespace nextn
