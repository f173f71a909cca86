// The decode step's CPU kernels as operators: attention, norm with residual, activation.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "attention_arguments.h"
#include "rows.h"

namespace {

using at::Tensor;

constexpr int64_t kNormSerial = 65536;  // elements below which waking a second thread costs more than it saves
constexpr int64_t kGateSerial = 16384;

Tensor attention(const Tensor& qkv, Tensor keys, Tensor values, std::optional<Tensor> key_scales,
                 std::optional<Tensor> value_scales, const Tensor& cosines, const Tensor& sines, const Tensor& tasks,
                 const Tensor& blocks, const std::optional<Tensor>& query_norm,
                 const std::optional<Tensor>& key_norm, double eps, int64_t window, double scale, double cap,
                 bool split, const std::optional<Tensor>& sinks, bool norm_last, bool chunked, bool gated) {
  const Held held{keys,   values, key_scales, value_scales, cosines, sines,     query_norm, key_norm,
                  eps,    window, scale,      cap,          sinks,   norm_last, chunked,    gated};
  const auto type = qkv.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "qkv: must be float or bfloat16");
  TORCH_CHECK(qkv.dim() == 2, "qkv: must be [tokens, heads times dim]");
  check_like(qkv, type, "qkv");
  held.check(type);
  const std::span<const Task> list = tasks_of(tasks);
  check_tasks(list, blocks, held, qkv.size(0));
  const int64_t width = qkv.size(1);
  Tensor out = at::empty({qkv.size(0), held.heads(width) * keys.size(3)}, qkv.options());
  if (type == at::kFloat) {
    attend_all<float>(held, width, qkv.const_data_ptr(), out.data_ptr(), list, blocks, split, Shared{});
  } else {
    attend_all<BFloat>(held, width, qkv.const_data_ptr(), out.data_ptr(), list, blocks, split, Shared{});
  }
  return out;
}

// The tasks of a step, INT32 [tasks, 6], as `plan_tasks` has them.
Tensor plan(const Tensor& slots, const Tensor& starts, const Tensor& lengths, int64_t kv_heads) {
  std::vector<Task> tasks;
  plan_tasks(slots, starts, lengths, kv_heads, tasks);
  Tensor out = at::empty({static_cast<int64_t>(tasks.size()), kTaskFields}, slots.options());
  if (!tasks.empty()) std::memcpy(out.data_ptr<int32_t>(), tasks.data(), tasks.size() * sizeof(Task));
  return out;
}

template <typename T>
void add_norm_of(float* state, const void* delta, const float* weight, double eps, int64_t rows, int64_t width,
                 void* out) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kNormSerial / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* added = delta == nullptr ? nullptr : static_cast<const T*>(delta) + row * width;
      T* target = static_cast<T*>(out) + row * width;
      add_norm_row(state + row * width, added, weight, static_cast<float>(eps), width, target);
    }
  });
}

// state += delta, where there is one; returns the RMS norm of state as `type`.
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
    add_norm_of<float>(own, added, scale, eps, rows, width, out.data_ptr());
  } else {
    add_norm_of<BFloat>(own, added, scale, eps, rows, width, out.data_ptr());
  }
  return out;
}

template <typename T>
void activate_of(Activation activation, bool gated, const T* both, int64_t rows, int64_t width, T* out) {
  const int64_t stride = gated ? 2 * width : width;
  at::parallel_for(0, rows, std::max<int64_t>(1, kGateSerial / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      activate_row(activation, gated, both + row * stride, width, out + row * width);
    }
  });
}

// The activations of each row; gated: of its first half, times its second half.
Tensor activate(const Tensor& both, int64_t activation, bool gated) {
  check_like(both, both.scalar_type(), "both", 2);
  TORCH_CHECK(!gated || both.size(1) % 2 == 0, "both: must be [tokens, twice the width]");
  TORCH_CHECK(activation >= 0 && activation <= static_cast<int64_t>(Activation::kTanh), "activation: must be one");
  const int64_t rows = both.size(0), width = both.size(1) / (gated ? 2 : 1);
  const auto kind = static_cast<Activation>(activation);
  Tensor out = at::empty({rows, width}, both.options());
  if (both.scalar_type() == at::kFloat) {
    activate_of(kind, gated, both.const_data_ptr<float>(), rows, width, out.data_ptr<float>());
  } else {
    TORCH_CHECK(both.scalar_type() == at::kBFloat16, "both: must be float or bfloat16");
    const auto* given = static_cast<const BFloat*>(both.const_data_ptr());
    activate_of(kind, gated, given, rows, width, static_cast<BFloat*>(out.data_ptr()));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(shapeshift_decode, library) {
  library.def("plan(Tensor slots, Tensor starts, Tensor lengths, int kv_heads) -> Tensor");
  library.def(
      "attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? key_scales, Tensor(d!)? value_scales, "
      "Tensor cosines, Tensor sines, Tensor tasks, Tensor blocks, Tensor? query_norm, "
      "Tensor? key_norm, float eps, int window, float scale, float cap, bool split, Tensor? sinks=None, "
      "bool norm_last=False, bool chunked=False, bool gated=False) -> Tensor");
  library.def("add_norm(Tensor(a!) state, Tensor? delta, Tensor weight, float eps, ScalarType type) -> Tensor");
  library.def("activate(Tensor both, int activation, bool gated) -> Tensor");
}

TORCH_LIBRARY_IMPL(shapeshift_decode, CPU, library) {
  library.impl("plan", &plan);
  library.impl("attention", &attention);
  library.impl("add_norm", &add_norm);
  library.impl("activate", &activate);
}
