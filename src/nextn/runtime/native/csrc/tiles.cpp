// bf16 products on tile registers (AMX). One row or thirty-two: the same instructions over k, so the same bits.
#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstring>
#include <vector>

#include "product.h"

namespace nextn {

namespace {

constexpr int64_t kRows = 16;  // of one tile
constexpr int64_t kGroup = 4;  // blocks of columns taken together
constexpr int64_t kWidth = kGroup * kTileColumns;
constexpr int64_t kAhead = 4;              // tiles by which weights are fetched early
constexpr int64_t kResident = 512 * 1024;  // values of x, in tiles, that stay in the second-level cache

// Up to 16 rows of x as a column of tiles: tile t starts at base + t * next, its rows are `row` values apart.
struct Rows {
  const uint16_t* base;
  int64_t row, next;
  int count;
};

// The tile registers during a product: 0-3 hold sums, 4 and 5 up to 16 rows of x each, 6 and 7 weights.
class Registers {
 public:
  ~Registers() { _tile_release(); }

  // For `upper` rows in 0, 1 and 4, and `lower` in 2, 3 and 5. Costs as much as a dozen tiles, so only on a change.
  void shape(int upper, int lower) {
    if (upper == upper_ && lower == lower_) return;
    upper_ = upper, lower_ = lower;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(upper);
    config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(lower);
    _tile_loadconfig(&config);
  }

 private:
  int upper_ = 0, lower_ = 0;
};

// A line in four is enough for the machine to follow, and four times as cheap where the weights are near.
void fetch(const uint16_t* tile) {
  for (int64_t line = 0; line < kTile; line += 128) _mm_prefetch(tile + line, _MM_HINT_T0);
}

// How far ahead of tile t lies the one to fetch: at the end of a block, the one after the blocks read beside it.
int64_t ahead(int64_t t, int64_t depth, int64_t num_blocks) {
  return (t + kAhead < depth ? kAhead : kAhead + (num_blocks - 1) * depth) * kTile;
}

void clear() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Up to 16 rows times 1-4 blocks of columns, `depth` tiles deep; sums [16][64].
template <int kBlocks>
void narrow(const Rows& x, const uint16_t* weights, int64_t depth, float* sums) {
  const int64_t block = depth * kTile;
  clear();
  for (int64_t t = 0; t < depth; ++t, weights += kTile) {
    const uint16_t* next = weights + ahead(t, depth, kBlocks);
    for (int i = 0; i < kBlocks; ++i) fetch(next + i * block);
    _tile_loadd(4, x.base + t * x.next, x.row * 2);
    _tile_loadd(6, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kBlocks > 1) {
      _tile_loadd(7, weights + block, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kBlocks > 2) {
      _tile_loadd(6, weights + 2 * block, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kBlocks > 3) {
      _tile_loadd(7, weights + 3 * block, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, kWidth * 4);
  if constexpr (kBlocks > 1) _tile_stored(1, sums + 16, kWidth * 4);
  if constexpr (kBlocks > 2) _tile_stored(2, sums + 32, kWidth * 4);
  if constexpr (kBlocks > 3) _tile_stored(3, sums + 48, kWidth * 4);
}

// 17 to 32 rows times 1-2 blocks of columns; sums [32][64].
template <int kBlocks>
void square(const Rows& upper, const Rows& lower, const uint16_t* weights, int64_t depth, float* sums) {
  const int64_t block = depth * kTile;
  clear();
  for (int64_t t = 0; t < depth; ++t, weights += kTile) {
    const uint16_t* next = weights + ahead(t, depth, kBlocks);
    for (int i = 0; i < kBlocks; ++i) fetch(next + i * block);
    _tile_loadd(4, upper.base + t * upper.next, upper.row * 2);
    _tile_loadd(6, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, lower.base + t * lower.next, lower.row * 2);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kBlocks > 1) {
      _tile_loadd(7, weights + block, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kWidth * 4);
  _tile_stored(2, sums + kRows * kWidth, kWidth * 4);
  if constexpr (kBlocks > 1) {
    _tile_stored(1, sums + 16, kWidth * 4);
    _tile_stored(3, sums + kRows * kWidth + 16, kWidth * 4);
  }
}

using Narrow = void (*)(const Rows&, const uint16_t*, int64_t, float*);
constexpr Narrow kNarrow[] = {narrow<1>, narrow<2>, narrow<3>, narrow<4>};

// One or two sets of rows times up to 4 blocks; sums [32][64].
void group(Registers& registers, const Rows* x, bool two, const uint16_t* weights, int64_t num_blocks, int64_t depth,
           float* sums) {
  registers.shape(x[0].count, two ? x[1].count : x[0].count);
  if (!two) return kNarrow[num_blocks - 1](x[0], weights, depth, sums);
  for (int64_t block = 0; block < num_blocks; block += 2) {
    const uint16_t* from = weights + block * depth * kTile;
    (block + 1 < num_blocks ? square<2> : square<1>)(x[0], x[1], from, depth, sums + block * kTileColumns);
  }
}

// Copies `count` rows into tiles [t][row][32], zero beyond k.
Rows gathered(const Product& product, int64_t begin, int count, uint16_t* to) {
  const int64_t next = count * kTileDepth;
  for (int row = 0; row < count; ++row) {
    const uint16_t* from = product.in<uint16_t>(begin + row);
    uint16_t* tile = to + row * kTileDepth;
    for (int64_t k = kTileDepth; k <= product.k; k += kTileDepth, from += kTileDepth, tile += next)
      std::memcpy(tile, from, kTileDepth * 2);
    if (const int64_t rest = product.k % kTileDepth) {
      std::memset(tile, 0, kTileDepth * 2);
      std::memcpy(tile, from, rest * 2);
    }
  }
  return {to, kTileDepth, next, count};
}

// Scratch that grows, from a cache line's start on.
uint16_t* scratch(int64_t values) {
  static thread_local std::vector<uint16_t> memory;
  if (int64_t(memory.size()) < values + 32) memory.resize(values + 32);
  return reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

// The rows in place if tiles can read them there, else a copy.
std::vector<Rows>& split(const Product& product, int64_t begin, int64_t end, int64_t depth) {
  static thread_local std::vector<Rows> rows;
  rows.clear();
  const bool lies = !product.order && product.k % kTileDepth == 0 && product.num_rows <= 2 * kRows;
  uint16_t* to = lies ? nullptr : scratch((end - begin) * depth * kTileDepth);
  for (int64_t i = begin; i < end; i += kRows) {
    const int count = int(end - i < kRows ? end - i : kRows);
    if (lies)
      rows.push_back({product.in<uint16_t>(i), product.x->stride[0], kTileDepth, count});
    else
      rows.push_back(gathered(product, i, count, to + (i - begin) * depth * kTileDepth));
  }
  return rows;
}

}  // namespace

void multiply_bf16(const Product& product, int64_t begin, int64_t end) {
  alignas(64) float sums[2 * kRows * kWidth];
  Registers registers;
  const int64_t depth = pieces(product.k, kTileDepth), num_rows = product.num_rows;
  const int64_t fitting = kResident / (depth * kTileDepth) / (2 * kRows) * (2 * kRows);
  const int64_t chunk = fitting ? fitting : 2 * kRows;
  const uint16_t* packed = reinterpret_cast<const uint16_t*>(product.packed);
  for (int64_t first = 0; first < num_rows; first += chunk) {
    const int64_t last = first + chunk < num_rows ? first + chunk : num_rows;
    const Rows* rows = split(product, first, last, depth).data();
    for (int64_t block = begin; block < end; block += kGroup) {
      const int64_t num_blocks = block + kGroup < end ? kGroup : end - block;
      for (int64_t i = first; i < last; i += 2 * kRows) {
        const int64_t count = i + 2 * kRows < last ? 2 * kRows : last - i;
        const Rows* x = rows + (i - first) / kRows;
        group(registers, x, count > kRows, packed + block * depth * kTile, num_blocks, depth, sums);
        for (int64_t row = 0; row < count; ++row)
          product.store(i + row, block * kTileColumns, num_blocks * kTileColumns, sums + row * kWidth);
      }
    }
  }
}

}  // namespace nextn

#endif
