// Ops for tests/test_abi.py: `come_late` has one worker arrive long after the others, `all_came` counts the workers that
// had not been there when another went on, and `stall` has 20 ms pass in one worker, by a clock that nothing else moves.
#include <atomic>
#include <chrono>
#include <thread>

#include "runtime.h"

namespace {

std::atomic<int> milliseconds = 1000, times_asked;

}  // namespace

namespace nextn {

// Only the caller asks: at the start and end of a run, and of a wait at a barrier.
double now() {
  const int asked_at = milliseconds;
  ++times_asked;  // not before, as `stall` then has time pass
  return asked_at / 1e3;
}

}  // namespace nextn

extern "C" void pass_time(int more) {
  milliseconds += more;
  times_asked = 0;
}

namespace {

using nextn::Call, nextn::Op, nextn::View, nextn::Worker;

void leave_stamp(const Call& call, const Worker& worker) {
  __atomic_store_n(nextn::data<int64_t>(call.views[0]) + worker.index, call.ints[1], __ATOMIC_RELEASE);
}

// Whether all workers but the first went on while another had not been there.
bool others_missed(const View& missed, const Worker& worker) {
  for (int other = 1; other < worker.count; ++other)
    if (!__atomic_load_n(nextn::data<int64_t>(missed) + other, __ATOMIC_ACQUIRE)) return false;
  return true;
}

// views: stamps, missed [workers], I64; ints: the late worker, the stamp, and the most milliseconds that it waits for the
// others to go on.
void come_late(const Call& call, const Worker& worker) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(call.ints[2]);
  while (worker.index == call.ints[0] && !others_missed(call.views[1], worker) &&
         std::chrono::steady_clock::now() < until)
    std::this_thread::yield();
  leave_stamp(call, worker);
}

// views: stamps [workers], I64; ints: the worker, the stamp. The time of one that is not the caller passes while that waits.
void stall(const Call& call, const Worker& worker) {
  if (worker.index == call.ints[0]) {
    while (worker.index && times_asked < 2) std::this_thread::yield();
    milliseconds += 20;
  }
  leave_stamp(call, worker);
}

// views: stamps, missed [workers], I64; ints: the stamp.
void all_came(const Call& call, const Worker& worker) {
  for (int other = 0; other < worker.count; ++other)
    nextn::data<int64_t>(call.views[1])[worker.index] +=
        __atomic_load_n(nextn::data<int64_t>(call.views[0]) + other, __ATOMIC_ACQUIRE) != call.ints[0];
}

template <nextn::Kernel K>
bool select(Call& call) {
  call.kernel = K;
  return call.parallel = true;
}

const Op ops[] = {{"come_late", select<come_late>}, {"all_came", select<all_came>}, {"stall", select<stall>}};

}  // namespace
