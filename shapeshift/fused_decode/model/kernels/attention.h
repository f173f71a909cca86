// Attention over blocks of a cache, with rotary positions and cache write.

#pragma once

#include "attention_few.h"
#include "attention_prompt.h"

// As `attend_few`, for a layer of any `dim` and a task of any number of tokens.
template <typename T, typename C>
void attend_plain(const Layer<T, C>& layer, const Task& task, Scratch& scratch) {
  const int64_t dim = layer.dim, group = layer.group, rows = task.count * group, chunk = chunk_of(dim);
  scratch.fit(rows, dim, chunk);
  begin_rows(layer, task, scratch);
  const int64_t end = task.position + task.count;
  for (int64_t from = layer.first_seen(task); from < end; from += chunk) {
    const int64_t to = std::min(from + chunk, end);
    const Parts parts(layer, task, from, to);
    std::array<const float*, std::tuple_size_v<decltype(Parts::all)>> keys, values;
    for (int64_t i = 0; i < parts.count; ++i) {
      const Part& part = parts.all[i];
      const int64_t offset = (part.first - from) * dim;
      keys[i] = widened(layer.keys + part.place, part.count * dim, scratch.keys + offset);
      values[i] = widened(layer.values + part.place, part.count * dim, scratch.values + offset);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = task.position + row / group;
      const int64_t first = std::max(from, layer.first_seen(position)), last = std::min(to, position + 1);
      if (first >= last) continue;
      float keep, *scores = scratch.scores;
      parts.within(first, last, [&](const Part& part, int64_t index, int64_t at, int64_t stop) {
        const float* own = keys[index] + (at - part.first) * dim;
        score(scratch.queries + row * dim, own, dim, stop - at, scores + at - first);
      });
      parts.scale(layer.key_scales, first, last, scores);
      if (layer.cap > 0.0f) flatten(scores, last - first, layer.cap);
      const float sum = soften(scores, last - first, scratch.best[row], keep);
      scratch.total[row] = scratch.total[row] * keep + sum;
      parts.scale(layer.value_scales, first, last, scores);
      parts.within(first, last, [&](const Part& part, int64_t index, int64_t at, int64_t stop) {
        const float* own = values[index] + (at - part.first) * dim;
        mix(scores + at - first, own, dim, stop - at, std::exchange(keep, 1.0f), scratch.sums + row * dim);
      });
    }
  }
  finish_rows(layer, task, scratch);
}

// Attention of a task. Many tokens are computed together; a few get the very results that they get one by one: behind a
// window each token's chunks of keys begin at another place.
template <int64_t kDim, typename T, typename C>
void attend(const Layer<T, C>& layer, const Task& task, const Task& following, Scratch& scratch) {
  const bool in_vectors = layer.dim % wide::kLanes == 0;
  if (in_vectors && task.count > kFew) return attend_prompt(layer, task, scratch);
  const auto attend_together = [&](const Task& own) {
    in_vectors ? attend_few<kDim>(layer, own, following, scratch) : attend_plain(layer, own, scratch);
  };
  if (task.count > kFew || layer.window <= 0) return attend_together(task);
  for (int32_t i = 0; i < task.count; ++i) {
    attend_together({task.head, task.slot, task.row, task.position + i, task.token + i, 1});
  }
}

template <int64_t kDim, typename T, typename C, typename Share>
void attend_all(const Layer<T, C>& layer, const Task* tasks, int64_t count, bool split, const Share& share) {
  static thread_local Scratch scratch;
  if (split) {
    // First all writes: a tile attends to keys that other tiles of its row write.
    share(count, [&](int64_t i) {
      scratch.fit(1, layer.dim, 0);
      write(layer, tasks[i], scratch.queries);
    });
  }
  share(count, [&](int64_t i) {
    if (!split) {
      scratch.fit(1, layer.dim, 0);
      write(layer, tasks[i], scratch.queries);
    }
    attend<kDim>(layer, tasks[i], tasks[std::min(i + 1, count - 1)], scratch);
  });
}

template <typename T, typename C, typename Share>
void attend_all(const Layer<T, C>& layer, const Task* tasks, int64_t count, bool split, const Share& share) {
  switch (layer.dim) {
    case 64: return attend_all<64>(layer, tasks, count, split, share);
    case 128: return attend_all<128>(layer, tasks, count, split, share);
    default: attend_all<0>(layer, tasks, count, split, share);
  }
}
