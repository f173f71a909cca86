// Panels of 32 outputs, which suit AMX tiles, and the tiles themselves.

#pragma once

#include "linear.h"
#include "unrolled.h"

#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr int64_t kSide = 16;   // rows and outputs of a tile, and its groups of inputs
constexpr int64_t kTiles = 2;   // of weights that are used together
constexpr int64_t kWide = kTiles * kSide;  // outputs of a panel
constexpr int64_t kHigh = 2 * kSide;       // rows that use a tile of weights together
constexpr int64_t kNear = 16;              // blocks of a panel that fit the first cache, beside rows and sums

// From the slowest to the fastest: vectors, dot products of a few inputs, tiles.
enum class Instructions { kPlain, kDots, kTiles };

#if defined(__AMX_TILE__)
// What `_tile_loadconfig` reads. Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // deep: groups of inputs of a tile of weights, 4 bytes of each row.
  TileShapes(int64_t low, int64_t high, int64_t deep = kSide) {
    const int64_t wanted[8] = {low, low, high, high, low, high, deep, deep};
    for (int64_t tile = 0; tile < 8; ++tile) {
      const bool of_rows = tile == 4 || tile == 5;
      rows[tile] = static_cast<uint8_t>(wanted[tile]);
      bytes[tile] = static_cast<uint16_t>(wanted[tile] == 0 ? 0 : of_rows ? 4 * deep : 64);
    }
  }
};

// Whether Linux lets this process use tiles; it has to be asked once.
inline bool tiles_permitted() {
  constexpr int64_t kRequest = 0x1023, kTileData = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return permitted;
}

// Tile instructions read memory that the compiler does not know of: what was written to `place` has to be there.
inline void finish_writing(const void* place) { asm volatile("" : : "r"(place) : "memory"); }

// Sets up tiles for `count` rows, at most kHigh, unless they are set up for as many: `shaped`.
inline void shape_tiles(int64_t count, int64_t& shaped, int64_t deep = kSide) {
  if (count == shaped) return;
  const TileShapes shapes(std::min(count, kSide), std::max<int64_t>(count - kSide, 0), deep);
  finish_writing(&shapes);
  _tile_loadconfig(&shapes);
  shaped = count;
}

// Sums of up to kHigh rows and kWide outputs, 4 bytes each, in tiles 0 to 3. kBoth: there are more than kSide rows.
template <bool kBoth, typename Sum>
void load_sums(bool first, const Sum* sums) {
  constexpr int64_t kStride = kWide * sizeof(Sum);
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kBoth) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, kStride);
    _tile_loadd(1, sums + kSide, kStride);
    if constexpr (kBoth) {
      _tile_loadd(2, sums + kSide * kWide, kStride);
      _tile_loadd(3, sums + kSide * kWide + kSide, kStride);
    }
  }
}

template <bool kBoth, typename Sum>
void store_sums(Sum* sums) {
  constexpr int64_t kStride = kWide * sizeof(Sum);
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kSide, kStride);
  if constexpr (kBoth) {
    _tile_stored(2, sums + kSide * kWide, kStride);
    _tile_stored(3, sums + kSide * kWide + kSide, kStride);
  }
}
#endif

constexpr int64_t kSoon = 8192;  // bytes between what vectors multiply and what they fetch

// Fetches the `bytes` at `from` into the cache.
inline void fetch(const void* from, int64_t bytes) {
#pragma GCC unroll 8
  for (int64_t line = 0; line < bytes; line += kLine) {
    __builtin_prefetch(static_cast<const char*>(from) + line, 0, 2);
  }
}

// Fetches weights while vectors multiply a part of the rows: while the first part, those that it multiplies soon; while
// each further one, its share of the next panel's, which memory would else bring while nothing is multiplied. With a few
// rows weights pass so fast that the CPU's own fetching does better alone.
class Fetch {
 public:
  // rows: of all parts; panel: bytes from one panel to the next.
  Fetch(int64_t rows, int64_t part, int64_t parts, int64_t panel)
      : distance_(part == 0 ? kSoon : panel),
        every_(part == 0 ? 1 : parts - 1),
        left_(rows <= kFewRows ? kNever : part == 0 ? 1 : part) {}

  // Takes a step, at which `bytes` of weights from `from` on are multiplied.
  void step(const void* from, int64_t bytes) {
    if (--left_ > 0) return;
    left_ = every_;
    fetch(static_cast<const char*>(from) + distance_, bytes);
  }

 private:
  static constexpr int64_t kFewRows = 4, kNever = std::numeric_limits<int64_t>::max();

  int64_t distance_, every_, left_;
};

// Calls each(row, count, fetch) for the parts of in_numbered_parts; each must take the steps of `fetch`, a Fetch of
// its own. panel: see Fetch.
template <int64_t kMost, typename Each>
void in_fetching_parts(int64_t rows, int64_t panel, const Each& each) {
  in_numbered_parts<kMost>(rows, [&](int64_t row, auto count, int64_t part, int64_t parts) {
    each(row, count, Fetch(rows, part, parts, panel));
  });
}
