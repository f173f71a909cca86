// Attention of a few tokens of a row: keys and values are widened in registers, once for several queries of their group,
// while the next ones are fetched into the cache.

#pragma once

#include "attention_rows.h"
#include "attention_scores.h"
#include "unrolled.h"

constexpr int64_t kTogether = wide::kLanes == 16 ? 4 : 2;  // queries of a group for which keys and values are read once
constexpr int64_t kKeys = 4;                               // keys that are scored together
constexpr int64_t kMixed = 4;                              // vectors of a value that are summed together

// Reads the lines of `count` elements into the cache; none from null.
template <typename T>
void fetch(const T* from, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (from == nullptr) return;
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i, 0, 2);
}

// Calls each(d, i, vector) for the vectors of kCount rows of `dim` elements at `from`, of row i from element d on, in the
// order of wide::load_pair.
template <int64_t kCount, typename T, typename Each>
__attribute__((always_inline)) inline void each_vector(const T* from, int64_t dim, const Each& each) {
  constexpr int64_t kLanes = wide::kLanes;
  int64_t d = 0;
#pragma GCC unroll 4
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    for (int64_t i = 0; i < kCount; ++i) {
      const wide::Pair pair = wide::load_pair(from + i * dim + d);
      each(d, i, pair.one), each(d + kLanes, i, pair.other);
    }
  }
  if (d == dim) return;
  for (int64_t i = 0; i < kCount; ++i) each(d, i, wide::load(from + i * dim + d));
}

// scores [kRows, stride] = queries [kRows, dim], paired up, times keys [count, dim], while as many elements at `next` are
// fetched.
template <int64_t kDim, int64_t kRows, typename T>
void score_group(const float* queries, const T* keys, int64_t runtime_dim, int64_t count, float* scores, int64_t stride,
                 const T* next) {
  using wide::Wide;
  const int64_t dim = kDim ? kDim : runtime_dim;
  int64_t k = 0;
  for (; k + kKeys <= count; k += kKeys) {
    fetch(next ? next + k * dim : next, kKeys * dim);
    Wide sums[kRows][kKeys] = {};
    each_vector<kKeys>(keys + k * dim, dim, [&](int64_t d, int64_t i, const Wide& key) {
      for (int64_t row = 0; row < kRows; ++row) sums[row][i] += wide::load(queries + row * dim + d) * key;
    });
    for (int64_t row = 0; row < kRows; ++row) {
      wide::totals(sums[row][0], sums[row][1], sums[row][2], sums[row][3], scores + row * stride + k);
    }
  }
  for (; k < count; ++k) {
    fetch(next ? next + k * dim : next, dim);
    Wide sums[kRows] = {};
    each_vector<1>(keys + k * dim, dim, [&](int64_t d, int64_t, const Wide& key) {
      for (int64_t row = 0; row < kRows; ++row) sums[row] += wide::load(queries + row * dim + d) * key;
    });
    for (int64_t row = 0; row < kRows; ++row) scores[row * stride + k] = wide::total(sums[row]);
  }
}

// Of targets [kRows, dim], paired up, the kVectors vectors from `targets` on = the same times keep [kRows] + weights
// [kRows, stride] times values [count, dim].
template <int64_t kVectors, int64_t kRows, typename T>
void mix_vectors(const float* weights, int64_t stride, const T* values, int64_t dim, int64_t count, const float* keep,
                 float* targets, const T* next) {
  using wide::kLanes, wide::Wide;
  Wide sums[kRows][kVectors];
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) sums[row][v] = wide::load(targets + row * dim + v * kLanes) * keep[row];
  }
  for (int64_t k = 0; k < count; ++k) {
    fetch(next ? next + k * dim : next, dim);
    each_vector<1>(values + k * dim, kVectors * kLanes, [&](int64_t d, int64_t, const Wide& value) {
      for (int64_t row = 0; row < kRows; ++row) sums[row][d / kLanes] += weights[row * stride + k] * value;
    });
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) wide::store(sums[row][v], targets + row * dim + v * kLanes);
  }
}

// targets [kRows, dim], paired up, = targets times keep [kRows] + weights [kRows, stride] times values [count, dim], while
// as many elements at `next` are fetched.
template <int64_t kDim, int64_t kRows, typename T>
void mix_group(const float* weights, int64_t stride, const T* values, int64_t runtime_dim, int64_t count,
               const float* keep, float* targets, const T* next) {
  using wide::kLanes;
  const int64_t dim = kDim ? kDim : runtime_dim;
  int64_t d = 0;
  const auto mix = [&](auto vectors) {
    mix_vectors<vectors, kRows>(weights, stride, values + d, dim, count, keep, targets + d, d == 0 ? next : nullptr);
    d += vectors * kLanes;
  };
  while (d + kMixed * kLanes <= dim) mix(std::integral_constant<int64_t, kMixed>{});
  while (d + 2 * kLanes <= dim) mix(std::integral_constant<int64_t, 2>{});
  if (d < dim) mix(std::integral_constant<int64_t, 1>{});
}

// Causal attention of a task's queries over the keys of its text, with a running softmax from chunk to chunk, for a layer
// whose `dim` is a multiple of wide::kLanes. While the last chunk is used, the first keys of the following task are
// fetched.
template <int64_t kDim, typename T, typename C>
void attend_few(const Layer<T, C>& layer, const Task& task, const Task& following, Scratch& scratch) {
  const int64_t dim = kDim ? kDim : layer.dim, group = layer.group, rows = task.count * group;
  const int64_t chunk = chunk_of(dim), end = task.position + task.count;
  scratch.fit(rows, dim, chunk, kTogether);
  begin_rows(layer, task, scratch);
  for (int64_t row = 0; row < rows; ++row) wide::pair_up<C>(scratch.queries + row * dim, dim);
  for (int64_t from = layer.first_seen(task); from < end; from += chunk) {
    const int64_t to = std::min(from + chunk, end);
    const Parts parts(layer, task, from, to);
    // Scores and mixes for kRows queries of one token, from `row` on, which see the same keys.
    const auto attend_rows = [&](int64_t row, auto together) {
      constexpr int64_t kRows = decltype(together)::value;
      const int64_t last = std::min(to, task.position + row / group + 1);
      if (from >= last) return;
      float *scores = scratch.scores, *targets = scratch.sums + row * dim, keep[kRows];
      parts.within(from, last, [&](const Part& part, int64_t, int64_t at, int64_t stop) {
        const C* next = row == 0 ? layer.values + part.place : nullptr;
        score_group<kDim, kRows>(scratch.queries + row * dim, layer.keys + part.place, dim, stop - at,
                                 scores + at - from, chunk, next);
      });
      for (int64_t i = 0; i < kRows; ++i) {
        float* own = scores + i * chunk;
        parts.scale(layer.key_scales, from, last, own);
        if (layer.cap > 0.0f) flatten(own, last - from, layer.cap);
        const float sum = soften(own, last - from, scratch.best[row + i], keep[i]);
        scratch.total[row + i] = scratch.total[row + i] * keep[i] + sum;
        parts.scale(layer.value_scales, from, last, own);
      }
      parts.within(from, last, [&](const Part& part, int64_t, int64_t at, int64_t stop) {
        const int64_t ahead = part.first + chunk, there = layer.first_seen(following) + part.first - from;
        const int64_t place = ahead < end ? layer.place(task, ahead)
                                          : layer.place(following, std::min<int64_t>(there, following.position));
        mix_group<kDim, kRows>(scores + at - from, chunk, layer.values + part.place, dim, stop - at, keep, targets,
                               row == 0 ? layer.keys + place : nullptr);
        std::fill(keep, keep + kRows, 1.0f);
      });
    };
    for (int64_t token = 0; token < task.count; ++token) {
      in_parts<kTogether>(group, [&](int64_t row, auto together) { attend_rows(token * group + row, together); });
    }
  }
  for (int64_t row = 0; row < rows; ++row) wide::set_apart<C>(scratch.sums + row * dim, dim);
  finish_rows(layer, task, scratch);
}
