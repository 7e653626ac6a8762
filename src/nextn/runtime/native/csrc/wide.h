// Included before all else: GCC's loops use whole 512-bit registers (it prefers half of one, 1.5 times slower here).
#pragma once

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif
