// Low-rank terms of many adapters in one call: every token has its own adapter's, of whatever rank, and no other.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "terms.h"

namespace {

using at::Tensor;

constexpr int64_t kSerial = 1 << 15;  // multiplications below which a second thread does not pay

template <typename Work>
void run(size_t tasks, bool serial, const Work& work) {
  if (serial) {
    for (size_t i = 0; i < tasks; ++i) work(i);
  } else {
    share(static_cast<int64_t>(tasks), work);
  }
}

template <typename T>
void add_of(Tensor& outputs, const Tensor& inputs, const low_rank::Factors& factors, const low_rank::Groups& groups,
            int64_t layer, int64_t linear) {
  static thread_local std::vector<float> scratch;
  static thread_local low_rank::Tasks<T> own;
  // Threads other than this one see them through a reference: their own are empty.
  auto& tasks = own;
  tasks.fit(factors, groups, layer, linear, inputs.size(1), outputs.size(1));
  if (static_cast<int64_t>(scratch.size()) < tasks.mixed()) scratch.resize(tasks.mixed());
  tasks.rest_at(scratch.data());
  const T* given = static_cast<const T*>(inputs.const_data_ptr());
  T* target = static_cast<T*>(outputs.data_ptr());
  const bool serial = tasks.multiplications < kSerial;
  run(tasks.rows.size(), serial, [&](int64_t task) { tasks.shrink(task, given); });
  run(tasks.columns.size(), serial, [&](int64_t task) { tasks.expand(task, target); });
}

// Adds to outputs [tokens, width] the terms of a layer's linear. Group g, whose adapter's factors lie where
// places[g] INT64 [layers, linears, parts, fields] says, has the tokens order[firsts[g]] to order[firsts[g + 1] - 1].
void add(Tensor outputs, const Tensor& inputs, const Tensor& memory, const Tensor& places, const Tensor& firsts,
         const Tensor& order, int64_t layer, int64_t linear) {
  const auto type = inputs.scalar_type();
  const low_rank::Factors factors{memory, places};
  const low_rank::Groups groups{firsts, order};
  check_like(outputs, type, "outputs", 2), check_like(inputs, type, "inputs", 2);
  factors.check_of(type);
  TORCH_CHECK(layer >= 0 && layer < factors.layers(), "layer: must be 0 to ", factors.layers() - 1);
  TORCH_CHECK(linear >= 0 && linear < factors.linears(), "linear: must be 0 to ", factors.linears() - 1);
  TORCH_CHECK(outputs.size(0) == inputs.size(0), "outputs: must have the tokens of inputs");
  groups.check_of(factors.groups(), inputs.size(0));
  if (type == at::kFloat) {
    add_of<float>(outputs, inputs, factors, groups, layer, linear);
  } else {
    TORCH_CHECK(type == at::kBFloat16, "inputs: must be float or bfloat16");
    add_of<BFloat>(outputs, inputs, factors, groups, layer, linear);
  }
}

// ---------------------------------------------------------------- loading

constexpr int64_t kTile = 16;
constexpr uint32_t kExponent = 0x7f800000;  // all of these bits are set in NaN and the infinities alone

// Writes `count` values times `scale`; the greatest exponent's bits.
template <typename S, typename T>
inline uint32_t scaled(const S* source, int64_t count, float scale, T* target) {
  uint32_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(source[i]) * scale;
    greatest = std::max(greatest, std::bit_cast<uint32_t>(value) & kExponent);
    narrow(value, target[i]);
  }
  return greatest;
}

template <typename S, typename T>
bool store_of(const S* source, int64_t rows, int64_t columns, bool transposed, float scale, T* target) {
  if (!transposed) return scaled(source, rows * columns, scale, target) != kExponent;
  uint32_t greatest = 0;
  float tile[kTile][kTile];
  for (int64_t row = 0; row < rows; row += kTile) {
    const int64_t height = std::min(kTile, rows - row);
    for (int64_t column = 0; column < columns; column += kTile) {
      const int64_t width = std::min(kTile, columns - column);
      for (int64_t r = 0; r < height; ++r) {
        greatest = std::max(greatest, scaled(source + (row + r) * columns + column, width, scale, tile[r]));
      }
      for (int64_t c = 0; c < width; ++c) {
        for (int64_t r = 0; r < height; ++r) narrow(tile[r][c], target[(column + c) * rows + row + r]);
      }
    }
  }
  return greatest != kExponent;
}

template <typename S>
bool store_as(Tensor& target, const Tensor& source, bool transposed, float scale) {
  const S* from = source.const_data_ptr<S>();
  if (target.scalar_type() == at::kFloat) {
    return store_of(from, source.size(0), source.size(1), transposed, scale, target.data_ptr<float>());
  }
  return store_of(from, source.size(0), source.size(1), transposed, scale, static_cast<BFloat*>(target.data_ptr()));
}

// Writes source [rows, columns], or its transpose, times `scale` into target, on the calling thread alone; whether
// all of that is finite.
bool store(Tensor target, const Tensor& source, bool transposed, double scale) {
  const auto type = target.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "target: must be float or bfloat16");
  TORCH_CHECK(target.is_contiguous() && source.is_contiguous() && source.dim() == 2, "source: must be [rows, columns]");
  TORCH_CHECK(target.numel() == source.numel(), "target: must have as many elements as source");
  switch (source.scalar_type()) {
    case at::kFloat: return store_as<float>(target, source, transposed, static_cast<float>(scale));
    case at::kHalf: return store_as<at::Half>(target, source, transposed, static_cast<float>(scale));
    case at::kBFloat16: return store_as<at::BFloat16>(target, source, transposed, static_cast<float>(scale));
    default: TORCH_CHECK(false, "source: must be float, half or bfloat16");
  }
}

}  // namespace

TORCH_LIBRARY(shapeshift_lora, library) {
  library.def(
      "add(Tensor(a!) outputs, Tensor inputs, Tensor memory, Tensor places, Tensor firsts, Tensor order, int layer, "
      "int linear) -> ()");
  library.def("store(Tensor(a!) target, Tensor source, bool transposed, float scale) -> bool");
}

TORCH_LIBRARY_IMPL(shapeshift_lora, CPU, library) {
  library.impl("add", &add);
  library.impl("store", &store);
}
