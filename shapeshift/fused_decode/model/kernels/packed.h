// Linears of float over a copy of their weights in panels.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <torch/custom_class.h>

#include <cstdlib>
#include <memory>
#include <optional>

#include "checks.h"
#include "linear.h"

constexpr size_t kHugePage = size_t{2} << 20;

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory aligned to huge pages, and made of them where the system has some: weights are read from front to back.
inline std::unique_ptr<float, Freed> reserve(int64_t elements) {
  void* memory = nullptr;
  const size_t bytes = elements * sizeof(float);
  TORCH_CHECK(posix_memalign(&memory, kHugePage, bytes) == 0, "weights: no memory for ", bytes, " bytes");
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return std::unique_ptr<float, Freed>(static_cast<float*>(memory));
}

// y = x weight^T + bias, over a copy of the weights in panels.
class Linear : public torch::CustomClassHolder {
 public:
  Linear(const at::Tensor& weight, std::optional<at::Tensor> bias) : bias_(std::move(bias)) {
    check_like(weight, at::kFloat, "weight");
    TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0, "weight: must be [outputs, inputs]");
    if (bias_) check_like(*bias_, at::kFloat, "bias");
    TORCH_CHECK(!bias_ || bias_->numel() == weight.size(0), "bias: must have an element for each output");
    panels_ = {nullptr, bias_ ? bias_->const_data_ptr<float>() : nullptr, weight.size(1), weight.size(0)};
    weights_ = reserve(panels_.count() * panels_.inputs * kPanel);
    panels_.weights = weights_.get();
    const float* from = weight.const_data_ptr<float>();
    share(panels_.count(), [&](int64_t panel) { pack(from, panel); });
  }

  const Panels& panels() const { return panels_; }

  at::Tensor forward(const at::Tensor& rows) const {
    check_like(rows, at::kFloat, "rows");
    TORCH_CHECK(rows.dim() == 2 && rows.size(1) == panels_.inputs, "rows: must be [rows, ", panels_.inputs, "]");
    at::Tensor out = at::empty({rows.size(0), panels_.outputs}, rows.options());
    multiply(panels_, rows.const_data_ptr<float>(), rows.size(0), out.data_ptr<float>(), Shared{});
    return out;
  }

 private:
  void pack(const float* from, int64_t panel) {
    float* target = weights_.get() + panel * panels_.inputs * kPanel;
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t output = panel * kPanel + lane;
      for (int64_t input = 0; input < panels_.inputs; ++input) {
        target[input * kPanel + lane] = output < panels_.outputs ? from[output * panels_.inputs + input] : 0.0f;
      }
    }
  }

  std::optional<at::Tensor> bias_;
  std::unique_ptr<float, Freed> weights_;
  Panels panels_;
};

using LinearPointer = c10::intrusive_ptr<Linear>;
