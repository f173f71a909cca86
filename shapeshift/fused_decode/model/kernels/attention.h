// Attention over blocks of a cache, with rotary positions and cache write. Storage is float or bfloat16, arithmetic is
// float. The compiler vectorises the loops over elements: without intrinsics, one source serves every vector width.

#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "checks.h"
#include "wide.h"

constexpr int64_t kChunkElements = 4096;  // of keys that are scored, normalised and mixed together
constexpr int64_t kMostChunk = 256;       // tokens of these
constexpr int64_t kGrain = 16;            // tokens; every block and every chunk is a multiple of it
constexpr int64_t kFew = 16;              // tokens of a row that verifies proposals, at most

// One tile of queries: `count` tokens of one row under one key-value head. Of its slot are the rotary tables.
struct Task {
  int32_t head, slot, row, position, token, count;
};

constexpr int64_t kTaskFields = sizeof(Task) / sizeof(int32_t);

// Positions of a text that lie in one block, and where a head's keys and values of the first one lie in the cache.
struct Part {
  int64_t first, count, place;
};

template <typename T>
struct Layer {
  const T* qkv;     // [tokens, (heads + 2 kv_heads) dim]
  T* keys;          // [blocks, kv_heads, length, dim], `block` elements from one block to the next
  T* values;
  T* out;           // [tokens, heads dim]
  const int32_t* blocks;  // [rows, row_blocks]: the blocks of each row's text
  const float* cosines;  // [slots, max_length, dim / 2], `table` elements from one slot to the next
  const float* sines;
  const float* query_norm;  // [dim], or null
  const float* key_norm;
  float eps, scale, cap;  // of norms; factor of scores; c in c tanh(score / c), or 0
  int64_t heads, kv_heads, group, dim, length, row_blocks, window, block, table;

  // Where the keys and values of a position of a task's text lie in the cache.
  int64_t place(const Task& task, int64_t position) const {
    const int64_t own = blocks[task.row * row_blocks + position / length];
    return own * block + (task.head * length + position % length) * dim;
  }
};

// The positions [from, to) of a task's text, at most kMostChunk, block by block.
struct Parts {
  std::array<Part, kMostChunk / kGrain + 1> all;
  int64_t count = 0;

  template <typename T>
  Parts(const Layer<T>& layer, const Task& task, int64_t from, int64_t to) {
    for (int64_t at = from; at < to; at += all[count++].count) {
      all[count] = {at, std::min(to - at, layer.length - at % layer.length), layer.place(task, at)};
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
  for (int64_t i = 0; i < task.count; ++i) {
    const T* key = layer.qkv + (task.token + i) * width + (layer.heads + task.head) * dim;
    const int64_t place = layer.place(task, task.position + i);
    prepare(layer, key, layer.key_norm, task.slot, task.position + i, 1.0f, scratch);
    T* target = layer.keys + place;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) narrow(scratch[d], target[d]);
    std::memcpy(layer.values + place, key + layer.kv_heads * dim, dim * sizeof(T));
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
// factor for the sums of earlier chunks.
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

  void fit(int64_t rows, int64_t dim, int64_t chunk) {
    const auto needed = static_cast<size_t>(rows * (2 * dim + 2) + chunk * (2 * dim + 1));
    if (memory.size() < needed) memory.resize(needed);
    queries = memory.data();
    sums = queries + rows * dim;
    best = sums + rows * dim;
    total = best + rows;
    keys = total + rows;
    values = keys + chunk * dim;
    scores = values + chunk * dim;
  }
};

// Causal attention of a task's queries over the keys of its text, with a running softmax from chunk to chunk.
template <typename T, int64_t kDim>
void attend(const Layer<T>& layer, const Task& task, Scratch& scratch) {
  const int64_t dim = kDim ? kDim : layer.dim, group = layer.group, rows = task.count * group;
  const int64_t width = (layer.heads + 2 * layer.kv_heads) * dim;
  const int64_t chunk = std::clamp<int64_t>(kChunkElements / dim / kGrain * kGrain, kGrain, kMostChunk);
  scratch.fit(rows, dim, chunk);
  for (int64_t row = 0; row < rows; ++row) {
    const T* source = layer.qkv + (task.token + row / group) * width + (task.head * group + row % group) * dim;
    prepare(layer, source, layer.query_norm, task.slot, task.position + row / group, layer.scale,
            scratch.queries + row * dim);
  }
  std::fill(scratch.sums, scratch.sums + rows * dim, 0.0f);
  std::fill(scratch.best, scratch.best + rows, -std::numeric_limits<float>::max());
  std::fill(scratch.total, scratch.total + rows, 0.0f);

  const int64_t end = task.position + task.count, reach = layer.window > 0 ? layer.window : end;
  const bool once = rows == 1 && dim % wide::kLanes == 0;
  for (int64_t from = std::max<int64_t>(0, task.position + 1 - reach); from < end; from += chunk) {
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
        if (layer.cap > 0.0f) flatten(scores, last - first, layer.cap);
        const float sum = soften(scores, last - first, scratch.best[row], keep);
        scratch.total[row] = scratch.total[row] * keep + sum;
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
        const int64_t next = part.first + chunk < end ? layer.place(task, part.first + chunk) : part.place;
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
  for (int64_t row = 0; row < rows; ++row) {
    T* target = layer.out + ((task.token + row / group) * layer.heads + task.head * group + row % group) * dim;
    const float inverse = 1.0f / scratch.total[row];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) narrow(scratch.sums[row * dim + d] * inverse, target[d]);
  }
}

// As `attend`, but a few tokens get the very results that they get one by one: the sums of a query that is alone, or that
// sees a window, are in another order than those of many.
template <typename T, int64_t kDim>
void attend_alike(const Layer<T>& layer, const Task& task, Scratch& scratch) {
  if (task.count > kFew || (layer.group > 1 && layer.window <= 0)) return attend<T, kDim>(layer, task, scratch);
  for (int32_t i = 0; i < task.count; ++i) {
    const Task one{task.head, task.slot, task.row, task.position + i, task.token + i, 1};
    attend<T, kDim>(layer, one, scratch);
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
    attend_alike<T, kDim>(layer, tasks[i], scratch);
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
    // Each block is contiguous; other layers' parts of the cache may lie between the blocks.
    const int64_t dim = keys.size(3), length = keys.size(2);
    TORCH_CHECK(keys.scalar_type() == type && values.scalar_type() == type && keys.stride(3) == 1 &&
                    keys.stride(2) == dim && keys.stride(1) == length * dim &&
                    keys.stride(0) >= keys.size(1) * length * dim,
                "keys: must be of the type of qkv, as values are, and contiguous block by block");
    TORCH_CHECK(length > 0 && length % kGrain == 0, "keys: must have blocks of a multiple of ", kGrain, " tokens");
    // The slots may share one table.
    for (const at::Tensor* table : {&cosines, &sines}) {
      TORCH_CHECK(table->scalar_type() == at::kFloat && table->dim() == 3 && table->sizes() == cosines.sizes() &&
                      table->size(2) == dim / 2 && table->stride(2) == 1 && table->stride(1) == dim / 2 &&
                      table->stride(0) == cosines.stride(0),
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

  // The arguments for attention of rows of `width` elements at `qkv`, into `out`; blocks: see `checked`.
  template <typename T>
  Layer<T> layer(int64_t width, const void* qkv, void* out, const at::Tensor& blocks) const {
    Layer<T> made;
    made.kv_heads = keys.size(1), made.length = keys.size(2), made.dim = keys.size(3);
    made.block = keys.stride(0);
    made.blocks = blocks.const_data_ptr<int32_t>(), made.row_blocks = blocks.size(1);
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

// The tasks INT32 [tasks, 6] of a batch of `tokens` tokens, each checked to lie inside batch and cache.
// blocks: INT32 [rows, most blocks of a row], the blocks of each row's text in order.
inline const Task* checked(const at::Tensor& tasks, const at::Tensor& blocks, const Held& held, int64_t tokens) {
  check_like(tasks, at::kInt, "tasks"), check_like(blocks, at::kInt, "blocks", 2);
  TORCH_CHECK(tasks.dim() == 2 && tasks.size(1) == kTaskFields, "tasks: must be [tasks, ", kTaskFields, "]");
  const int64_t kv_heads = held.keys.size(1), slots = held.cosines.size(0), rows = blocks.size(0);
  const int64_t longest = std::min(blocks.size(1) * held.keys.size(2), held.cosines.size(1));
  const auto* list = reinterpret_cast<const Task*>(tasks.const_data_ptr<int32_t>());
  for (int64_t i = 0; i < tasks.size(0); ++i) {
    const Task& task = list[i];
    const bool inside = task.head >= 0 && task.head < kv_heads && task.slot >= 0 && task.slot < slots &&
                        task.row >= 0 && task.row < rows && task.position >= 0 &&
                        task.position + int64_t{task.count} <= longest && task.token >= 0 &&
                        task.token + int64_t{task.count} <= tokens;
    TORCH_CHECK(inside, "attention: task ", i, " lies outside the cache or the batch");
  }
  const int32_t* numbers = blocks.const_data_ptr<int32_t>();
  const bool exist = std::all_of(numbers, numbers + blocks.numel(), [&](int32_t number) {
    return number >= 0 && number < held.keys.size(0);
  });
  TORCH_CHECK(exist, "blocks: must be 0 to ", held.keys.size(0) - 1);
  return list;
}
