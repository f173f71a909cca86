// The low-rank terms of the linears of a pass (`interfaces.LowRank`), computed by the team that computes the linears.

#pragma once

#include <array>
#include <vector>

#include "linear_bf16.h"
#include "linear_levels.h"
#include "team.h"
#include "terms.h"

constexpr int64_t kLinears = 4;  // of a layer, in the order of `interfaces.QKV`, `OUTPUT`, `GATE_UP`, `DOWN`
enum Place { kQkv, kOutput, kGateUp, kDown };

// T: of the rows and of the terms; W: the kind of the linears' weights.
template <typename T, typename W>
class Added {
  using Groups = low_rank::Groups;
  using Tasks = low_rank::Tasks<T>;

 public:
  // Sets the terms of a pass over `rows` tokens. given: the tensors of `interfaces.LowRank.arrays`, or none. linears:
  // those of each layer; in the last layer, the linears after attention compute only `wanted` tokens.
  void fit(const std::vector<at::Tensor>& given, const std::array<const Panels<W>*, kLinears>& linears, int64_t layers,
           int64_t rows, int64_t wanted) {
    any_ = !given.empty();
    if (!any_) return;
    tasks_.resize(layers * kLinears);
    TORCH_CHECK(given.size() == 6, "terms: must be memory, places, and groups of all and of the wanted tokens");
    const low_rank::Factors factors{given[0], given[1]};
    const Groups all{given[2], given[3]}, last{given[4], given[5]};
    factors.check_of(kType<T>);
    TORCH_CHECK(factors.layers() == layers && factors.linears() == kLinears, "places: must have the model's linears");
    all.check_of(factors.groups(), rows), last.check_of(factors.groups(), wanted);
    int64_t most = 0;
    for (int64_t i = 0; i < layers * kLinears; ++i) {
      const int64_t layer = i / kLinears, linear = i % kLinears;
      const Panels<W>& own = *linears[linear];
      const Groups& groups = layer + 1 == layers && linear != kQkv ? last : all;
      tasks_[i].fit(factors, groups, layer, linear, own.inputs, own.outputs);
      most = std::max(most, tasks_[i].mixed());
    }
    // The terms of one linear end before those of the next begin, so that all share this memory.
    if (static_cast<int64_t>(mixed_.size()) < most) mixed_.resize(most);
    for (auto& tasks : tasks_) tasks.rest_at(mixed_.data());
  }

  // A linear and its terms; see `multiply`. operand: the rows as the linear takes them, from: as they are.
  template <typename Given>
  void multiply(const Team& team, int64_t layer, Place linear, const Panels<W>& own, const Given& operand,
                const T* from, int64_t rows, T* out) const {
    if (!any_) return ::multiply(own, operand, rows, out, team);
    const Tasks& tasks = tasks_[layer * kLinears + linear];
    if (tasks.empty()) return ::multiply(own, operand, rows, out, team);
    ::multiply(own, operand, rows, out, Before{team, tasks, from});
    team(tasks.columns.size(), [&](int64_t task) { tasks.expand(task, out); });
  }

 private:
  // Shares work among the team; the tasks of the first phase of the terms come before the linear's own.
  struct Before {
    const Team& team;
    const Tasks& tasks;
    const T* from;

    template <typename Each>
    void operator()(int64_t count, const Each& each) const {
      const auto first = static_cast<int64_t>(tasks.rows.size());
      team(first + count, [&](int64_t i) {
        if (i < first) {
          tasks.shrink(i, from);
        } else {
          each(i - first);
        }
      });
    }
  };

  bool any_ = false;
  std::vector<Tasks> tasks_;
  std::vector<float> mixed_;
};
