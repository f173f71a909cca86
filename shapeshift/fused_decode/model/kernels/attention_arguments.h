// The arguments of attention: tensors, checked.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <vector>

#include "attention.h"
#include "checks.h"

// Cache, positions and norms of one layer.
struct Held {
  at::Tensor keys, values;
  std::optional<at::Tensor> key_scales, value_scales;
  at::Tensor cosines, sines;
  std::optional<at::Tensor> query_norm, key_norm;
  double eps;
  int64_t window;
  double scale, cap;
  std::optional<at::Tensor> sinks = std::nullopt;
  bool norm_last = false, chunked = false;
  bool gated = false;  // whether rows end with a gate of each head's output

  void check(at::ScalarType type) const {
    TORCH_CHECK(keys.dim() == 4 && keys.sizes() == values.sizes() && keys.strides() == values.strides(),
                "keys: must have 4 dimensions, values the same");
    // Each head's part of a block is contiguous; scales, and other layers' parts of the cache, may lie between them.
    const int64_t dim = keys.size(3), length = keys.size(2);
    TORCH_CHECK(keys.scalar_type() == values.scalar_type() && keys.stride(3) == 1 && keys.stride(2) == dim &&
                    keys.stride(1) >= length * dim && keys.stride(0) >= keys.size(1) * keys.stride(1),
                "keys: must be of the type of values, and contiguous head by head");
    TORCH_CHECK(keys.scalar_type() == (in_levels() ? at::kChar : type),
                "keys: must be of the type of qkv, or Char with scales");
    for (const auto* scales : {&key_scales, &value_scales}) {
      TORCH_CHECK(scales->has_value() == in_levels(), "key_scales and value_scales: both or none");
      if (!in_levels()) continue;
      const at::Tensor& own = **scales;
      TORCH_CHECK(own.scalar_type() == at::kFloat && own.sizes() == keys.sizes().slice(0, 3) && own.stride(2) == 1 &&
                      own.strides() == key_scales->strides(),
                  "key_scales: must be Float [blocks, kv_heads, length], value_scales the same");
    }
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

  // Whether the cache holds levels of 8 bits.
  bool in_levels() const { return key_scales.has_value(); }

  // The number of query heads in a row of `width` elements: queries, keys and values, and gates where there are some.
  int64_t heads(int64_t width) const {
    const int64_t dim = keys.size(3), kv_heads = keys.size(1);
    TORCH_CHECK(width % dim == 0, "qkv: must be [tokens, heads times dim]");
    const int64_t rest = width / dim - 2 * kv_heads, queries = gated ? rest / 2 : rest;
    TORCH_CHECK(queries % kv_heads == 0 && (!gated || rest % 2 == 0), "qkv: must hold a multiple of kv_heads");
    return queries;
  }

  // The arguments for attention of rows of `width` elements at `qkv`, into `out`; blocks: see `check_tasks`.
  template <typename T, typename C>
  Layer<T, C> layer(int64_t width, const void* qkv, void* out, const at::Tensor& blocks) const {
    Layer<T, C> made{};
    made.kv_heads = keys.size(1), made.length = keys.size(2), made.dim = keys.size(3);
    made.vectors = {keys.stride(0), keys.stride(1)};
    if (in_levels()) {
      made.scales = {key_scales->stride(0), key_scales->stride(1)};
      made.key_scales = key_scales->data_ptr<float>(), made.value_scales = value_scales->data_ptr<float>();
    }
    made.blocks = blocks.const_data_ptr<int32_t>(), made.row_blocks = blocks.size(1);
    made.width = width, made.gated = gated;
    made.heads = heads(width), made.group = made.heads / made.kv_heads;
    made.norm_last = norm_last, made.chunked = chunked, made.eps = static_cast<float>(eps), made.window = window;
    made.scale = static_cast<float>(scale), made.cap = static_cast<float>(cap), made.table = cosines.stride(0);
    made.qkv = static_cast<const T*>(qkv);
    made.keys = static_cast<C*>(keys.data_ptr());
    made.values = static_cast<C*>(values.data_ptr());
    made.out = static_cast<T*>(out);
    made.cosines = cosines.const_data_ptr<float>();
    made.sines = sines.const_data_ptr<float>();
    made.query_norm = query_norm ? query_norm->const_data_ptr<float>() : nullptr;
    made.key_norm = key_norm ? key_norm->const_data_ptr<float>() : nullptr;
    if (sinks) {
      check_like(*sinks, at::kFloat, "sinks");
      TORCH_CHECK(sinks->numel() == made.heads, "sinks: must have an element for each head");
      made.sinks = sinks->const_data_ptr<float>();
    }
    return made;
  }
};

constexpr int32_t kTaskTokens = wide::kLanes == 16 ? 64 : 128;  // of a prefill task

// The tasks of a step: prefill tiles first, since they take longest, then single tokens head by head. The queries of one
// tile, and those of one key-value head's group, read keys and values together.
inline void plan_tasks(const at::Tensor& slots, const at::Tensor& starts, const at::Tensor& lengths, int64_t kv_heads,
                       std::vector<Task>& tasks) {
  check_like(slots, at::kInt, "slots"), check_like(starts, at::kInt, "starts");
  check_like(lengths, at::kInt, "lengths");
  const int64_t rows = slots.numel();
  TORCH_CHECK(starts.numel() == rows && lengths.numel() == rows, "slots, starts and lengths: must be as many");
  const auto *slot = slots.const_data_ptr<int32_t>(), *start = starts.const_data_ptr<int32_t>();
  const auto* length = lengths.const_data_ptr<int32_t>();
  tasks.clear();
  for (const bool single : {false, true}) {
    for (int32_t head = 0; head < kv_heads; ++head) {
      int32_t token = 0;
      for (int64_t row = 0; row < rows; token += length[row++]) {
        if ((length[row] == 1) != single) continue;
        for (int32_t done = 0; done < length[row]; done += kTaskTokens) {
          const int32_t count = std::min(kTaskTokens, length[row] - done);
          tasks.push_back({head, slot[row], static_cast<int32_t>(row), start[row] + done, token + done, count});
        }
      }
    }
  }
}

// The tasks in INT32 [tasks, 6].
inline std::span<const Task> tasks_of(const at::Tensor& tasks) {
  check_like(tasks, at::kInt, "tasks");
  TORCH_CHECK(tasks.dim() == 2 && tasks.size(1) == kTaskFields, "tasks: must be [tasks, ", kTaskFields, "]");
  return {reinterpret_cast<const Task*>(tasks.const_data_ptr<int32_t>()), static_cast<size_t>(tasks.size(0))};
}

// Checks that the tasks of a batch of `tokens` tokens lie inside batch and cache.
// blocks: INT32 [rows, most blocks of a row], the blocks of each row's text in order.
inline void check_tasks(std::span<const Task> tasks, const at::Tensor& blocks, const Held& held, int64_t tokens) {
  check_like(blocks, at::kInt, "blocks", 2);
  const int64_t kv_heads = held.keys.size(1), slots = held.cosines.size(0), rows = blocks.size(0);
  const int64_t longest = std::min(blocks.size(1) * held.keys.size(2), held.cosines.size(1));
  for (const Task& task : tasks) {
    const bool inside = task.head >= 0 && task.head < kv_heads && task.slot >= 0 && task.slot < slots &&
                        task.row >= 0 && task.row < rows && task.position >= 0 &&
                        task.position + int64_t{task.count} <= longest && task.token >= 0 &&
                        task.token + int64_t{task.count} <= tokens;
    TORCH_CHECK(inside, "attention: task ", &task - tasks.data(), " lies outside the cache or the batch");
  }
  check_below<int32_t>(blocks, held.keys.size(0), "blocks");
}

// `attend_all` of rows of `width` elements at `qkv`, into `out`, by tasks that `check_tasks` has seen.
template <typename T, typename Share>
void attend_all(const Held& held, int64_t width, const void* qkv, void* out, std::span<const Task> tasks,
                const at::Tensor& blocks, bool split, const Share& share) {
  const auto count = static_cast<int64_t>(tasks.size());
  const auto run = [&](const auto& layer) { attend_all(layer, tasks.data(), count, split, share); };
  if (held.in_levels()) {
    run(held.layer<T, int8_t>(width, qkv, out, blocks));
  } else {
    run(held.layer<T, T>(width, qkv, out, blocks));
  }
}
