// Linears of float or bfloat16 over a copy of their weights in panels.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <torch/custom_class.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "checks.h"
#include "linear_bf16.h"

constexpr size_t kHugePage = size_t{2} << 20;

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory aligned to huge pages, and made of them where the system has some: weights are read from front to back.
template <typename T>
std::unique_ptr<T, Freed> reserve(int64_t elements) {
  void* memory = nullptr;
  const size_t bytes = elements * sizeof(T);
  TORCH_CHECK(posix_memalign(&memory, kHugePage, bytes) == 0, "weights: no memory for ", bytes, " bytes");
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return std::unique_ptr<T, Freed>(static_cast<T*>(memory));
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

// y = x weight^T + bias, over a copy of the weights in panels.
template <typename T>
class Linear : public torch::CustomClassHolder {
 public:
  // instructions: "tiles", "pairs" or "plain" for bfloat16; "best": the fastest here.
  Linear(const at::Tensor& weight, std::optional<at::Tensor> bias, const std::string& instructions) {
    check_like(weight, kType<T>, "weight");
    TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0, "weight: must be [outputs, inputs]");
    if (bias) check_like(*bias, kType<T>, "bias");
    TORCH_CHECK(!bias || bias->numel() == weight.size(0), "bias: must have an element for each output");
    if (bias) bias_ = bias->to(at::kFloat);
    panels_.bias = bias_ ? bias_->const_data_ptr<float>() : nullptr;
    panels_.inputs = weight.size(1), panels_.outputs = weight.size(0);
    if constexpr (std::is_same_v<T, BFloat>) panels_.instructions = chosen(panels_, instructions);
    weights_ = reserve<T>(panels_.elements());
    panels_.weights = weights_.get();
    const auto* from = static_cast<const T*>(weight.const_data_ptr());
    share(panels_.count(), [&](int64_t panel) { panels_.pack(from, panel, weights_.get()); });
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
  std::optional<at::Tensor> bias_;
  std::unique_ptr<T, Freed> weights_;
  Panels<T> panels_{};
};

template <typename T>
using LinearPointer = c10::intrusive_ptr<Linear<T>>;
