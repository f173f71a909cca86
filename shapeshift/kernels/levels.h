// Weights as unsigned levels of 8 or 4 bits. A weight is its group's scale times (level - the group's zero), plus the
// group's minimum where there are minima.

#pragma once

#include "quantised_rows.h"
#include "tiles.h"

// The kind of weights with levels of kBits bits.
template <int64_t kBits>
struct Levels {
  uint8_t bits;
};

constexpr int64_t kQuad = 4;        // inputs whose levels lie side by side
constexpr int64_t kFetched = 4096;  // bytes between what tiles read and what they fetch into the cache

// weights [panels, blocks, kSide quads, kWide outputs, kQuad]; with 4 bits [panels, blocks, kSide quads, kSide outputs,
// kQuad], where one byte holds the levels of both tiles, the second one in its high bits. scales, zeros and minima [panels,
// groups, kWide], minima or null; bias [outputs] or null. A group has `group` inputs of an output, a multiple of kPart; the last one may
// have fewer.
template <int64_t kBits>
struct Panels<Levels<kBits>> {
  static_assert(kBits == 8 || kBits == 4);
  const uint8_t* weights;
  const float* scales;
  const uint8_t* zeros;
  const float* minima;
  const float* bias;
  int64_t inputs, outputs, group;
  Instructions instructions;

  static constexpr const char* kNames[] = {"plain", "quads", "tiles"};
  static constexpr int64_t kTileLine = kSide * kQuad;                    // bytes of a quad of a tile's outputs
  static constexpr int64_t kLineBytes = kTiles * kTileLine * kBits / 8;  // of a quad of all outputs
  static constexpr int64_t kBytes = kSide * kLineBytes;                  // of a block
  static constexpr int64_t kMostInputs = 65536;                       // so that sums of products fit 32 bits

  Instructions best() const {
#if defined(__AMX_INT8__)
    if (tiles_permitted()) return Instructions::kTiles;
#endif
#if defined(__AVX512VNNI__)
    return Instructions::kDots;
#else
    return Instructions::kPlain;
#endif
  }

  int64_t count() const { return (outputs + kWide - 1) / kWide; }
  int64_t blocks() const { return (inputs + kBlockInputs - 1) / kBlockInputs; }
  int64_t groups() const { return (inputs + group - 1) / group; }
  int64_t elements() const { return count() * blocks() * kBytes; }
  // The end of a group, where padding belongs to the last one.
  int64_t end(int64_t of) const { return of + 1 == groups() ? blocks() * kBlockInputs : (of + 1) * group; }

  // Writes panel `index` of plain levels [outputs, inputs] to its place in `target`; 0 where there is none.
  void pack(const uint8_t* plain, int64_t index, uint8_t* target) const {
    target += index * blocks() * kBytes;
    std::memset(target, 0, blocks() * kBytes);
    const int64_t count = std::min(kWide, outputs - index * kWide);
    for (int64_t column = 0; column < count; ++column) {
      const uint8_t* from = plain + (index * kWide + column) * inputs;
      const int64_t tile = column / kSide, place = column % kSide * kQuad;
      for (int64_t input = 0; input < inputs; ++input) {
        uint8_t* block = target + input / kBlockInputs * kBytes;
        const int64_t at = input % kBlockInputs / kQuad * kLineBytes + place + input % kQuad;
        if constexpr (kBits == 8) {
          block[tile * kTileLine + at] = from[input];
        } else {
          block[at] |= static_cast<uint8_t>(from[input] << (4 * tile));
        }
      }
    }
  }
};

// A group of the inputs of a panel, from input `begin` to `end`, both multiples of kPart.
template <int64_t kBits>
struct Group {
  const Panels<Levels<kBits>>& own;
  const uint8_t* panel;
  int64_t begin, end;

  // The place of the levels of a quad of inputs: of all outputs of both tiles with 4 bits, of one tile's with 8.
  const uint8_t* line(int64_t input, int64_t tile) const {
    using Own = Panels<Levels<kBits>>;
    return panel + input / kQuad * Own::kLineBytes + (kBits == 8 ? tile * Own::kTileLine : 0);
  }
};

#if defined(__AVX512F__) && defined(__AVX512BW__)
// The levels of a quad of inputs, as bytes, of a tile's outputs.
template <int64_t kBits>
__m512i line_of(const Group<kBits>& group, int64_t input, int64_t tile) {
  const __m512i line = _mm512_loadu_si512(group.line(input, tile));
  if constexpr (kBits == 8) return line;
  return _mm512_and_si512(tile ? _mm512_srli_epi16(line, 4) : line, _mm512_set1_epi8(15));
}
#endif
