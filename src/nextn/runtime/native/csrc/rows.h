// Rows of x times pieces of a packed matrix on vector registers. One pass over k for each row, in order, so a row's
// result does not depend on the other rows.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "product.h"

namespace nextn {

namespace {

#if defined(__AVX512F__)
constexpr int kFloats = 16;
constexpr int kSums = 24, kMost = 24, kRowsAtOnce = 12;
#elif defined(__AVX__)
constexpr int kFloats = 8;
constexpr int kSums = 8, kMost = 12, kRowsAtOnce = 8;
#else
constexpr int kFloats = 4;
constexpr int kSums = 8, kMost = 8, kRowsAtOnce = 8;
#endif
// Registers of sums: kSums keep a machine busy that waits some cycles for each, kMost leave room for the operands.
// More rows at once than kRowsAtOnce: their addresses would not stay in registers.

constexpr int kStepsAhead = 8;  // or steps of k, where these lie farther apart
constexpr int kFetched = 4;     // rows from which on several pieces at once are, too

// Prefetches of weights that are read once. Lines that are used once need not evict others from AMD's second-level cache,
// and may come long before: those of the next pieces. Intel's processors take such lines into the small first-level cache
// alone, where they are lost before they are used, and four rows took four times as long as three.
#if defined(__SSE4A__) || !defined(__x86_64__)
constexpr int kOnce = 0;
constexpr bool kOfNextPieces = true;
#else
constexpr int kOnce = 3;  // into all caches
constexpr bool kOfNextPieces = false;
#endif
constexpr int64_t kShortAhead = 1024;  // bytes

typedef float Floats __attribute__((vector_size(4 * kFloats), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kFloats), aligned(4), may_alias));

// Two neighboring values of bf16.
struct Word {
  uint16_t even, odd;
};

// Some rows of x, and the packed matrix: its pieces lie `next` bytes apart, and what a piece holds for one k (or pair)
// and for the next one `step` bytes apart. ahead, pace: see `InTurns`.
template <typename X>
struct Part {
  const X* const* x;
  const char* weights;
  int64_t depth, next, step;
  int64_t ahead = 0, pace = 0;
};

// Rows of a kernel at most.
constexpr int rows_of(int64_t width) { return std::min(kRowsAtOnce, kMost * kFloats / int(width)); }

// Common to formats with floats on both sides. kApart: partial sums of a column, which the steps of k take in turn;
// kStays: kOnce, or which caches prefetched weights stay in; kAhead: bytes by which a piece that is read alone is
// prefetched; kOne: rows from which on every piece is; kValues: values of k in an X.
struct Singles {
  using X = float;
  using Wide = Floats;
  static constexpr int kApart = 1, kStays = kOnce, kOne = kRowsAtOnce;
  static constexpr int64_t kValues = 1, kAhead = 2048;

  static Floats spread(float value) { return value - Floats{}; }  // + would be an addition
  static Floats sum(Floats x, Floats weights, Floats before) { return before + x * weights; }
};

// fp32: [k][kWidth columns].
template <int64_t kColumns>
struct Fp32 : Singles {
  using In = float;
  static constexpr int64_t kWidth = kColumns, kStep = 1, kRead = kWidth * int64_t(sizeof(float));

  static Floats weights(const char* at, int v, int) { return reinterpret_cast<const Floats*>(at)[v]; }
  static const float* row(const float* from, int64_t, int64_t, float*) { return from; }
};

#if defined(__AVX512BF16__)
// bf16: [pair of k][16 columns][2]; a pair is one word, and pairs are multiplied as such.
struct Bf16 {
  using In = uint16_t;
  using X = Word;
  using Wide = Words;
  static constexpr int kApart = 1, kStays = kOnce, kOne = kRowsAtOnce;
  static constexpr int64_t kWidth = kTileColumns, kStep = 1, kRead = kWidth * int64_t(sizeof(Word)), kValues = 2;
  static constexpr int64_t kAhead = 2048;

  static Words spread(Word pair) { return (Words)_mm512_set1_epi32(std::bit_cast<int>(pair)); }
  static Floats sum(Words x, Words weights, Floats before) {
    return (Floats)_mm512_dpbf16_ps((__m512)before, (__m512bh)weights, (__m512bh)x);
  }
  static Words weights(const char* at, int v, int) { return reinterpret_cast<const Words*>(at)[v]; }

  // A row of x padded with zeros beyond its k values: in place, or in the scratch.
  static const Word* row(const uint16_t* from, int64_t k, int64_t depth, Word* room) {
    if (k == depth * kValues) return reinterpret_cast<const Word*>(from);
    std::memset(room, 0, depth * sizeof(Word));
    std::memcpy(room, from, k * sizeof(uint16_t));
    return room;
  }
};

// The same in blocks as weights are packed. One stream with 8 KB under way is as much as memory gives.
struct Halves : Bf16 {
  static constexpr int kStays = 3, kOne = 2;
  static constexpr int64_t kWidth = kHalfColumns, kRead = kWidth * int64_t(sizeof(Word)), kAhead = 8192;
};

// Bytes: [4 of k][16 columns][4], the pairs of k in turn. A byte b below 128 is the end of the bf16 number 128 + b.
struct Bytes : Bf16 {
  static constexpr int kApart = 2, kStays = 3;
  static constexpr int64_t kStep = 2;
  static constexpr float kOffset = 128;

  static Words weights(const char* at, int v, int odd) {
    const Words four = reinterpret_cast<const Words*>(at)[v];
    return ((odd ? four >> 8 : four) & 0x00FF00FF) | 0x43004300;
  }
};
#else
// bf16: [pair of k][16 columns][2]; a pair is one word, the even one its lower half.
struct Bf16 : Singles {
  using In = uint16_t;
  static constexpr int64_t kWidth = kTileColumns, kStep = 2, kRead = kWidth * int64_t(sizeof(Word));

  static Floats weights(const char* at, int v, int odd) {
    const Words pair = reinterpret_cast<const Words*>(at)[v];
    return (Floats)(odd ? pair & 0xFFFF0000 : pair << 16);
  }

  // A row of x, of bf16 or fp32: in place, or in the scratch, padded with zeros beyond its k values.
  template <typename T>
  static const float* row(const T* from, int64_t k, int64_t depth, float* room) {
    if constexpr (std::is_same_v<T, float>)
      if (k == depth) return from;
    by_sixteen(k, [&](auto load, auto store) { store(room, load(from)); });
    std::fill(room + k, room + depth, 0.0f);
    return room;
  }
};

using Halves = Bf16;

// Bytes: [4 of k][16 columns][4], the second and third changed. A byte b below 128 makes the number 128 + b.
struct Bytes : Bf16 {
  static constexpr int kStays = 3;
  static constexpr int64_t kStep = 4;
  static constexpr float kOffset = 128;

  static Floats weights(const char* at, int v, int one) {
    const Words four = reinterpret_cast<const Words*>(at)[v];
    const Words moved = one == 0 ? four << 16 : one == 1 ? four : one == 2 ? four << 8 : four >> 8;
    return (Floats)((moved & 0x007F0000) | 0x43000000);
  }
};
#endif

// Consecutive pieces that are read once. Weights are prefetched: those that follow in a run, or the pieces after those
// that are read together, or those near in each. With fewer rows than kFew the hardware prefetcher is as fast.
template <typename Form, int kFew = kFetched>
struct Streamed : Form {
  using Source = Part<typename Form::X>;
  static int64_t step(const Source&) { return Form::kRead; }

  struct Early {
    Early(const Source&, const char*) {}

    template <int kCount, int kPieces>
    void fetch(const char* at, const Source& part) const {
      if (kPieces > 1 && kCount < kFew) return;
      const int64_t ahead = kPieces == 1 ? Form::kAhead : kOfNextPieces ? kPieces * part.next : kShortAhead;
      for (int piece = 0; piece < kPieces; ++piece)
        for (int line = 0; line < Form::kRead; line += 64)
          __builtin_prefetch(at + ahead + piece * part.next + line, 0, Form::kStays);
    }
  };
};

// The same, read by several groups of rows one after another. `ahead` is what all of them read next; each group
// prefetches its share of it, `pace` bytes a step, so that memory does not idle while a group computes.
template <typename Form>
struct InTurns : Streamed<Form> {
  using Source = Part<typename Form::X>;

  struct Early {
    const char* next;

    Early(const Source& part, const char* at) : next(at + part.ahead) {}

    template <int, int kPieces>
    void fetch(const char*, const Source& part) {
      for (int piece = 0; piece < kPieces; ++piece) __builtin_prefetch(next + piece * part.next);
      next += part.pace;
    }
  };
};

// Adjacent pieces: a step reads one contiguous run of them.
template <typename Form>
struct Beside : Form {
  using Source = Part<typename Form::X>;
  static int64_t step(const Source& part) { return part.step; }

  struct Early {
    Early(const Source&, const char*) {}

    template <int, int kPieces>
    void fetch(const char* at, const Source& part) const {
      for (int piece = 0; piece < kPieces; ++piece)
        __builtin_prefetch(at + kStepsAhead * part.step + piece * part.next);
    }
  };
};

// acc[row][v] += x[row] * weights(v): the smaller operand stays in registers.
template <typename Form, int kCount, int kVectors, typename Weights>
inline void add(Floats (&acc)[kCount][kVectors], const typename Form::X* const* x, int64_t k, Weights&& weights) {
  if constexpr (kCount <= kVectors) {
    typename Form::Wide value[kCount];
    for (int row = 0; row < kCount; ++row) value[row] = Form::spread(x[row][k]);
    for (int v = 0; v < kVectors; ++v) {
      const auto w = weights(v);
      for (int row = 0; row < kCount; ++row) acc[row][v] = Form::sum(value[row], w, acc[row][v]);
    }
  } else {
    typename Form::Wide w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = weights(v);
    for (int row = 0; row < kCount; ++row) {
      const auto value = Form::spread(x[row][k]);
      for (int v = 0; v < kVectors; ++v) acc[row][v] = Form::sum(value, w[v], acc[row][v]);
    }
  }
}

// sums [kCount, kPieces * width]
template <typename Form, int kCount, int kPieces>
void sum(const Part<typename Form::X>& part, const char* weights, float* sums) {
  constexpr int kEach = Form::kWidth / kFloats, kVectors = kPieces * kEach;
  Floats acc[Form::kApart][kCount][kVectors] = {};
  typename Form::Early early(part, weights);
  for (int64_t k = 0; k < part.depth; k += Form::kStep, weights += Form::step(part)) {
    early.template fetch<kCount, kPieces>(weights, part);
    for (int one = 0; one < Form::kStep; ++one)
      add<Form>(acc[one % Form::kApart], part.x, k + one,
                [=](int v) { return Form::weights(weights + v / kEach * part.next, v % kEach, one); });
  }
  if constexpr (Form::kApart > 1)
    for (int row = 0; row < kCount; ++row)
      for (int v = 0; v < kVectors; ++v) acc[0][row][v] += acc[1][row][v];
  std::memcpy(sums, acc[0], sizeof acc[0]);
}

// Pieces that a kernel of kCount rows processes together.
template <typename Form, int kCount>
constexpr int kTogether =
    kCount >= Form::kOne ? 1
                         : int(std::bit_floor(unsigned(
                               std::clamp(kSums * kFloats / (Form::kApart * kCount * int(Form::kWidth)), 1, 4))));

template <typename Form, int kCount, int kPieces, typename Keep>
void sum_and_keep(const Part<typename Form::X>& part, int64_t piece, const Keep& keep) {
  constexpr int64_t kWidth = kPieces * Form::kWidth;
  alignas(64) float sums[kCount * kWidth];
  sum<Form, kCount, kPieces>(part, part.weights + piece * part.next, sums);
  for (int64_t row = 0; row < kCount; ++row) keep(row, piece * Form::kWidth, kWidth, sums + row * kWidth);
}

// The kCount rows of part.x times the pieces [begin, end): keep(row, column, width, sums) receives the results and may
// overwrite them.
template <typename Form, int kCount, typename Keep>
void rows_times(const Part<typename Form::X>& part, int64_t begin, int64_t end, const Keep& keep) {
  constexpr int kMany = kTogether<Form, kCount>;
  int64_t piece = begin;
  for (; piece + kMany <= end; piece += kMany) sum_and_keep<Form, kCount, kMany>(part, piece, keep);
  for (; piece < end; ++piece) sum_and_keep<Form, kCount, 1>(part, piece, keep);
}

template <typename Form, typename Keep>
using Rows = void (*)(const Part<typename Form::X>&, int64_t, int64_t, const Keep&);

template <typename Form, typename Keep, size_t... kIndex>
constexpr std::array<Rows<Form, Keep>, sizeof...(kIndex)> counted(std::index_sequence<kIndex...>) {
  return {rows_times<Form, int(kIndex) + 1, Keep>...};
}

// Kernels by their number of rows, from 1 on.
template <typename Form, typename Keep>
constexpr auto kKernels = counted<Form, Keep>(std::make_index_sequence<rows_of(Form::kWidth)>());

}  // namespace

}  // namespace nextn
