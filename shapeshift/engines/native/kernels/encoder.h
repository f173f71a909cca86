// An encoder as one operation over texts that lie side by side without padding: its threads stay in it from part to
// part, and it allocates nothing. `export.py` describes what it is made of.

#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <string>
#include <vector>

#include "added.h"
#include "encoder_attention.h"
#include "helpers.h"
#include "operand.h"
#include "packed_levels.h"

using at::Tensor;
using Tensors = c10::Dict<std::string, Tensor>;
using Numbers = c10::Dict<std::string, double>;

constexpr int64_t kGroup = 128;  // inputs of levels that share a scale: with one for all, a vector's error doubles
constexpr int64_t kShares = 13;  // most calls of the team in a layer, or outside the layers

// What a description names. It holds the tensors, which are read in place.
class Described {
 public:
  Described(Tensors tensors, Numbers numbers) : tensors_(std::move(tensors)), numbers_(std::move(numbers)) {}

  bool has(const std::string& name) const { return tensors_.contains(name); }

  Tensor tensor(const std::string& name, at::ScalarType type, int64_t dimensions) const {
    TORCH_CHECK(has(name), name, ": missing");
    Tensor values = tensors_.at(name);
    check_like(values, type, name.c_str(), dimensions);
    return values;
  }

  int64_t number(const std::string& name) const { return static_cast<int64_t>(real(name)); }

  double real(const std::string& name) const {
    TORCH_CHECK(numbers_.contains(name), name, ": missing");
    return numbers_.at(name);
  }

  // Floats [count], or null where there are none of this name.
  const float* floats(const std::string& name, int64_t count) const {
    if (!has(name)) return nullptr;
    const Tensor values = tensor(name, at::kFloat, 1);
    TORCH_CHECK(values.numel() == count, name, ": must have ", count, " elements");
    return values.const_data_ptr<float>();
  }

  Norm norm(const std::string& name, int64_t width) const {
    Norm norm;
    norm.weight = floats(name + ".weight", width);
    if (!norm) return norm;
    norm.bias = floats(name + ".bias", width);
    norm.eps = static_cast<float>(real(name + ".eps")), norm.centred = number(name + ".centred") != 0;
    return norm;
  }

  template <typename W>
  Panels<W> linear(const std::string& name, int64_t inputs, int64_t outputs) const {
    Panels<W> panels{};
    if constexpr (std::is_same_v<W, Levels<8>>) {
      const Tensor scales = tensor(name + ".scales", at::kFloat, 3), zeros = tensor(name + ".zeros", at::kByte, 3);
      const Tensor packed = tensor(name + ".packed", at::kByte, 1);
      panels = Linear<W>(packed, inputs, outputs, scales, zeros, std::nullopt, kGroup, std::nullopt, "best").panels();
    } else {
      panels.inputs = inputs, panels.outputs = outputs;
      const Tensor packed = tensor(name + ".packed", kType<W>, 1);
      TORCH_CHECK(packed.numel() == panels.elements(), name, ": must be [", outputs, ", ", inputs, "]");
      panels.weights = static_cast<const W*>(packed.const_data_ptr());
    }
    panels.bias = floats(name + ".bias", outputs);
    if constexpr (std::is_same_v<W, BFloat>) panels.instructions = panels.best();
    return panels;
  }

 private:
  Tensors tensors_;
  Numbers numbers_;
};

// Attention or MLP of a layer. pre: of what it takes; after: of what it adds to the state; post: of the state then.
struct Branch {
  Norm pre, after, post;

  Branch(const Described& from, const std::string& name, int64_t width)
      : pre(from.norm(name + "_pre", width)),
        after(from.norm(name + "_after", width)),
        post(from.norm(name + "_post", width)) {}
};

template <typename W>
struct EncoderLayer {
  Branch attention, mlp;
  Panels<W> qkv, output, up, down;
  AttentionParts parts;
  Activation activation;
  bool gated;
};

// The embeddings of words: T, or where linears have levels, levels with scales as theirs.
template <typename T, typename W>
struct Words {
  static constexpr bool kInLevels = std::is_same_v<W, Levels<8>>;
  using Value = std::conditional_t<kInLevels, uint8_t, T>;

  const Value* values;
  const float* scales = nullptr;
  int64_t count, width;

  explicit Words(const Described& from) {
    const Tensor table = from.tensor("words", kInLevels ? at::kByte : kType<T>, 2);
    values = static_cast<const Value*>(table.const_data_ptr()), count = table.size(0), width = table.size(1);
    if (!kInLevels) return;
    scales = from.floats("word_scales", count * groups());
    TORCH_CHECK(scales != nullptr, "word_scales: missing");
  }

  int64_t groups() const { return (width + kGroup - 1) / kGroup; }

  // target [width] = the embedding of a word.
  void operator()(int64_t word, float* target) const {
    const Value* from = values + word * width;
    if constexpr (kInLevels) {
      for (int64_t group = 0; group < groups(); ++group) {
        const int64_t end = std::min(width, (group + 1) * kGroup);
        const float scale = scales[word * groups() + group];
        for (int64_t i = group * kGroup; i < end; ++i) target[i] = scale * static_cast<float>(from[i] - 128);
      }
    } else {
      for (int64_t i = 0; i < width; ++i) target[i] = widen(from[i]);
    }
  }
};

// The state is float, the weights of linears and of words are W, and all else is T.
template <typename T, typename W = T>
class Encoder : public torch::CustomClassHolder {
 public:
  Encoder(Tensors tensors, Numbers numbers)
      : described_(std::move(tensors), std::move(numbers)), words_(described_) {
    vocabulary_ = words_.count, embedded_ = words_.width, hidden_ = described_.number("hidden");
    positions_ = described_.number("positions"), type_stride_ = described_.number("type_stride");
    if (described_.has("places")) places_ = described_.floats("places", positions_ * embedded_);
    TORCH_CHECK(type_stride_ == 0 || type_stride_ == vocabulary_, "type_stride: must be 0 or ", vocabulary_);
    kinds_ = type_stride_ ? 2 : 1;
    if (described_.has("types")) types_ = described_.floats("types", kinds_ * embedded_);
    norm_ = described_.norm("norm", embedded_);
    projects_ = described_.has("project.packed");
    if (projects_) project_ = described_.template linear<W>("project", embedded_, hidden_);
    TORCH_CHECK(projects_ || embedded_ == hidden_, "project: missing");
    last_ = described_.norm("last", hidden_);
  }

  // Adds a layer, from the first to the last. It may be one that was added before.
  void add(Tensors tensors, Numbers numbers) {
    Described part(std::move(tensors), std::move(numbers));
    AttentionParts parts{};
    parts.heads = part.number("heads"), parts.kv_heads = part.number("kv_heads"), parts.dim = part.number("dim");
    TORCH_CHECK(parts.kv_heads > 0 && parts.heads % parts.kv_heads == 0 && parts.dim > 0, "heads: must share keys");
    parts.reach = part.number("reach") < 0 ? std::numeric_limits<int32_t>::max() : part.number("reach");
    parts.causal = part.number("causal") != 0, parts.scale = static_cast<float>(part.real("scale"));
    parts.rotated = part.number("rotated");
    TORCH_CHECK(parts.rotated % 2 == 0 && parts.rotated <= parts.dim, "rotated: must be even, at most dim");
    if (parts.rotated) {
      const Tensor cosines = part.tensor("cosines", at::kFloat, 2), sines = part.tensor("sines", at::kFloat, 2);
      const bool fit = cosines.size(0) >= positions_ && cosines.size(1) == parts.rotated / 2;
      TORCH_CHECK(fit, "cosines: must be of positions");
      TORCH_CHECK(sines.sizes() == cosines.sizes(), "sines: must be as many as cosines");
      parts.cosines = cosines.const_data_ptr<float>(), parts.sines = sines.const_data_ptr<float>();
    }
    parts.query_norm = part.norm("query_norm", parts.dim), parts.key_norm = part.norm("key_norm", parts.dim);
    parts.far = part.number("far"), parts.bias = part.floats("bias", parts.heads * (2 * parts.far + 1));
    TORCH_CHECK(parts.bias == nullptr || parts.far + 1 >= positions_, "far: must reach every position");
    if (part.has("buckets")) parts.places = places(part, parts);
    const int64_t inner = part.number("inner"), activation = part.number("activation");
    const bool gated = part.number("gated") != 0;
    TORCH_CHECK(0 <= activation && activation <= 3, "activation: must be 0 to 3");
    layers_.push_back({Branch(part, "attention", hidden_), Branch(part, "mlp", hidden_),
                       part.template linear<W>("qkv", hidden_, parts.width()),
                       part.template linear<W>("output", parts.heads * parts.dim, hidden_),
                       part.template linear<W>("up", hidden_, gated ? 2 * inner : inner),
                       part.template linear<W>("down", inner, hidden_), parts, static_cast<Activation>(activation),
                       gated});
    held_.push_back(std::move(part));
  }

  // Compute on so many threads from the next call on; a call that runs goes on with no more than so many. Any thread.
  void use(int64_t threads) {
    TORCH_CHECK(threads > 0, "threads: must be positive");
    threads_ = threads;
  }

  // The vectors FLOAT [tokens, hidden] of a pack (`interfaces`), whose texts lie one after another; zeros where no text
  // is. terms: of adapters, see `Added::fit`. Valid until the next call.
  Tensor forward(const Tensor& ids, const Tensor& segments, const Tensor& positions, const std::vector<Tensor>& terms) {
    TORCH_CHECK(!layers_.empty(), "layers: at least one");
    check_like(ids, at::kLong, "ids"), check_like(segments, at::kLong, "segments");
    check_like(positions, at::kLong, "positions");
    const int64_t tokens = ids.numel();
    TORCH_CHECK(segments.numel() == tokens && positions.numel() == tokens, "segments, positions: must be of the ids");
    const int64_t rows = divide(segments.const_data_ptr<int64_t>(), tokens);
    const int64_t *id = ids.const_data_ptr<int64_t>(), *at = positions.const_data_ptr<int64_t>();
    check_below(id, rows, kinds_ * vocabulary_, "ids"), check_below(at, rows, positions_, "positions");
    for (const auto& text : texts_) TORCH_CHECK(text.second <= positions_, "segments: at most ", positions_, " alike");
    const Buffers buffers = fit(tokens, rows);
    fit_terms(terms, rows);
    const auto shares = kShares * static_cast<int64_t>(layers_.size() + 1);
    const int64_t threads = threads_;
    at::get_num_threads();  // torch sets a thread's number, to that of the process, when it is first asked for it
    omp_set_num_threads(static_cast<int>(threads));  // torch's own call starts threads of other pools, too
    Helpers& helpers = Helpers::of_this_thread(threads - 1);
    Team::gather(shares, threads_, [&](const Team& team) {
      helpers.awake(team.number());
      pass(team, buffers, id, at, rows);
    });
    return state_.narrow(0, 0, tokens);
  }

  // The vectors FLOAT [count, hidden x poolings] of the texts of a pack; zeros where there is no text.
  Tensor pool(const Tensor& ids, const Tensor& segments, const Tensor& positions, const std::vector<Tensor>& terms,
              int64_t count, const std::vector<int64_t>& poolings, bool normalised) {
    for (const int64_t pooling : poolings) TORCH_CHECK(0 <= pooling && pooling <= 5, "poolings: must be 0 to 5");
    forward(ids, segments, positions, terms);
    TORCH_CHECK(count >= static_cast<int64_t>(texts_.size()), "count: fewer than texts");
    const int64_t width = hidden_ * static_cast<int64_t>(poolings.size());
    Tensor vectors = at::zeros({count, width}, at::kFloat);
    float* target = vectors.data_ptr<float>();
    for (size_t text = 0; text < texts_.size(); ++text, target += width) {
      const auto [first, tokens] = texts_[text];
      for (size_t i = 0; i < poolings.size(); ++i) {
        pool_rows(static_cast<Pooling>(poolings[i]), state_.data_ptr<float>() + first * hidden_, tokens, hidden_,
                  target + i * hidden_);
      }
      if (normalised) normalise(target, width);
    }
    return vectors;
  }

 private:
  struct Buffers {
    float* state;
    T *normed, *qkv, *mixed, *delta, *inner, *active;
  };

  Places places(const Described& part, const AttentionParts& parts) const {
    const Tensor keys = part.tensor("place_keys", at::kFloat, 4), queries = part.tensor("place_queries", at::kFloat, 3);
    const Tensor buckets = part.tensor("buckets", at::kInt, 1);
    Places places;
    places.count = queries.size(1), places.far = buckets.numel() / 2, places.padded = queries.size(2);
    using Form = typename FormOf<T>::Form;
    const std::array<int64_t, 4> laid{parts.heads, (places.count + kSeen - 1) / kSeen,
                                      places.padded / Form::kNumbers, kSeen};
    const bool fit = queries.size(0) == parts.heads && places.padded == padded_to<Form>(parts.dim);
    TORCH_CHECK(fit && keys.sizes() == at::IntArrayRef(laid), "place_keys, place_queries: must be of heads and dim");
    const bool reach = buckets.numel() == 2 * places.far + 1 && places.far + 1 >= positions_;
    TORCH_CHECK(reach && parts.kv_heads == parts.heads, "buckets: must reach every position");
    places.keys = keys.const_data_ptr<float>(), places.queries = queries.const_data_ptr<float>();
    places.buckets = buckets.const_data_ptr<int32_t>();
    bool ascend = 0 <= places.buckets[0] && places.buckets[2 * places.far] < places.count;
    for (int64_t i = 0; i < 2 * places.far; ++i) {
      const int32_t step = places.buckets[i + 1] - places.buckets[i];
      ascend = ascend && (step == 0 || step == 1);
    }
    TORCH_CHECK(ascend, "buckets: must ascend by at most 1, from 0 on, to less than ", places.count);
    return places;
  }

  // Finds the texts, and their pieces; returns the number of their tokens.
  int64_t divide(const int64_t* segments, int64_t tokens) {
    pieces_.clear(), texts_.clear();
    int64_t first = 0;
    while (first < tokens && segments[first] > 0) {
      int64_t end = first + 1;
      while (end < tokens && segments[end] == segments[first]) ++end;
      add_pieces(first, end - first, pieces_);
      texts_.emplace_back(first, end - first);
      first = end;
    }
    return first;
  }

  // Memory that later calls reuse.
  Buffers fit(int64_t tokens, int64_t rows) {
    int64_t qkv = 0, mixed = 0, inner = 0, gated = 0;
    for (const EncoderLayer<W>& layer : layers_) {
      qkv = std::max(qkv, layer.qkv.outputs), mixed = std::max(mixed, layer.output.inputs);
      inner = std::max(inner, layer.up.outputs), gated = std::max(gated, layer.gated ? layer.down.inputs : 0);
    }
    const int64_t widest = std::max(hidden_, embedded_);
    operand_.fit(rows, std::max({widest, mixed, inner}));
    if (!state_.defined() || state_.size(0) < tokens) state_ = at::empty({tokens, hidden_}, at::kFloat);
    if (embedded_ > hidden_ && static_cast<int64_t>(embeddings_.size()) < rows * embedded_) {
      embeddings_.resize(rows * embedded_);
    }
    const auto needed = static_cast<size_t>(rows * (widest + qkv + mixed + hidden_ + inner + gated));
    if (memory_.size() < needed) memory_.resize(needed);
    T* next = memory_.data();
    const auto part = [&](int64_t width) { return std::exchange(next, next + rows * width); };
    Buffers buffers{};
    buffers.state = state_.data_ptr<float>();
    buffers.normed = part(widest), buffers.qkv = part(qkv), buffers.mixed = part(mixed), buffers.delta = part(hidden_);
    buffers.inner = part(inner), buffers.active = part(gated);
    std::fill(buffers.state + rows * hidden_, buffers.state + tokens * hidden_, 0.0f);
    return buffers;
  }

  void fit_terms(const std::vector<Tensor>& terms, int64_t rows) {
    const EncoderLayer<W>& first = layers_.front();
    for (const EncoderLayer<W>& layer : layers_) {
      const bool alike = layer.qkv.outputs == first.qkv.outputs && layer.output.inputs == first.output.inputs &&
                         layer.up.outputs == first.up.outputs && layer.down.inputs == first.down.inputs;
      TORCH_CHECK(alike || terms.empty(), "terms: layers must be alike");
    }
    added_.fit(terms, {&first.qkv, &first.output, &first.up, &first.down}, static_cast<int64_t>(layers_.size()), rows,
               rows);
  }

  void pass(const Team& team, const Buffers& buffers, const int64_t* ids, const int64_t* positions, int64_t rows) {
    embed(team, buffers, ids, positions, rows);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const EncoderLayer<W>& layer = layers_[i];
      const auto apply = [&](Place place, const Panels<W>& linear, const T* from, T* out) {
        added_.multiply(team, static_cast<int64_t>(i), place, linear, operand_.of(from, linear), from, rows, out);
      };
      apply(kQkv, layer.qkv, buffers.normed, buffers.qkv);
      const int64_t heads = layer.parts.heads, pieces = static_cast<int64_t>(pieces_.size());
      team(pieces * heads, [&](int64_t task) {
        static thread_local AttentionMemory memory;
        attend_piece(layer.parts, pieces_[task / heads], task % heads, buffers.qkv, positions, buffers.mixed, memory);
      });
      if constexpr (Operand<T, W>::kWorks) {
        team(rows, [&](int64_t row) { operand_.prepare(buffers.mixed, row, layer.output); });
      }
      apply(kOutput, layer.output, buffers.mixed, buffers.delta);
      finish(team, buffers, layer.attention, layer.mlp.pre, &layer.up, rows);
      apply(kGateUp, layer.up, buffers.normed, buffers.inner);
      const int64_t width = layer.up.outputs, inner = layer.down.inputs;
      T* active = layer.gated ? buffers.active : buffers.inner;
      team(rows, [&](int64_t row) {
        activate_row(layer.activation, layer.gated, buffers.inner + row * width, inner, active + row * inner);
        operand_.prepare(active, row, layer.down);
      });
      apply(kDown, layer.down, active, buffers.delta);
      const EncoderLayer<W>* next = i + 1 < layers_.size() ? &layers_[i + 1] : nullptr;
      finish(team, buffers, layer.mlp, next ? next->attention.pre : Norm{}, next ? &next->qkv : nullptr, rows);
    }
    if (last_) {
      team(rows, [&](int64_t row) { last_(buffers.state + row * hidden_, hidden_, buffers.state + row * hidden_); });
    }
  }

  void embed(const Team& team, const Buffers& buffers, const int64_t* ids, const int64_t* positions, int64_t rows) {
    float* sums = embedded_ > hidden_ ? embeddings_.data() : buffers.state;
    const Norm& next = layers_.front().attention.pre;
    const Panels<W>* qkv = &layers_.front().qkv;
    team(rows, [&](int64_t row) {
      const int64_t kind = type_stride_ && ids[row] >= type_stride_ ? 1 : 0;
      const float* place = places_ == nullptr ? nullptr : places_ + positions[row] * embedded_;
      const float* type = types_ == nullptr ? nullptr : types_ + kind * embedded_;
      float* sum = sums + row * embedded_;
      words_(ids[row] - kind * type_stride_, sum);
      for (int64_t i = 0; place != nullptr && i < embedded_; ++i) sum[i] += place[i];
      for (int64_t i = 0; type != nullptr && i < embedded_; ++i) sum[i] += type[i];
      if (norm_) norm_(sum, embedded_, sum);
      if (projects_) {
        copy(sum, embedded_, buffers.normed + row * embedded_);
        operand_.prepare(buffers.normed, row, project_);
      } else {
        enter(next, qkv, sum, buffers.normed, row);
      }
    });
    if (!projects_) return;
    multiply(project_, operand_.of(buffers.normed, project_), rows, buffers.delta, team);
    team(rows, [&](int64_t row) {
      float* state = buffers.state + row * hidden_;
      for (int64_t i = 0; i < hidden_; ++i) state[i] = widen(buffers.delta[row * hidden_ + i]);
      enter(next, qkv, state, buffers.normed, row);
    });
  }

  // Adds what a branch has computed to the state, and makes of it what the next branch takes: see `enter`.
  void finish(const Team& team, const Buffers& buffers, const Branch& branch, const Norm& next, const Panels<W>* linear,
              int64_t rows) {
    team(rows, [&](int64_t row) {
      static thread_local std::vector<float> memory;
      float* state = buffers.state + row * hidden_;
      const T* delta = buffers.delta + row * hidden_;
      if (branch.after) {
        memory.resize(hidden_);
        for (int64_t i = 0; i < hidden_; ++i) memory[i] = widen(delta[i]);
        branch.after(memory.data(), hidden_, memory.data());
        for (int64_t i = 0; i < hidden_; ++i) state[i] += memory[i];
      } else {
#pragma omp simd
        for (int64_t i = 0; i < hidden_; ++i) state[i] += widen(delta[i]);
      }
      if (branch.post) branch.post(state, hidden_, state);
      enter(next, linear, state, buffers.normed, row);
    });
  }

  // Writes row `row` of normed [rows, hidden]: the state behind the norm of a branch, if any, for its first linear, or
  // null behind the last branch.
  void enter(const Norm& norm, const Panels<W>* linear, const float* state, T* normed, int64_t row) {
    if (norm) {
      norm(state, hidden_, normed + row * hidden_);
    } else {
      copy(state, hidden_, normed + row * hidden_);
    }
    if (linear != nullptr) operand_.prepare(normed, row, *linear);
  }

  static void copy(const float* from, int64_t width, T* target) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) narrow(from[i], target[i]);
  }

  Described described_;
  std::vector<Described> held_;
  Words<T, W> words_;
  const float *places_ = nullptr, *types_ = nullptr;
  int64_t vocabulary_, embedded_, hidden_, positions_, type_stride_, kinds_;
  bool projects_;
  Panels<W> project_{};
  Norm norm_, last_;
  std::vector<EncoderLayer<W>> layers_;
  Operand<T, W> operand_;
  Added<T, W> added_;
  std::vector<Piece> pieces_;
  std::vector<std::pair<int64_t, int64_t>> texts_;  // first row, and tokens
  std::vector<T> memory_;
  std::vector<float> embeddings_;
  Tensor state_;
  std::atomic<int64_t> threads_{1};
};

template <typename T, typename W = T>
void define(torch::Library& library, const std::string& name) {
  using Own = Encoder<T, W>;
  library.class_<Own>(name)
      .def(torch::init<Tensors, Numbers>())
      .def("add", &Own::add)
      .def("use", &Own::use)
      .def("forward", &Own::forward)
      .def("pool", &Own::pool);
}
