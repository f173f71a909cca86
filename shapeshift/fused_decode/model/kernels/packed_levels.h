// Linears over weights in levels, packed once, for rows of float or bfloat16.

#pragma once

#include <ATen/ops/zeros.h>

#include "linear_levels.h"
#include "packed.h"

// y = x weight^T + bias, where weight = scales (levels - zeros) group by group, and x is quantised row by row.
template <int64_t kBits>
class Linear<Levels<kBits>> : public torch::CustomClassHolder {
  using Own = Panels<Levels<kBits>>;

 public:
  // levels and zeros UINT8, scales and bias FLOAT32: [outputs, inputs], [outputs, groups], [outputs, groups], [outputs].
  // group: inputs of a group; 0: all. instructions: "tiles", "quads" or "plain"; "best": the fastest here.
  Linear(const at::Tensor& levels, const at::Tensor& scales, const at::Tensor& zeros, int64_t group,
         std::optional<at::Tensor> bias, const std::string& instructions) {
    check_like(levels, at::kByte, "levels", 2), check_like(scales, at::kFloat, "scales", 2);
    check_like(zeros, at::kByte, "zeros", 2);
    TORCH_CHECK(levels.numel() > 0, "levels: must be [outputs, inputs]");
    panels_.outputs = levels.size(0), panels_.inputs = levels.size(1);
    TORCH_CHECK(panels_.inputs <= Own::kMostInputs, "levels: must have at most ", Own::kMostInputs, " inputs");
    TORCH_CHECK(group >= 0 && group % kPart == 0, "group: must be a multiple of ", kPart);
    panels_.group = group == 0 ? panels_.blocks() * kBlockInputs : group;
    const int64_t groups = panels_.groups();
    for (const auto& [tensor, name] : {std::pair{scales, "scales"}, std::pair{zeros, "zeros"}}) {
      const bool fits = tensor.size(0) == panels_.outputs && tensor.size(1) == groups;
      TORCH_CHECK(fits, name, ": must be [", panels_.outputs, ", ", groups, "]");
    }
    if (bias) check_like(*bias, at::kFloat, "bias");
    TORCH_CHECK(!bias || bias->numel() == panels_.outputs, "bias: must have an element for each output");
    bias_ = std::move(bias);
    panels_.bias = bias_ ? bias_->const_data_ptr<float>() : nullptr;
    panels_.instructions = chosen(panels_, instructions);
    weights_ = reserve<uint8_t>(panels_.elements());
    panels_.weights = weights_.get();
    scales_ = by_panel(scales), zeros_ = by_panel(zeros);
    panels_.scales = scales_.const_data_ptr<float>(), panels_.zeros = zeros_.const_data_ptr<uint8_t>();
    const auto* from = levels.const_data_ptr<uint8_t>();
    share(panels_.count(), [&](int64_t panel) { panels_.pack(from, panel, weights_.get()); });
  }

  const Own& panels() const { return panels_; }

  at::Tensor forward(const at::Tensor& rows) const {
    return rows.scalar_type() == at::kFloat ? forward_of<float>(rows) : forward_of<BFloat>(rows);
  }

  std::string instructions() const { return Own::kNames[static_cast<int>(panels_.instructions)]; }

 private:
  template <typename T>
  at::Tensor forward_of(const at::Tensor& rows) const {
    const int64_t count = checked_rows<T>(rows, panels_.inputs);
    at::Tensor out = at::empty({count, panels_.outputs}, rows.options());
    QuantisedMemory memory;
    memory.fit(count, panels_.inputs);
    const QuantisedRows quantised = memory.of(panels_.inputs);
    const auto* from = static_cast<const T*>(rows.const_data_ptr());
    share(count, [&](int64_t row) { quantise_row(from + row * panels_.inputs, quantised.from(row)); });
    multiply(panels_, quantised, count, static_cast<T*>(out.data_ptr()), Shared{});
    return out;
  }

  // From [outputs, groups] to [panels, groups, kWide], with 0 where there is no output.
  at::Tensor by_panel(const at::Tensor& given) const {
    at::Tensor padded = at::zeros({panels_.count() * kWide, given.size(1)}, given.options());
    padded.narrow(0, 0, panels_.outputs).copy_(given);
    return padded.view({panels_.count(), kWide, given.size(1)}).transpose(1, 2).contiguous();
  }

  std::optional<at::Tensor> bias_;
  at::Tensor scales_, zeros_;
  std::unique_ptr<uint8_t, Freed> weights_;
  Own panels_{};
};
