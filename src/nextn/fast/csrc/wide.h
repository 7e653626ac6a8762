// Included before all else: GCC's loops use whole registers where they are 512 bits wide (it prefers half; 1.5 x slower).
#pragma once

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif
