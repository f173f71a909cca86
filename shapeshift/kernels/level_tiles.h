// Sums of products of levels by AMX tiles, group by group.

#pragma once

#include "levels.h"

#if defined(__AMX_INT8__)
constexpr int64_t kTileRows = 9;  // the fewest rows that tiles multiply faster than dot products do

// Tiles hold levels of 4 bits less their zeros, so that nothing has to be taken from the sums.
template <int64_t kBits>
constexpr bool kCentred = kBits == 4;

// sums [rows, kWide] = (first ? 0 : sums) + rows times `count` pairs of tiles of weights, one byte a level, whose lines
// take turns. deep: inputs of a tile.
template <int64_t kBits, bool kBoth, bool kFetch>
void multiply_tiles(const QuantisedRows& from, int64_t input, const uint8_t* weights, int64_t count, int64_t deep,
                    bool first, int32_t* sums) {
  const int64_t stride = from.stride(), step = deep * kWide;
  const int8_t* given = from.levels + input;
  load_sums<kBoth>(first, sums);
  for (int64_t i = 0; i < count; ++i, weights += step, given += deep) {
    if constexpr (kFetch) {
      for (int64_t ahead = 0; ahead < step; ahead += kLine) __builtin_prefetch(weights + kFetched + ahead, 0, 2);
    }
    _tile_loadd(4, given, stride);
    _tile_loadd(6, weights, kTiles * kLine);
    _tile_loadd(7, weights + kLine, kTiles * kLine);
    if constexpr (kBoth) _tile_loadd(5, given + kSide * stride, stride);
    // Names of tiles cannot be arguments.
    if constexpr (kCentred<kBits>) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if constexpr (kBoth) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    } else {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if constexpr (kBoth) {
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
  }
  store_sums<kBoth>(sums);
}

// Writes the lines of both tiles from input `from` to `to` of a group, less its zeros [kWide], as bytes to `target`.
inline void unpack(const Group<4>& group, int64_t from, int64_t to, const uint8_t* zeros, uint8_t* target) {
  __m512i less[kTiles];
  for (int64_t tile = 0; tile < kTiles; ++tile) {
    const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + tile * kSide));
    less[tile] = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(own), _mm512_set1_epi32(0x01010101));
  }
  for (int64_t input = from; input < to; input += kQuad) {
    for (int64_t tile = 0; tile < kTiles; ++tile, target += kLine) {
      _mm512_store_si512(target, _mm512_sub_epi8(line_of(group, input, tile), less[tile]));
    }
    __builtin_prefetch(group.line(input, 0) + kFetched, 0, 2);
  }
}

// sums [rows, kWide] of each group of a panel at `weights`. Calls settle(group, its number, first row, rows) when the
// sums of some rows are there, group after group. All rows use a part of the weights, of several groups where they are
// small, while it lies in the first cache; so do their sums.
template <int64_t kBits, typename Settle>
void sum_by_tiles(const Panels<Levels<kBits>>& own, const uint8_t* weights, const uint8_t* zeros,
                  const QuantisedRows& from, int64_t rows, int32_t* sums, const Settle& settle) {
  const int64_t all = own.blocks() * kBlockInputs;
  // A tile lies in one group.
  const int64_t deep = own.groups() == 1 || own.group % kBlockInputs == 0 ? kBlockInputs : kPart;
  constexpr bool kInPlace = kBits == 8;
  const int64_t together = kInPlace && rows <= kHigh ? all : kNear / 2 * kBlockInputs;
  alignas(kLine) uint8_t unpacked[kInPlace ? 1 : kNear / 2 * kBlockInputs * kWide];
  int64_t shaped = 0;
  for (int64_t begin = 0; begin < all; begin += together) {
    const int64_t end = std::min(begin + together, all);
    // Calls each(group, its number, first input, last input) for the groups that have some of these inputs.
    const auto each_group = [&](const auto& each) {
      for (int64_t i = begin / own.group; i < own.groups() && i * own.group < end; ++i) {
        const Group<kBits> group{own, weights, i * own.group, own.end(i)};
        each(group, i, std::max(begin, group.begin), std::min(end, group.end));
      }
    };
    if constexpr (!kInPlace) {
      each_group([&](const Group<kBits>& group, int64_t i, int64_t first, int64_t last) {
        unpack(group, first, last, zeros + i * kWide, unpacked + (first - begin) * kWide);
      });
      finish_writing(unpacked);
    }
    for (int64_t row = 0; row < rows; row += kHigh) {
      const int64_t high = std::min(kHigh, rows - row);
      const bool fetch = kInPlace && row == 0;
      const auto run = high <= kSide ? (fetch ? multiply_tiles<kBits, false, true> : multiply_tiles<kBits, false, false>)
                                     : (fetch ? multiply_tiles<kBits, true, true> : multiply_tiles<kBits, true, false>);
      shape_tiles(high, shaped, deep / kQuad);
      each_group([&](const Group<kBits>& group, int64_t i, int64_t first, int64_t last) {
        const uint8_t* tiles = kInPlace ? group.line(first, 0) : unpacked + (first - begin) * kWide;
        run(from.from(row), first, tiles, (last - first) / deep, deep, first == group.begin, sums + row * kWide);
        if (last == group.end) settle(group, i, row, high);
      });
    }
  }
  // Tiles in use make every switch between threads slower.
  _tile_release();
}
#endif
