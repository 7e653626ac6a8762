// The team of threads, the table of ops, programs, and the C interface that abi.py calls.
#include "runtime.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nextn {

namespace {

std::map<std::string, Select>& table() {
  static std::map<std::string, Select> ops;
  return ops;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Linux grants tile registers only to a process that asks for them, once ( Documentation/arch/x86/xstate.rst).
bool ask_for_tiles() {
#if defined(__AMX_BF16__)
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return true;
#endif
}

// About 20 microseconds of spinning; then the other thread is probably not scheduled, and waiting must cost nothing.
constexpr int kSpins = 1000;

// Workers spin for the next run, which in a draft loop follows closely; after this many spins they sleep.
constexpr int kIdleSpins = 20000;

// Where other processes take the cores, each barrier waits for a worker that is not scheduled, often for milliseconds.
// After this many seconds of parallel runs it is decided whether one worker alone would be faster; if so, it is for a while,
// and for longer each time.
constexpr double kTrial = 0.004, kShortRest = 0.05, kLongRest = 1.0;

constexpr size_t kSoon = 2;  // calls ahead that are prefetched

}  // namespace

#if defined(NEXTN_TEST_CLOCK)
double now();  // of a test, which decides when time passes
#else
static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
#endif

Op::Op(const char* name, Select select) { table()[name] = select; }

struct Program {
  std::vector<Call> calls;
};

// A worker's barrier count, and for each level the count that the worker before it on that level has signaled.
struct BarrierState {
  static constexpr int kLevels = 16;
  alignas(64) uint32_t turn = 0;
  alignas(64) std::atomic<uint32_t> signals[kLevels] = {};
};

// Threads that run programs. Between two calls of which at least one is parallel, all meet at a barrier.
class Team {
 public:
  explicit Team(int count) : count_(count), workers_(count) {
    for (int index = 1; index < count; ++index) threads_.emplace_back([this, index] { serve(index); });
  }

  ~Team() {
    stopping_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void run(const Call* calls, size_t num_calls) {
    calls_ = calls, num_calls_ = num_calls;
    const double started = count_ > 1 ? now() : 0;
    if (count_ == 1 || started < resting_until_) return work(0, 1);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    work(0, count_);
    decide(now() - started);
  }

  // Dissemination (Hensgen, Finkel, Manber 1988): on level n a worker signals the one 2^n after it and waits for the
  // one 2^n before it. Each flag has one writer, so the last worker to arrive waits for nobody.
  void barrier(int index) {
    const uint32_t turn = ++workers_[index].turn;
    for (int step = 1, level = 0; step < count_; step *= 2, ++level) {
      workers_[(index + step) % count_].signals[level].store(turn, std::memory_order_release);
      const auto& own = workers_[index].signals[level];
      double stalled_since = 0;
      for (int spin = 0; int32_t(own.load(std::memory_order_acquire) - turn) < 0; ++spin)
        if (spin < kSpins) {
          pause();
        } else {
          if (index == 0 && stalled_since == 0) stalled_since = now();
          std::this_thread::yield();
        }
      if (stalled_since > 0) stalled_ += now() - stalled_since;
    }
  }

 private:
  // n workers of which the first waits for a share s of the time do what one alone does in n (1 - s) of it.
  void decide(double seconds) {
    ran_ += seconds;
    if (ran_ < kTrial) return;
    if (stalled_ > ran_ * (1 - 1.0 / count_)) {
      rest_ = std::min(2 * rest_, kLongRest);
      resting_until_ = now() + rest_;
    } else {
      rest_ = kShortRest / 2;
    }
    ran_ = stalled_ = 0;
  }

  void serve(int index) {
    uint32_t seen = 0;
    while (true) {
      for (int spin = 0; epoch_.load(std::memory_order_acquire) == seen; ++spin)
        if (spin < kIdleSpins)
          pause();
        else
          epoch_.wait(seen, std::memory_order_acquire);
      seen = epoch_.load(std::memory_order_acquire);
      if (stopping_) return;
      work(index, count_);
    }
  }

  // A call's views and parameters lie elsewhere, in memory that a pass over all weights evicts from the caches.
  static void fetch(const Call& call) {
    const auto* views = reinterpret_cast<const char*>(call.views.data());
    for (size_t at = 0; at < call.views.size() * sizeof(View); at += 64) __builtin_prefetch(views + at);
    __builtin_prefetch(call.ints.data());
    __builtin_prefetch(&call + kSoon);
  }

  // Whether workers need a barrier between the two calls.
  static bool needs_barrier(const Call& call, const Call& next, int count) {
    const bool is_sharded = next.num_shards && next.num_shards % count == 0;
    return (call.parallel || next.parallel) && !is_sharded;
  }

  // The share of worker `index` of `count`; one alone meets nobody at barriers.
  void work(int index, int count) {
    const Worker worker{index, count, this}, alone{0, 1, this};
    const Call* calls = calls_;
    const size_t num_calls = num_calls_;
    for (size_t i = 0; i < num_calls; ++i) {
      const Call& call = calls[i];
      if (i + kSoon < num_calls) fetch(calls[i + kSoon]);
      NEXTN_CHECKED_OP(call.name);
      if (call.parallel || index == 0) call.kernel(call, call.parallel ? worker : alone);
      if (count > 1 && (i + 1 < num_calls ? needs_barrier(call, calls[i + 1], count) : call.parallel)) barrier(index);
    }
    // The caller may change the calls once run() returns, so all workers must be done with them.
    if (count > 1) barrier(index);
  }

  const int count_;
  std::vector<std::thread> threads_;
  bool stopping_ = false;  // like calls_: written before the epoch advances, read after
  const Call* calls_ = nullptr;
  size_t num_calls_ = 0;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::vector<BarrierState> workers_;
  // Seconds, of the caller: parallel runs since the last decision, its waiting in them, and the time of one worker alone.
  double ran_ = 0, stalled_ = 0, rest_ = kShortRest / 2, resting_until_ = 0;
};

void Worker::barrier() const {
  if (count > 1) team->barrier(index);
}

void run(const Program* program, Team* team) { team->run(program->calls.data(), program->calls.size()); }

namespace {

// What every kernel relies on: a known type, memory where there are elements, and a size that does not overflow.
void check_view([[maybe_unused]] const View& view, [[maybe_unused]] int64_t place) {
#if defined(NEXTN_DEBUG)
  constexpr int64_t kMost = int64_t(1) << 46;
  NEXTN_CHECK(view.type >= F32 && view.type <= BOOL, "view ", place, " is of type ", view.type);
  NEXTN_CHECK(view.ndim >= 0 && view.ndim <= kMaxDims, "view ", place, " has ", view.ndim, " dims");
  int64_t reach = 1;
  for (int64_t dim = 0; dim < view.ndim; ++dim) {
    NEXTN_CHECK(view.size[dim] >= 0 && view.size[dim] < kMost && view.stride[dim] >= 0 && view.stride[dim] < kMost,
                "view ", place, ", dim ", dim, ": size ", view.size[dim], ", stride ", view.stride[dim]);
    reach += std::max<int64_t>(view.size[dim] - 1, 0) * view.stride[dim];
    NEXTN_CHECK(reach < kMost, "view ", place, " ends at element ", reach);
  }
  NEXTN_CHECK(view.data || numel(view) == 0, "view ", place, " has ", numel(view), " elements and no memory");
#endif
}

bool filled(Call& call, const char* name, const View* views, int64_t num_views, const int64_t* ints, int64_t num_ints,
            const double* reals, int64_t num_reals) {
  const auto found = table().find(name);
  if (found == table().end()) return false;
  NEXTN_CHECKED_OP(found->first.c_str());
#if defined(NEXTN_DEBUG)
  call.name = found->first.c_str();
#endif
  for (int64_t i = 0; i < num_views; ++i) check_view(views[i], i);
  call.views.assign(views, views + num_views);
  call.ints.assign(ints, ints + num_ints);
  call.reals.assign(reals, reals + num_reals);
  return found->second(call);
}

}  // namespace

}  // namespace nextn

using nextn::Call, nextn::Program, nextn::Team, nextn::View;

extern "C" {

// 0 if the system grants the registers that the kernels were compiled for.
int nextn_ready() { return nextn::ask_for_tiles() ? 0 : -1; }

Team* nextn_team(int count) {
  NEXTN_CHECK(count > 0, "a team of ", count, " threads");
  return new Team(count);
}
void nextn_team_free(Team* team) { delete team; }

Program* nextn_program() { return new Program; }
void nextn_program_free(Program* program) { delete program; }

// Marks the last call and the one before it as sharded, see Call.
void nextn_program_shard(Program* program, int64_t num_shards) {
  NEXTN_CHECK(program->calls.size() > 1 && num_shards > 0, num_shards, " shards, ", program->calls.size(), " calls");
  Call* last = &program->calls.back();
  last[-1].parallel = last->parallel = true;
  last->num_shards = num_shards;
}

// 0, or -1 for an op, types or strides that no kernel supports; the program is then unchanged.
int nextn_program_add(Program* program, const char* name, const View* views, int64_t num_views, const int64_t* ints,
                      int64_t num_ints, const double* reals, int64_t num_reals) {
  Call call;
  if (!nextn::filled(call, name, views, num_views, ints, num_ints, reals, num_reals)) return -1;
  program->calls.push_back(std::move(call));
  return 0;
}

void nextn_program_run(const Program* program, Team* team) { nextn::run(program, team); }

// Runs one op immediately: for packing weights and for tests.
int nextn_call(Team* team, const char* name, const View* views, int64_t num_views, const int64_t* ints,
               int64_t num_ints, const double* reals, int64_t num_reals) {
  Call call;
  if (!nextn::filled(call, name, views, num_views, ints, num_ints, reals, num_reals)) return -1;
  team->run(&call, 1);
  return 0;
}
}
