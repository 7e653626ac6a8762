// The team of threads and its barrier by themselves, without Python: for a build under ThreadSanitizer, which then sees all
// code that runs (tests/test_team.py). The kernels use plain memory, so whatever the team does not order is a data race.
// With the argument `race`, calls share memory that the team was told they do not share: the sanitizer must find it.
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "runtime.h"

using nextn::Call, nextn::Op, nextn::Program, nextn::Team, nextn::View, nextn::Worker;

extern "C" {
Team* nextn_team(int count);
void nextn_team_free(Team* team);
Program* nextn_program();
void nextn_program_free(Program* program);
void nextn_program_shard(Program* program, int64_t num_shards);
int nextn_program_add(Program* program, const char* name, const View* views, int64_t num_views, const int64_t* ints,
                      int64_t num_ints, const double* reals, int64_t num_reals);
void nextn_program_run(const Program* program, Team* team);
}

namespace {

constexpr int64_t kItems = 240;  // 2, 3, 4, 5 and 8 workers share them evenly

int64_t* items(const Call& call, int place) { return nextn::data<int64_t>(call.views[place]); }

// views: to, from; to[i] = from[i] + 1 for the worker's share.
void add_one(const Call& call, const Worker& worker) {
  int64_t begin, end;
  worker.share(kItems, begin, end);
  for (int64_t i = begin; i < end; ++i) items(call, 0)[i] = items(call, 1)[i] + 1;
}

// The same with what other workers wrote.
void add_one_reversed(const Call& call, const Worker& worker) {
  int64_t begin, end;
  worker.share(kItems, begin, end);
  for (int64_t i = begin; i < end; ++i) items(call, 0)[i] = items(call, 1)[kItems - 1 - i] + 1;
}

// Both, with a barrier within the call.
void add_two(const Call& call, const Worker& worker) {
  add_one(call, worker);
  worker.barrier();
  int64_t begin, end;
  worker.share(kItems, begin, end);
  for (int64_t i = begin; i < end; ++i) items(call, 1)[i] = items(call, 0)[kItems - 1 - i] + 1;
}

template <nextn::Kernel K, bool kParallel>
bool select(Call& call) {
  call.kernel = K, call.parallel = kParallel;
  return true;
}

const Op ops[] = {{"add_one", select<add_one, true>},
                  {"add_one_reversed", select<add_one_reversed, true>},
                  {"add_two", select<add_two, true>},
                  {"alone", select<add_one_reversed, false>}};

struct Run {
  int64_t a[kItems] = {}, b[kItems] = {};
  Program* program = nextn_program();

  ~Run() { nextn_program_free(program); }

  void add(const char* name, int64_t* to, int64_t* from, int64_t num_shards = 0) {
    const auto view = [](int64_t* data) { return View{reinterpret_cast<char*>(data), nextn::I64, 1, {kItems}, {1}}; };
    const View views[] = {view(to), view(from)};
    if (nextn_program_add(program, name, views, 2, nullptr, 0, nullptr, 0)) std::abort();
    if (num_shards) nextn_program_shard(program, num_shards);
  }
};

// Every kind of neighbors: two parallel calls, one within which workers meet, one of worker 0 alone, sharded ones.
bool works(int count, int rounds) {
  Run run;
  for (const char* name : {"add_one", "add_two", "alone", "alone", "add_one_reversed", "add_two"}) {
    run.add(name, run.b, run.a);
    run.add("add_one_reversed", run.a, run.b);
  }
  run.add("add_one", run.b, run.a);
  run.add("add_one", run.a, run.b, kItems);
  Team* team = nextn_team(count);
  int64_t expected = 0;
  bool right = true;
  for (int round = 0; round < rounds; ++round) {
    nextn_program_run(run.program, team);
    expected += 14;
    for (int64_t i = 0; i < kItems; ++i) right &= run.a[i] == expected;
    std::memset(run.b, 0, sizeof run.b);  // the caller's again, once the run has ended
  }
  nextn_team_free(team);
  return right;
}

// Two threads of the caller take turns with one team, as two threads of Python do under its lock.
bool works_in_turns(int count, int rounds) {
  Run run;
  run.add("add_two", run.b, run.a);
  Team* team = nextn_team(count);
  std::mutex lock;
  const auto call = [&] {
    for (int round = 0; round < rounds; ++round) {
      const std::lock_guard<std::mutex> held(lock);
      nextn_program_run(run.program, team);
    }
  };
  std::thread first(call), second(call);
  first.join(), second.join();
  nextn_team_free(team);
  return run.a[0] == 4 * rounds;
}

void race() {
  Run run;
  run.add("add_one", run.b, run.a);
  run.add("add_one_reversed", run.a, run.b, kItems);
  Team* team = nextn_team(2);
  for (int round = 0; round < 100; ++round) nextn_program_run(run.program, team);
  nextn_team_free(team);
}

}  // namespace

int main(int num_words, char** words) {
  if (num_words > 1 && !std::strcmp(words[1], "race")) return race(), 0;
  for (const int count : {1, 2, 3, 4, 5, 8})
    if (!works(count, 40) || !works_in_turns(count, 20)) return std::printf("wrong with %d workers\n", count), 1;
  return 0;
}
