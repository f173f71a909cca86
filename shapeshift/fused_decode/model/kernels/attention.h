// Attention over slots with rotary positions and cache write. Storage is float or bfloat16, arithmetic is float. The
// compiler vectorises the loops over elements: without intrinsics, one source serves every vector width.

#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>
#include <vector>

#include "checks.h"
#include "wide.h"

constexpr int64_t kBlockElements = 4096;  // of the keys of one block: scored, normalised and mixed together

// One tile of queries: `count` tokens of one row under one key-value head.
struct Task {
  int32_t head, slot, position, token, count;
};

constexpr int64_t kTaskFields = sizeof(Task) / sizeof(int32_t);

template <typename T>
struct Layer {
  const T* qkv;     // [tokens, (heads + 2 kv_heads) dim]
  T* keys;          // [slots, kv_heads, max_length, dim], `slot` elements from one slot to the next
  T* values;
  T* out;           // [tokens, heads dim]
  const float* cosines;  // [slots, max_length, dim / 2], `table` elements from one slot to the next
  const float* sines;
  const float* query_norm;  // [dim], or null
  const float* key_norm;
  float eps, scale, cap;  // of norms; factor of scores; c in c tanh(score / c), or 0
  int64_t heads, kv_heads, group, dim, max_length, window, slot, table;

  // Where a head's keys and values lie in the cache.
  int64_t place(int64_t own, int64_t head, int64_t position) const {
    return own * slot + (head * max_length + position) * dim;
  }
};

// Normalises (where the model has a norm) and rotates one head's vector at a position of a slot.
template <typename T>
void prepare(const Layer<T>& layer, const T* source, const float* norm, int64_t slot, int64_t position, float scale,
             float* target) {
  const int64_t dim = layer.dim, half = dim / 2;
  if (norm != nullptr) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < dim; ++i) squares += widen(source[i]) * widen(source[i]);
    const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(dim) + layer.eps);
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) target[i] = widen(source[i]) * inverse * norm[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) target[i] = widen(source[i]);
  }
  const float* cosines = layer.cosines + slot * layer.table + position * half;
  const float* sines = layer.sines + slot * layer.table + position * half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float first = target[i], second = target[i + half];
    target[i] = (first * cosines[i] - second * sines[i]) * scale;
    target[i + half] = (second * cosines[i] + first * sines[i]) * scale;
  }
}

// Writes the keys and values of a task's own tokens into the cache.
template <typename T>
void write(const Layer<T>& layer, const Task& task, float* scratch) {
  const int64_t dim = layer.dim, width = (layer.heads + 2 * layer.kv_heads) * dim;
  const int64_t place = layer.place(task.slot, task.head, task.position);
  for (int64_t i = 0; i < task.count; ++i) {
    const T* key = layer.qkv + (task.token + i) * width + (layer.heads + task.head) * dim;
    prepare(layer, key, layer.key_norm, task.slot, task.position + i, 1.0f, scratch);
    T* target = layer.keys + place + i * dim;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) narrow(scratch[d], target[d]);
    std::memcpy(layer.values + place + i * dim, key + layer.kv_heads * dim, dim * sizeof(T));
  }
}

// scores[k] = query . keys[k]
template <int64_t kDim>
void score(const float* query, const float* keys, int64_t runtime_dim, int64_t count, float* scores) {
  const int64_t dim = kDim ? kDim : runtime_dim;
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const float *a = keys + k * dim, *b = a + dim, *c = b + dim, *e = c + dim;
    float sa = 0.0f, sb = 0.0f, sc = 0.0f, se = 0.0f;
#pragma omp simd reduction(+ : sa, sb, sc, se)
    for (int64_t d = 0; d < dim; ++d) {
      sa += query[d] * a[d];
      sb += query[d] * b[d];
      sc += query[d] * c[d];
      se += query[d] * e[d];
    }
    scores[k] = sa, scores[k + 1] = sb, scores[k + 2] = sc, scores[k + 3] = se;
  }
  for (; k < count; ++k) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < dim; ++d) sum += query[d] * keys[k * dim + d];
    scores[k] = sum;
  }
}

// target = target * keep + sum over k of weights[k] values[k]
template <int64_t kDim>
void mix(const float* weights, const float* values, int64_t runtime_dim, int64_t count, float keep, float* target) {
  const int64_t dim = kDim ? kDim : runtime_dim;
  if (keep != 1.0f) {
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) target[d] *= keep;
  }
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const float *a = values + k * dim, *b = a + dim, *c = b + dim, *e = c + dim;
    const float wa = weights[k], wb = weights[k + 1], wc = weights[k + 2], we = weights[k + 3];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) target[d] += (wa * a[d] + wb * b[d]) + (wc * c[d] + we * e[d]);
  }
  for (; k < count; ++k) {
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) target[d] += weights[k] * values[k * dim + d];
  }
}

// Replaces scores x by cap tanh(x / cap).
inline void flatten(float* scores, int64_t count, float cap) {
  const float inverse = 1.0f / cap;
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) scores[k] = cap * tangent(scores[k] * inverse);
}

// Reads the lines of `count` elements into the cache.
template <typename T>
void fetch(const T* from, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i, 0, 2);
}

// As `score`, for keys in memory that only one query reads: widened in registers, while as many elements at `next` are
// fetched. `dim` is a multiple of wide::kLanes.
template <int64_t kDim, typename T>
void score_once(const float* query, const T* keys, int64_t runtime_dim, int64_t count, float* scores, const T* next) {
  using wide::load, wide::Wide;
  constexpr int64_t kLanes = wide::kLanes;
  const int64_t dim = kDim ? kDim : runtime_dim;
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const T* first = keys + k * dim;
    fetch(next + k * dim, 4 * dim);
    Wide sums[4] = {};
#pragma GCC unroll 8
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Wide own = load(query + d);
      for (int64_t i = 0; i < 4; ++i) sums[i] += own * load(first + i * dim + d);
    }
    wide::totals(sums[0], sums[1], sums[2], sums[3], scores + k);
  }
  for (; k < count; ++k) {
    fetch(next + k * dim, dim);
    Wide sum = {};
    for (int64_t d = 0; d < dim; d += kLanes) sum += load(query + d) * load(keys + k * dim + d);
    scores[k] = wide::total(sum);
  }
}

// As `mix`, under the same conditions.
template <int64_t kDim, typename T>
void mix_once(const float* weights, const T* values, int64_t runtime_dim, int64_t count, float keep, float* target,
              const T* next) {
  using wide::load, wide::Wide;
  constexpr int64_t kLanes = wide::kLanes;
  const int64_t dim = kDim ? kDim : runtime_dim;
  // The sums of so many vectors stay in registers over all values.
  constexpr int64_t kHeld = kDim && kDim % kLanes == 0 ? std::min<int64_t>(kDim / kLanes, 8) : 1;
  for (int64_t d = 0; d < dim; d += kHeld * kLanes) {
    Wide sums[kHeld];
    for (int64_t i = 0; i < kHeld; ++i) sums[i] = load(target + d + i * kLanes) * keep;
    for (int64_t k = 0; k < count; ++k) {
      if (d == 0) fetch(next + k * dim, dim);
      for (int64_t i = 0; i < kHeld; ++i) sums[i] += weights[k] * load(values + k * dim + d + i * kLanes);
    }
    for (int64_t i = 0; i < kHeld; ++i) wide::store(sums[i], target + d + i * kLanes);
  }
}

// Replaces scores by weights e^(score - best); returns their sum. `best` becomes the maximum so far; `keep` is the
// factor for the sums of earlier blocks.
inline float soften(float* scores, int64_t count, float& best, float& keep) {
  float top = best;
#pragma omp simd reduction(max : top)
  for (int64_t k = 0; k < count; ++k) top = std::max(top, scores[k]);
  keep = exponential(best - top);
  best = top;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < count; ++k) {
    scores[k] = exponential(scores[k] - top);
    sum += scores[k];
  }
  return sum;
}

inline const float* widened(const float* source, int64_t, float*) { return source; }

inline const float* widened(const BFloat* source, int64_t count, float* target) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) target[i] = widen(source[i]);
  return target;
}

// Working memory of one thread, for `rows` query rows.
struct Scratch {
  std::vector<float> memory;
  float *queries, *sums, *best, *total, *keys, *values, *scores;

  void fit(int64_t rows, int64_t dim, int64_t block) {
    const auto needed = static_cast<size_t>(rows * (2 * dim + 2) + block * (2 * dim + 1));
    if (memory.size() < needed) memory.resize(needed);
    queries = memory.data();
    sums = queries + rows * dim;
    best = sums + rows * dim;
    total = best + rows;
    keys = total + rows;
    values = keys + block * dim;
    scores = values + block * dim;
  }
};

// Causal attention of a task's queries over the slot's keys, with a running softmax from block to block.
template <typename T, int64_t kDim>
void attend(const Layer<T>& layer, const Task& task, Scratch& scratch) {
  const int64_t dim = kDim ? kDim : layer.dim, group = layer.group, rows = task.count * group;
  const int64_t width = (layer.heads + 2 * layer.kv_heads) * dim;
  const int64_t block = std::clamp<int64_t>(kBlockElements / dim, 16, 256);
  scratch.fit(rows, dim, block);
  for (int64_t row = 0; row < rows; ++row) {
    const T* source = layer.qkv + (task.token + row / group) * width + (task.head * group + row % group) * dim;
    prepare(layer, source, layer.query_norm, task.slot, task.position + row / group, layer.scale,
            scratch.queries + row * dim);
  }
  std::fill(scratch.sums, scratch.sums + rows * dim, 0.0f);
  std::fill(scratch.best, scratch.best + rows, -std::numeric_limits<float>::max());
  std::fill(scratch.total, scratch.total + rows, 0.0f);

  const int64_t reach = layer.window > 0 ? layer.window : layer.max_length;
  const int64_t end = task.position + task.count;
  const bool once = rows == 1 && dim % wide::kLanes == 0;
  for (int64_t from = std::max<int64_t>(0, task.position + 1 - reach); from < end; from += block) {
    const int64_t to = std::min(from + block, end);
    const T *keys = layer.keys + layer.place(task.slot, task.head, from), *values = layer.values + (keys - layer.keys);
    const auto each_row = [&](const auto& score_of, const auto& mix_of) {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t position = task.position + row / group;
        const int64_t first = std::max(from, position + 1 - reach), count = std::min(to, position + 1) - first;
        if (count <= 0) continue;
        float keep;
        score_of(scratch.queries + row * dim, (first - from) * dim, count);
        if (layer.cap > 0.0f) flatten(scratch.scores, count, layer.cap);
        const float sum = soften(scratch.scores, count, scratch.best[row], keep);
        scratch.total[row] = scratch.total[row] * keep + sum;
        mix_of((first - from) * dim, count, keep, scratch.sums + row * dim);
      }
    };
    if (once) {
      each_row([&](const float* query, int64_t at, int64_t count) {
        score_once<kDim>(query, keys + at, dim, count, scratch.scores, values + at);
      }, [&](int64_t at, int64_t count, float keep, float* target) {
        mix_once<kDim>(scratch.scores, values + at, dim, count, keep, target, keys + (to - from) * dim);
      });
      continue;
    }
    const float *wide_keys = widened(keys, (to - from) * dim, scratch.keys),
                *wide_values = widened(values, (to - from) * dim, scratch.values);
    each_row([&](const float* query, int64_t at, int64_t count) {
      score<kDim>(query, wide_keys + at, dim, count, scratch.scores);
    }, [&](int64_t at, int64_t count, float keep, float* target) {
      mix<kDim>(scratch.scores, wide_values + at, dim, count, keep, target);
    });
  }
  for (int64_t row = 0; row < rows; ++row) {
    T* target = layer.out + ((task.token + row / group) * layer.heads + task.head * group + row % group) * dim;
    const float inverse = 1.0f / scratch.total[row];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) narrow(scratch.sums[row * dim + d] * inverse, target[d]);
  }
}

template <typename T, int64_t kDim, typename Share>
void attend_all(const Layer<T>& layer, const Task* tasks, int64_t count, bool split, const Share& share) {
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
    attend<T, kDim>(layer, tasks[i], scratch);
  });
}

template <typename T, typename Share>
void attend_all(const Layer<T>& layer, const Task* tasks, int64_t count, bool split, const Share& share) {
  switch (layer.dim) {
    case 64: return attend_all<T, 64>(layer, tasks, count, split, share);
    case 128: return attend_all<T, 128>(layer, tasks, count, split, share);
    default: attend_all<T, 0>(layer, tasks, count, split, share);
  }
}

// ---------------------------------------------------------------- arguments

// Cache, positions and norms of one layer.
struct Held {
  at::Tensor keys, values, cosines, sines;
  std::optional<at::Tensor> query_norm, key_norm;
  double eps;
  int64_t window;
  double scale, cap;

  void check(at::ScalarType type) const {
    TORCH_CHECK(keys.dim() == 4 && keys.sizes() == values.sizes() && keys.strides() == values.strides(),
                "keys: must have 4 dimensions, values the same");
    // Each slot is contiguous; other layers' parts of the cache may lie between the slots.
    const int64_t dim = keys.size(3), length = keys.size(2);
    TORCH_CHECK(keys.scalar_type() == type && values.scalar_type() == type && keys.stride(3) == 1 &&
                    keys.stride(2) == dim && keys.stride(1) == length * dim &&
                    keys.stride(0) >= keys.size(1) * length * dim,
                "keys: must be of the type of qkv, as values are, and contiguous slot by slot");
    // The slots may share one table.
    for (const at::Tensor* table : {&cosines, &sines}) {
      TORCH_CHECK(table->scalar_type() == at::kFloat && table->dim() == 3 && table->size(0) == keys.size(0) &&
                      table->size(1) >= length && table->size(2) == dim / 2 && table->stride(2) == 1 &&
                      table->stride(1) == dim / 2 && table->stride(0) == cosines.stride(0),
                  "cosines: must be contiguous Float [slots, max_length, dim / 2], sines the same");
    }
    for (const auto* norm : {&query_norm, &key_norm}) {
      if (norm->has_value()) check_like(**norm, at::kFloat, "norm");
      TORCH_CHECK(!norm->has_value() || (*norm)->numel() == dim, "norm: must have head_dim elements");
    }
  }

  // The number of query heads in a row of `width` elements: queries, keys and values.
  int64_t heads(int64_t width) const {
    const int64_t dim = keys.size(3), kv_heads = keys.size(1);
    TORCH_CHECK(width % dim == 0, "qkv: must be [tokens, heads times dim]");
    TORCH_CHECK(width / dim % kv_heads == 0, "qkv: must hold a multiple of kv_heads");
    return width / dim - 2 * kv_heads;
  }

  // The arguments for attention of rows of `width` elements at `qkv`, into `out`.
  template <typename T>
  Layer<T> layer(int64_t width, const void* qkv, void* out) const {
    Layer<T> made;
    made.kv_heads = keys.size(1), made.max_length = keys.size(2), made.dim = keys.size(3);
    made.slot = keys.stride(0);
    made.heads = heads(width), made.group = made.heads / made.kv_heads;
    made.eps = static_cast<float>(eps), made.window = window;
    made.scale = static_cast<float>(scale), made.cap = static_cast<float>(cap), made.table = cosines.stride(0);
    made.qkv = static_cast<const T*>(qkv);
    made.keys = static_cast<T*>(keys.data_ptr());
    made.values = static_cast<T*>(values.data_ptr());
    made.out = static_cast<T*>(out);
    made.cosines = cosines.const_data_ptr<float>();
    made.sines = sines.const_data_ptr<float>();
    made.query_norm = query_norm ? query_norm->const_data_ptr<float>() : nullptr;
    made.key_norm = key_norm ? key_norm->const_data_ptr<float>() : nullptr;
    return made;
  }
};

// The tasks INT32 [tasks, 5] of a batch of `tokens` tokens, each checked to lie inside batch and cache.
inline const Task* checked(const at::Tensor& tasks, const Held& held, int64_t tokens) {
  check_like(tasks, at::kInt, "tasks");
  TORCH_CHECK(tasks.dim() == 2 && tasks.size(1) == kTaskFields, "tasks: must be [tasks, 5]");
  const int64_t slots = held.keys.size(0), kv_heads = held.keys.size(1), max_length = held.keys.size(2);
  const Task* list = reinterpret_cast<const Task*>(tasks.const_data_ptr<int32_t>());
  for (int64_t i = 0; i < tasks.size(0); ++i) {
    const Task& task = list[i];
    const bool inside = task.head >= 0 && task.head < kv_heads && task.slot >= 0 && task.slot < slots &&
                        task.position >= 0 && task.position + int64_t{task.count} <= max_length && task.token >= 0 &&
                        task.token + int64_t{task.count} <= tokens;
    TORCH_CHECK(inside, "attention: task ", i, " lies outside the cache or the batch");
  }
  return list;
}
