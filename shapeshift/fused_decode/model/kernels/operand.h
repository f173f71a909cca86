// What the linears of a pass take: rows of T, or for weights in levels the same rows quantised.

#pragma once

#include "levels.h"

// kWorks: whether rows have to be prepared before a linear takes them.
template <typename T, typename W>
struct Operand {
  static constexpr bool kWorks = false;
  void fit(int64_t, int64_t) {}
  void prepare(const T*, int64_t, int64_t) {}
  const T* of(const T* rows, int64_t) { return rows; }
};

template <typename T, int64_t kBits>
class Operand<T, Levels<kBits>> {
 public:
  static constexpr bool kWorks = true;

  // Room for `rows` rows of at most `inputs` inputs, those of one linear at a time.
  void fit(int64_t rows, int64_t inputs) { memory_.fit(rows, inputs); }

  // Quantises row `row` of rows [rows, inputs].
  void prepare(const T* rows, int64_t row, int64_t inputs) {
    quantise_row(rows + row * inputs, memory_.of(inputs).from(row));
  }

  // The rows [rows, inputs] that were prepared last.
  QuantisedRows of(const T*, int64_t inputs) { return memory_.of(inputs); }

 private:
  QuantisedMemory memory_;
};
