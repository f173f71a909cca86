// What the linears of a pass take: rows of T, or for weights in levels the same rows quantised.

#pragma once

#include "levels.h"

// kWorks: whether rows have to be prepared before a linear takes them.
template <typename T, typename W>
struct Operand {
  static constexpr bool kWorks = false;
  void fit(int64_t, int64_t) {}
  void prepare(const T*, int64_t, const Panels<W>&) {}
  const T* of(const T* rows, const Panels<W>&) { return rows; }
};

template <typename T, int64_t kBits>
class Operand<T, Levels<kBits>> {
 public:
  static constexpr bool kWorks = true;

  // Room for `rows` rows of at most `inputs` inputs, those of one linear at a time.
  void fit(int64_t rows, int64_t inputs) { memory_.fit(rows, inputs); }

  // Quantises row `row` of rows [rows, inputs] for the linear with the panels `next`.
  template <typename Next>
  void prepare(const T* rows, int64_t row, const Next& next) {
    quantise_row(rows + row * next.inputs, memory_.of(next.inputs, next.group).from(row));
  }

  // The rows [rows, inputs] that were prepared last, for the same linear.
  template <typename Next>
  QuantisedRows of(const T*, const Next& next) {
    return memory_.of(next.inputs, next.group);
  }

 private:
  QuantisedMemory memory_;
};
