// Low-rank terms as `interfaces.LowRank` describes them: their checks, and the tasks of each linear.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "checks.h"
#include "low_rank.h"

namespace low_rank {

constexpr int64_t kParts = 3, kFields = 4;
constexpr int64_t kRanks = 8;  // rows of A of one task
constexpr int64_t kFewestColumns = 128;

// Tokens by group: group g has order[firsts[g]] to order[firsts[g + 1] - 1].
struct Groups {
  at::Tensor firsts, order;

  const int32_t* first() const { return firsts.const_data_ptr<int32_t>(); }
  const int32_t* list() const { return order.const_data_ptr<int32_t>(); }

  // Checks that there are `groups` groups, of places below `tokens`.
  void check_of(int64_t groups, int64_t tokens) const {
    check_like(firsts, at::kInt, "firsts", 1), check_like(order, at::kInt, "order", 1);
    TORCH_CHECK(firsts.numel() == groups + 1, "firsts: must be one more than the groups");
    const int32_t *from = first(), *all = list();
    TORCH_CHECK(from[0] == 0 && from[groups] == order.numel(), "firsts: must run from 0 to the tokens in order");
    TORCH_CHECK(std::is_sorted(from, from + groups + 1), "firsts: must not fall");
    const bool inside = std::all_of(all, all + order.numel(), [&](int32_t at) { return at >= 0 && at < tokens; });
    TORCH_CHECK(inside, "order: must be tokens of inputs");
  }
};

// The place of each group's factors in `memory`: places INT64 [groups, layers, linears, kParts, kFields].
struct Factors {
  at::Tensor memory, places;

  int64_t groups() const { return places.size(0); }
  int64_t layers() const { return places.size(1); }
  int64_t linears() const { return places.size(2); }

  void check_of(at::ScalarType type) const {
    check_like(memory, type, "memory", 1), check_like(places, at::kLong, "places", 5);
    TORCH_CHECK(places.size(3) == kParts && places.size(4) == kFields, "places: must end in [3, 4]");
  }
};

// The terms of one linear. All tasks of `rows`, and the linear itself, must end before the first of `columns` begins.
template <typename T>
class Tasks {
 public:
  std::vector<Task> rows, columns;
  int64_t multiplications = 0;

  // Sets the terms of a layer's linear with this many inputs and outputs; checks that they lie inside.
  void fit(const Factors& factors, const Groups& groups, int64_t layer, int64_t linear, int64_t inputs,
           int64_t outputs) {
    terms_.clear(), rows.clear(), columns.clear();
    inputs_ = inputs, outputs_ = outputs, multiplications = 0, mixed_ = 0;
    const int64_t linears = factors.linears(), stride = factors.layers() * linears * kParts * kFields;
    const auto* place = factors.places.const_data_ptr<int64_t>() + (layer * linears + linear) * kParts * kFields;
    for (int64_t group = 0; group < factors.groups(); ++group) {
      for (int64_t part = 0; part < kParts; ++part) {
        add(factors, groups, group, place + group * stride + part * kFields);
      }
    }
    cut();
  }

  bool empty() const { return terms_.empty(); }

  // The number of floats between the two phases.
  int64_t mixed() const { return mixed_; }

  // Sets the memory of these floats.
  void rest_at(float* free) {
    for (Term<T>& term : terms_) term.mixed = std::exchange(free, free + term.count * term.rank);
  }

  void shrink(int64_t task, const T* from) const {
    low_rank::shrink(terms_[rows[task].term], rows[task], from, inputs_);
  }

  void expand(int64_t task, T* out) const {
    low_rank::expand(terms_[columns[task].term], columns[task], out, outputs_);
  }

 private:
  void add(const Factors& factors, const Groups& groups, int64_t group, const int64_t* field) {
    const int64_t offset = field[0], rank = field[1], first = field[2], count = field[3];
    const int64_t begin = groups.first()[group], tokens = groups.first()[group + 1] - begin;
    if (rank == 0 || tokens == 0) return;
    // Differences and a quotient, since sums and products of any numbers may overflow.
    const int64_t elements = factors.memory.numel();
    const bool inside = rank > 0 && offset >= 0 && offset <= elements && first >= 0 && first < outputs_ && count > 0 &&
                        count <= outputs_ - first && rank <= (elements - offset) / (inputs_ + count);
    TORCH_CHECK(inside, "add: group ", group, " lies outside the memory or the outputs");
    const T* a = static_cast<const T*>(factors.memory.const_data_ptr()) + offset;
    const auto term = static_cast<int32_t>(terms_.size());
    terms_.push_back({a, a + rank * inputs_, groups.list() + begin, nullptr, tokens, rank, first, count});
    split(rank, kRanks, term, rows);
    mixed_ += tokens * rank;
    multiplications += tokens * rank * (inputs_ + count);
  }

  // Splits the outputs into tasks that are long, for memory, and yet enough for all threads.
  void cut() {
    int64_t added = 0;
    for (const Term<T>& term : terms_) added += term.outputs;
    const int64_t share_of_each = added / (2 * at::get_num_threads()) / kLanes * kLanes;
    const int64_t most = std::clamp(share_of_each, kFewestColumns, kColumns);
    for (size_t i = 0; i < terms_.size(); ++i) split(terms_[i].outputs, most, static_cast<int32_t>(i), columns);
  }

  static void split(int64_t count, int64_t most, int32_t term, std::vector<Task>& tasks) {
    for (int64_t at = 0; at < count; at += most) {
      tasks.push_back({term, static_cast<int32_t>(at), static_cast<int32_t>(std::min(at + most, count))});
    }
  }

  std::vector<Term<T>> terms_;
  int64_t inputs_ = 0, outputs_ = 0, mixed_ = 0;
};

}  // namespace low_rank
