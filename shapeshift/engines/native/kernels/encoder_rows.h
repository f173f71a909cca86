// Operations on single rows of an encoder: norms, and the activations between the linears of a layer.

#pragma once

#include "common.h"

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

// In the order of `layouts.ACTIVATIONS`.
enum class Activation { kGelu, kGeluTanh, kSilu, kRelu };

// x times the normal distribution up to x, whose error function is at most 1.5e-7 off (Abramowitz and Stegun, 7.1.26).
inline float gelu(float x) {
  const float size = std::fabs(x) * 0.70710678f;
  const float t = 1.0f / (1.0f + 0.3275911f * size);
  float series = 1.061405429f;
  series = series * t - 1.453152027f;
  series = series * t + 1.421413741f;
  series = series * t - 0.284496736f;
  series = series * t + 0.254829592f;
  const float half = 0.5f * series * t * exponential(-size * size);
  return x * (x < 0.0f ? half : 1.0f - half);
}

inline float gelu_tanh(float x) { return x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x))); }

// Calls run(function) with the activation's.
template <typename Run>
void with_activation(Activation activation, const Run& run) {
  switch (activation) {
    case Activation::kGelu:
      return run([](float x) { return gelu(x); });
    case Activation::kGeluTanh:
      return run([](float x) { return gelu_tanh(x); });
    case Activation::kSilu:
      return run([](float x) { return silu(x); });
    case Activation::kRelu:
      return run([](float x) { return std::max(x, 0.0f); });
  }
}

// target [width] = the activations of `from`, times the `width` elements behind those where it is gated. May be `from`.
template <typename T>
void activate_row(Activation activation, bool gated, const T* from, int64_t width, T* target) {
  with_activation(activation, [&](const auto& function) {
    if (gated) {
      const T* ups = from + width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) narrow(function(widen(from[i])) * widen(ups[i]), target[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) narrow(function(widen(from[i])), target[i]);
    }
  });
}
