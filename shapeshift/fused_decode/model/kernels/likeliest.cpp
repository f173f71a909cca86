// The likeliest tokens of each row, and what is subtracted from its logits to make logprobs. Equal to `largest` of
// engine/sampling/sampler.py and `log_norms` of engine/beam_search.py, up to the order in which a norm is summed.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <numeric>
#include <tuple>
#include <vector>

#include "columns.h"

namespace {

using at::Tensor;

constexpr int64_t kSummed = 1024;  // weights that are summed in float before their sum goes on in double

// A thread's working memory, reused for every row.
struct Scratch {
  std::vector<float> maxima, ordered;
  std::vector<int64_t> found;
};

// The sum of e^(logit - best).
double weight_sum(const Row& row, float best) {
  // In a variable of its own: else the compiler gathers one logit after another.
  const float* logits = row.logits;
  double total = 0;
  for (int64_t start = 0; start < row.size; start += kSummed) {
    const int64_t end = std::min(row.size, start + kSummed);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t token = start; token < end; ++token) sum += exponential(logits[token] - best);
    total += sum;
  }
  return total;
}

// Writes the `count` likeliest tokens, the likeliest first, of equal ones the lower; returns the norm. A row that is not
// finite has the norm NaN, and its tokens mean nothing.
float rank(const Row& row, int64_t count, Scratch& s, int64_t* tokens) {
  const bool ordered = scan(row, s.maxima);
  const float best = *std::max_element(s.maxima.begin(), s.maxima.end());
  if (!ordered || !std::isfinite(best)) {
    std::iota(tokens, tokens + count, int64_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  s.ordered = s.maxima, s.found.clear();
  each_from(row, s.maxima, least_of_largest(s.ordered, count), [&](int64_t token) { s.found.push_back(token); });
  std::partial_sort(s.found.begin(), s.found.begin() + count, s.found.end(), [&](int64_t one, int64_t other) {
    const float a = row.logits[one], b = row.logits[other];
    return a > b || (a == b && one < other);
  });
  std::copy(s.found.begin(), s.found.begin() + count, tokens);
  return static_cast<float>(best + std::log(weight_sum(row, best)));
}

// logits FLOAT32 [rows, vocabulary]. Returns the norms, FLOAT32 [rows], and tokens, INT64 [rows, count].
std::tuple<Tensor, Tensor> likeliest(const Tensor& logits, int64_t count) {
  check_logits(logits);
  const int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(count > 0 && count <= size, "count: must be 1 to the vocabulary's ", size);
  Tensor norms = at::empty({rows}, logits.options());
  Tensor tokens = at::empty({rows, count}, logits.options().dtype(at::kLong));
  auto* sums = norms.data_ptr<float>();
  auto* chosen = tokens.data_ptr<int64_t>();
  share(rows, [&](int64_t row) {
    thread_local Scratch scratch;
    sums[row] = rank(Row(logits, row), count, scratch, chosen + row * count);
  });
  return {norms, tokens};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shapeshift_decode, library) {
  library.def("likeliest(Tensor logits, int count) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shapeshift_decode, CPU, library) { library.impl("likeliest", &likeliest); }
