// Linears of float or bfloat16 over weights in panels, which `pack` makes.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <torch/custom_class.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "checks.h"
#include "linear_bf16.h"

constexpr size_t kHugePage = size_t{2} << 20;

// A tensor in memory aligned to huge pages, and made of them where the system has some: weights are read from front to
// back.
inline at::Tensor reserve(int64_t elements, at::ScalarType type) {
  void* memory = nullptr;
  const size_t bytes = elements * at::elementSize(type);
  TORCH_CHECK(posix_memalign(&memory, kHugePage, bytes) == 0, "weights: no memory for ", bytes, " bytes");
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return at::from_blob(memory, {elements}, [](void* own) { std::free(own); }, at::TensorOptions().dtype(type));
}

// The instructions of a name of `Panels::kNames`, or, for "best", the fastest here.
template <typename Own>
Instructions chosen(const Own& panels, const std::string& wanted) {
  const Instructions best = panels.best();
  for (int name = 0; name <= static_cast<int>(best); ++name) {
    if (wanted == Own::kNames[name]) return static_cast<Instructions>(name);
  }
  TORCH_CHECK(wanted == "best", "instructions: ", wanted, ": this CPU, or this number of inputs, has none such");
  return best;
}

// What every linear takes.
template <typename T>
int64_t checked_rows(const at::Tensor& rows, int64_t inputs) {
  check_like(rows, kType<T>, "rows");
  TORCH_CHECK(rows.dim() == 2 && rows.size(1) == inputs, "rows: must be [rows, ", inputs, "]");
  return rows.size(0);
}

// The weights [outputs, inputs] in panels, flat.
template <typename T>
at::Tensor pack(const at::Tensor& weight) {
  check_like(weight, kType<T>, "weight");
  TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0, "weight: must be [outputs, inputs]");
  Panels<T> panels{};
  panels.inputs = weight.size(1), panels.outputs = weight.size(0);
  at::Tensor packed = reserve(panels.elements(), kType<T>);
  const auto* from = static_cast<const T*>(weight.const_data_ptr());
  auto* to = static_cast<T*>(packed.data_ptr());
  share(panels.count(), [&](int64_t panel) { panels.pack(from, panel, to); });
  return packed;
}

// As `pack`, of a weight of either type.
inline at::Tensor packed_weight(const at::Tensor& weight) {
  return weight.scalar_type() == at::kFloat ? pack<float>(weight) : pack<BFloat>(weight);
}

// y = x weight^T + bias.
template <typename T>
class Linear : public torch::CustomClassHolder {
 public:
  // packed: see `pack`; it is only read. instructions: "tiles", "pairs" or "plain" for bfloat16; "best": the fastest
  // here.
  Linear(at::Tensor packed, int64_t inputs, int64_t outputs, std::optional<at::Tensor> bias,
         const std::string& instructions)
      : packed_(std::move(packed)) {
    TORCH_CHECK(inputs > 0 && outputs > 0, "weight: must be [outputs, inputs]");
    panels_.inputs = inputs, panels_.outputs = outputs;
    check_like(packed_, kType<T>, "packed", 1);
    TORCH_CHECK(packed_.numel() == panels_.elements(), "packed: must have ", panels_.elements(), " elements");
    if (bias) check_like(*bias, kType<T>, "bias");
    TORCH_CHECK(!bias || bias->numel() == outputs, "bias: must have an element for each output");
    if (bias) bias_ = bias->to(at::kFloat);
    panels_.bias = bias_ ? bias_->const_data_ptr<float>() : nullptr;
    if constexpr (std::is_same_v<T, BFloat>) panels_.instructions = chosen(panels_, instructions);
    panels_.weights = static_cast<const T*>(packed_.const_data_ptr());
  }

  const Panels<T>& panels() const { return panels_; }

  at::Tensor forward(const at::Tensor& rows) const {
    const int64_t count = checked_rows<T>(rows, panels_.inputs);
    at::Tensor out = at::empty({count, panels_.outputs}, rows.options());
    multiply(panels_, static_cast<const T*>(rows.const_data_ptr()), count, static_cast<T*>(out.data_ptr()), Shared{});
    return out;
  }

  // The name of the instructions that multiply.
  std::string instructions() const {
    if constexpr (std::is_same_v<T, BFloat>) return Panels<T>::kNames[static_cast<int>(panels_.instructions)];
    return "plain";
  }

 private:
  at::Tensor packed_;
  std::optional<at::Tensor> bias_;
  Panels<T> panels_{};
};

template <typename T>
using LinearPointer = c10::intrusive_ptr<Linear<T>>;
