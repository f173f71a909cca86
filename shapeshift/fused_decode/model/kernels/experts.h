// The gated MLPs of a layer's experts, for the rows that a router gave to each: rows are put together by expert, and all
// experts' panels are shared among the threads at once. Weights are those of the other linears, in float, bfloat16 or
// levels.

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

// The same linear of each expert, over the rows of each.
template <typename W, typename Rows, typename T>
class Grouped {
 public:
  Grouped(const std::vector<LinearPointer<W>>& linears, const std::vector<int64_t>& firsts, const Rows& rows, T* out)
      : rows_(rows), out_(out) {
    for (size_t i = 0; i < linears.size(); ++i) {
      if (firsts[i] == firsts[i + 1]) continue;
      const Part part{&linears[i]->panels(), firsts[i], firsts[i + 1] - firsts[i], count_};
      multiply_part(part, [&](int64_t count, const auto&) { count_ += count; });
      parts_.push_back(part);
    }
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
  // Rows `first` to `first` + `count`; piece: the number of its first piece of work.
  struct Part {
    const Panels<W>* panels;
    int64_t first, count, piece;
  };

  template <typename Share>
  void multiply_part(const Part& part, const Share& share) const {
    multiply(*part.panels, from(rows_, part.first, *part.panels), part.count,
             out_ + part.first * part.panels->outputs, share);
  }

  Rows rows_;
  T* out_;
  std::vector<Part> parts_;
  int64_t count_ = 0;
};

// Memory of a pass; that of the thread that computes serves all layers.
template <typename T, typename W>
struct Workspace {
  std::vector<T> memory;
  Operand<T, W> operand;
};

template <typename W>
class Experts : public torch::CustomClassHolder {
 public:
  // limit: of the gate of gpt-oss, see `clamped_gate_row`; 0: the gate is SiLU.
  Experts(double alpha, double limit) : alpha_(static_cast<float>(alpha)), limit_(static_cast<float>(limit)) {}

  // Adds an expert; called from the first one to the last.
  void add(LinearPointer<W> gate_up, LinearPointer<W> down) {
    const Panels<W>&first = gate_up->panels(), &last = down->panels();
    TORCH_CHECK(first.outputs == 2 * last.inputs && first.inputs == last.outputs,
                "experts: gate_up must be [2 width, hidden], down [hidden, width]");
    if (!down_.empty()) {
      const Panels<W>&one = gate_up_[0]->panels(), &other = down_[0]->panels();
      TORCH_CHECK(one.inputs == first.inputs && one.outputs == first.outputs && alike(one, first) && alike(other, last),
                  "experts: must be alike");
    }
    gate_up_.push_back(std::move(gate_up)), down_.push_back(std::move(down));
  }

  // The sum of what the experts `chosen` INT64 [rows, k] make of each of `rows` [rows, hidden], times their `weights`
  // FLOAT32 [rows, k]: as `rows`. A row's result does not depend on the others.
  Tensor forward(const Tensor& rows, const Tensor& chosen, const Tensor& weights) const {
    TORCH_CHECK(!down_.empty(), "experts: at least one");
    const int64_t hidden = down_[0]->panels().outputs, count = rows.size(0);
    check_like(rows, rows.scalar_type(), "rows", 2);
    check_like(chosen, at::kLong, "chosen", 2), check_like(weights, at::kFloat, "weights", 2);
    TORCH_CHECK(rows.size(1) == hidden, "rows: must be [rows, ", hidden, "]");
    TORCH_CHECK(chosen.size(0) == count && weights.sizes() == chosen.sizes(), "chosen: must be [rows, k], as weights");
    const int64_t* experts = chosen.const_data_ptr<int64_t>();
    check_below(chosen, static_cast<int64_t>(down_.size()), "chosen");
    Tensor out = at::empty(rows.sizes(), rows.options());
    if constexpr (!Operand<float, W>::kWorks) {
      TORCH_CHECK(rows.scalar_type() == kType<W>, "rows: must be of the type of the weights");
      run<W>(rows, experts, weights, out);
    } else if (rows.scalar_type() == at::kFloat) {
      run<float>(rows, experts, weights, out);
    } else {
      TORCH_CHECK(rows.scalar_type() == at::kBFloat16, "rows: must be float or bfloat16");
      run<BFloat>(rows, experts, weights, out);
    }
    return out;
  }

 private:
  static bool alike(const Panels<W>& one, const Panels<W>& other) {
    if constexpr (Operand<float, W>::kWorks) {
      if (one.group != other.group) return false;
    }
    return one.inputs == other.inputs && one.outputs == other.outputs;
  }

  template <typename T>
  void run(const Tensor& rows, const int64_t* experts, const Tensor& weights, Tensor& out) const {
    const int64_t k = weights.size(1), most = std::max<int64_t>(1, kMostPairs / std::max<int64_t>(1, k));
    const int64_t count = rows.size(0), hidden = rows.size(1);
    const auto* given = static_cast<const T*>(rows.const_data_ptr());
    for (int64_t row = 0; row < count; row += most) {
      compute(given + row * hidden, std::min(most, count - row), k, experts + row * k,
              weights.const_data_ptr<float>() + row * k, static_cast<T*>(out.data_ptr()) + row * hidden);
    }
  }

  template <typename T>
  void compute(const T* rows, int64_t count, int64_t k, const int64_t* experts, const float* weights, T* out) const {
    static thread_local Workspace<T, W> workspace;
    const Panels<W>&first = gate_up_[0]->panels(), &last = down_[0]->panels();
    const int64_t hidden = first.inputs, inner = last.inputs, pairs = count * k;
    const Grouping grouping(experts, pairs, static_cast<int64_t>(down_.size()));
    auto& memory = workspace.memory;
    const auto needed = static_cast<size_t>(pairs * (hidden + 3 * inner));
    if (memory.size() < needed) memory.resize(needed);
    // What the experts make of the rows takes the place of the rows.
    T *gathered = memory.data(), *both = gathered + pairs * hidden, *gated = both + 2 * pairs * inner;
    Operand<T, W>& operand = workspace.operand;
    operand.fit(pairs, std::max(hidden, inner));
    const Grouped entering(gate_up_, grouping.firsts, operand.of(gathered, first), both);
    const Grouped leaving(down_, grouping.firsts, operand.of(gated, last), gathered);
    Team::gather(kSteps, [&](const Team& team) {
      team(pairs, [&](int64_t i) {
        const int64_t place = grouping.places[i];
        std::memcpy(gathered + place * hidden, rows + i / k * hidden, hidden * sizeof(T));
        operand.prepare(gathered, place, first);
      });
      entering.run(team);
      team(pairs, [&](int64_t i) {
        const T* own = both + 2 * i * inner;
        T* target = gated + i * inner;
        limit_ > 0.0f ? clamped_gate_row(own, inner, alpha_, limit_, target) : gate_row(own, inner, target);
        operand.prepare(gated, i, last);
      });
      leaving.run(team);
      team(count, [&](int64_t row) { add_up(gathered, grouping.places, weights, row, k, hidden, out + row * hidden); });
    });
  }

  // The weighted sum of the results of a row, in the order in which its experts were given.
  template <typename T>
  static void add_up(const T* results, const std::vector<int64_t>& places, const float* weights, int64_t row, int64_t k,
                     int64_t hidden, T* target) {
    static thread_local std::vector<float> sums;
    sums.assign(hidden, 0.0f);
    float* own = sums.data();
    for (int64_t i = row * k; i < (row + 1) * k; ++i) {
      const T* result = results + places[i] * hidden;
      const float weight = weights[i];
#pragma omp simd
      for (int64_t d = 0; d < hidden; ++d) own[d] += weight * widen(result[d]);
    }
#pragma omp simd
    for (int64_t d = 0; d < hidden; ++d) narrow(own[d], target[d]);
  }

  float alpha_, limit_;
  std::vector<LinearPointer<W>> gate_up_, down_;
};

}  // namespace experts
