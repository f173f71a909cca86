// The query rows of a task: their working memory, and what comes before and after their keys and values.

#pragma once

#include <limits>
#include <vector>

#include "attention_layer.h"

// Working memory of one thread, for `rows` query rows and chunks of `chunk` keys, with scores of `scored` rows.
struct Scratch {
  static constexpr int64_t kLine = 16;  // floats

  std::vector<float> memory;
  float *queries, *sums, *best, *total, *keys, *values, *scores;

  // Each part begins a cache line: a vector that lies in two takes twice as long to read or write.
  void fit(int64_t rows, int64_t dim, int64_t chunk, int64_t scored = 1) {
    const int64_t sizes[] = {rows * dim, rows * dim, rows, rows, chunk * dim, chunk * dim, chunk * scored};
    float** const parts[] = {&queries, &sums, &best, &total, &keys, &values, &scores};
    const auto whole = [](int64_t size) { return (size + kLine - 1) / kLine * kLine; };
    int64_t needed = kLine;
    for (const int64_t size : sizes) needed += whole(size);
    if (memory.size() < static_cast<size_t>(needed)) memory.resize(needed);
    auto next = reinterpret_cast<float*>(whole(reinterpret_cast<intptr_t>(memory.data()) / sizeof(float)) * sizeof(float));
    for (size_t i = 0; i < std::size(sizes); next += whole(sizes[i++])) *parts[i] = next;
  }
};

// Keys of `dim` elements that are scored, normalised and mixed together.
inline int64_t chunk_of(int64_t dim) {
  return std::clamp<int64_t>(kChunkElements / dim / kGrain * kGrain, kGrain, kMostChunk);
}

// Prepares the queries of a task, row by row of its group, and clears what is gathered for them.
template <typename T, typename C>
void begin_rows(const Layer<T, C>& layer, const Task& task, const Scratch& scratch) {
  const int64_t dim = layer.dim, group = layer.group, rows = task.count * group;
  for (int64_t row = 0; row < rows; ++row) {
    const T* source = layer.qkv + (task.token + row / group) * layer.width + (task.head * group + row % group) * dim;
    prepare(layer, source, layer.query_norm, task.slot, task.position + row / group, layer.scale,
            scratch.queries + row * dim);
  }
  std::fill(scratch.sums, scratch.sums + rows * dim, 0.0f);
  const float* sinks = layer.sinks == nullptr ? nullptr : layer.sinks + task.head * group;
  for (int64_t row = 0; row < rows; ++row) {
    scratch.best[row] = sinks ? sinks[row % group] : -std::numeric_limits<float>::max();
    scratch.total[row] = sinks ? 1.0f : 0.0f;
  }
}

// Writes what was gathered for the queries of a task.
template <typename T, typename C>
void finish_rows(const Layer<T, C>& layer, const Task& task, const Scratch& scratch) {
  const int64_t dim = layer.dim, group = layer.group, rows = task.count * group;
  for (int64_t row = 0; row < rows; ++row) {
    T* target = layer.out + ((task.token + row / group) * layer.heads + task.head * group + row % group) * dim;
    const float inverse = 1.0f / scratch.total[row];
    const float* sums = scratch.sums + row * dim;
    if (layer.gated) {
      const int64_t head = layer.heads + 2 * layer.kv_heads + task.head * group + row % group;
      const T* gate = layer.qkv + (task.token + row / group) * layer.width + head * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) narrow(sums[d] * inverse / (1.0f + exponential(-widen(gate[d]))), target[d]);
    } else {
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) narrow(sums[d] * inverse, target[d]);
    }
  }
}
