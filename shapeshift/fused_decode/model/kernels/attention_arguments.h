// The arguments of attention: tensors, checked.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "attention.h"
#include "checks.h"

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
