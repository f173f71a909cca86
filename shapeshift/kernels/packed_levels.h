// Linears over weights in levels, packed once, for rows of float or bfloat16.

#pragma once

#include <ATen/ops/zeros.h>

#include <array>

#include "linear_levels.h"
#include "packed.h"

// The levels [outputs, inputs] in panels, flat.
template <int64_t kBits>
at::Tensor pack_levels(const at::Tensor& levels) {
  check_like(levels, at::kByte, "levels", 2);
  TORCH_CHECK(levels.numel() > 0, "levels: must be [outputs, inputs]");
  Panels<Levels<kBits>> panels{};
  panels.inputs = levels.size(1), panels.outputs = levels.size(0);
  at::Tensor packed = reserve(panels.elements(), at::kByte);
  const auto* from = levels.const_data_ptr<uint8_t>();
  auto* to = packed.data_ptr<uint8_t>();
  share(panels.count(), [&](int64_t panel) { panels.pack(from, panel, to); });
  return packed;
}

// From [outputs, groups] to [panels, groups, kWide], with 0 where there is no output: scales, zeros or minima by panel.
inline at::Tensor by_panel(const at::Tensor& given) {
  TORCH_CHECK(given.dim() == 2, "values: must be [outputs, groups]");
  const int64_t outputs = given.size(0), panels = (outputs + kWide - 1) / kWide;
  at::Tensor padded = at::zeros({panels * kWide, given.size(1)}, given.options());
  padded.narrow(0, 0, outputs).copy_(given);
  return padded.view({panels, kWide, given.size(1)}).transpose(1, 2).contiguous();
}

// y = x weight^T + bias, where weight = scales (levels - zeros) + minima group by group, and x is quantised group by
// group.
template <int64_t kBits>
class Linear<Levels<kBits>> : public torch::CustomClassHolder {
  using Own = Panels<Levels<kBits>>;

 public:
  // packed: see `pack_levels`. scales and minima FLOAT32, zeros UINT8: see `by_panel`; bias FLOAT32 [outputs]. All are
  // only read. group: inputs of a group; 0: all. instructions: "tiles", "quads" or "plain"; "best": the fastest here.
  Linear(at::Tensor packed, int64_t inputs, int64_t outputs, at::Tensor scales, at::Tensor zeros,
         std::optional<at::Tensor> minima, int64_t group, std::optional<at::Tensor> bias,
         const std::string& instructions)
      : packed_(std::move(packed)), scales_(std::move(scales)), zeros_(std::move(zeros)), minima_(std::move(minima)) {
    check_like(packed_, at::kByte, "packed", 1);
    check_like(scales_, at::kFloat, "scales", 3), check_like(zeros_, at::kByte, "zeros", 3);
    panels_.outputs = outputs, panels_.inputs = inputs;
    TORCH_CHECK(inputs > 0 && inputs <= Own::kMostInputs, "levels: must have 1 to ", Own::kMostInputs, " inputs");
    TORCH_CHECK(packed_.numel() == panels_.elements(), "packed: must have ", panels_.elements(), " elements");
    TORCH_CHECK(group >= 0 && group % kPart == 0, "group: must be a multiple of ", kPart);
    panels_.group = group == 0 ? panels_.blocks() * kBlockInputs : group;
    const int64_t groups = panels_.groups();
    if (minima_) check_like(*minima_, at::kFloat, "minima", 3);
    const std::array<int64_t, 3> expected{panels_.count(), groups, kWide};
    for (const auto& [tensor, name] :
         {std::pair{scales_, "scales"}, std::pair{zeros_, "zeros"}, std::pair{minima_.value_or(scales_), "minima"}}) {
      TORCH_CHECK(tensor.sizes() == at::IntArrayRef(expected), name, ": must be ", at::IntArrayRef(expected));
    }
    const uint8_t* given = zeros_.const_data_ptr<uint8_t>();
    const bool fit = kBits == 8 || std::all_of(given, given + zeros_.numel(), [](uint8_t zero) { return zero <= 128; });
    TORCH_CHECK(fit, "zeros: must be at most 128 for levels of 4 bits, so that differences fit 8");
    if (bias) check_like(*bias, at::kFloat, "bias");
    TORCH_CHECK(!bias || bias->numel() == panels_.outputs, "bias: must have an element for each output");
    bias_ = std::move(bias);
    panels_.bias = bias_ ? bias_->const_data_ptr<float>() : nullptr;
    panels_.instructions = chosen(panels_, instructions);
    panels_.weights = packed_.const_data_ptr<uint8_t>();
    panels_.scales = scales_.const_data_ptr<float>(), panels_.zeros = zeros_.const_data_ptr<uint8_t>();
    panels_.minima = minima_ ? minima_->const_data_ptr<float>() : nullptr;
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
    const QuantisedRows quantised = memory.of(panels_.inputs, panels_.group);
    const auto* from = static_cast<const T*>(rows.const_data_ptr());
    share(count, [&](int64_t row) { quantise_row(from + row * panels_.inputs, quantised.from(row)); });
    multiply(panels_, quantised, count, static_cast<T*>(out.data_ptr()), Shared{});
    return out;
  }

  at::Tensor packed_, scales_, zeros_;
  std::optional<at::Tensor> minima_, bias_;
  Own panels_{};
};
