// The gated delta rule as an operator.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "delta_net.h"

namespace {

using at::Tensor;

template <typename T>
void compute(delta::Net<T>& net, const Tensor& inputs, const Tensor& runs, Tensor& out) {
  net.inputs = static_cast<const T*>(inputs.const_data_ptr()), net.out = static_cast<T*>(out.data_ptr());
  delta::run_all(net, reinterpret_cast<const delta::Run*>(runs.const_data_ptr<int32_t>()), runs.size(0), Shared{});
}

// What `network.Operations.delta_net` says; the tensors are those of `network.DeltaLayer`.
Tensor delta_net(const Tensor& inputs, const Tensor& gates, const Tensor& weight, const Tensor& decay,
                 const Tensor& bias, const Tensor& norm, double eps, Tensor window, Tensor state, const Tensor& runs) {
  const auto type = inputs.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "inputs: must be float or bfloat16");
  check_like(inputs, type, "inputs", 2), check_like(gates, at::kFloat, "gates", 2);
  check_like(weight, at::kFloat, "weight", 2), check_like(window, at::kFloat, "window", 3);
  check_like(state, at::kFloat, "state", 4), check_like(runs, at::kInt, "runs", 2);
  const int64_t heads = state.size(1), depth = state.size(2), width = state.size(3), tokens = inputs.size(0);
  const int64_t values = heads * width, channels = weight.size(1), keys = (channels - values) / 2;
  TORCH_CHECK(keys > 0 && channels == 2 * keys + values && keys % depth == 0 && heads % (keys / depth) == 0,
              "weight: must have the channels of queries, keys and values");
  TORCH_CHECK(window.size(0) == state.size(0) && window.size(1) == weight.size(0) && window.size(2) == channels,
              "window: must be [slots, kernel, channels]");
  TORCH_CHECK(inputs.size(1) == channels + values, "inputs: must be [tokens, channels and values]");
  TORCH_CHECK(gates.size(0) == tokens && gates.size(1) == 2 * heads, "gates: must be [tokens, twice the heads]");
  for (const Tensor* own : {&decay, &bias}) {
    check_like(*own, at::kFloat, "decay and bias");
    TORCH_CHECK(own->numel() == heads, "decay and bias: must have an element for each head");
  }
  check_like(norm, at::kFloat, "norm");
  TORCH_CHECK(norm.numel() == width, "norm: must have the width of a head");
  TORCH_CHECK(runs.size(1) == delta::kRunFields, "runs: must be [runs, ", delta::kRunFields, "]");
  const auto* all = reinterpret_cast<const delta::Run*>(runs.const_data_ptr<int32_t>());
  int64_t end = 0;
  for (int64_t i = 0; i < runs.size(0); end += all[i++].count) {
    const delta::Run& run = all[i];
    TORCH_CHECK(run.slot >= 0 && run.slot < state.size(0) && run.position >= 0 && run.token == end && run.count >= 1,
                "runs: run ", i, " lies outside the states or the batch");
  }
  TORCH_CHECK(end == tokens, "runs: must have all tokens of inputs");
  const auto floats = inputs.options().dtype(at::kFloat);
  Tensor mixed = at::empty({tokens, channels}, floats), shares = at::empty({tokens, 2 * heads}, floats);
  Tensor sums = at::empty({tokens, values}, floats), out = at::empty({tokens, values}, inputs.options());
  const auto fill = [&](auto& net) {
    net.gates = gates.const_data_ptr<float>(), net.weight = weight.const_data_ptr<float>();
    net.decay = decay.const_data_ptr<float>(), net.bias = bias.const_data_ptr<float>();
    net.norm = norm.const_data_ptr<float>(), net.eps = static_cast<float>(eps);
    net.window = window.data_ptr<float>(), net.state = state.data_ptr<float>();
    net.mixed = mixed.data_ptr<float>(), net.shares = shares.data_ptr<float>(), net.sums = sums.data_ptr<float>();
    net.key_heads = keys / depth, net.heads = heads, net.key_dim = depth, net.value_dim = width;
    net.kernel = weight.size(0);
    compute(net, inputs, runs, out);
  };
  if (type == at::kFloat) {
    delta::Net<float> net{};
    fill(net);
  } else {
    delta::Net<BFloat> net{};
    fill(net);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shapeshift_decode, library) {
  library.def(
      "delta_net(Tensor inputs, Tensor gates, Tensor weight, Tensor decay, Tensor bias, Tensor norm, float eps, "
      "Tensor(a!) window, Tensor(b!) state, Tensor runs) -> Tensor");
}

TORCH_LIBRARY_IMPL(shapeshift_decode, CPU, library) { library.impl("delta_net", &delta_net); }
