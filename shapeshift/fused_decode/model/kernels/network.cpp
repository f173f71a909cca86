// A whole forward pass as one operation, in float or bfloat16, over weights of the same type or in levels: its threads
// stay in it from part to part, and it allocates nothing. It computes the same as network.py with the operators, by the
// same kernels.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <numeric>
#include <optional>
#include <vector>

#include "added.h"
#include "attention_arguments.h"
#include "draw.h"
#include "experts.h"
#include "operand.h"
#include "packed_levels.h"
#include "rows.h"
#include "team.h"

namespace {

using at::Tensor;

constexpr int64_t kShares = 11 + kLinears;  // most calls of the team in a layer, or outside the layers

// The weights of the output head: with levels of 4 bits in the layers it has 8, since every error there is a token's.
template <typename W>
using HeadOf = std::conditional_t<std::is_same_v<W, Levels<4>>, Levels<8>, W>;

// One decoder layer.
template <typename W>
struct LayerParts {
  Tensor attention_norm, mlp_norm;
  LinearPointer<W> qkv, output, gate_up, down;
  Held attention;
};

// Buffers of a pass, [rows, width] each; after the last attention, only the wanted rows.
template <typename T>
struct Buffers {
  float *state, *chosen;
  T *normed, *qkv, *mixed, *picked, *delta, *both, *gated;
};

// The residual state and the logits are float, weights are W, all else is T.
template <typename T, typename W>
class Network : public torch::CustomClassHolder {
 public:
  Network(Tensor embedding, Tensor norm, LinearPointer<HeadOf<W>> head, double eps)
      : embedding_(std::move(embedding)),
        norm_(std::move(norm)),
        head_(std::move(head)),
        eps_(static_cast<float>(eps)) {
    check_like(embedding_, kType<T>, "embedding");
    TORCH_CHECK(embedding_.dim() == 2, "embedding: must be [vocabulary, hidden]");
    hidden_ = embedding_.size(1);
    check_norm(norm_);
    check_linear(*head_, hidden_, head_->panels().outputs, "head");
  }

  // Adds a layer; called from the first layer to the last.
  void add(Tensor attention_norm, LinearPointer<W> qkv, Tensor keys, Tensor values, std::optional<Tensor> key_scales,
           std::optional<Tensor> value_scales, Tensor cosines, Tensor sines, std::optional<Tensor> query_norm,
           std::optional<Tensor> key_norm, double eps, int64_t window, double scale, double cap, LinearPointer<W> output,
           Tensor mlp_norm, LinearPointer<W> gate_up, LinearPointer<W> down) {
    LayerParts<W> parts{attention_norm, mlp_norm, qkv, output, gate_up, down,
                        Held{keys, values, key_scales, value_scales, cosines, sines, query_norm, key_norm, eps, window,
                             scale, cap}};
    check_norm(attention_norm), check_norm(mlp_norm);
    parts.attention.check(kType<T>);
    check_linear(*qkv, hidden_, qkv->panels().outputs, "qkv");
    check_linear(*output, parts.attention.heads(qkv->panels().outputs) * keys.size(3), hidden_, "output");
    check_linear(*gate_up, hidden_, 2 * down->panels().inputs, "gate_up");
    check_linear(*down, down->panels().inputs, hidden_, "down");
    TORCH_CHECK(layers_.empty() || alike(layers_[0], parts), "layers: must be alike");
    layers_.push_back(std::move(parts));
  }

  // Logits [wanted, vocabulary] after the last tokens of the rows `chosen`, then after those at `further`, places in
  // `tokens`; valid until the next call. The other arguments are those of `StepBatch`.
  // terms: the low-rank terms of the linears, see `Added`. columns: see `draws::Slots`, with which a token of each of the
  // rows `chosen` is chosen.
  Tensor forward(const Tensor& tokens, const Tensor& slots, const Tensor& starts, const Tensor& lengths,
                 const Tensor& blocks, const Tensor& chosen, const std::optional<Tensor>& further,
                 const std::vector<Tensor>& terms, const std::vector<Tensor>& columns) {
    TORCH_CHECK(!layers_.empty(), "layers: at least one");
    check_like(tokens, at::kLong, "tokens"), check_like(chosen, at::kLong, "logit_rows");
    const LayerParts<W>& parts = layers_[0];
    plan_tasks(slots, starts, lengths, parts.attention.keys.size(1), tasks_);
    check_below(tokens, embedding_.size(0), "tokens"), check_below(chosen, slots.numel(), "logit_rows");
    const int64_t rows = tokens.numel();
    check_tasks(tasks_, blocks, parts.attention, rows);
    const draws::Slots draw(columns, parts.attention.cosines.size(0));
    find_last(lengths, chosen, rows);
    if (further) {
      check_like(*further, at::kLong, "further"), check_below(*further, rows, "further");
      const int64_t* places = further->const_data_ptr<int64_t>();
      last_.insert(last_.end(), places, places + further->numel());
    }
    const auto wanted = static_cast<int64_t>(last_.size());
    added_.fit(terms, {&parts.qkv->panels(), &parts.output->panels(), &parts.gate_up->panels(), &parts.down->panels()},
               static_cast<int64_t>(layers_.size()), rows, wanted);
    const Buffers<T> buffers = fit(rows, wanted);
    Team::gather(kShares * static_cast<int64_t>(layers_.size() + 1), [&](const Team& team) {
      pass(team, buffers, tokens, blocks, static_cast<int64_t>(tasks_.size()) > slots.numel() * kv_heads());
      if (draw.empty()) return;
      team(chosen.numel(), [&](int64_t place) {
        const int64_t row = chosen.const_data_ptr<int64_t>()[place];
        const auto at = [&](const Tensor& values) { return values.const_data_ptr<int32_t>()[row]; };
        draw.choose(Row(logits_, place), at(slots), int64_t{at(starts)} + at(lengths));
      });
    });
    return logits_.narrow(0, 0, wanted);
  }

 private:
  void check_norm(const Tensor& norm) const {
    check_like(norm, at::kFloat, "norm");
    TORCH_CHECK(norm.numel() == hidden_, "norm: must have ", hidden_, " elements");
  }

  template <typename Any>
  static void check_linear(const Any& linear, int64_t inputs, int64_t outputs, const char* name) {
    const auto& own = linear.panels();
    TORCH_CHECK(own.inputs == inputs && own.outputs == outputs, name, ": must be [", outputs, ", ", inputs, "]");
  }

  static bool alike(const LayerParts<W>& one, const LayerParts<W>& other) {
    return one.attention.keys.sizes() == other.attention.keys.sizes() &&
           one.qkv->panels().outputs == other.qkv->panels().outputs &&
           one.down->panels().inputs == other.down->panels().inputs;
  }

  int64_t kv_heads() const { return layers_[0].attention.keys.size(1); }

  // The places of the last tokens of the rows `chosen`, of `tokens` tokens in all.
  void find_last(const Tensor& lengths, const Tensor& chosen, int64_t tokens) {
    const int32_t* length = lengths.const_data_ptr<int32_t>();
    ends_.assign(length, length + lengths.numel());
    std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
    TORCH_CHECK(!ends_.empty() && ends_.back() == tokens, "tokens: must be as many as the sum of lengths");
    const int64_t* rows = chosen.const_data_ptr<int64_t>();
    last_.clear();
    for (int64_t i = 0; i < chosen.numel(); ++i) last_.push_back(ends_[rows[i]] - 1);
  }

  // Buffers for a pass of this size, in memory that later passes reuse.
  Buffers<T> fit(int64_t rows, int64_t wanted) {
    const LayerParts<W>& parts = layers_[0];
    const int64_t query = parts.output->panels().inputs, inner = parts.down->panels().inputs;
    const int64_t width = 2 * hidden_ + parts.qkv->panels().outputs + 2 * query + 3 * inner;
    const auto needed = static_cast<size_t>(rows * width);
    if (memory_.size() < needed) memory_.resize(needed), states_.resize(2 * rows * hidden_);
    if (!logits_.defined() || logits_.size(0) < wanted) {
      logits_ = at::empty({wanted, head_->panels().outputs}, embedding_.options().dtype(at::kFloat));
    }
    operand_.fit(rows, std::max({hidden_, query, inner}));
    T* next = memory_.data();
    const auto part = [&](int64_t own) { return std::exchange(next, next + rows * own); };
    Buffers<T> made{};
    made.state = states_.data(), made.chosen = made.state + rows * hidden_;
    made.normed = part(hidden_), made.delta = part(hidden_);
    made.qkv = part(parts.qkv->panels().outputs), made.mixed = part(query), made.picked = part(query);
    made.both = part(2 * inner), made.gated = part(inner);
    return made;
  }

  void pass(const Team& team, const Buffers<T>& own, const Tensor& tokens, const Tensor& blocks, bool split) {
    const int64_t* ids = tokens.const_data_ptr<int64_t>();
    const auto* table = static_cast<const T*>(embedding_.const_data_ptr());
    const auto wanted = static_cast<int64_t>(last_.size());
    int64_t rows = tokens.numel();
    team(rows, [&](int64_t row) {
      const T* from = table + ids[row] * hidden_;
      std::transform(from, from + hidden_, own.state + row * hidden_, [](T value) { return widen(value); });
    });
    float* state = own.state;
    T *mixed = own.mixed, *delta = nullptr;
    for (int64_t layer = 0; layer < static_cast<int64_t>(layers_.size()); ++layer) {
      const LayerParts<W>& parts = layers_[layer];
      const Panels<W> &qkv = parts.qkv->panels(), &output = parts.output->panels();
      add_norm(team, state, delta, parts.attention_norm, rows, own.normed, qkv);
      linear(team, layer, kQkv, qkv, own.normed, rows, own.qkv);
      attend_all<T>(parts.attention, qkv.outputs, own.qkv, own.mixed, tasks_, blocks, split, team);
      if (&parts == &layers_.back()) {
        // After the last attention, only the wanted tokens matter.
        team(wanted, [&](int64_t row) {
          copy(own.chosen, row, own.state, last_[row], hidden_);
          copy(own.picked, row, own.mixed, last_[row], output.inputs);
        });
        rows = wanted, state = own.chosen, mixed = own.picked;
      }
      if constexpr (Operand<T, W>::kWorks) {
        team(rows, [&](int64_t row) { operand_.prepare(mixed, row, output); });
      }
      delta = own.delta;
      linear(team, layer, kOutput, output, mixed, rows, delta);
      add_norm(team, state, delta, parts.mlp_norm, rows, own.normed, parts.gate_up->panels());
      linear(team, layer, kGateUp, parts.gate_up->panels(), own.normed, rows, own.both);
      const Panels<W>& down = parts.down->panels();
      const int64_t inner = down.inputs;
      team(rows, [&](int64_t row) {
        activate_row(Activation::kSilu, true, own.both + 2 * row * inner, inner, own.gated + row * inner);
        operand_.prepare(own.gated, row, down);
      });
      linear(team, layer, kDown, down, own.gated, rows, delta);
    }
    add_norm(team, state, delta, norm_, rows, own.normed, head_->panels());
    multiply(head_->panels(), operand_.of(own.normed, head_->panels()), rows, logits_.data_ptr<float>(), team);
  }

  // A linear of a layer with its low-rank terms; `from` is prepared.
  void linear(const Team& team, int64_t layer, Place place, const Panels<W>& own, const T* from, int64_t rows, T* out) {
    added_.multiply(team, layer, place, own, operand_.of(from, own), from, rows, out);
  }

  // Rows for the linear with the panels `next`.
  template <typename Next>
  void add_norm(const Team& team, float* state, const T* delta, const Tensor& weight, int64_t rows, T* out,
                const Next& next) {
    const float* scale = weight.const_data_ptr<float>();
    team(rows, [&](int64_t row) {
      const T* added = delta == nullptr ? nullptr : delta + row * hidden_;
      add_norm_row(state + row * hidden_, added, scale, eps_, hidden_, out + row * hidden_);
      operand_.prepare(out, row, next);
    });
  }

  template <typename Element>
  static void copy(Element* to, int64_t row, const Element* from, int64_t place, int64_t width) {
    std::memcpy(to + row * width, from + place * width, width * sizeof(Element));
  }

  Tensor embedding_, norm_;
  LinearPointer<HeadOf<W>> head_;
  float eps_;
  int64_t hidden_;
  std::vector<LayerParts<W>> layers_;
  std::vector<Task> tasks_;
  std::vector<int64_t> ends_, last_;
  std::vector<float> states_;
  std::vector<T> memory_;
  Operand<T, W> operand_;
  Added<T, W> added_;
  Tensor logits_;
};

// The levels of a linear in the layout of its kernels.
Tensor packed_levels(const Tensor& levels, int64_t bits) {
  TORCH_CHECK(bits == 4 || bits == 8, "bits: must be 4 or 8");
  return bits == 8 ? pack_levels<8>(levels) : pack_levels<4>(levels);
}

template <typename W>
void define_linear(torch::Library& library, const std::string& suffix) {
  library.class_<Linear<W>>("Linear" + suffix)
      .def(torch::init<Tensor, int64_t, int64_t, std::optional<Tensor>, const std::string&>())
      .def("forward", &Linear<W>::forward)
      .def("instructions", &Linear<W>::instructions);
}

template <int64_t kBits>
void define_levels(torch::Library& library, const std::string& suffix) {
  using Own = Linear<Levels<kBits>>;
  library.class_<Own>("Linear" + suffix)
      .def(torch::init<Tensor, int64_t, int64_t, Tensor, Tensor, std::optional<Tensor>, int64_t,
                       std::optional<Tensor>, const std::string&>())
      .def("forward", &Own::forward)
      .def("instructions", &Own::instructions);
}

template <typename W>
void define_experts(torch::Library& library, const std::string& suffix) {
  using Own = experts::Experts<W>;
  library.class_<Own>("Experts" + suffix)
      .def(torch::init<double, double, bool, bool>())
      .def("add", &Own::add)
      .def("add_shared", &Own::add_shared)
      .def("forward", &Own::forward);
}

template <typename T, typename W = T>
void define_network(torch::Library& library, const std::string& suffix) {
  using Own = Network<T, W>;
  library.class_<Own>("Network" + suffix)
      .def(torch::init<Tensor, Tensor, LinearPointer<HeadOf<W>>, double>())
      .def("add", &Own::add)
      .def("forward", &Own::forward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shapeshift_decode, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def("pack_levels(Tensor levels, int bits) -> Tensor");
  library.def("by_panel(Tensor values) -> Tensor");
  define_linear<float>(library, "");
  define_linear<BFloat>(library, "BFloat16");
  define_levels<8>(library, "Levels8");
  define_levels<4>(library, "Levels4");
  define_experts<float>(library, "");
  define_experts<BFloat>(library, "BFloat16");
  define_experts<Levels<8>>(library, "Levels8");
  define_experts<Levels<4>>(library, "Levels4");
  define_network<float>(library, "");
  define_network<BFloat>(library, "BFloat16");
  define_network<float, Levels<8>>(library, "Levels8");
  define_network<BFloat, Levels<8>>(library, "Levels8BFloat16");
  define_network<float, Levels<4>>(library, "Levels4");
  define_network<BFloat, Levels<4>>(library, "Levels4BFloat16");
}

TORCH_LIBRARY_IMPL(shapeshift_decode, CPU, library) {
  library.impl("pack", &packed_weight);
  library.impl("pack_levels", &packed_levels);
  library.impl("by_panel", &by_panel);
}
