// Products of few rows with a large matrix of float. Weights lie in panels of kPanel outputs, input after input, and
// are read once from front to back. A tile of kTile rows times a panel stays in registers.

#pragma once

#include "common.h"

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kTile = 8;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8, kTile = 4;
#elif defined(__aarch64__)
constexpr int64_t kLanes = 4, kTile = 8;
#else
constexpr int64_t kLanes = 4, kTile = 4;
#endif
constexpr int64_t kVectors = 3, kPanel = kVectors * kLanes;
constexpr int64_t kInputs = 256;    // inputs of a panel that all rows use before the next ones: they fit L1
constexpr int64_t kMostRows = 256;  // rows whose kInputs inputs fit L2
constexpr int64_t kAheadInputs = 4;  // inputs between two reads ahead
constexpr int64_t kLine = 64;  // bytes of a cache line

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

// Keeps a vector in a register. Otherwise the compiler reads weights again for every row, and loads become the limit.
inline void hold(Vector& vector) {
#if defined(__x86_64__)
  asm("" : "+x"(vector));
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#endif
}

// The weights of a linear in the layout of its kernel, without a copy.
template <typename T>
struct Panels;

// weights [panels, inputs, kPanel], bias [outputs] or null.
template <>
struct Panels<float> {
  const float* weights;
  const float* bias;
  int64_t inputs, outputs;

  int64_t count() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t elements() const { return count() * inputs * kPanel; }

  // Writes panel `index` of plain weights [outputs, inputs] to its place in `target`; 0 where there is no output.
  void pack(const float* plain, int64_t index, float* target) const {
    target += index * inputs * kPanel;
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t output = index * kPanel + lane;
      for (int64_t input = 0; input < inputs; ++input) {
        target[input * kPanel + lane] = output < outputs ? plain[output * inputs + input] : 0.0f;
      }
    }
  }
};

// sums [kRows, kPanel] = (first ? 0 : sums) + rows [kRows, count], `stride` apart, times panel [count, kPanel]. Reads
// `step` bytes at `ahead` into the cache every kAheadInputs inputs.
template <int64_t kRows>
void multiply_tile(const float* rows, int64_t stride, const float* panel, int64_t count, bool first, float* sums,
                   const char* ahead, int64_t step) {
  Vector held[kRows][kVectors];
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) {
      held[row][v] = first ? Vector{} : *reinterpret_cast<Vector*>(sums + row * kPanel + v * kLanes);
    }
  }
  // One loop and no lambda: of sums that a lambda takes the compiler keeps a copy in memory.
  for (int64_t input = 0; input < count; ++input, ++rows, panel += kPanel) {
    if (input % kAheadInputs == 0) {
      for (int64_t line = 0; line < step; line += kLine) __builtin_prefetch(ahead + line, 0, 2);
      ahead += step;
    }
    Vector weights[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {
      weights[v] = *reinterpret_cast<const Vector*>(panel + v * kLanes);
      hold(weights[v]);
    }
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < kVectors; ++v) held[row][v] += rows[row * stride] * weights[v];
    }
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Vector*>(sums + row * kPanel + v * kLanes) = held[row][v];
    }
  }
}

// As multiply_tile, for up to kTile rows.
template <int64_t kRows = kTile>
void multiply_rows(int64_t rows, const float* from, int64_t stride, const float* panel, int64_t count, bool first,
                   float* sums, const char* ahead, int64_t step) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<kRows - 1>(rows, from, stride, panel, count, first, sums, ahead, step);
  }
  multiply_tile<kRows>(from, stride, panel, count, first, sums, ahead, step);
}

// out [rows, outputs] of one panel = rows [rows, inputs] times the panel, plus bias; at most kMostRows rows. Each
// output is summed in the order of the inputs, for any number of rows.
inline void multiply_panel(const Panels<float>& own, int64_t index, const float* from, int64_t rows, float* out) {
  alignas(kLine) static thread_local float sums[kMostRows * kPanel];
  const float* panel = own.weights + index * own.inputs * kPanel;
  for (int64_t start = 0; start < own.inputs; start += kInputs) {
    const int64_t count = std::min(kInputs, own.inputs - start);
    // Each tile also prefetches a share of the weights of the next inputs.
    const int64_t tiles = (rows + kTile - 1) / kTile;
    const int64_t share = count * kPanel * static_cast<int64_t>(sizeof(float)) / tiles;
    const char* ahead = reinterpret_cast<const char*>(panel + (start + count) * kPanel);
    for (int64_t row = 0; row < rows; row += kTile, ahead += share) {
      multiply_rows(std::min(kTile, rows - row), from + row * own.inputs + start, own.inputs, panel + start * kPanel,
                    count, start == 0, sums + row * kPanel, ahead, share * kAheadInputs / count);
    }
  }
  const int64_t first = index * kPanel, width = std::min(kPanel, own.outputs - first);
  alignas(kLine) float added[kPanel] = {};
  if (own.bias != nullptr) std::copy(own.bias + first, own.bias + first + width, added);
  for (int64_t row = 0; row < rows; ++row) {
    float* target = out + row * own.outputs + first;
    const float* sum = sums + row * kPanel;
    const auto write = [&](int64_t count) {
      for (int64_t i = 0; i < count; ++i) target[i] = sum[i] + added[i];
    };
    width == kPanel ? write(kPanel) : write(width);  // a count that the compiler knows
  }
}

// Calls each(panel, row, count) for `count` rows from `row` on, so that all panels meet all rows; a piece has a multiple
// of `tile` rows, and up to `few` rows are all in one.
template <typename Share, typename Each>
void cross(int64_t panels, int64_t rows, int64_t few, int64_t tile, const Share& share, const Each& each) {
  if (rows == 0) return;
  if (rows <= few) return share(panels, [&](int64_t panel) { each(panel, int64_t{0}, rows); });
  const int64_t blocks = (rows + kMostRows - 1) / kMostRows;
  const int64_t height = ((rows + blocks - 1) / blocks + tile - 1) / tile * tile;
  share(panels * blocks, [&](int64_t i) {
    const int64_t row = i % blocks * height;
    const int64_t count = std::min(height, rows - row);
    if (count > 0) each(i / blocks, row, count);
  });
}

// out [rows, outputs] = rows [rows, inputs] times the weights, plus bias.
template <typename Share>
void multiply(const Panels<float>& own, const float* from, int64_t rows, float* out, const Share& share) {
  cross(own.count(), rows, kTile, kTile, share, [&](int64_t panel, int64_t row, int64_t count) {
    multiply_panel(own, panel, from + row * own.inputs, count, out + row * own.outputs);
  });
}
