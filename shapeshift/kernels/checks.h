// Checks of the tensors that operators get.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
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

template <typename Place>
void check_below(const Place* places, int64_t count, int64_t limit, const char* name) {
  const bool inside = std::all_of(places, places + count, [&](Place at) { return at >= 0 && at < limit; });
  TORCH_CHECK(inside, name, ": must be 0 to ", limit - 1);
}

template <typename Place = int64_t>
void check_below(const at::Tensor& places, int64_t limit, const char* name) {
  check_below(places.const_data_ptr<Place>(), places.numel(), limit, name);
}
