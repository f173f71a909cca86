// Products of few rows with a large matrix of bfloat16, summed in float: by AMX tiles, by dot products of pairs
// (avx512_bf16), or by plain vectors. All three read one layout. A row's result does not depend on the other rows.

#pragma once

#include "tiles.h"
#include "wide.h"

constexpr int64_t kBlock = 32;  // inputs of a tile
constexpr int64_t kStep = kBlock * kWide;
constexpr int64_t kPairRows = 12;  // rows of a tile of vectors
constexpr int64_t kPlainPairRows = kLanes == 16 ? kPairRows : 4;  // the same without dot products
constexpr int64_t kAhead = 4096;  // elements between what tiles read and what they fetch into the cache
constexpr int64_t kFetchInputs = 8;  // inputs between two fetches of vectors
constexpr int64_t kFetchBytes = kFetchInputs * kWide * static_cast<int64_t>(sizeof(BFloat));

// weights [panels, blocks, kSide pairs, kWide outputs, 2], with 0 where there is no input or output; bias [outputs] or
// null. Both tiles of a block lie side by side: one after the other, dot products would read from two places in turns,
// which the CPU does not foresee.
template <>
struct Panels<BFloat> {
  const BFloat* weights;
  const float* bias;
  int64_t inputs, outputs;
  Instructions instructions;

  static constexpr const char* kNames[] = {"plain", "pairs", "tiles"};  // of the instructions

  // The fastest instructions that this CPU, system and number of inputs allow.
  Instructions best() const {
#if defined(__AMX_BF16__)
    if (inputs % kBlock == 0 && tiles_permitted()) return Instructions::kTiles;
#endif
#if defined(__AVX512BF16__)
    return Instructions::kDots;
#else
    return Instructions::kPlain;
#endif
  }

  int64_t count() const { return (outputs + kWide - 1) / kWide; }
  int64_t blocks() const { return (inputs + kBlock - 1) / kBlock; }
  int64_t elements() const { return count() * blocks() * kStep; }

  // As Panels<float>::pack.
  void pack(const BFloat* plain, int64_t index, BFloat* target) const {
    target += index * blocks() * kStep;
    for (int64_t block = 0; block < blocks(); ++block) {
      for (int64_t place = 0; place < kStep; ++place) {
        const int64_t output = index * kWide + place / 2 % kWide;
        const int64_t input = block * kBlock + place / (2 * kWide) * 2 + place % 2;
        const bool inside = output < outputs && input < inputs;
        target[block * kStep + place] = inside ? plain[output * inputs + input] : BFloat{0};
      }
    }
  }
};

#if defined(__AMX_BF16__)
// sums [rows, kWide] = (first ? 0 : sums) + rows, `inputs` apart, times `blocks` blocks of a panel. kBoth: there are more
// than kSide rows. kFetch: the weights come from memory, not from the cache.
template <bool kBoth, bool kFetch>
void multiply_blocks(const BFloat* from, int64_t inputs, const BFloat* panel, int64_t blocks, bool first, float* sums) {
  const int64_t stride = inputs * static_cast<int64_t>(sizeof(BFloat));
  load_sums<kBoth>(first, sums);
  for (int64_t block = 0; block < blocks; ++block, panel += kStep, from += kBlock) {
    if constexpr (kFetch) {
      for (int64_t ahead = 0; ahead < kStep; ahead += kBlock) __builtin_prefetch(panel + kAhead + ahead, 0, 2);
    }
    _tile_loadd(4, from, stride);
    _tile_loadd(6, panel, kTiles * kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kBlock, kTiles * kLine);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBoth) {
      _tile_loadd(5, from + kSide * inputs, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  store_sums<kBoth>(sums);
}

// sums [rows, kWide] = rows [rows, inputs] times a panel; `inputs` a multiple of kBlock. Many rows use a part of the
// panel together while it lies in the first cache.
inline void sum_by_tiles(const Panels<BFloat>& own, const BFloat* panel, const BFloat* from, int64_t rows, float* sums) {
  const int64_t together = rows <= kHigh ? own.blocks() : kNear;
  for (int64_t block = 0; block < own.blocks(); block += together) {
    const int64_t blocks = std::min(together, own.blocks() - block);
    int64_t shaped = 0;
    for (int64_t row = 0; row < rows; row += kHigh) {
      const int64_t count = std::min(kHigh, rows - row);
      shape_tiles(count, shaped);
      const auto run = count <= kSide ? multiply_blocks<false, true>
                       : row == 0     ? multiply_blocks<true, true>
                                      : multiply_blocks<true, false>;
      run(from + row * own.inputs + block * kBlock, own.inputs, panel + block * kStep, blocks, block == 0,
          sums + row * kWide);
    }
  }
  // Tiles in use make every switch between threads slower.
  _tile_release();
}
#endif

// Two adjacent inputs of a row; the second is 0 where there is none.
inline uint32_t pair_of(const BFloat* row, int64_t input, int64_t inputs) {
  uint32_t both = row[input].bits;
  if (input + 1 < inputs) std::memcpy(&both, row + input, sizeof both);
  return both;
}

#if defined(__AVX512BF16__)
template <int64_t kRows>
void sum_pairs(const Panels<BFloat>& own, const BFloat* panel, const BFloat* from, Fetch next, float* sums) {
  __m512 held[kRows][kTiles] = {};
  const auto add = [&](int64_t input, const auto& pair) {
    const BFloat* place = panel + input * kWide;
    __m512bh weights[kTiles];
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      weights[tile] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(place + tile * kBlock));
    }
    for (int64_t row = 0; row < kRows; ++row) {
      const auto both = static_cast<int>(pair(from + row * own.inputs, input));
      const auto given = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
      for (int64_t tile = 0; tile < kTiles; ++tile) {
        held[row][tile] = _mm512_dpbf16_ps(held[row][tile], given, weights[tile]);
      }
    }
  };
  int64_t input = 0;
  for (; input + kFetchInputs <= own.inputs; input += kFetchInputs) {
    next.step(panel + input * kWide, kFetchBytes);
#pragma GCC unroll 4
    for (int64_t ahead = 0; ahead < kFetchInputs; ahead += 2) {
      add(input + ahead, [](const BFloat* row, int64_t at) {
        uint32_t both;
        std::memcpy(&both, row + at, sizeof both);
        return both;
      });
    }
  }
  for (; input < own.inputs; input += 2) {
    add(input, [&](const BFloat* row, int64_t at) { return pair_of(row, at, own.inputs); });
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      _mm512_storeu_ps(sums + row * kWide + tile * kSide, held[row][tile]);
    }
  }
}
#endif

typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(sizeof(uint16_t)), may_alias));

// held += two inputs of kRows rows, pair(row), times the weights of two vectors of outputs.
template <int64_t kRows, typename Pair>
__attribute__((always_inline)) inline void add_pair(Vector (&held)[kRows][2], const Bits* weights, const Pair& pair) {
  Vector one[2], other[2];
  for (int64_t v = 0; v < 2; ++v) {
    one[v] = reinterpret_cast<Vector>(weights[v] << 16), other[v] = reinterpret_cast<Vector>(weights[v] & 0xffff0000u);
    hold(one[v]), hold(other[v]);
  }
  for (int64_t row = 0; row < kRows; ++row) {
    Vector both = reinterpret_cast<Vector>(Bits{} + pair(row));
    hold(both);  // else each half is moved to its lanes apart
    const Vector near = reinterpret_cast<Vector>(reinterpret_cast<Bits>(both) << 16);
    const Vector far = reinterpret_cast<Vector>(reinterpret_cast<Bits>(both) & 0xffff0000u);
    for (int64_t v = 0; v < 2; ++v) held[row][v] += near * one[v];
    for (int64_t v = 0; v < 2; ++v) held[row][v] += far * other[v];
  }
}

// A tile of kRows rows and two vectors of outputs stays in registers.
template <int64_t kRows>
void sum_plain(const Panels<BFloat>& own, const BFloat* panel, const BFloat* from, float* sums) {
  for (int64_t first = 0; first < kWide; first += 2 * kLanes) {
    Vector held[kRows][2] = {};
    int64_t input = 0;
    const auto weights = [&] { return reinterpret_cast<const Bits*>(panel + input * kWide + 2 * first); };
    for (; input + 1 < own.inputs; input += 2) {
      add_pair(held, weights(), [&](int64_t row) {
        uint32_t both;
        std::memcpy(&both, from + row * own.inputs + input, sizeof both);
        return both;
      });
    }
    if (input < own.inputs) add_pair(held, weights(), [&](int64_t row) { return from[row * own.inputs + input].bits; });
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < 2; ++v) *reinterpret_cast<Vector*>(sums + row * kWide + first + v * kLanes) = held[row][v];
    }
  }
}

// As sum_by_tiles, for any number of inputs.
inline void sum_by_vectors(const Panels<BFloat>& own, const BFloat* panel, const BFloat* from, int64_t rows,
                           float* sums) {
#if defined(__AVX512BF16__)
  if (own.instructions == Instructions::kDots) {
    const int64_t bytes = own.blocks() * kStep * static_cast<int64_t>(sizeof(BFloat));
    return in_fetching_parts<kPairRows>(rows, bytes, [&](int64_t row, auto count, const Fetch& fetch) {
      sum_pairs<count>(own, panel, from + row * own.inputs, fetch, sums + row * kWide);
    });
  }
#endif
  in_parts<kPlainPairRows>(rows, [&](int64_t row, auto count) {
    sum_plain<count>(own, panel, from + row * own.inputs, sums + row * kWide);
  });
}

// Writes the first `width` sums of a row of a panel, at most kWide, plus bias, unless it is null.
template <typename Out>
__attribute__((always_inline)) inline void write_sums(const float* sums, const float* bias, int64_t width, Out* target) {
  if (width == kWide) {
    for (int64_t lane = 0; lane < kWide; lane += wide::kLanes) {
      wide::Wide values = wide::load(sums + lane);
      if (bias != nullptr) values += wide::load(bias + lane);
      wide::store(values, target + lane);
    }
  } else {
    for (int64_t lane = 0; lane < width; ++lane) narrow(sums[lane] + (bias ? bias[lane] : 0.0f), target[lane]);
  }
}

// out [rows, outputs] of one panel = rows [rows, inputs] times the panel, plus bias; at most kMostRows rows.
template <typename Out>
void multiply_panel(const Panels<BFloat>& own, int64_t index, const BFloat* from, int64_t rows, Out* out) {
  alignas(kLine) float sums[kMostRows * kWide];
  const BFloat* panel = own.weights + index * own.blocks() * kStep;
  const int64_t first = index * kWide, width = std::min(kWide, own.outputs - first);
#if defined(__AMX_BF16__)
  if (own.instructions == Instructions::kTiles) {
    sum_by_tiles(own, panel, from, rows, sums);
  } else
#endif
  {
    sum_by_vectors(own, panel, from, rows, sums);
  }
  const float* bias = own.bias == nullptr ? nullptr : own.bias + first;
  for (int64_t i = 0; i < rows; ++i) write_sums(sums + i * kWide, bias, width, out + i * own.outputs + first);
}

// out [rows, outputs] = rows [rows, inputs] times the weights, plus bias.
template <typename Out, typename Share>
void multiply(const Panels<BFloat>& own, const BFloat* from, int64_t rows, Out* out, const Share& share) {
  cross(own.count(), rows, kHigh, kHigh, share, [&](int64_t panel, int64_t row, int64_t count) {
    multiply_panel(own, panel, from + row * own.inputs, count, out + row * own.outputs);
  });
}
