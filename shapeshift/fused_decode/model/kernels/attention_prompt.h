// Attention of many tokens of a row at once, in tiles. Each row is summed in the order of its keys, whatever the other
// rows are.

#pragma once

#include "attention_few.h"
#include "attention_tiles.h"

constexpr int64_t kSlice = 6 * kQueries;  // rows during whose product a part of the next keys or values is fetched

// Calls each(row, count) for slices of the rows from `row` to `end`, while the `next` keys, or values, in the cache at
// `from` are fetched: blocks lie apart, where the CPU does not foresee them.
template <typename C, typename Each>
void in_slices(int64_t row, int64_t end, const Parts& next, const C* from, int64_t dim, const Each& each) {
  for (int64_t part = 0; row < end; row += kSlice, ++part) {
    if (part < next.count) fetch(from + next.all[part].place, next.all[part].count * dim);
    each(row, std::min(kSlice, end - row));
  }
}

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
    // The first tokens of a long task see none of these keys.
    const int64_t skipped = std::max<int64_t>(from - task.position, 0) * group, seeing = rows - skipped;
    const Parts next(layer, task, to, std::min(to + kSeen, end));
    in_slices(skipped, rows, next, layer.keys, dim, [&](int64_t row, int64_t count) {
      multiply<Product, false>(count, scratch.queries + row * dim, dim, scratch.keys, kSeen, kSeen,
                               dim / kNumbers, scratch.scores + row * kSeen, kSeen);
    });
    const bool hiding = to > task.position + 1 || layer.first_seen(end - 1) > from || to - from < kSeen;
    for (int64_t row = skipped; row < rows; ++row) {
      const int64_t position = task.position + row / group;
      float* scores = scratch.scores + row * kSeen;
      parts.scale(layer.key_scales, from, to, scores);
      if (layer.cap > 0.0f) flatten(scores, to - from, layer.cap);
      if (!hiding) continue;
      const int64_t first = std::clamp(layer.first_seen(position) - from, int64_t{0}, kSeen);
      const int64_t last = std::clamp(std::min(to, position + 1) - from, first, kSeen);
      std::fill(scores, scores + first, kHidden), std::fill(scores + last, scores + kSeen, kHidden);
    }
    soften_rows(seeing, scratch.scores + skipped * kSeen, kSeen, scratch.best + skipped, scratch.total + skipped,
                scratch.sums + skipped * dim, dim);
    for (int64_t row = skipped; row < rows; ++row) {
      float* scores = scratch.scores + row * kSeen;
      parts.scale(layer.value_scales, from, to, scores);
      Form::lay_row(scores, kSeen);
    }
    const int64_t depth = (to - from + kNumbers - 1) / kNumbers;
    in_slices(skipped, rows, next, layer.values, dim, [&](int64_t row, int64_t count) {
      multiply<Product, true>(count, scratch.scores + row * kSeen, kSeen, scratch.values, dim, dim, depth,
                              scratch.sums + row * dim, dim);
    });
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
