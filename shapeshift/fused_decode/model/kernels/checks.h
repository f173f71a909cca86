// Checks of the tensors that operators get.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

inline void check_like(const at::Tensor& tensor, at::ScalarType type, const char* name,
                       std::optional<int64_t> dimensions = std::nullopt) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous(), name, ": must be contiguous ", type);
  TORCH_CHECK(!dimensions || tensor.dim() == *dimensions, name, ": must have ", *dimensions, " dimensions");
}
