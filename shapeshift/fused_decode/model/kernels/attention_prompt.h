// Attention of many tokens of a row at once: products of tiles of queries with keys, and of weights with values, that
// stay in registers. Each row is summed in the order of its keys, whatever the other rows are.

#pragma once

#include "attention_rows.h"
#include "attention_scores.h"

constexpr int64_t kSeen = 64;       // keys that a tile of queries scores and mixes together
constexpr int64_t kQueries = 4;     // rows of a product that stay in registers
constexpr int64_t kColumns = wide::kLanes == 16 ? 4 : 2;  // vectors of its columns that do

// out [kRows, kVectors vectors] += rows [kRows, count] times columns [count, kVectors vectors], each with its stride.
template <int64_t kRows, int64_t kVectors>
void add_tile(const float* rows, int64_t row_stride, const float* columns, int64_t stride, int64_t count, float* out,
              int64_t out_stride) {
  using wide::kLanes, wide::Wide;
  Wide held[kRows][kVectors];
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) held[row][v] = wide::load(out + row * out_stride + v * kLanes);
  }
  for (int64_t k = 0; k < count; ++k, columns += stride) {
    Wide own[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) own[v] = wide::load(columns + v * kLanes);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < kVectors; ++v) held[row][v] += rows[row * row_stride + k] * own[v];
    }
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) wide::store(held[row][v], out + row * out_stride + v * kLanes);
  }
}

// out [count of rows, width] += rows [count of rows, depth] times columns [depth, width]; width a multiple of kLanes.
template <int64_t kRows = kQueries>
void add_product(int64_t count, const float* rows, int64_t row_stride, const float* columns, int64_t width,
                 int64_t depth, float* out) {
  using wide::kLanes;
  for (; count >= kRows; count -= kRows, rows += kRows * row_stride, out += kRows * width) {
    int64_t at = 0;
    for (; at + kColumns * kLanes <= width; at += kColumns * kLanes) {
      add_tile<kRows, kColumns>(rows, row_stride, columns + at, width, depth, out + at, width);
    }
    for (; at < width; at += kLanes) add_tile<kRows, 1>(rows, row_stride, columns + at, width, depth, out + at, width);
  }
  if constexpr (kRows > 1) add_product<kRows - 1>(count, rows, row_stride, columns, width, depth, out);
}

// Writes `count` rows of `dim` elements as columns of target [dim, kSeen], which start on a multiple of kLanes; zeros
// fill the last vector.
template <typename T>
void turn(const T* from, int64_t count, int64_t dim, float* target) {
  using wide::kLanes;
  for (int64_t first = 0; first < count; first += kLanes) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      wide::Wide square[kLanes] = {};
      const int64_t here = std::min(kLanes, count - first);
      for (int64_t k = 0; k < here; ++k) square[k] = wide::load(from + (first + k) * dim + d);
      wide::transpose(square);
      for (int64_t i = 0; i < kLanes; ++i) wide::store(square[i], target + (d + i) * kSeen + first);
    }
  }
}

// As `attend`, for a layer whose `dim` is a multiple of wide::kLanes.
template <typename T, typename C>
void attend_prompt(const Layer<T, C>& layer, const Task& task, Scratch& scratch) {
  const int64_t dim = layer.dim, group = layer.group, rows = task.count * group;
  scratch.fit(rows, dim, kSeen, rows);
  begin_rows(layer, task, scratch);
  const int64_t end = task.position + task.count, reach = layer.window > 0 ? layer.window : end;
  const int64_t begin = layer.first_seen(task) / kGrain * kGrain;
  for (int64_t from = begin; from < end; from += kSeen) {
    const int64_t to = std::min(from + kSeen, end);
    const Parts parts(layer, task, from, to);
    for (int64_t i = 0; i < parts.count; ++i) {
      const Part& part = parts.all[i];
      turn(layer.keys + part.place, part.count, dim, scratch.keys + part.first - from);
      float* target = scratch.values + (part.first - from) * dim;
      const float* found = widened(layer.values + part.place, part.count * dim, target);
      if (found != target) std::copy(found, found + part.count * dim, target);
    }
    std::fill(scratch.scores, scratch.scores + rows * kSeen, 0.0f);
    add_product(rows, scratch.queries, dim, scratch.keys, kSeen, dim, scratch.scores);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = task.position + row / group;
      const int64_t first = std::max(from, position + 1 - reach) - from, last = std::min(to, position + 1) - from;
      float* scores = scratch.scores + row * kSeen;
      if (first >= last) {
        std::fill(scores, scores + kSeen, 0.0f);
        continue;
      }
      parts.scale(layer.key_scales, from + first, from + last, scores + first);
      if (layer.cap > 0.0f) flatten(scores + first, last - first, layer.cap);
      float keep;
      const float sum = soften(scores + first, last - first, scratch.best[row], keep);
      parts.scale(layer.value_scales, from + first, from + last, scores + first);
      std::fill(scores, scores + first, 0.0f), std::fill(scores + last, scores + kSeen, 0.0f);
      scratch.total[row] = scratch.total[row] * keep + sum;
      if (keep == 1.0f) continue;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) scratch.sums[row * dim + d] *= keep;
    }
    add_product(rows, scratch.scores, kSeen, scratch.values, dim, to - from, scratch.sums);
  }
  finish_rows(layer, task, scratch);
}
