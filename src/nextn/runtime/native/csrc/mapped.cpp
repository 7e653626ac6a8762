// Mapped files that another program truncates: their lost pages read as zeros, where the system would end the process
// with SIGBUS. Whoever uses such a page has to see from the file that its values are none.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>

namespace {

struct Range {
  int64_t begin, end;
};

// Written once, before the handler is installed, and kept: a signal may come at any time.
const Range* ranges = nullptr;
int64_t num_ranges = 0;
struct sigaction before;

bool is_mapped_file(int64_t address) {
  for (int64_t i = 0; i < num_ranges; ++i)
    if (ranges[i].begin <= address && address < ranges[i].end) return true;
  return false;
}

void on_bus_error(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<int64_t>(info->si_addr);
  if (info->si_code == BUS_ADRERR && is_mapped_file(address)) {
    const int64_t size = sysconf(_SC_PAGESIZE);
    void* page = reinterpret_cast<void*>(address / size * size);
    if (mmap(page, size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == page) return;
  }
  sigaction(SIGBUS, &before, nullptr);  // the access is repeated, and ends as it would have
}

}  // namespace

// ranges: begin and end of each, `count` pairs. -1 if the handler cannot be installed, or is for other ranges.
extern "C" int nextn_zero_lost_pages(const int64_t* bounds, int64_t count) {
  if (ranges != nullptr) return -1;
  auto* copy = new Range[count];
  for (int64_t i = 0; i < count; ++i) copy[i] = {bounds[2 * i], bounds[2 * i + 1]};
  ranges = copy, num_ranges = count;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  return sigaction(SIGBUS, &action, &before);
}
