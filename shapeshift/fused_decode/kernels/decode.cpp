// The decode step's kernels for CPUs: attention over slots with rotary positions and cache write, norm with
// residual, gate. Storage is float or bfloat16, arithmetic is float. The loops over elements are written for the
// compiler to vectorise: no intrinsics, so that one source serves every vector width.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <vector>

#include "common.h"

namespace {

using at::Tensor;

constexpr int64_t kBlockElements = 4096;  // of the keys that are scored, normalised and mixed together
constexpr int64_t kTileRows = 32;         // query rows (tokens times grouped heads) of a prefill task
constexpr int64_t kNormSerial = 65536;    // elements below which a second thread does not pay, for it must wake first
constexpr int64_t kGateSerial = 16384;

// ---------------------------------------------------------------- attention

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
  const float* cosines;  // [max_length, dim / 2]
  const float* sines;
  const float* query_norm;  // [dim], or null
  const float* key_norm;
  float eps;
  int64_t heads, kv_heads, group, dim, max_length, window, slot;

  // Where a head's keys and values lie in the cache.
  int64_t place(int64_t own, int64_t head, int64_t position) const {
    return own * slot + (head * max_length + position) * dim;
  }
};

// Norm (where the model has one) and rotation of one head's vector at a position.
template <typename T>
void prepare(const Layer<T>& layer, const T* source, const float* norm, int64_t position, float scale, float* target) {
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
  const float* cosines = layer.cosines + position * half;
  const float* sines = layer.sines + position * half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float first = target[i], second = target[i + half];
    target[i] = (first * cosines[i] - second * sines[i]) * scale;
    target[i + half] = (second * cosines[i] + first * sines[i]) * scale;
  }
}

// Keys and values of a task's own tokens into the cache.
template <typename T>
void write(const Layer<T>& layer, const Task& task, float* scratch) {
  const int64_t dim = layer.dim, width = (layer.heads + 2 * layer.kv_heads) * dim;
  const int64_t place = layer.place(task.slot, task.head, task.position);
  for (int64_t i = 0; i < task.count; ++i) {
    const T* key = layer.qkv + (task.token + i) * width + (layer.heads + task.head) * dim;
    prepare(layer, key, layer.key_norm, task.position + i, 1.0f, scratch);
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

// Weights e^(score - best) in place; returns their sum. `best` and `keep` take the block into account.
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

// Causal attention of a task's queries over the slot's keys, the softmax carried on from block to block.
template <typename T, int64_t kDim>
void attend(const Layer<T>& layer, const Task& task, Scratch& scratch) {
  const int64_t dim = kDim ? kDim : layer.dim, group = layer.group, rows = task.count * group;
  const int64_t width = (layer.heads + 2 * layer.kv_heads) * dim;
  const int64_t block = std::clamp<int64_t>(kBlockElements / dim, 16, 256);
  scratch.fit(rows, dim, block);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t row = 0; row < rows; ++row) {
    const T* source = layer.qkv + (task.token + row / group) * width + (task.head * group + row % group) * dim;
    prepare(layer, source, layer.query_norm, task.position + row / group, scale, scratch.queries + row * dim);
  }
  std::fill(scratch.sums, scratch.sums + rows * dim, 0.0f);
  std::fill(scratch.best, scratch.best + rows, -std::numeric_limits<float>::max());
  std::fill(scratch.total, scratch.total + rows, 0.0f);

  const int64_t reach = layer.window > 0 ? layer.window : layer.max_length;
  const int64_t end = task.position + task.count;
  for (int64_t from = std::max<int64_t>(0, task.position + 1 - reach); from < end; from += block) {
    const int64_t to = std::min(from + block, end);
    const float* keys = widened(layer.keys + layer.place(task.slot, task.head, from), (to - from) * dim, scratch.keys);
    const float* values = widened(layer.values + layer.place(task.slot, task.head, from), (to - from) * dim, scratch.values);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = task.position + row / group;
      const int64_t first = std::max(from, position + 1 - reach), count = std::min(to, position + 1) - first;
      if (count <= 0) continue;
      float keep;
      score<kDim>(scratch.queries + row * dim, keys + (first - from) * dim, dim, count, scratch.scores);
      const float sum = soften(scratch.scores, count, scratch.best[row], keep);
      scratch.total[row] = scratch.total[row] * keep + sum;
      mix<kDim>(scratch.scores, values + (first - from) * dim, dim, count, keep, scratch.sums + row * dim);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    T* target = layer.out + ((task.token + row / group) * layer.heads + task.head * group + row % group) * dim;
    const float inverse = 1.0f / scratch.total[row];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) narrow(scratch.sums[row * dim + d] * inverse, target[d]);
  }
}

template <typename T, int64_t kDim>
void attend_all(const Layer<T>& layer, const Task* tasks, int64_t count, bool split) {
  static thread_local Scratch scratch;
  if (split) {
    // A tile attends to keys that other tiles of its row write.
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

template <typename T>
Tensor attention_of(const Tensor& qkv, Tensor& keys, Tensor& values, const Tensor& cosines, const Tensor& sines,
                    const Tensor& tasks, const std::optional<Tensor>& query_norm,
                    const std::optional<Tensor>& key_norm, double eps, int64_t window, bool split) {
  Layer<T> layer;
  layer.kv_heads = keys.size(1), layer.max_length = keys.size(2), layer.dim = keys.size(3);
  layer.slot = keys.stride(0);
  layer.heads = qkv.size(1) / layer.dim - 2 * layer.kv_heads, layer.group = layer.heads / layer.kv_heads;
  layer.eps = static_cast<float>(eps), layer.window = window;
  Tensor out = at::empty({qkv.size(0), layer.heads * layer.dim}, qkv.options());
  layer.qkv = static_cast<const T*>(qkv.const_data_ptr());
  layer.keys = static_cast<T*>(keys.data_ptr());
  layer.values = static_cast<T*>(values.data_ptr());
  layer.out = static_cast<T*>(out.data_ptr());
  layer.cosines = cosines.const_data_ptr<float>();
  layer.sines = sines.const_data_ptr<float>();
  layer.query_norm = query_norm ? query_norm->const_data_ptr<float>() : nullptr;
  layer.key_norm = key_norm ? key_norm->const_data_ptr<float>() : nullptr;

  const Task* list = reinterpret_cast<const Task*>(tasks.const_data_ptr<int32_t>());
  for (int64_t i = 0; i < tasks.size(0); ++i) {
    const Task& task = list[i];
    const bool inside = task.head >= 0 && task.head < layer.kv_heads && task.slot >= 0 && task.slot < keys.size(0) &&
                        task.position >= 0 && task.position + int64_t{task.count} <= layer.max_length &&
                        task.token >= 0 && task.token + int64_t{task.count} <= qkv.size(0);
    TORCH_CHECK(inside, "attention: task ", i, " lies outside the cache or the batch");
  }
  switch (layer.dim) {
    case 64: attend_all<T, 64>(layer, list, tasks.size(0), split); break;
    case 128: attend_all<T, 128>(layer, list, tasks.size(0), split); break;
    default: attend_all<T, 0>(layer, list, tasks.size(0), split);
  }
  return out;
}

void check_like(const Tensor& tensor, at::ScalarType type, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous(), name, ": must be contiguous ", type);
}

Tensor attention(const Tensor& qkv, Tensor keys, Tensor values, const Tensor& cosines, const Tensor& sines,
                 const Tensor& tasks, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
                 double eps, int64_t window, bool split) {
  const auto type = qkv.scalar_type();
  check_like(qkv, type, "qkv");
  check_like(cosines, at::kFloat, "cosines"), check_like(sines, at::kFloat, "sines");
  check_like(tasks, at::kInt, "tasks");
  TORCH_CHECK(keys.dim() == 4 && keys.sizes() == values.sizes() && keys.strides() == values.strides(),
              "keys: must have 4 dimensions, values the same");
  // Each slot is contiguous; what other layers hold of it may lie between them.
  const int64_t dim = keys.size(3), length = keys.size(2);
  TORCH_CHECK(keys.scalar_type() == type && values.scalar_type() == type && keys.stride(3) == 1 &&
                  keys.stride(2) == dim && keys.stride(1) == length * dim && keys.stride(0) >= keys.size(1) * length * dim,
              "keys: must be of the type of qkv, as values are, and contiguous slot by slot");
  TORCH_CHECK(qkv.dim() == 2 && qkv.size(1) % keys.size(3) == 0, "qkv: must be [tokens, heads times dim]");
  TORCH_CHECK(qkv.size(1) / keys.size(3) % keys.size(1) == 0, "qkv: must hold a multiple of kv_heads");
  TORCH_CHECK(tasks.dim() == 2 && tasks.size(1) == kTaskFields, "tasks: must be [tasks, 5]");
  TORCH_CHECK(cosines.numel() >= keys.size(2) * keys.size(3) / 2 && sines.numel() == cosines.numel(),
              "cosines: must cover max_length positions");
  for (const auto* norm : {&query_norm, &key_norm}) {
    if (norm->has_value()) check_like(**norm, at::kFloat, "norm");
    TORCH_CHECK(!norm->has_value() || (*norm)->numel() == keys.size(3), "norm: must have head_dim elements");
  }
  if (type == at::kFloat) {
    return attention_of<float>(qkv, keys, values, cosines, sines, tasks, query_norm, key_norm, eps, window, split);
  }
  TORCH_CHECK(type == at::kBFloat16, "qkv: must be float or bfloat16");
  return attention_of<BFloat>(qkv, keys, values, cosines, sines, tasks, query_norm, key_norm, eps, window, split);
}

// The tasks of a step, INT32 [tasks, 5]: prefill tiles first, for they take longest, and single tokens head by head.
// Queries of one tile share what they read of keys and values; those of a key-value head's group always do.
Tensor plan(const Tensor& slots, const Tensor& starts, const Tensor& lengths, int64_t kv_heads, int64_t group) {
  check_like(slots, at::kInt, "slots"), check_like(starts, at::kInt, "starts"), check_like(lengths, at::kInt, "lengths");
  const int64_t rows = slots.numel();
  TORCH_CHECK(starts.numel() == rows && lengths.numel() == rows, "slots, starts and lengths: must be as many");
  const auto *slot = slots.const_data_ptr<int32_t>(), *start = starts.const_data_ptr<int32_t>();
  const auto* length = lengths.const_data_ptr<int32_t>();
  const auto tile = static_cast<int32_t>(std::max<int64_t>(1, kTileRows / group));
  std::vector<Task> tasks;
  tasks.reserve(rows * kv_heads);
  for (const bool single : {false, true}) {
    for (int32_t head = 0; head < kv_heads; ++head) {
      int32_t token = 0;
      for (int64_t row = 0; row < rows; token += length[row++]) {
        if ((length[row] == 1) != single) continue;
        for (int32_t done = 0; done < length[row]; done += tile) {
          const int32_t count = std::min(tile, length[row] - done);
          tasks.push_back({head, slot[row], start[row] + done, token + done, count});
        }
      }
    }
  }
  Tensor out = at::empty({static_cast<int64_t>(tasks.size()), kTaskFields}, slots.options());
  if (!tasks.empty()) std::memcpy(out.data_ptr<int32_t>(), tasks.data(), tasks.size() * sizeof(Task));
  return out;
}

// ---------------------------------------------------------------- norm and gate

template <typename T>
void add_norm_of(float* state, const T* delta, const float* weight, float eps, int64_t rows, int64_t width, T* out) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kNormSerial / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* own = state + row * width;
      float squares = 0.0f;
      if (delta != nullptr) {
        const T* added = delta + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) own[i] += widen(added[i]);
      }
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < width; ++i) squares += own[i] * own[i];
      const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
      T* target = out + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) narrow(own[i] * inverse * weight[i], target[i]);
    }
  });
}

// state += delta, where there is one; returns the RMS norm of state in the type of `like`.
Tensor add_norm(Tensor state, const std::optional<Tensor>& delta, const Tensor& weight, double eps,
                at::ScalarType type) {
  check_like(state, at::kFloat, "state"), check_like(weight, at::kFloat, "weight");
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "type: must be float or bfloat16");
  TORCH_CHECK(state.dim() == 2 && weight.numel() == state.size(1), "weight: must have the width of state");
  if (delta) check_like(*delta, type, "delta");
  TORCH_CHECK(!delta || delta->sizes() == state.sizes(), "delta: must have the shape of state");
  Tensor out = at::empty(state.sizes(), state.options().dtype(type));
  const void* added = delta ? delta->const_data_ptr() : nullptr;
  const int64_t rows = state.size(0), width = state.size(1);
  float* own = state.data_ptr<float>();
  const float* scale = weight.const_data_ptr<float>();
  if (type == at::kFloat) {
    add_norm_of(own, static_cast<const float*>(added), scale, eps, rows, width, out.data_ptr<float>());
  } else {
    add_norm_of(own, static_cast<const BFloat*>(added), scale, eps, rows, width, static_cast<BFloat*>(out.data_ptr()));
  }
  return out;
}

template <typename T>
void gate_of(const T* both, int64_t rows, int64_t width, T* out) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGateSerial / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *gates = both + 2 * row * width, *ups = gates + width;
      T* target = out + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float gate = widen(gates[i]);
        narrow(gate / (1.0f + exponential(-gate)) * widen(ups[i]), target[i]);
      }
    }
  });
}

// SiLU of the first half of each row times its second half.
Tensor gate(const Tensor& both) {
  check_like(both, both.scalar_type(), "both");
  TORCH_CHECK(both.dim() == 2 && both.size(1) % 2 == 0, "both: must be [tokens, twice the width]");
  const int64_t rows = both.size(0), width = both.size(1) / 2;
  Tensor out = at::empty({rows, width}, both.options());
  if (both.scalar_type() == at::kFloat) {
    gate_of(both.const_data_ptr<float>(), rows, width, out.data_ptr<float>());
  } else {
    TORCH_CHECK(both.scalar_type() == at::kBFloat16, "both: must be float or bfloat16");
    gate_of(static_cast<const BFloat*>(both.const_data_ptr()), rows, width, static_cast<BFloat*>(out.data_ptr()));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(shapeshift_decode, library) {
  library.def("plan(Tensor slots, Tensor starts, Tensor lengths, int kv_heads, int group) -> Tensor");
  library.def(
      "attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor cosines, Tensor sines, Tensor tasks, "
      "Tensor? query_norm, Tensor? key_norm, float eps, int window, bool split) -> Tensor");
  library.def("add_norm(Tensor(a!) state, Tensor? delta, Tensor weight, float eps, ScalarType type) -> Tensor");
  library.def("gate(Tensor both) -> Tensor");
}

TORCH_LIBRARY_IMPL(shapeshift_decode, CPU, library) {
  library.impl("plan", &plan);
  library.impl("attention", &attention);
  library.impl("add_norm", &add_norm);
  library.impl("gate", &gate);
}
