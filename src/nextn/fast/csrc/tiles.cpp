// bf16 products on tile registers (AMX). One row or thirty-two: the same instructions over k, so the same bits.
#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstring>
#include <vector>

#include "product.h"

namespace nextn {

namespace {

constexpr int64_t kRows = 16;             // of one tile
constexpr int64_t kGroup = 4;             // blocks of columns taken together
constexpr int64_t kWidth = kGroup * kTileColumns;
constexpr int64_t kAhead = 8;             // tiles by which weights are fetched early
constexpr int64_t kResident = 512 * 1024;  // values of x, in tiles, that stay in the second-level cache

// Up to 16 rows of x as a column of tiles: tile t starts at base + t * next, its rows are `row` values apart.
struct Rows {
  const uint16_t* base;
  int64_t row, next;
  int count;
};

// Tiles 0-3 take sums, 4-5 rows of x, 5-7 weights.
struct alignas(64) Config {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
};

struct Loan {
  ~Loan() { _tile_release(); }
};

void fetch(const uint16_t* tile) {
  for (int64_t line = 0; line < kTile; line += 32) _mm_prefetch(reinterpret_cast<const char*>(tile + line), _MM_HINT_T0);
}

// Up to 16 rows times 1-4 blocks of columns, `depth` tiles deep; sums [16][64].
template <int kBlocks>
void narrow(const Rows& x, const uint16_t* weights, int64_t depth, float* sums) {
  Config config;
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = tile < 5 ? x.count : 16;
  _tile_loadconfig(&config);
  const int64_t block = depth * kTile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t t = 0; t < depth; ++t) {
    const uint16_t* w = weights + t * kTile;
    const int64_t ahead = t + kAhead < depth ? kAhead * kTile : kAhead * kTile + (kBlocks - 1) * block;
    _tile_loadd(4, x.base + t * x.next, x.row * 2);
    _tile_loadd(5, w, 64);
    fetch(w + ahead);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kBlocks > 1) {
      _tile_loadd(6, w + block, 64);
      fetch(w + block + ahead);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kBlocks > 2) {
      _tile_loadd(7, w + 2 * block, 64);
      fetch(w + 2 * block + ahead);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kBlocks > 3) {
      _tile_loadd(5, w + 3 * block, 64);
      fetch(w + 3 * block + ahead);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, kWidth * 4);
  if constexpr (kBlocks > 1) _tile_stored(1, sums + 16, kWidth * 4);
  if constexpr (kBlocks > 2) _tile_stored(2, sums + 32, kWidth * 4);
  if constexpr (kBlocks > 3) _tile_stored(3, sums + 48, kWidth * 4);
}

// 17 to 32 rows times 1-2 blocks of columns; sums [32][64].
template <int kBlocks>
void square(const Rows& x, const Rows& y, const uint16_t* weights, int64_t depth, float* sums) {
  Config config;
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = 16;
  config.rows[2] = config.rows[3] = config.rows[5] = y.count;
  _tile_loadconfig(&config);
  const int64_t block = depth * kTile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t t = 0; t < depth; ++t) {
    const uint16_t* w = weights + t * kTile;
    const int64_t ahead = t + kAhead < depth ? kAhead * kTile : kAhead * kTile + (kBlocks - 1) * block;
    _tile_loadd(4, x.base + t * x.next, x.row * 2);
    _tile_loadd(6, w, 64);
    fetch(w + ahead);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, y.base + t * y.next, y.row * 2);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kBlocks > 1) {
      _tile_loadd(7, w + block, 64);
      fetch(w + block + ahead);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kWidth * 4);
  _tile_stored(2, sums + 16 * kWidth, kWidth * 4);
  if constexpr (kBlocks > 1) {
    _tile_stored(1, sums + 16, kWidth * 4);
    _tile_stored(3, sums + 16 * kWidth + 16, kWidth * 4);
  }
}

using Narrow = void (*)(const Rows&, const uint16_t*, int64_t, float*);
constexpr Narrow kNarrow[] = {narrow<1>, narrow<2>, narrow<3>, narrow<4>};

// Up to 32 rows times up to 4 blocks; sums [32][64].
void group(const Rows* x, int64_t num_rows, const uint16_t* weights, int64_t num_blocks, int64_t depth, float* sums) {
  if (num_rows <= kRows) return kNarrow[num_blocks - 1](x[0], weights, depth, sums);
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

// Rows as they lie where tiles can read them so, else copied.
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
  const Loan loan;
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
        group(rows + (i - first) / kRows, count, packed + block * depth * kTile, num_blocks, depth, sums);
        for (int64_t row = 0; row < count; ++row)
          product.store(i + row, block * kTileColumns, num_blocks * kTileColumns, sums + row * kWidth);
      }
    }
  }
}

}  // namespace nextn

#endif
