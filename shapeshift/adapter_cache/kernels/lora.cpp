// Low-rank terms of many adapters in one call: every token has its own adapter's, of whatever rank, and no other.
// Storage is float or bfloat16, arithmetic is float. Vectors are the compiler's, so that one source serves every width.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "common.h"

namespace {

using at::Tensor;

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;  // a vector of two registers goes through memory
#endif
constexpr int64_t kRanks = 8;          // rows of A that are one task
constexpr int64_t kColumns = 1024;     // most outputs that are one task; their sums stay in the nearest cache
constexpr int64_t kFewestColumns = 128;
constexpr int64_t kRows = 4;           // rows of B that are read together
constexpr int64_t kTokens = 4;         // tokens that share what a task reads
constexpr int64_t kSerial = 1 << 15;   // multiplications below which a second thread does not pay
constexpr int64_t kParts = 3, kFields = 4;

// Read in place, aligned or not: what memcpy makes of it goes through the stack in halves.
typedef float Wide __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4), may_alias));

inline Wide load(const float* source) { return *reinterpret_cast<const Wide*>(source); }

inline Wide load(const BFloat* source) {
  const auto& halves = *reinterpret_cast<const Halves*>(source);
  return reinterpret_cast<Wide>(__builtin_convertvector(halves, Words) << 16);
}

inline float total(const Wide& values) {
  float sum = 0.0f;
  for (int64_t i = 0; i < kLanes; ++i) sum += values[i];
  return sum;
}

// One adapter's term of a part of the linear, for the tokens of its group.
template <typename T>
struct Term {
  const T* a;           // [rank, inputs]
  const T* b;           // [rank, outputs], scaled
  const int32_t* tokens;
  float* mixed;         // [count, rank]: inputs times A
  int64_t count, rank, first, outputs;
};

// A task of either phase: rows of A, or outputs.
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
      for (int64_t t = 0; t < kCount; ++t) sums[k][t] += factor * given[t];
    }
  }
  for (int64_t k = 0; k < kTogether; ++k) {
    for (int64_t t = 0; t < kCount; ++t) {
      float sum = total(sums[k][t]);
      for (int64_t j = i; j < inputs; ++j) sum += widen(a[k * inputs + j]) * widen(rows[t][j]);
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

template <typename T>
void shrink(const Term<T>& term, const Task& task, const T* inputs, int64_t width) {
  int64_t token = 0;
  for (; token + kTokens <= term.count; token += kTokens) shrink_tokens<kTokens>(term, task, inputs, width, token);
  for (; token < term.count; ++token) shrink_tokens<1>(term, task, inputs, width, token);
}

// sums[t, o] += mixed[t, k] B[k, o] for kTogether rows k from `row` on, `columns` outputs o and kCount tokens. Rows are
// read along, as memory likes it: with all of them for a few outputs at a time it took three times as long.
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
      for (int64_t k = 0; k < kTogether; ++k) sum += read[k] * factor[t][k];
      *reinterpret_cast<Wide*>(sums[t] + o) = sum;
    }
  }
  for (; o < columns; ++o) {
    for (int64_t t = 0; t < kCount; ++t) {
      for (int64_t k = 0; k < kTogether; ++k) sums[t][o] += mixed[t][k] * widen(row[k * stride + o]);
    }
  }
}

// out[t, o] += sum over k of mixed[t, k] B[k, o], for the outputs of the task and kCount tokens.
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

template <typename T>
void expand(const Term<T>& term, const Task& task, T* outputs, int64_t width) {
  int64_t token = 0;
  for (; token + kTokens <= term.count; token += kTokens) expand_tokens<kTokens>(term, task, outputs, width, token);
  for (; token < term.count; ++token) expand_tokens<1>(term, task, outputs, width, token);
}

template <typename Work>
void run(const std::vector<Task>& tasks, bool serial, const Work& work) {
  if (serial) {
    for (const Task& task : tasks) work(task);
  } else {
    share(static_cast<int64_t>(tasks.size()), [&](int64_t i) { work(tasks[i]); });
  }
}

template <typename T>
void add_of(Tensor& outputs, const Tensor& inputs, const Tensor& memory, const Tensor& places, const Tensor& firsts,
            const Tensor& order, int64_t layer, int64_t linear) {
  const int64_t width = inputs.size(1), groups = places.size(0), linears = places.size(2);
  const auto* place = places.const_data_ptr<int64_t>() + (layer * linears + linear) * kParts * kFields;
  const int64_t stride = places.size(1) * linears * kParts * kFields;
  const auto* first = firsts.const_data_ptr<int32_t>();
  const T* weights = static_cast<const T*>(memory.const_data_ptr());
  static thread_local std::vector<float> scratch;
  static thread_local std::vector<Term<T>> terms;
  static thread_local std::vector<Task> rows, columns;
  terms.clear(), rows.clear(), columns.clear();
  int64_t mixed = 0, work = 0, added = 0;
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t part = 0; part < kParts; ++part) {
      const int64_t* field = place + group * stride + part * kFields;
      const int64_t offset = field[0], rank = field[1], from = field[2], count = field[3];
      if (rank == 0) continue;
      const bool inside = rank > 0 && offset >= 0 && offset + rank * (width + count) <= memory.numel() && from >= 0 &&
                          count > 0 && from + count <= outputs.size(1);
      TORCH_CHECK(inside, "add: group ", group, " lies outside the memory or the outputs");
      const int64_t tokens = first[group + 1] - first[group];
      const T* a = weights + offset;
      terms.push_back({a, a + rank * width, order.const_data_ptr<int32_t>() + first[group], nullptr, tokens, rank, from,
                       count});
      const auto term = static_cast<int32_t>(terms.size() - 1);
      for (int64_t k = 0; k < rank; k += kRanks) {
        rows.push_back({term, static_cast<int32_t>(k), static_cast<int32_t>(std::min(k + kRanks, rank))});
      }
      mixed += tokens * rank;
      added += count;
      work += tokens * rank * (width + count);
    }
  }
  if (terms.empty()) return;
  if (static_cast<int64_t>(scratch.size()) < mixed) scratch.resize(mixed);
  // Tasks as long as memory likes them, and yet enough of them for all threads.
  const int64_t share_of_each = added / (2 * at::get_num_threads()) / kLanes * kLanes;
  const int64_t most = std::clamp(share_of_each, kFewestColumns, kColumns);
  float* free = scratch.data();
  for (size_t i = 0; i < terms.size(); ++i) {
    Term<T>& term = terms[i];
    term.mixed = free;
    free += term.count * term.rank;
    for (int64_t o = 0; o < term.outputs; o += most) {
      columns.push_back({static_cast<int32_t>(i), static_cast<int32_t>(o),
                         static_cast<int32_t>(std::min(o + most, term.outputs))});
    }
  }
  // Threads other than this one see these through references: their own are empty.
  const auto &all = terms;
  const T* given = static_cast<const T*>(inputs.const_data_ptr());
  T* target = static_cast<T*>(outputs.data_ptr());
  const int64_t out_width = outputs.size(1);
  const bool serial = work < kSerial;
  run(rows, serial, [&all, given, width](const Task& task) { shrink(all[task.term], task, given, width); });
  run(columns, serial, [&all, target, out_width](const Task& task) { expand(all[task.term], task, target, out_width); });
}

void check(const Tensor& tensor, at::ScalarType type, int64_t dimensions, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.dim() == dimensions, name,
              ": must be contiguous ", type, " of ", dimensions, " dimensions");
}

// Adds to outputs [tokens, width] the terms of a layer's linear. Group g, whose adapter's factors lie where
// places[g] INT64 [layers, linears, parts, fields] says, has the tokens order[firsts[g]] to order[firsts[g + 1] - 1].
void add(Tensor outputs, const Tensor& inputs, const Tensor& memory, const Tensor& places, const Tensor& firsts,
         const Tensor& order, int64_t layer, int64_t linear) {
  const auto type = inputs.scalar_type();
  check(outputs, type, 2, "outputs"), check(inputs, type, 2, "inputs"), check(memory, type, 1, "memory");
  check(places, at::kLong, 5, "places"), check(firsts, at::kInt, 1, "firsts"), check(order, at::kInt, 1, "order");
  TORCH_CHECK(places.size(3) == kParts && places.size(4) == kFields, "places: must end in [3, 4]");
  TORCH_CHECK(layer >= 0 && layer < places.size(1), "layer: must be 0 to ", places.size(1) - 1);
  TORCH_CHECK(linear >= 0 && linear < places.size(2), "linear: must be 0 to ", places.size(2) - 1);
  TORCH_CHECK(outputs.size(0) == inputs.size(0), "outputs: must have the tokens of inputs");
  TORCH_CHECK(firsts.numel() == places.size(0) + 1, "firsts: must be one more than the groups");
  const auto *first = firsts.const_data_ptr<int32_t>(), *tokens = order.const_data_ptr<int32_t>();
  TORCH_CHECK(first[0] == 0 && first[places.size(0)] == order.numel(), "firsts: must run from 0 to the tokens in order");
  for (int64_t group = 0; group < places.size(0); ++group) {
    TORCH_CHECK(first[group] <= first[group + 1], "firsts: must not fall");
  }
  for (int64_t i = 0; i < order.numel(); ++i) {
    TORCH_CHECK(tokens[i] >= 0 && tokens[i] < inputs.size(0), "order: must be tokens of inputs");
  }
  if (type == at::kFloat) {
    add_of<float>(outputs, inputs, memory, places, firsts, order, layer, linear);
  } else {
    TORCH_CHECK(type == at::kBFloat16, "inputs: must be float or bfloat16");
    add_of<BFloat>(outputs, inputs, memory, places, firsts, order, layer, linear);
  }
}

// ---------------------------------------------------------------- loading

constexpr int64_t kTile = 16;

template <typename S, typename T>
bool store_of(const S* source, int64_t rows, int64_t columns, bool transposed, float scale, T* target) {
  bool finite = true;
  for (int64_t row = 0; row < rows; row += kTile) {
    for (int64_t column = 0; column < columns; column += kTile) {
      for (int64_t r = row; r < std::min(row + kTile, rows); ++r) {
        for (int64_t c = column; c < std::min(column + kTile, columns); ++c) {
          const auto value = static_cast<float>(source[r * columns + c]);
          finite &= std::isfinite(value);
          narrow(value * scale, target[transposed ? c * rows + r : r * columns + c]);
        }
      }
    }
  }
  return finite;
}

template <typename S>
bool store_as(Tensor& target, const Tensor& source, bool transposed, float scale) {
  const S* from = source.const_data_ptr<S>();
  if (target.scalar_type() == at::kFloat) {
    return store_of(from, source.size(0), source.size(1), transposed, scale, target.data_ptr<float>());
  }
  return store_of(from, source.size(0), source.size(1), transposed, scale, static_cast<BFloat*>(target.data_ptr()));
}

// Writes source [rows, columns], or its transpose, times `scale` into target, on the calling thread alone; whether
// all of source is finite.
bool store(Tensor target, const Tensor& source, bool transposed, double scale) {
  const auto type = target.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "target: must be float or bfloat16");
  TORCH_CHECK(target.is_contiguous() && source.is_contiguous() && source.dim() == 2, "source: must be [rows, columns]");
  TORCH_CHECK(target.numel() == source.numel(), "target: must have as many elements as source");
  switch (source.scalar_type()) {
    case at::kFloat: return store_as<float>(target, source, transposed, static_cast<float>(scale));
    case at::kHalf: return store_as<at::Half>(target, source, transposed, static_cast<float>(scale));
    case at::kBFloat16: return store_as<at::BFloat16>(target, source, transposed, static_cast<float>(scale));
    default: TORCH_CHECK(false, "source: must be float, half or bfloat16");
  }
}

}  // namespace

TORCH_LIBRARY(shapeshift_lora, library) {
  library.def(
      "add(Tensor(a!) outputs, Tensor inputs, Tensor memory, Tensor places, Tensor firsts, Tensor order, int layer, "
      "int linear) -> ()");
  library.def("store(Tensor(a!) target, Tensor source, bool transposed, float scale) -> bool");
}

TORCH_LIBRARY_IMPL(shapeshift_lora, CPU, library) {
  library.impl("add", &add);
  library.impl("store", &store);
}
