// Checks of the tensors that operators get.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <type_traits>

#include "common.h"

// The type of a tensor's elements that kernels see as T.
template <typename T>
constexpr at::ScalarType kType = std::is_same_v<T, float> ? at::kFloat : at::kBFloat16;

inline void check_like(const at::Tensor& tensor, at::ScalarType type, const char* name,
                       std::optional<int64_t> dimensions = std::nullopt) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous(), name, ": must be contiguous ", type);
  TORCH_CHECK(!dimensions || tensor.dim() == *dimensions, name, ": must have ", *dimensions, " dimensions");
}
