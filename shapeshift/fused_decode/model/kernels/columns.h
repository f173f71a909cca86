// A row of logits as a table of columns: token t is in column t % columns. The largest logits are in few columns, those
// with the largest maxima.

#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <limits>
#include <vector>

#include "common.h"

constexpr int64_t kDepth = 64;  // tokens of a column
constexpr float kNone = -std::numeric_limits<float>::infinity();

// A row's logits and the number of its columns.
struct Row {
  const float* logits;
  int64_t size, columns;

  // Row `row` of logits that `check_logits` has seen.
  Row(const at::Tensor& all, int64_t row)
      : logits(all.const_data_ptr<float>() + row * all.size(1)),
        size(all.size(1)),
        columns((all.size(1) + kDepth - 1) / kDepth) {}
};

inline void check_logits(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.is_contiguous() && logits.scalar_type() == at::kFloat,
              "logits: must be contiguous float [rows, vocabulary]");
}

// Writes the columns' maxima; returns whether no logit is NaN.
inline bool scan(const Row& row, std::vector<float>& maxima) {
  maxima.assign(row.columns, kNone);
  float* best = maxima.data();
  int32_t unordered = 0;
  for (int64_t start = 0; start < row.size; start += row.columns) {
    const float* logits = row.logits + start;
    const int64_t width = std::min(row.columns, row.size - start);
    for (int64_t column = 0; column < width; ++column) {
      best[column] = logits[column] > best[column] ? logits[column] : best[column];
      unordered |= logits[column] != logits[column];
    }
  }
  return unordered == 0;
}

// The least of the `keep` largest values; -infinity where all are kept. Reorders the values.
inline float least_of_largest(std::vector<float>& values, int64_t keep) {
  if (keep >= static_cast<int64_t>(values.size())) return kNone;
  std::nth_element(values.begin(), values.begin() + (keep - 1), values.end(), std::greater<float>());
  return values[keep - 1];
}

// Calls each(token) for the tokens with logits of at least `bound`, column by column.
template <typename Each>
void each_from(const Row& row, const std::vector<float>& maxima, float bound, const Each& each) {
  for (int64_t column = 0; column < row.columns; ++column) {
    if (maxima[column] < bound) continue;
    for (int64_t token = column; token < row.size; token += row.columns) {
      if (row.logits[token] >= bound) each(token);
    }
  }
}
