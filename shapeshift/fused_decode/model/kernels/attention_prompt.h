// Attention of many tokens of a row at once, in tiles. Each row is summed in the order of its keys, whatever the other
// rows are.

#pragma once

#include "attention_rows.h"
#include "attention_tiles.h"

// As `attend_few`, for any number of tokens of a layer that `Form` fits.
template <typename Form, typename T, typename C>
void attend_tiles(const Layer<T, C>& layer, const Task& task, Scratch& scratch) {
  using Product = typename Form::Product;
  constexpr int64_t kNumbers = Form::kNumbers;
  const int64_t dim = layer.dim, group = layer.group, rows = task.count * group;
  scratch.fit(rows, dim, kSeen, rows);
  begin_rows(layer, task, scratch);
  for (int64_t row = 0; row < rows; ++row) Form::lay_row(scratch.queries + row * dim, dim);
  const int64_t end = task.position + task.count;
  const int64_t begin = layer.first_seen(task) / kGrain * kGrain;
  for (int64_t from = begin; from < end; from += kSeen) {
    const int64_t to = std::min(from + kSeen, end);
    const Parts parts(layer, task, from, to);
    for (int64_t i = 0; i < parts.count; ++i) {
      const Part& part = parts.all[i];
      const int64_t at = part.first - from;
      Form::turn_keys(layer.keys + part.place, dim, part.count, dim, scratch.keys + at);
      Form::lay_values(layer.values + part.place, dim, part.count, dim, scratch.values + at / kNumbers * dim);
    }
    multiply<Product, false>(rows, scratch.queries, dim, scratch.keys, kSeen, dim / kNumbers, scratch.scores, kSeen);
    const bool hiding = to > task.position + 1 || layer.first_seen(end - 1) > from || to - from < kSeen;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = task.position + row / group;
      float* scores = scratch.scores + row * kSeen;
      parts.scale(layer.key_scales, from, to, scores);
      if (layer.cap > 0.0f) flatten(scores, to - from, layer.cap);
      if (!hiding) continue;
      const int64_t first = std::clamp(layer.first_seen(position) - from, int64_t{0}, kSeen);
      const int64_t last = std::clamp(std::min(to, position + 1) - from, first, kSeen);
      std::fill(scores, scores + first, kHidden), std::fill(scores + last, scores + kSeen, kHidden);
    }
    soften_rows(rows, scratch.scores, kSeen, scratch.best, scratch.total, scratch.sums, dim);
    for (int64_t row = 0; row < rows; ++row) {
      float* scores = scratch.scores + row * kSeen;
      parts.scale(layer.value_scales, from, to, scores);
      Form::lay_row(scores, kSeen);
    }
    const int64_t depth = (to - from + kNumbers - 1) / kNumbers;
    multiply<Product, true>(rows, scratch.scores, kSeen, scratch.values, dim, depth, scratch.sums, dim);
  }
  finish_rows(layer, task, scratch);
}

// As `attend_few`, for any number of tokens of a layer whose `dim` is a multiple of wide::kLanes.
template <typename T, typename C>
void attend_prompt(const Layer<T, C>& layer, const Task& task, Scratch& scratch) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<C, BFloat>) {
    if (Paired::fits(layer.dim)) return attend_tiles<Paired>(layer, task, scratch);
  }
#endif
  attend_tiles<Singly>(layer, task, scratch);
}
