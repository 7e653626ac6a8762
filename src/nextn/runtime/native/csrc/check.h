// Checks of the builds `debug`, `asan` and `tsan`, which end the process with a message; a release build has none.
//
// They are of what sizes, indices and addresses must be for the kernels to stay within memory. What Python may ask for and
// is refused (types, shapes, parameters) is checked in every build, by the selection of kernels.
#pragma once

#if defined(NEXTN_DEBUG)

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace nextn {

// The op that this thread runs or selects, for messages.
inline thread_local const char* checked_op = "none";

template <typename... Parts>
[[noreturn]] void fail_check(const char* condition, const Parts&... parts) {
  std::ostringstream line;
  line << "nextn: op " << checked_op << ": ";
  (line << ... << parts);
  line << "; not so: " << condition << "\n";
  std::fputs(line.str().c_str(), stderr);
  std::abort();
}

}  // namespace nextn

// What follows the condition names the view, the index and the size.
#define NEXTN_CHECK(condition, ...)                             \
  do {                                                          \
    if (!(condition)) [[unlikely]]                              \
      nextn::fail_check(#condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)
#define NEXTN_CHECKED_OP(name) nextn::checked_op = (name)

#else

#define NEXTN_CHECK(...) ((void)0)
#define NEXTN_CHECKED_OP(...) ((void)0)

#endif
