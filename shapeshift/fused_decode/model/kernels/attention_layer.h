// Where the queries, keys and values of a task lie, and what becomes of them before they are used: norm, rotary
// positions, cache write. Storage is float or bfloat16, that of the cache also levels of 8 bits; arithmetic is float.
// The compiler vectorises the loops over elements: without intrinsics, one source serves every vector width.

#pragma once

#include <array>
#include <type_traits>

#include "quantised_rows.h"

constexpr int64_t kChunkElements = 4096;  // of keys that are scored, normalised and mixed together
constexpr int64_t kMostChunk = 256;       // tokens of these
constexpr int64_t kGrain = 16;            // tokens; every block and every chunk is a multiple of it
constexpr int64_t kFew = 16;              // tokens of a row that verifies proposals, at most

// One tile of queries: `count` tokens of one row under one key-value head. Of its slot are the rotary tables.
struct Task {
  int32_t head, slot, row, position, token, count;
};

constexpr int64_t kTaskFields = sizeof(Task) / sizeof(int32_t);

// Positions of a text that lie in one block; where a head's keys and values of the first one, and their scales, lie.
struct Part {
  int64_t first, count, place, scale;
};

// Elements from one block, and from one head of a block, to the next.
struct Strides {
  int64_t block, head;
};

// C: T, or int8_t, where the cache holds levels with a scale for each token and head.
template <typename T, typename C>
struct Layer {
  const T* qkv;     // [tokens, width]: queries, keys and values, then the gates of the heads where the layer has some
  C* keys;          // [blocks, kv_heads, length, dim]
  C* values;
  float* key_scales;  // [blocks, kv_heads, length] of levels, or null
  float* value_scales;
  T* out;           // [tokens, heads dim]
  const int32_t* blocks;  // [rows, row_blocks]: the blocks of each row's text
  const float* cosines;  // [slots, max_length, dim / 2], `table` elements from one slot to the next
  const float* sines;
  const float* query_norm;  // [dim], or null
  const float* key_norm;
  const float* sinks;  // [heads]: a score that every query of the head has beside those of its keys; or null
  bool norm_last;      // whether norms come after the rotation
  bool chunked;        // whether a query sees no further than the beginning of its chunk of `window` positions
  float eps, scale, cap;  // of norms; factor of scores; c in c tanh(score / c), or 0
  int64_t heads, kv_heads, group, dim, length, row_blocks, window, table, width;
  bool gated;
  Strides vectors, scales;

  // Where the keys and values of a position of a task's text lie in the cache.
  int64_t place(const Task& task, int64_t position) const {
    return start(task, position, vectors) + position % length * dim;
  }

  // Where their scales lie.
  int64_t scale_place(const Task& task, int64_t position) const {
    return start(task, position, scales) + position % length;
  }

  // The first position that a query at `position` sees.
  int64_t first_seen(int64_t position) const {
    if (window <= 0) return 0;
    return chunked ? position / window * window : std::max<int64_t>(0, position + 1 - window);
  }

  // The first position that a task's first query sees.
  int64_t first_seen(const Task& task) const { return first_seen(int64_t{task.position}); }

 private:
  // The first element of the head's part of the position's block.
  int64_t start(const Task& task, int64_t position, const Strides& strides) const {
    return blocks[task.row * row_blocks + position / length] * strides.block + task.head * strides.head;
  }
};

// The positions [from, to) of a task's text, at most kMostChunk, block by block.
struct Parts {
  std::array<Part, kMostChunk / kGrain + 1> all;
  int64_t count = 0;

  template <typename T, typename C>
  Parts(const Layer<T, C>& layer, const Task& task, int64_t from, int64_t to) {
    for (int64_t at = from; at < to; at += all[count++].count) {
      const int64_t within_block = std::min(to - at, layer.length - at % layer.length);
      all[count] = {at, within_block, layer.place(task, at), layer.scale_place(task, at)};
    }
  }

  // Calls each(part, index, first, end) for every part that has some of the positions [from, to), with these.
  template <typename Each>
  void within(int64_t from, int64_t to, const Each& each) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = std::max(from, all[i].first), end = std::min(to, all[i].first + all[i].count);
      if (first < end) each(all[i], i, first, end);
    }
  }

  // Multiplies the numbers of the positions [from, to) by the scales of their vectors; null: they have none.
  void scale(const float* scales, int64_t from, int64_t to, float* numbers) const {
    if (scales == nullptr) return;
    within(from, to, [&](const Part& part, int64_t, int64_t first, int64_t end) {
      const float* own = scales + part.scale + first - part.first;
      float* target = numbers + first - from;
#pragma omp simd
      for (int64_t i = 0; i < end - first; ++i) target[i] *= own[i];
    });
  }
};

// target = RMS norm of source, times scale; the two may be the same.
template <typename T>
void normalise(const T* source, const float* norm, int64_t dim, float eps, float scale, float* target) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < dim; ++i) squares += widen(source[i]) * widen(source[i]);
  const float inverse = scale / std::sqrt(squares / static_cast<float>(dim) + eps);
#pragma omp simd
  for (int64_t i = 0; i < dim; ++i) target[i] = widen(source[i]) * inverse * norm[i];
}

// Normalises (where the model has a norm) and rotates one head's vector at a position of a slot.
template <typename T, typename C>
void prepare(const Layer<T, C>& layer, const T* source, const float* norm, int64_t slot, int64_t position, float scale,
             float* target) {
  const int64_t dim = layer.dim, half = dim / 2;
  const bool is_last = norm != nullptr && layer.norm_last;
  const float factor = is_last ? 1.0f : scale;
  if (norm != nullptr && !is_last) {
    normalise(source, norm, dim, layer.eps, 1.0f, target);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) target[i] = widen(source[i]);
  }
  const float* cosines = layer.cosines + slot * layer.table + position * half;
  const float* sines = layer.sines + slot * layer.table + position * half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float first = target[i], second = target[i + half];
    target[i] = (first * cosines[i] - second * sines[i]) * factor;
    target[i + half] = (second * cosines[i] + first * sines[i]) * factor;
  }
  if (is_last) normalise(target, norm, dim, layer.eps, scale, target);
}

// Writes the keys and values of a task's own tokens into the cache.
template <typename T, typename C>
void write(const Layer<T, C>& layer, const Task& task, float* scratch) {
  const int64_t dim = layer.dim, width = layer.width;
  for (int64_t i = 0; i < task.count; ++i) {
    const T* key = layer.qkv + (task.token + i) * width + (layer.heads + task.head) * dim;
    const T* value = key + layer.kv_heads * dim;
    const int64_t place = layer.place(task, task.position + i);
    prepare(layer, key, layer.key_norm, task.slot, task.position + i, 1.0f, scratch);
    C* target = layer.keys + place;
    if constexpr (std::is_same_v<C, int8_t>) {
      const int64_t scale = layer.scale_place(task, task.position + i);
      layer.key_scales[scale] = quantise(scratch, dim, target);
      layer.value_scales[scale] = quantise(value, dim, layer.values + place);
    } else {
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) narrow(scratch[d], target[d]);
      std::memcpy(layer.values + place, value, dim * sizeof(T));
    }
  }
}
