// Rows of activations as signed 8-bit levels. Each group of inputs of a row has a scale of its own, chosen when the row
// is there: a few inputs of a row may be a hundred times as large as the others.

#pragma once

#include <limits>
#include <vector>

#include "common.h"

constexpr int64_t kPart = 32;         // inputs whose levels are summed together
constexpr int64_t kBlockInputs = 64;  // inputs of a block of weights; rows are padded to whole ones
constexpr float kMostLevel = 127.0f;
constexpr float kLeast = 1e-30f;  // a row of smaller values is one of zeros
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// levels [rows, stride], -127 to 127, and 0 behind the inputs. scales [rows, groups()]: a value is its level times the
// scale of its group of `group` inputs, those of the weights. sums [rows, parts() + 1]: of the levels before each part of
// kPart inputs.
struct QuantisedRows {
  int8_t* levels;
  float* scales;
  int32_t* sums;
  int64_t inputs, group;

  int64_t groups() const { return (inputs + group - 1) / group; }
  int64_t stride() const { return (inputs + kBlockInputs - 1) / kBlockInputs * kBlockInputs; }
  int64_t parts() const { return stride() / kPart; }
  QuantisedRows from(int64_t row) const {
    return {levels + row * stride(), scales + row * groups(), sums + row * (parts() + 1), inputs, group};
  }
  // The sum of the levels of a row's inputs from `begin` to `end`, multiples of kPart.
  int32_t sum(int64_t row, int64_t begin, int64_t end) const {
    const int32_t* own = sums + row * (parts() + 1);
    return own[end / kPart] - own[begin / kPart];
  }
};

// sums [parts + 1] of the levels before each part of kPart levels.
inline void sum_parts(const int8_t* levels, int64_t parts, int32_t* sums) {
  sums[0] = 0;
  for (int64_t part = 0; part < parts; ++part, levels += kPart) {
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < kPart; ++i) sum += levels[i];
    sums[part + 1] = sums[part] + sum;
  }
}

// Writes the levels of `count` values; returns their scale. Where a value is infinite or not a number, so is the scale.
template <typename T>
float quantise(const T* values, int64_t count, int8_t* levels) {
  // As integers, magnitudes have the order of the numbers, and those that are none come last.
  int32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) {
    const float value = widen(values[i]);
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    most = std::max(most, bits & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  if (largest > kLeast && largest < kInfinity) {
    const float factor = kMostLevel / largest;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      levels[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(widen(values[i]) * factor)));
    }
  } else {
    // There is no factor: the scale alone tells what the values are.
    std::memset(levels, 0, count);
  }
  return largest / kMostLevel;
}

// Quantises a row.
template <typename T>
void quantise_row(const T* values, const QuantisedRows& row) {
  for (int64_t i = 0, begin = 0; begin < row.inputs; ++i, begin += row.group) {
    row.scales[i] = quantise(values + begin, std::min(row.group, row.inputs - begin), row.levels + begin);
  }
  std::memset(row.levels + row.inputs, 0, row.stride() - row.inputs);
  sum_parts(row.levels, row.parts(), row.sums);
}

// Memory for quantised rows.
class QuantisedMemory {
 public:
  // Room for `rows` rows of at most `inputs` inputs.
  void fit(int64_t rows, int64_t inputs) {
    const QuantisedRows most{nullptr, nullptr, nullptr, inputs, kPart};
    grow(levels_, rows * most.stride()), grow(scales_, rows * most.groups()), grow(sums_, rows * (most.parts() + 1));
  }

  QuantisedRows of(int64_t inputs, int64_t group) {
    return {levels_.data(), scales_.data(), sums_.data(), inputs, group};
  }

 private:
  template <typename Element>
  static void grow(std::vector<Element>& memory, int64_t elements) {
    if (static_cast<int64_t>(memory.size()) < elements) memory.resize(elements);
  }

  std::vector<int8_t> levels_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
};
