// The decode step's CPU kernels as operators: attention, norm with residual, activation, the gated delta rule, the likeliest
// tokens, the next token. One file: most of the time it takes to compile goes into torch's headers.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_arguments.h"
#include "checks.h"
#include "columns.h"
#include "delta_net.h"
#include "draw.h"
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

// The likeliest tokens of each row, and what is subtracted from its logits to make logprobs. Equal to `largest` of
// engine/sampling/sampler.py and `log_norms` of engine/beam_search.py, up to the order in which a norm is summed.

constexpr int64_t kSummed = 1024;  // weights that are summed in float before their sum goes on in double

// A thread's working memory, reused for every row.
struct Scratch {
  std::vector<float> maxima, ordered;
  std::vector<int64_t> found;
};

// The sum of e^(logit - best).
double weight_sum(const Row& row, float best) {
  // In a variable of its own: else the compiler gathers one logit after another.
  const float* logits = row.logits;
  double total = 0;
  for (int64_t start = 0; start < row.size; start += kSummed) {
    const int64_t end = std::min(row.size, start + kSummed);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t token = start; token < end; ++token) sum += exponential(logits[token] - best);
    total += sum;
  }
  return total;
}

// Writes the `count` likeliest tokens, the likeliest first, of equal ones the lower; returns the norm. A row that is not
// finite has the norm NaN, and its tokens mean nothing.
float rank(const Row& row, int64_t count, Scratch& s, int64_t* tokens) {
  const bool ordered = scan(row, s.maxima);
  const float best = *std::max_element(s.maxima.begin(), s.maxima.end());
  if (!ordered || !std::isfinite(best)) {
    std::iota(tokens, tokens + count, int64_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  s.ordered = s.maxima, s.found.clear();
  each_from(row, s.maxima, least_of_largest(s.ordered, count), [&](int64_t token) { s.found.push_back(token); });
  std::partial_sort(s.found.begin(), s.found.begin() + count, s.found.end(), [&](int64_t one, int64_t other) {
    const float a = row.logits[one], b = row.logits[other];
    return a > b || (a == b && one < other);
  });
  std::copy(s.found.begin(), s.found.begin() + count, tokens);
  return static_cast<float>(best + std::log(weight_sum(row, best)));
}

// logits FLOAT32 [rows, vocabulary]. Returns the norms, FLOAT32 [rows], and tokens, INT64 [rows, count].
std::tuple<Tensor, Tensor> likeliest(const Tensor& logits, int64_t count) {
  check_logits(logits);
  const int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(count > 0 && count <= size, "count: must be 1 to the vocabulary's ", size);
  Tensor norms = at::empty({rows}, logits.options());
  Tensor tokens = at::empty({rows, count}, logits.options().dtype(at::kLong));
  auto* sums = norms.data_ptr<float>();
  auto* chosen = tokens.data_ptr<int64_t>();
  share(rows, [&](int64_t row) {
    thread_local Scratch scratch;
    sums[row] = rank(Row(logits, row), count, scratch, chosen + row * count);
  });
  return {norms, tokens};
}

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

TORCH_LIBRARY(shapeshift_decode, library) {
  library.def("plan(Tensor slots, Tensor starts, Tensor lengths, int kv_heads) -> Tensor");
  library.def(
      "attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? key_scales, Tensor(d!)? value_scales, "
      "Tensor cosines, Tensor sines, Tensor tasks, Tensor blocks, Tensor? query_norm, "
      "Tensor? key_norm, float eps, int window, float scale, float cap, bool split, Tensor? sinks=None, "
      "bool norm_last=False, bool chunked=False, bool gated=False) -> Tensor");
  library.def("add_norm(Tensor(a!) state, Tensor? delta, Tensor weight, float eps, ScalarType type) -> Tensor");
  library.def("activate(Tensor both, int activation, bool gated) -> Tensor");
  library.def(
      "delta_net(Tensor inputs, Tensor gates, Tensor weight, Tensor decay, Tensor bias, Tensor norm, float eps, "
      "Tensor(a!) window, Tensor(b!) state, Tensor runs) -> Tensor");
  library.def("likeliest(Tensor logits, int count) -> (Tensor, Tensor)");
  library.def(
      "draw(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniforms) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shapeshift_decode, CPU, library) {
  library.impl("plan", &plan);
  library.impl("attention", &attention);
  library.impl("add_norm", &add_norm);
  library.impl("activate", &activate);
  library.impl("delta_net", &delta_net);
  library.impl("likeliest", &likeliest);
  library.impl("draw", &draw);
}
