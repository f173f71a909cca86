// Products of quantised rows with weights in levels: summed exactly in integers within a group, by AMX tiles, by dot
// products of quads (VNNI), or by plain vectors. A row's result does not depend on the other rows.

#pragma once

#include "levels.h"
#include "wide.h"

constexpr int64_t kQuadRows = 8;    // rows of a tile of vectors
constexpr int64_t kPlainRows = 4;  // the same without wide registers
constexpr int64_t kFetched = 4096;  // bytes between what is read and what is fetched into the cache

// The fewest rows that tiles multiply faster than dot products do. With 4 bits they have to be unpacked first.
template <int64_t kBits>
constexpr int64_t kTileRows = kBits == 8 ? 9 : 17;

// A group of the inputs of a panel, from input `begin` to `end`, both multiples of kPart.
template <int64_t kBits>
struct Group {
  const Panels<Levels<kBits>>& own;
  const uint8_t* panel;
  int64_t begin, end;

  // The place of the levels of a quad of inputs: of all outputs of both tiles with 4 bits, of one tile's with 8.
  const uint8_t* line(int64_t input, int64_t tile) const {
    using Own = Panels<Levels<kBits>>;
    const uint8_t* block = panel + input / kBlockInputs * Own::kBytes;
    return block + (kBits == 8 ? tile * Own::kTileBytes : 0) + input % kBlockInputs / kQuad * Own::kLineBytes;
  }
};

// Four adjacent levels of a row.
inline int32_t quad_of(const int8_t* row, int64_t input) {
  int32_t quad;
  std::memcpy(&quad, row + input, sizeof quad);
  return quad;
}

#if defined(__AVX512VNNI__)
template <int64_t kBits>
__m512i line_of(const Group<kBits>& group, int64_t input, int64_t tile) {
  const __m512i line = _mm512_loadu_si512(group.line(input, tile));
  if constexpr (kBits == 8) return line;
  return _mm512_and_si512(tile ? _mm512_srli_epi16(line, 4) : line, _mm512_set1_epi8(15));
}

// sums [kRows, kWide] of a group.
template <int64_t kBits, int64_t kRows>
void sum_quads(const Group<kBits>& group, const QuantisedRows& from, int32_t* sums) {
  __m512i held[kRows][kTiles] = {};
  const int64_t stride = from.stride();
  for (int64_t input = group.begin; input < group.end; input += kQuad) {
    __m512i weights[kTiles];
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      weights[tile] = line_of(group, input, tile);
      if (kBits == 8 || tile == 0) __builtin_prefetch(group.line(input, tile) + kFetched, 0, 2);
    }
    for (int64_t row = 0; row < kRows; ++row) {
      const __m512i given = _mm512_set1_epi32(quad_of(from.levels + row * stride, input));
      for (int64_t tile = 0; tile < kTiles; ++tile) {
        held[row][tile] = _mm512_dpbusd_epi32(held[row][tile], weights[tile], given);
      }
    }
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      _mm512_storeu_si512(sums + row * kWide + tile * kSide, held[row][tile]);
    }
  }
}
#endif

#if defined(__AVX2__)
// sums + factor times the sums of products of quads of levels. Weights below 128: else sums of two products would not
// fit the 16 bits between.
inline __m256i add_products(__m256i sums, __m256i weights, __m256i given, int16_t factor) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, given), _mm256_set1_epi16(factor)));
}

template <int64_t kBits, int64_t kRows>
void sum_levels(const Group<kBits>& group, const QuantisedRows& from, int32_t* sums) {
  constexpr int64_t kLanesOf = 8;
  const int64_t stride = from.stride();
  for (int64_t lane = 0; lane < kWide; lane += kLanesOf) {
    const int64_t tile = lane / kSide, place = lane % kSide * kQuad;
    __m256i held[kRows] = {};
    for (int64_t input = group.begin; input < group.end; input += kQuad) {
      const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.line(input, tile) + place));
      const __m256i shifted = _mm256_srli_epi16(line, kBits == 8 ? 7 : 4 * static_cast<int>(tile));
      const __m256i low = _mm256_and_si256(kBits == 8 ? line : shifted, _mm256_set1_epi8(kBits == 8 ? 127 : 15));
      const __m256i high = _mm256_and_si256(shifted, _mm256_set1_epi8(1));
      for (int64_t row = 0; row < kRows; ++row) {
        const __m256i given = _mm256_set1_epi32(quad_of(from.levels + row * stride, input));
        held[row] = add_products(held[row], low, given, 1);
        if constexpr (kBits == 8) held[row] = add_products(held[row], high, given, 128);
      }
    }
    for (int64_t row = 0; row < kRows; ++row) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + row * kWide + lane), held[row]);
    }
  }
}
#else
template <int64_t kBits, int64_t kRows>
void sum_levels(const Group<kBits>& group, const QuantisedRows& from, int32_t* sums) {
  std::memset(sums, 0, kRows * kWide * sizeof(int32_t));
  for (int64_t input = group.begin; input < group.end; input += kQuad) {
    for (int64_t lane = 0; lane < kWide; ++lane) {
      const int64_t tile = lane / kSide;
      const uint8_t* quad = group.line(input, tile) + lane % kSide * kQuad;
      for (int64_t row = 0; row < kRows; ++row) {
        const int8_t* given = from.levels + row * from.stride() + input;
        for (int64_t i = 0; i < kQuad; ++i) {
          const int32_t level = kBits == 8 ? quad[i] : quad[i] >> (4 * tile) & 15;
          sums[row * kWide + lane] += level * given[i];
        }
      }
    }
  }
}
#endif

// sums [rows, kWide] of a group, kRows rows after another.
template <int64_t kBits, int64_t kRows = kQuadRows>
void sum_rows(const Group<kBits>& group, const QuantisedRows& from, int64_t rows, int32_t* sums) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
#if defined(__AVX512VNNI__)
    if (group.own.instructions != Instructions::kPlain) {
      sum_quads<kBits, kRows>(group, from.from(row), sums + row * kWide);
      continue;
    }
#endif
    if constexpr (kRows > kPlainRows) {
      sum_levels<kBits, kPlainRows>(group, from.from(row), sums + row * kWide);
      sum_levels<kBits, kRows - kPlainRows>(group, from.from(row + kPlainRows), sums + (row + kPlainRows) * kWide);
    } else {
      sum_levels<kBits, kRows>(group, from.from(row), sums + row * kWide);
    }
  }
  if constexpr (kRows > 1) sum_rows<kBits, kRows - 1>(group, from.from(row), rows - row, sums + row * kWide);
}

#if defined(__AMX_INT8__)
// sums [rows, kWide] = (first ? 0 : sums) + rows times `count` tiles of weights for each half of the panel: the first
// ones `step` bytes apart, those of the second half `half` bytes behind them. deep: inputs of a tile.
template <bool kBoth, bool kFetch>
void multiply_tiles(const QuantisedRows& from, int64_t input, const uint8_t* weights, int64_t count, int64_t step,
                    int64_t half, int64_t deep, bool first, int32_t* sums) {
  const int64_t stride = from.stride();
  const int8_t* given = from.levels + input;
  load_sums<kBoth>(first, sums);
  for (int64_t i = 0; i < count; ++i, weights += step, given += deep) {
    if constexpr (kFetch) {
      for (int64_t ahead = 0; ahead < step; ahead += kLine) __builtin_prefetch(weights + kFetched + ahead, 0, 2);
    }
    _tile_loadd(4, given, stride);
    _tile_loadd(6, weights, kLine);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, weights + half, kLine);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kBoth) {
      _tile_loadd(5, given + kSide * stride, stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  store_sums<kBoth>(sums);
}

// Writes `count` tiles of both halves from `input` on as bytes to `target`.
template <int64_t kBits>
void unpack(const Group<kBits>& group, int64_t input, int64_t count, int64_t deep, uint8_t* target) {
  for (const int64_t end = input + count * deep; input < end; input += deep) {
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      for (int64_t quad = 0; quad < deep; quad += kQuad, target += kLine) {
        _mm512_store_si512(target, line_of(group, input + quad, tile));
        if (kBits == 4 && tile == 0) __builtin_prefetch(group.line(input + quad, 0) + kFetched, 0, 2);
      }
    }
  }
}
// sums [rows, kWide] of a group. Many rows use a part of the weights together while it lies in the first cache.
template <int64_t kBits>
void sum_by_tiles(const Group<kBits>& group, const QuantisedRows& from, int64_t rows, int32_t* sums) {
  using Own = Panels<Levels<kBits>>;
  // A tile lies in one group.
  const int64_t deep = (group.begin | group.end) % kBlockInputs == 0 ? kBlockInputs : kPart;
  const bool in_place = kBits == 8 && deep == kBlockInputs;
  const int64_t bytes = deep / kQuad * Own::kLineBytes, step = in_place ? Own::kBytes : kTiles * bytes;
  const int64_t together = in_place && rows <= kHigh ? group.end - group.begin : kNear / 2 * deep;
  alignas(kLine) uint8_t unpacked[kNear / 2 * kTiles * Own::kTileBytes];
  for (int64_t input = group.begin; input < group.end; input += together) {
    const int64_t count = (std::min(input + together, group.end) - input) / deep;
    if (!in_place) unpack(group, input, count, deep, unpacked);
    finish_writing(unpacked);
    const uint8_t* weights = in_place ? group.line(input, 0) : unpacked;
    int64_t shaped = 0;
    for (int64_t row = 0; row < rows; row += kHigh) {
      const int64_t high = std::min(kHigh, rows - row);
      shape_tiles(high, shaped, deep / kQuad);
      const bool fetch = in_place && row == 0;
      const auto run = high <= kSide ? (fetch ? multiply_tiles<false, true> : multiply_tiles<false, false>)
                                     : (fetch ? multiply_tiles<true, true> : multiply_tiles<true, false>);
      run(from.from(row), input, weights, count, step, in_place ? Own::kTileBytes : bytes, deep, input == group.begin,
          sums + row * kWide);
    }
  }
  // Tiles in use make every switch between threads slower.
  _tile_release();
}

#endif

// What turns the sums of a group into numbers, for the outputs of a panel.
struct GroupScales {
  const float* scales;
  alignas(kLine) int32_t zeros[kWide];

  GroupScales(const float* own, const uint8_t* given) : scales(own) { std::copy(given, given + kWide, zeros); }
};

// Adds a group's sums [rows, kWide], its zeros taken from the levels, times its scales to held [rows, kWide]; calls
// each(row, lane, values) with what the row's are then, from `lane` on. kFirst: nothing is held yet.
template <bool kFirst, int64_t kBits, typename Each>
void add_group(const Group<kBits>& group, const GroupScales& own, const QuantisedRows& from, int64_t rows,
               const int32_t* sums, const float* held, const Each& each) {
  for (int64_t row = 0; row < rows; ++row, sums += kWide, held += kWide) {
    const int32_t total = from.sum(row, group.begin, group.end);
    for (int64_t lane = 0; lane < kWide; lane += wide::kLanes) {
      const wide::Ints levels = wide::load(sums + lane) - wide::load(own.zeros + lane) * total;
      wide::Wide values = wide::load(own.scales + lane) * wide::numbers(levels);
      if constexpr (!kFirst) values += wide::load(held + lane);
      each(row, lane, values);
    }
  }
}

// out [rows, outputs] of one panel = rows times the panel, plus bias; at most kMostRows rows.
template <int64_t kBits, typename Out>
void multiply_panel(const Panels<Levels<kBits>>& own, int64_t index, const QuantisedRows& from, int64_t rows,
                    Out* out) {
  alignas(kLine) int32_t sums[kMostRows * kWide];
  alignas(kLine) float held[kMostRows * kWide];
  alignas(kLine) float added[kWide] = {};
  alignas(kLine) Out part[kWide];
  const int64_t first = index * kWide, width = std::min(kWide, own.outputs - first);
  if (own.bias != nullptr) std::memcpy(added, own.bias + first, width * sizeof(float));
  const auto hold = [&](int64_t row, int64_t lane, const wide::Wide& values) {
    wide::store(values, held + row * kWide + lane);
  };
  const auto finish = [&](int64_t row, int64_t lane, const wide::Wide& values) {
    Out* place = out + row * own.outputs + first;
    wide::store(values * from.scales[row] + wide::load(added + lane), (width == kWide ? place : part) + lane);
    if (width < kWide && lane + wide::kLanes == kWide) std::memcpy(place, part, width * sizeof(Out));
  };
  Group<kBits> group{own, own.weights + index * own.blocks() * own.kBytes, 0, 0};
  for (int64_t i = 0; i < own.groups(); ++i, group.begin = group.end) {
    group.end = own.end(i);
#if defined(__AMX_INT8__)
    if (own.instructions == Instructions::kTiles && rows >= kTileRows<kBits>) {
      sum_by_tiles(group, from, rows, sums);
    } else
#endif
    {
      sum_rows(group, from, rows, sums);
    }
    const int64_t place = (index * own.groups() + i) * kWide;
    const GroupScales scales(own.scales + place, own.zeros + place);
    const bool last = i + 1 == own.groups();
    if (i == 0 && last) {
      add_group<true>(group, scales, from, rows, sums, held, finish);
    } else if (i == 0) {
      add_group<true>(group, scales, from, rows, sums, held, hold);
    } else if (last) {
      add_group<false>(group, scales, from, rows, sums, held, finish);
    } else {
      add_group<false>(group, scales, from, rows, sums, held, hold);
    }
  }
}

// out [rows, outputs] = rows times the weights, plus bias.
template <int64_t kBits, typename Out, typename Share>
void multiply(const Panels<Levels<kBits>>& own, const QuantisedRows& from, int64_t rows, Out* out,
              const Share& share) {
  cross(own.count(), rows, kHigh, kHigh, share, [&](int64_t panel, int64_t row, int64_t count) {
    multiply_panel(own, panel, from.from(row), count, out + row * own.outputs);
  });
}
