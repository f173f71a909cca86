// Work whose counts the compiler knows, so that it stays in registers.

#pragma once

#include "common.h"

// Calls run(count), 1 to kMost, as a constant.
template <int64_t kMost, typename Run>
void with_constant(int64_t count, const Run& run) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_constant<kMost - 1>(count, run);
  }
  run(std::integral_constant<int64_t, kMost>{});
}

// Calls each(i) for i in [0, kCount), each as a constant. An array that is indexed by these alone stays in registers, if
// `each` is inlined early, as this is; of an array that loops index the compiler keeps a copy in memory.
template <int64_t kCount, typename Each>
__attribute__((always_inline)) inline void for_constants(const Each& each) {
  [&]<int64_t... kPlaces>(std::integer_sequence<int64_t, kPlaces...>) __attribute__((always_inline)) {
    (each(std::integral_constant<int64_t, kPlaces>{}), ...);
  }(std::make_integer_sequence<int64_t, kCount>{});
}

// Calls each(row, count, part, parts) for parts of `rows` rows, at most kMost in each; count is a constant. The parts are
// of nearly equal height, since vectors multiply one row in the time of several.
template <int64_t kMost, typename Each>
void in_numbered_parts(int64_t rows, const Each& each) {
  const int64_t parts = (rows + kMost - 1) / kMost;
  for (int64_t part = 0, row = 0; part < parts; ++part) {
    const int64_t count = (rows - row + parts - part - 1) / (parts - part);
    with_constant<kMost>(count, [&](auto constant) { each(row, constant, part, parts); });
    row += count;
  }
}

// Calls each(row, count) for the parts of in_numbered_parts.
template <int64_t kMost, typename Each>
void in_parts(int64_t rows, const Each& each) {
  in_numbered_parts<kMost>(rows, [&](int64_t row, auto count, int64_t, int64_t) { each(row, count); });
}
