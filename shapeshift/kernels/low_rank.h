// Low-rank terms of groups of tokens: inputs times A, times B. Each group has its own factors, of any rank. Storage is
// float or bfloat16, arithmetic is float. Vectors are the compiler's, so one source serves every width.

#pragma once

#include "wide.h"

namespace low_rank {

using wide::load;
using wide::multiply_add;
using wide::total;
using wide::Wide;
constexpr int64_t kLanes = wide::kLanes;

constexpr int64_t kColumns = 1024;  // most outputs of one task; their sums stay in L1
constexpr int64_t kRows = 4;        // rows of B that are read together
constexpr int64_t kTokens = 4;      // tokens that share what a task reads

// The term of one group in one part of a linear.
template <typename T>
struct Term {
  const T* a;             // [rank, inputs]
  const T* b;             // [rank, outputs], scaled
  const int32_t* tokens;  // of the group
  float* mixed;           // [count, rank]: inputs times A
  int64_t count, rank, first, outputs;
};

// A task of the first phase (rows of A) or of the second (outputs).
struct Task {
  int32_t term, begin, end;
};

// mixed[t, k] = inputs[t] . A[k] for kTogether rows k and kCount tokens.
template <int64_t kTogether, int64_t kCount, typename T>
void dots(const T* a, int64_t inputs, const T* const* rows, float* const* mixed) {
  Wide sums[kTogether][kCount] = {};
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    Wide given[kCount];
    for (int64_t t = 0; t < kCount; ++t) given[t] = load(rows[t] + i);
    for (int64_t k = 0; k < kTogether; ++k) {
      const Wide factor = load(a + k * inputs + i);
      for (int64_t t = 0; t < kCount; ++t) sums[k][t] = multiply_add(factor, given[t], sums[k][t]);
    }
  }
  for (int64_t k = 0; k < kTogether; ++k) {
    for (int64_t t = 0; t < kCount; ++t) {
      float sum = total(sums[k][t]);
      for (int64_t j = i; j < inputs; ++j) sum = multiply_add(widen(a[k * inputs + j]), widen(rows[t][j]), sum);
      mixed[t][k] = sum;
    }
  }
}

template <int64_t kCount, typename T>
void shrink_tokens(const Term<T>& term, const Task& task, const T* inputs, int64_t width, int64_t token) {
  const T* rows[kCount];
  float* mixed[kCount];
  for (int64_t t = 0; t < kCount; ++t) {
    rows[t] = inputs + term.tokens[token + t] * width;
    mixed[t] = term.mixed + (token + t) * term.rank + task.begin;
  }
  constexpr int64_t kTogether = kCount == 1 ? 4 : 2;
  int64_t k = task.begin;
  for (; k + kTogether <= task.end; k += kTogether) {
    dots<kTogether, kCount>(term.a + k * width, width, rows, mixed);
    for (float*& place : mixed) place += kTogether;
  }
  for (; k < task.end; ++k) {
    dots<1, kCount>(term.a + k * width, width, rows, mixed);
    for (float*& place : mixed) ++place;
  }
}

// mixed = inputs [tokens, width] of the group times A, for the rows of A of the task.
template <typename T>
void shrink(const Term<T>& term, const Task& task, const T* inputs, int64_t width) {
  int64_t token = 0;
  for (; token + kTokens <= term.count; token += kTokens) shrink_tokens<kTokens>(term, task, inputs, width, token);
  for (; token < term.count; ++token) shrink_tokens<1>(term, task, inputs, width, token);
}

// sums[t, o] += mixed[t, k] B[k, o] for kTogether rows k from `row` on, `columns` outputs o and kCount tokens. Rows are
// read in the order of memory: all rows for a few outputs at a time took three times as long.
template <int64_t kTogether, int64_t kCount, typename T>
void add_rows(const T* row, int64_t stride, int64_t columns, const float* const* mixed, float (*sums)[kColumns]) {
  Wide factor[kCount][kTogether];
  for (int64_t t = 0; t < kCount; ++t) {
    for (int64_t k = 0; k < kTogether; ++k) factor[t][k] = Wide{} + mixed[t][k];
  }
  int64_t o = 0;
  for (; o + kLanes <= columns; o += kLanes) {
    Wide read[kTogether];
    for (int64_t k = 0; k < kTogether; ++k) read[k] = load(row + k * stride + o);
    for (int64_t t = 0; t < kCount; ++t) {
      Wide sum = load(sums[t] + o);
      for (int64_t k = 0; k < kTogether; ++k) sum = multiply_add(read[k], factor[t][k], sum);
      *reinterpret_cast<Wide*>(sums[t] + o) = sum;
    }
  }
  for (; o < columns; ++o) {
    for (int64_t t = 0; t < kCount; ++t) {
      for (int64_t k = 0; k < kTogether; ++k) {
        sums[t][o] = multiply_add(mixed[t][k], widen(row[k * stride + o]), sums[t][o]);
      }
    }
  }
}

template <int64_t kCount, typename T>
void expand_tokens(const Term<T>& term, const Task& task, T* outputs, int64_t width, int64_t token) {
  const int64_t columns = task.end - task.begin;
  float sums[kCount][kColumns];
  const float* mixed[kCount];
  for (int64_t t = 0; t < kCount; ++t) {
    mixed[t] = term.mixed + (token + t) * term.rank;
    std::memset(sums[t], 0, columns * sizeof(float));
  }
  int64_t k = 0;
  const T* row = term.b + task.begin;
  for (; k + kRows <= term.rank; k += kRows) {
    add_rows<kRows, kCount>(row + k * term.outputs, term.outputs, columns, mixed, sums);
    for (const float*& place : mixed) place += kRows;
  }
  for (; k < term.rank; ++k) {
    add_rows<1, kCount>(row + k * term.outputs, term.outputs, columns, mixed, sums);
    for (const float*& place : mixed) ++place;
  }
  for (int64_t t = 0; t < kCount; ++t) {
    T* out = outputs + term.tokens[token + t] * width + term.first + task.begin;
    for (int64_t o = 0; o < columns; ++o) narrow(widen(out[o]) + sums[t][o], out[o]);
  }
}

// outputs [tokens, width] of the group += mixed times B, for the outputs of the task.
template <typename T>
void expand(const Term<T>& term, const Task& task, T* outputs, int64_t width) {
  int64_t token = 0;
  for (; token + kTokens <= term.count; token += kTokens) expand_tokens<kTokens>(term, task, outputs, width, token);
  for (; token < term.count; ++token) expand_tokens<1>(term, task, outputs, width, token);
}

}  // namespace low_rank
