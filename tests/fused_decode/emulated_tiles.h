// AMX tiles in plain C++, for CPUs that have none: included before everything else, it takes the place of the
// intrinsics. What is checked as on a CPU with tiles: that a tile is set up as the instruction needs it.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated_tiles {

constexpr int kTiles = 8, kRows = 16, kBytes = 64;

struct Tile {
  int rows = 0, bytes = 0;
  alignas(64) uint8_t data[kRows][kBytes];

  template <typename Element>
  Element& at(int row, int place) {
    return reinterpret_cast<Element*>(data[row])[place];
  }
};

struct Config {
  uint8_t palette, start, unused[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

inline thread_local Tile tiles[kTiles];

inline void expect(bool holds) {
  if (!holds) std::abort();
}

inline void load_config(const void* from) {
  Config config;
  static_assert(sizeof config == 64);
  std::memcpy(&config, from, sizeof config);
  expect(config.palette == 1 && config.start == 0);
  for (int tile = 0; tile < kTiles; ++tile) {
    expect(config.rows[tile] <= kRows && config.bytes[tile] <= kBytes);
    expect((config.rows[tile] == 0) == (config.bytes[tile] == 0));
    tiles[tile] = Tile{config.rows[tile], config.bytes[tile], {}};
  }
}

inline void release() {
  for (Tile& tile : tiles) tile = Tile{};
}

inline Tile& in_use(int tile) {
  expect(tiles[tile].rows > 0);
  return tiles[tile];
}

inline void zero(int tile) { std::memset(in_use(tile).data, 0, sizeof tiles[tile].data); }

inline void load(int tile, const void* from, int64_t stride) {
  Tile& own = in_use(tile);
  zero(tile);
  for (int row = 0; row < own.rows; ++row) {
    std::memcpy(own.data[row], static_cast<const uint8_t*>(from) + row * stride, own.bytes);
  }
}

inline void store(int tile, void* to, int64_t stride) {
  Tile& own = in_use(tile);
  for (int row = 0; row < own.rows; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, own.data[row], own.bytes);
  }
}

// sums += rows times weights, whose elements lie in groups of 4 bytes.
template <typename Sum, typename Row, typename Weight, typename Product>
void multiply(int sums, int rows, int weights, const Product& product) {
  constexpr int kGroup = 4 / sizeof(Row);
  Tile &to = in_use(sums), &from = in_use(rows), &by = in_use(weights);
  expect(to.rows == from.rows && to.bytes == by.bytes && from.bytes == 4 * by.rows);
  for (int row = 0; row < to.rows; ++row) {
    for (int output = 0; output < to.bytes / 4; ++output) {
      for (int input = 0; input < by.rows * kGroup; ++input) {
        const Weight weight = by.at<Weight>(input / kGroup, output * kGroup + input % kGroup);
        to.at<Sum>(row, output) += product(from.at<Row>(row, input), weight);
      }
    }
  }
}

inline float widened(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline void multiply_bf16(int sums, int rows, int weights) {
  multiply<float, uint16_t, uint16_t>(sums, rows, weights,
                                      [](uint16_t a, uint16_t b) { return widened(a) * widened(b); });
}

template <typename Weight>
void multiply_bytes(int sums, int rows, int weights) {
  multiply<int32_t, int8_t, Weight>(sums, rows, weights, [](int32_t a, int32_t b) { return a * b; });
}

}  // namespace emulated_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig emulated_tiles::load_config
#define _tile_release emulated_tiles::release
#define _tile_zero emulated_tiles::zero
#define _tile_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_dpbf16ps emulated_tiles::multiply_bf16
#define _tile_dpbssd emulated_tiles::multiply_bytes<int8_t>
#define _tile_dpbsud emulated_tiles::multiply_bytes<uint8_t>
// The kernels ask the system whether they may use tiles, and nothing else.
#define syscall(...) 0
