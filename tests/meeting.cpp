// Two ops for tests/test_abi.py: `come_late` has one worker arrive long after the others, `all_came` counts the
// workers that had not been there when another went on.
#include <chrono>
#include <thread>

#include "runtime.h"

namespace {

using nextn::Call, nextn::Op, nextn::Worker;

// views: stamps [workers], I64; ints: the late worker, the stamp.
void come_late(const Call& call, const Worker& worker) {
  if (worker.index == call.ints[0]) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  __atomic_store_n(nextn::data<int64_t>(call.views[0]) + worker.index, call.ints[1], __ATOMIC_RELEASE);
}

// views: stamps, missed [workers], I64; ints: the stamp.
void all_came(const Call& call, const Worker& worker) {
  for (int other = 0; other < worker.count; ++other)
    nextn::data<int64_t>(call.views[1])[worker.index] +=
        __atomic_load_n(nextn::data<int64_t>(call.views[0]) + other, __ATOMIC_ACQUIRE) != call.ints[0];
}

bool late(Call& call) {
  call.kernel = come_late;
  return call.parallel = true;
}

bool came(Call& call) {
  call.kernel = all_came;
  return call.parallel = true;
}

const Op ops[] = {{"come_late", late}, {"all_came", came}};

}  // namespace
