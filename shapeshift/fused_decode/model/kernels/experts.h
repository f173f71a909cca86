// The gated MLPs of a layer's experts, for the rows that a router gave to each: rows are put together by expert, and all
// experts' panels are shared among the threads at once. A shared expert takes all rows, in the same pass. Weights are
// those of the other linears, in float, bfloat16 or levels.

#pragma once

#include <vector>

#include "operand.h"
#include "packed_levels.h"
#include "rows.h"
#include "team.h"

namespace experts {

using at::Tensor;

constexpr int64_t kSteps = 5;        // calls of the team in a pass
constexpr int64_t kMostPairs = 4096;  // of a row and an expert that are computed together, so that memory stays small

// The gate of gpt-oss: sigmoid(alpha gate) gate (up + 1), with the gate at most `limit`, and up within -limit to limit.
template <typename T>
void clamped_gate_row(const T* both, int64_t width, float alpha, float limit, T* target) {
  const T* ups = both + width;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float gate = std::min(widen(both[i]), limit), up = std::max(-limit, std::min(widen(ups[i]), limit));
    narrow(gate / (1.0f + exponential(-alpha * gate)) * (up + 1.0f), target[i]);
  }
}

// Which rows each expert has: pair i is one of a row and an expert, and place[i] where it lies among those of its expert.
struct Grouping {
  std::vector<int64_t> firsts;  // of each expert, and the end
  std::vector<int64_t> places;

  Grouping(const int64_t* experts, int64_t pairs, int64_t count) : firsts(count + 1), places(pairs) {
    for (int64_t i = 0; i < pairs; ++i) ++firsts[experts[i] + 1];
    for (int64_t i = 0; i < count; ++i) firsts[i + 1] += firsts[i];
    std::vector<int64_t> next(firsts.begin(), firsts.end() - 1);
    for (int64_t i = 0; i < pairs; ++i) places[i] = next[experts[i]]++;
  }
};

template <typename T, typename W>
const T* from(const T* rows, int64_t row, const Panels<W>& own) {
  return rows + row * own.inputs;
}

template <typename W>
QuantisedRows from(const QuantisedRows& rows, int64_t row, const Panels<W>&) {
  return rows.from(row);
}

// Linears that are computed together, each over rows of its own.
template <typename W, typename Rows, typename T>
class Together {
 public:
  // `count` rows of the linear with these panels, into `out`.
  void add(const Panels<W>& panels, const Rows& rows, int64_t count, T* out) {
    if (count == 0) return;
    const Part part{&panels, rows, count, out, count_};
    multiply_part(part, [&](int64_t pieces, const auto&) { count_ += pieces; });
    parts_.push_back(part);
  }

  void run(const Team& team) const {
    team(count_, [&](int64_t i) {
      const auto after = std::upper_bound(parts_.begin(), parts_.end(), i,
                                          [](int64_t piece, const Part& part) { return piece < part.piece; });
      const Part& part = *std::prev(after);
      multiply_part(part, [&](int64_t, const auto& each) { each(i - part.piece); });
    });
  }

 private:
  // piece: the number of its first piece of work.
  struct Part {
    const Panels<W>* panels;
    Rows rows;
    int64_t count;
    T* out;
    int64_t piece;
  };

  template <typename Share>
  static void multiply_part(const Part& part, const Share& share) {
    multiply(*part.panels, part.rows, part.count, part.out, share);
  }

  std::vector<Part> parts_;
  int64_t count_ = 0;
};

// Memory of a pass; that of the thread that computes serves all layers. shared: of the rows of the shared expert.
template <typename T, typename W>
struct Workspace {
  std::vector<T> memory;
  Operand<T, W> operand, shared;
};

template <typename W>
class Experts : public torch::CustomClassHolder {
 public:
  // limit: of the gate of gpt-oss, see `clamped_gate_row`; 0: the gate is SiLU, or GELU.
  // scales_rows: weights multiply the rows of an expert, not what it makes of them.
  Experts(double alpha, double limit, bool gelu, bool scales_rows)
      : alpha_(static_cast<float>(alpha)), limit_(static_cast<float>(limit)), gelu_(gelu), scales_rows_(scales_rows) {}

  // Adds an expert; called from the first one to the last.
  void add(LinearPointer<W> gate_up, LinearPointer<W> down) {
    check_mlp(*gate_up, *down);
    if (!down_.empty()) {
      const Panels<W>&first = gate_up->panels(), &last = down->panels();
      const Panels<W>&one = gate_up_[0]->panels(), &other = down_[0]->panels();
      TORCH_CHECK(one.inputs == first.inputs && one.outputs == first.outputs && alike(one, first) && alike(other, last),
                  "experts: must be alike");
    }
    gate_up_.push_back(std::move(gate_up)), down_.push_back(std::move(down));
  }

  // Adds the expert of all rows, of any width; called after the last one.
  void add_shared(LinearPointer<W> gate_up, LinearPointer<W> down) {
    check_mlp(*gate_up, *down);
    TORCH_CHECK(!down_.empty() && down_[0]->panels().outputs == down->panels().outputs, "experts: must be alike");
    shared_gate_up_ = std::move(gate_up), shared_down_ = std::move(down);
  }

  // The sum of what the experts `chosen` INT64 [rows, k] make of each of `rows` [rows, hidden], times their `weights`
  // FLOAT32 [rows, k], which of a shared expert follow in one more column: as `rows`. A row's result does not depend on
  // the others.
  Tensor forward(const Tensor& rows, const Tensor& chosen, const Tensor& weights) const {
    TORCH_CHECK(!down_.empty(), "experts: at least one");
    const int64_t hidden = down_[0]->panels().outputs, count = rows.size(0);
    check_like(rows, rows.scalar_type(), "rows", 2);
    check_like(chosen, at::kLong, "chosen", 2), check_like(weights, at::kFloat, "weights", 2);
    TORCH_CHECK(rows.size(1) == hidden, "rows: must be [rows, ", hidden, "]");
    TORCH_CHECK(chosen.size(0) == count && weights.size(0) == count &&
                    weights.size(1) == chosen.size(1) + (shared_down_ ? 1 : 0),
                "chosen: must be [rows, k], as weights");
    const int64_t* experts = chosen.const_data_ptr<int64_t>();
    check_below(chosen, static_cast<int64_t>(down_.size()), "chosen");
    Tensor out = at::empty(rows.sizes(), rows.options());
    if constexpr (!Operand<float, W>::kWorks) {
      TORCH_CHECK(rows.scalar_type() == kType<W>, "rows: must be of the type of the weights");
      run<W>(rows, experts, chosen.size(1), weights, out);
    } else if (rows.scalar_type() == at::kFloat) {
      run<float>(rows, experts, chosen.size(1), weights, out);
    } else {
      TORCH_CHECK(rows.scalar_type() == at::kBFloat16, "rows: must be float or bfloat16");
      run<BFloat>(rows, experts, chosen.size(1), weights, out);
    }
    return out;
  }

 private:
  static void check_mlp(const Linear<W>& gate_up, const Linear<W>& down) {
    const Panels<W>&first = gate_up.panels(), &last = down.panels();
    TORCH_CHECK(first.outputs == 2 * last.inputs && first.inputs == last.outputs,
                "experts: gate_up must be [2 width, hidden], down [hidden, width]");
  }

  static bool alike(const Panels<W>& one, const Panels<W>& other) {
    if constexpr (Operand<float, W>::kWorks) {
      if (one.group != other.group) return false;
    }
    return one.inputs == other.inputs && one.outputs == other.outputs;
  }

  template <typename T>
  void run(const Tensor& rows, const int64_t* experts, int64_t k, const Tensor& weights, Tensor& out) const {
    const int64_t most = std::max<int64_t>(1, kMostPairs / std::max<int64_t>(1, k));
    const int64_t count = rows.size(0), hidden = rows.size(1);
    const auto* given = static_cast<const T*>(rows.const_data_ptr());
    for (int64_t row = 0; row < count; row += most) {
      compute(given + row * hidden, std::min(most, count - row), k, experts + row * k,
              weights.const_data_ptr<float>() + row * weights.size(1), static_cast<T*>(out.data_ptr()) + row * hidden);
    }
  }

  template <typename T>
  void compute(const T* rows, int64_t count, int64_t k, const int64_t* experts, const float* weights, T* out) const {
    static thread_local Workspace<T, W> workspace;
    const Panels<W>&first = gate_up_[0]->panels(), &last = down_[0]->panels();
    const int64_t hidden = first.inputs, inner = last.inputs, pairs = count * k;
    const int64_t columns = k + (shared_down_ ? 1 : 0);  // of weights
    const int64_t shared = shared_down_ ? count : 0, breadth = shared_down_ ? shared_down_->panels().inputs : 0;
    const Grouping grouping(experts, pairs, static_cast<int64_t>(down_.size()));
    auto& memory = workspace.memory;
    const auto needed = static_cast<size_t>(pairs * (hidden + 3 * inner) + shared * (hidden + 3 * breadth));
    if (memory.size() < needed) memory.resize(needed);
    // What the experts make of the rows takes the place of the rows; behind it comes what the shared one makes of them.
    T *gathered = memory.data(), *apart = gathered + pairs * hidden;
    T *both = apart + shared * hidden, *wide_both = both + 2 * pairs * inner;
    T *gated = wide_both + 2 * shared * breadth, *wide_gated = gated + pairs * inner;
    Operand<T, W>&operand = workspace.operand, &shared_operand = workspace.shared;
    operand.fit(pairs, std::max(hidden, inner)), shared_operand.fit(shared, std::max(hidden, breadth));
    Together<W, decltype(operand.of(rows, first)), T> entering, leaving;
    for (size_t i = 0; i < down_.size(); ++i) {
      const int64_t begin = grouping.firsts[i], own = grouping.firsts[i + 1] - begin;
      entering.add(gate_up_[i]->panels(), from(operand.of(gathered, first), begin, first), own, both + 2 * begin * inner);
      leaving.add(down_[i]->panels(), from(operand.of(gated, last), begin, last), own, gathered + begin * hidden);
    }
    if (shared_down_) {
      const Panels<W>&wide_first = shared_gate_up_->panels(), &wide_last = shared_down_->panels();
      entering.add(wide_first, shared_operand.of(rows, wide_first), shared, wide_both);
      leaving.add(wide_last, shared_operand.of(wide_gated, wide_last), shared, apart);
    }
    Team::gather(kSteps, [&](const Team& team) {
      team(pairs + shared, [&](int64_t i) {
        if (i >= pairs) return shared_operand.prepare(rows, i - pairs, shared_gate_up_->panels());
        const int64_t place = grouping.places[i];
        gather_row(rows + i / k * hidden, weights[i / k * columns + i % k], hidden, gathered + place * hidden);
        operand.prepare(gathered, place, first);
      });
      entering.run(team);
      team(pairs + shared, [&](int64_t i) {
        if (i >= pairs) return pass_gate(wide_both, i - pairs, wide_gated, shared_down_->panels(), shared_operand);
        pass_gate(both, i, gated, last, operand);
      });
      leaving.run(team);
      team(count, [&](int64_t row) {
        add_up(gathered, apart, grouping.places, weights + row * columns, row, k, hidden, out + row * hidden);
      });
    });
  }

  template <typename T>
  void gather_row(const T* row, float weight, int64_t hidden, T* target) const {
    if (!scales_rows_) return static_cast<void>(std::memcpy(target, row, hidden * sizeof(T)));
#pragma omp simd
    for (int64_t d = 0; d < hidden; ++d) narrow(widen(row[d]) * weight, target[d]);
  }

  // Row `row` of `both` [rows, 2 width] through the gate to `gated` [rows, width], for the linear with the panels `next`.
  template <typename T>
  void pass_gate(const T* both, int64_t row, T* gated, const Panels<W>& next, Operand<T, W>& operand) const {
    const int64_t width = next.inputs;
    const T* own = both + 2 * row * width;
    T* target = gated + row * width;
    if (limit_ > 0.0f) {
      clamped_gate_row(own, width, alpha_, limit_, target);
    } else {
      activate_row(gelu_ ? Activation::kGeluTanh : Activation::kSilu, true, own, width, target);
    }
    operand.prepare(gated, row, next);
  }

  // The weighted sum of the results of a row with these weights, in the order in which its experts were given; that of
  // the shared expert comes last.
  template <typename T>
  void add_up(const T* results, const T* apart, const std::vector<int64_t>& places, const float* weights, int64_t row,
              int64_t k, int64_t hidden, T* target) const {
    static thread_local std::vector<float> sums;
    sums.assign(hidden, 0.0f);
    float* own = sums.data();
    const auto add = [&](const T* result, float weight) {
#pragma omp simd
      for (int64_t d = 0; d < hidden; ++d) own[d] += weight * widen(result[d]);
    };
    for (int64_t i = 0; i < k; ++i) {
      add(results + places[row * k + i] * hidden, scales_rows_ ? 1.0f : weights[i]);
    }
    if (shared_down_) add(apart + row * hidden, weights[k]);
#pragma omp simd
    for (int64_t d = 0; d < hidden; ++d) narrow(own[d], target[d]);
  }

  float alpha_, limit_;
  bool gelu_, scales_rows_;
  std::vector<LinearPointer<W>> gate_up_, down_;
  LinearPointer<W> shared_gate_up_, shared_down_;
};

}  // namespace experts
