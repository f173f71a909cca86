// The next token of each row, as `draw.h` has it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "draw.h"

namespace {

using at::Tensor;

constexpr int64_t kShared = 4;  // rows with long work from which a second thread pays

// logits FLOAT32 [rows, vocabulary]; the others have one value for each row: FLOAT32, INT64 (top_k), FLOAT64
// (uniforms). Returns the tokens, INT64 [rows], and whether the row's logits were finite, BOOL [rows].
std::tuple<Tensor, Tensor> draw(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                                const Tensor& top_p, const Tensor& min_p, const Tensor& uniforms) {
  check_logits(logits);
  const int64_t rows = logits.size(0);
  for (const Tensor* each : {&temperature, &top_k, &top_p, &min_p, &uniforms}) {
    TORCH_CHECK(each->dim() == 1 && each->size(0) == rows && each->is_contiguous(), "one value for each row is needed");
  }
  Tensor tokens = at::empty({rows}, logits.options().dtype(at::kLong));
  Tensor good = at::empty({rows}, logits.options().dtype(at::kBool));
  int64_t* chosen = tokens.data_ptr<int64_t>();
  bool* finite = good.data_ptr<bool>();
  const auto ask_of = [&](int64_t row) {
    return draws::Ask{temperature.const_data_ptr<float>()[row], top_p.const_data_ptr<float>()[row],
                      min_p.const_data_ptr<float>()[row], top_k.const_data_ptr<int64_t>()[row],
                      uniforms.const_data_ptr<double>()[row]};
  };
  const auto work = [&](int64_t row) {
    thread_local draws::Scratch scratch;
    chosen[row] = draws::choose(Row(logits, row), ask_of(row), finite[row], scratch);
  };
  int64_t heavy = 0;
  for (int64_t row = 0; row < rows; ++row) heavy += !draws::is_short(Row(logits, row), ask_of(row));
  if (heavy >= kShared) {
    share(rows, work);
  } else {
    for (int64_t row = 0; row < rows; ++row) work(row);
  }
  return {tokens, good};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shapeshift_decode, library) {
  library.def(
      "draw(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniforms) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shapeshift_decode, CPU, library) { library.impl("draw", &draw); }
