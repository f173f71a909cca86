// Operations on single rows of an encoder: norms, and the activations between the linears of a layer.

#pragma once

#include "rows.h"

// A norm over `width` elements. bias: or null; centred: the mean is taken off, as LayerNorm does and RMSNorm does not.
struct Norm {
  const float* weight = nullptr;
  const float* bias = nullptr;
  float eps = 0.0f;
  bool centred = false;

  explicit operator bool() const { return weight != nullptr; }

  // target may be `from`.
  template <typename T>
  void operator()(const float* from, int64_t width, T* target) const {
    float sum = 0.0f, squares = 0.0f;
    if (centred) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += from[i];
    }
    const float mean = sum / static_cast<float>(width);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += (from[i] - mean) * (from[i] - mean);
    const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
    if (bias == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) narrow((from[i] - mean) * inverse * weight[i], target[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) narrow((from[i] - mean) * inverse * weight[i] + bias[i], target[i]);
    }
  }
};

// In the order of `settings.POOLINGS`.
enum class Pooling { kFirst, kMean, kMost, kMeanOfRoot, kWeighted, kLast };

// target [width] = the rows [count, width] of a text as one vector.
inline void pool_rows(Pooling pooling, const float* rows, int64_t count, int64_t width, float* target) {
  if (pooling == Pooling::kFirst || pooling == Pooling::kLast) {
    const float* from = rows + (pooling == Pooling::kFirst ? 0 : count - 1) * width;
    std::copy(from, from + width, target);
    return;
  }
  if (pooling == Pooling::kMost) {
    std::copy(rows, rows + width, target);
    for (int64_t row = 1; row < count; ++row) {
      for (int64_t i = 0; i < width; ++i) target[i] = std::max(target[i], rows[row * width + i]);
    }
    return;
  }
  const bool weighted = pooling == Pooling::kWeighted;
  const auto tokens = static_cast<float>(count);
  const float total = weighted ? tokens * (tokens + 1.0f) / 2.0f : pooling == Pooling::kMean ? tokens : std::sqrt(tokens);
  std::fill(target, target + width, 0.0f);
  for (int64_t row = 0; row < count; ++row) {
    const float weight = weighted ? static_cast<float>(row + 1) : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) target[i] += weight * rows[row * width + i];
  }
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) target[i] /= total;
}

// Scales a vector to length 1.
inline void normalise(float* vector, int64_t width) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += vector[i] * vector[i];
  const float inverse = 1.0f / std::max(std::sqrt(squares), 1e-12f);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) vector[i] *= inverse;
}
