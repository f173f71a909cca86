// Operations on single rows: norm with residual, activation. Storage is float or bfloat16, arithmetic is float.

#pragma once

#include "common.h"

// own += added, unless it is null; target = RMS norm of own.
template <typename T>
void add_norm_row(float* own, const T* added, const float* weight, float eps, int64_t width, T* target) {
  float squares = 0.0f;
  if (added != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) own[i] += widen(added[i]);
  }
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += own[i] * own[i];
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) narrow(own[i] * inverse * weight[i], target[i]);
}

// In the order of `layouts.ACTIVATIONS` and `network.ACTIVATIONS`.
enum class Activation { kGelu, kGeluTanh, kSilu, kRelu, kRelu2, kTanh };

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
    case Activation::kRelu2:
      return run([](float x) { return std::max(x, 0.0f) * std::max(x, 0.0f); });
    case Activation::kTanh:
      return run([](float x) { return tangent(x); });
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
