// Scores by the place of a key beside a query, as DeBERTa adds them: distances lie in buckets, each of which has a key
// for the queries and a query for the keys.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "attention_tiles.h"

constexpr int64_t kQueryTokens = 128;                  // of a piece of work
constexpr int64_t kWindow = kQueryTokens + 2 * kSeen;  // no piece with kSeen keys has more buckets, from a block on

// Elements of a head with the zeros behind it, in this form; see `FormOf`.
template <typename Form>
int64_t padded_to(int64_t dim) {
  constexpr int64_t kStep = Form::kNumbers * wide::kLanes;
  return (dim + kStep - 1) / kStep * kStep;
}

// The keys [heads, count, dim] of buckets as columns, in blocks: [heads, blocks, padded / kNumbers, kSeen].
template <typename Form, typename Element>
at::Tensor lay_keys(const at::Tensor& given) {
  const int64_t heads = given.size(0), count = given.size(1), dim = given.size(2), padded = padded_to<Form>(dim);
  const int64_t blocks = (count + kSeen - 1) / kSeen, step = padded / Form::kNumbers * kSeen;
  at::Tensor laid = at::zeros({heads, blocks, padded / Form::kNumbers, kSeen}, at::kFloat);
  float* target = laid.data_ptr<float>();
  const float* from = given.const_data_ptr<float>();
  std::vector<Element> rows(kSeen * padded);
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t first = 0; first < count; first += kSeen, target += step) {
      const int64_t here = std::min(kSeen, count - first);
      for (int64_t row = 0; row < here; ++row, from += dim) {
        for (int64_t d = 0; d < dim; ++d) narrow(from[d], rows[row * padded + d]);
      }
      Form::turn_keys(rows.data(), padded, here, padded, target);
    }
  }
  return laid;
}

// The queries [heads, count, dim] of buckets as rows: [heads, count, padded].
template <typename Form>
at::Tensor lay_queries(const at::Tensor& given) {
  const int64_t dim = given.size(2), padded = padded_to<Form>(dim);
  at::Tensor laid = at::zeros({given.size(0), given.size(1), padded}, at::kFloat);
  float* target = laid.data_ptr<float>();
  const float* from = given.const_data_ptr<float>();
  for (int64_t row = 0; row < given.size(0) * given.size(1); ++row, from += dim, target += padded) {
    std::copy(from, from + dim, target);
    Form::lay_row(target, padded);
  }
  return laid;
}

// The buckets of a layer's distances, `count` of them.
//
// keys     [heads, blocks, padded / kNumbers, kSeen], see `lay_keys`; or null: there are no buckets
// queries  [heads, count, padded], see `lay_queries`
// buckets  of the distances from key to query, -far to far; they ascend by at most 1
struct Places {
  const float *keys = nullptr, *queries = nullptr;
  const int32_t* buckets = nullptr;
  int64_t count = 0, far = 0, padded = 0;

  // Adds to scores [tokens, kSeen] what places give: of queries [tokens, padded], and of `seen` keys as columns
  // [padded / kNumbers, kSeen]. distance: from the first key to the first query.
  template <typename Form>
  void add(int64_t head, int64_t distance, int64_t tokens, const float* own_queries, int64_t seen,
           const float* own_keys, float* scores) const {
    using Product = typename Form::Product;
    static thread_local std::vector<float> of_queries(kQueryTokens * kWindow), of_keys(kWindow * kSeen);
    const int32_t* at = buckets + far + distance;
    const int64_t depth = padded / Form::kNumbers, columns = (seen + wide::kLanes - 1) / wide::kLanes * wide::kLanes;
    const int64_t least = at[1 - seen], most = at[tokens - 1], first = least / kSeen * kSeen;
    const int64_t blocks = (count + kSeen - 1) / kSeen;
    for (int64_t from = first; from <= most; from += kSeen) {
      const float* block = keys + (head * blocks + from / kSeen) * depth * kSeen;
      multiply<Product, false>(tokens, own_queries, padded, block, kSeen, kSeen, depth, of_queries.data() + from - first,
                               kWindow);
    }
    multiply<Product, false>(most + 1 - least, queries + (head * count + least) * padded, padded, own_keys, kSeen,
                             columns, depth, of_keys.data(), kSeen);
    for (int64_t i = 0; i < tokens; ++i) {
      const float* own = of_queries.data() + i * kWindow - first;
      for (int64_t k = 0; k < seen; ++k) {
        const int64_t bucket = at[i - k];
        scores[i * kSeen + k] += own[bucket] + of_keys[(bucket - least) * kSeen + k];
      }
    }
  }
};
