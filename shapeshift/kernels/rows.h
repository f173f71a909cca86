// Operations on single rows: norm with residual, gate. Storage is float or bfloat16, arithmetic is float.

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

// SiLU of the first half of `both` times its second half.
template <typename T>
void gate_row(const T* both, int64_t width, T* target) {
  const T* ups = both + width;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) narrow(silu(widen(both[i])) * widen(ups[i]), target[i]);
}
