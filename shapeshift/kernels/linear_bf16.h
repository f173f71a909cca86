// Products of few rows with a large matrix of bfloat16, summed in float: by AMX tiles, by dot products of pairs
// (avx512_bf16), or by plain vectors. All three read one layout. A row's result does not depend on the other rows.

#pragma once

#include "tiles.h"
#include "wide.h"

constexpr int64_t kBlock = 32;  // inputs of a tile
constexpr int64_t kStep = kBlock * kWide;
constexpr int64_t kPairRows = 12;  // rows of a tile of vectors
constexpr int64_t kPlainPairRows = kLanes == 16 ? kPairRows : 6;  // the same without dot products
constexpr int64_t kAheadPairs = 8;  // of inputs, between two fetches of these
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

#if defined(__AVX512BF16__)
// Two adjacent inputs of a row; the second is 0 where there is none.
inline uint32_t pair_of(const BFloat* row, int64_t input, int64_t inputs) {
  uint32_t both = row[input].bits;
  if (input + 1 < inputs) std::memcpy(&both, row + input, sizeof both);
  return both;
}

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

// sums [kRows, kWide] = (first ? 0 : sums) + rows [kRows, 2 pairs], `stride` apart, times the weights of `pairs` pairs
// of inputs, while `bytes` at `ahead` are fetched. Few rows take all outputs at once, so that memory brings one after
// another.
template <int64_t kRows>
void multiply_pairs(const float* rows, int64_t stride, const BFloat* panel, int64_t pairs, bool first, float* sums,
                    const char* ahead, int64_t bytes) {
  constexpr int64_t kAll = kWide / kLanes, kVectors = kRows * kAll <= 8 ? kAll : 2, kTurns = kAll / kVectors;
  const int64_t step = bytes * kAheadPairs / (pairs * kTurns);
  for (int64_t turn = 0; turn < kTurns; ++turn, sums += kVectors * kLanes) {
    Vector held[kRows][kVectors];
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < kVectors; ++v) {
        held[row][v] = first ? Vector{} : *reinterpret_cast<Vector*>(sums + row * kWide + v * kLanes);
      }
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (pair % kAheadPairs == 0) fetch(ahead, step), ahead += step;
      const Bits* both = reinterpret_cast<const Bits*>(panel + 2 * (pair * kWide + turn * kVectors * kLanes));
#pragma GCC unroll 2
      for (int64_t input = 0; input < 2; ++input) {
        Vector weights[kVectors];
        for (int64_t v = 0; v < kVectors; ++v) {
          weights[v] = reinterpret_cast<Vector>(input == 0 ? both[v] << 16 : both[v] & 0xffff0000u);
          hold(weights[v]);
        }
        for (int64_t row = 0; row < kRows; ++row) {
          for (int64_t v = 0; v < kVectors; ++v) held[row][v] += rows[row * stride + 2 * pair + input] * weights[v];
        }
      }
    }
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < kVectors; ++v) {
        *reinterpret_cast<Vector*>(sums + row * kWide + v * kLanes) = held[row][v];
      }
    }
  }
}

// As sum_by_tiles, for any number of inputs: rows are widened once, weights for each tile of rows.
inline void sum_plain(const Panels<BFloat>& own, const BFloat* panel, const BFloat* from, int64_t rows, float* sums) {
  alignas(kLine) static thread_local float widened[kMostRows * kInputs];
  for (int64_t start = 0; start < own.inputs; start += kInputs, panel += kInputs * kWide) {
    const int64_t count = std::min(kInputs, own.inputs - start), pairs = (count + 1) / 2;
    for (int64_t row = 0; row < rows; ++row) {
      const BFloat* given = from + row * own.inputs + start;
      float* target = widened + row * kInputs;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) target[i] = widen(given[i]);
      if (count % 2 == 1) target[count] = 0.0f;
    }
    in_numbered_parts<kPlainPairRows>(rows, [&](int64_t row, auto together, int64_t part, int64_t parts) {
      const int64_t bytes = count * kWide * static_cast<int64_t>(sizeof(BFloat)) / parts;
      const char* ahead = reinterpret_cast<const char*>(panel + count * kWide) + part * bytes;
      multiply_pairs<together>(widened + row * kInputs, kInputs, panel, pairs, start == 0, sums + row * kWide, ahead,
                               bytes);
    });
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
  sum_plain(own, panel, from, rows, sums);
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
