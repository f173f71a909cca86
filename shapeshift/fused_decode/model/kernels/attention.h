// Attention over blocks of a cache, with rotary positions and cache write.

#pragma once

#include "attention_prompt.h"

// Causal attention of a task's queries over the keys of its text, with a running softmax from chunk to chunk. While the
// last chunk is used, the first keys of the following task are fetched.
template <int64_t kDim, typename T, typename C>
void attend(const Layer<T, C>& layer, const Task& task, const Task& following, Scratch& scratch) {
  const int64_t dim = kDim ? kDim : layer.dim, group = layer.group, rows = task.count * group;
  const int64_t chunk = std::clamp<int64_t>(kChunkElements / dim / kGrain * kGrain, kGrain, kMostChunk);
  scratch.fit(rows, dim, chunk);
  begin_rows(layer, task, scratch);
  const int64_t end = task.position + task.count, reach = layer.window > 0 ? layer.window : end;
  const bool once = rows == 1 && dim % wide::kLanes == 0;
  for (int64_t from = layer.first_seen(task); from < end; from += chunk) {
    const int64_t to = std::min(from + chunk, end);
    const Parts parts(layer, task, from, to);
    const auto each_row = [&](const auto& score_of, const auto& mix_of) {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t position = task.position + row / group;
        const int64_t first = std::max(from, position + 1 - reach), last = std::min(to, position + 1);
        if (first >= last) continue;
        const float* query = scratch.queries + row * dim;
        float keep, *scores = scratch.scores, *target = scratch.sums + row * dim;
        parts.within(first, last, [&](const Part& part, int64_t index, int64_t at, int64_t stop) {
          score_of(part, index, at - part.first, stop - at, query, scores + at - first);
        });
        parts.scale(layer.key_scales, first, last, scores);
        if (layer.cap > 0.0f) flatten(scores, last - first, layer.cap);
        const float sum = soften(scores, last - first, scratch.best[row], keep);
        scratch.total[row] = scratch.total[row] * keep + sum;
        parts.scale(layer.value_scales, first, last, scores);
        parts.within(first, last, [&](const Part& part, int64_t index, int64_t at, int64_t stop) {
          mix_of(part, index, at - part.first, stop - at, scores + at - first, std::exchange(keep, 1.0f), target);
        });
      }
    };
    if (once) {
      each_row([&](const Part& part, int64_t, int64_t skip, int64_t count, const float* query, float* scores) {
        const int64_t at = part.place + skip * dim;
        score_once<kDim>(query, layer.keys + at, dim, count, scores, layer.values + at);
      }, [&](const Part& part, int64_t, int64_t skip, int64_t count, const float* weights, float keep, float* target) {
        const int64_t ahead = part.first + chunk, there = layer.first_seen(following) + part.first - from;
        const int64_t next = ahead < end ? layer.place(task, ahead)
                                         : layer.place(following, std::min<int64_t>(there, following.position));
        mix_once<kDim>(weights, layer.values + part.place + skip * dim, dim, count, keep, target, layer.keys + next);
      });
      continue;
    }
    std::array<const float*, std::tuple_size_v<decltype(Parts::all)>> keys, values;
    for (int64_t i = 0; i < parts.count; ++i) {
      const Part& part = parts.all[i];
      const int64_t offset = (part.first - from) * dim;
      keys[i] = widened(layer.keys + part.place, part.count * dim, scratch.keys + offset);
      values[i] = widened(layer.values + part.place, part.count * dim, scratch.values + offset);
    }
    each_row([&](const Part&, int64_t index, int64_t skip, int64_t count, const float* query, float* scores) {
      score<kDim>(query, keys[index] + skip * dim, dim, count, scores);
    }, [&](const Part&, int64_t index, int64_t skip, int64_t count, const float* weights, float keep, float* target) {
      mix<kDim>(weights, values[index] + skip * dim, dim, count, keep, target);
    });
  }
  finish_rows(layer, task, scratch);
}

// As `attend`. Many tokens are computed together; a few get the very results that they get one by one: the sums of a
// query that is alone, or that sees a window, are in another order than those of many.
template <int64_t kDim, typename T, typename C>
void attend_alike(const Layer<T, C>& layer, const Task& task, const Task& following, Scratch& scratch) {
  if (task.count > kFew && layer.dim % wide::kLanes == 0) return attend_prompt(layer, task, scratch);
  if (task.count > kFew || (layer.group > 1 && layer.window <= 0)) {
    return attend<kDim>(layer, task, following, scratch);
  }
  for (int32_t i = 0; i < task.count; ++i) {
    const Task one{task.head, task.slot, task.row, task.position + i, task.token + i, 1};
    attend<kDim>(layer, one, following, scratch);
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
    attend_alike<kDim>(layer, tasks[i], tasks[std::min(i + 1, count - 1)], scratch);
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
