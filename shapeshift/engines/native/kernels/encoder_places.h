// Scores by the place of a key beside a query, as DeBERTa adds them: distances lie in buckets, each of which has a key
// for the queries and a query for the keys.

#pragma once

#include <vector>

#include "attention_tiles.h"

constexpr int64_t kQueryTokens = 128;                     // of a piece of work
constexpr int64_t kWindow = kQueryTokens + 2 * kSeen;  // no piece with kSeen keys has more buckets, from a block on

// The buckets of a layer's distances from key to query, -far to far, which ascend by at most 1.
//
// count   how many there are
// padded  elements of a head, with zeros behind it
class Places {
 public:
  // keys, queries [heads, count, dim]; buckets [2 far + 1], which are only read. Form, Element: see `FormOf`.
  template <typename Form, typename Element>
  void lay(const float* keys, const float* queries, const int32_t* buckets, int64_t heads, int64_t count, int64_t far,
           int64_t dim) {
    constexpr int64_t kStep = Form::kNumbers * wide::kLanes;
    padded_ = (dim + kStep - 1) / kStep * kStep, step_ = padded_ / Form::kNumbers * kSeen;
    buckets_ = buckets, count_ = count, far_ = far, blocks_ = (count + kSeen - 1) / kSeen;
    keys_.assign(heads * blocks_ * step_, 0.0f), queries_.assign(heads * count * padded_, 0.0f);
    std::vector<Element> rows(kSeen * padded_);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t first = 0; first < count; first += kSeen) {
        const int64_t here = std::min(kSeen, count - first);
        for (int64_t row = 0; row < here; ++row) {
          const float* from = keys + (head * count + first + row) * dim;
          for (int64_t d = 0; d < dim; ++d) narrow(from[d], rows[row * padded_ + d]);
        }
        Form::turn_keys(rows.data(), padded_, here, padded_, keys_.data() + (head * blocks_ + first / kSeen) * step_);
      }
      for (int64_t row = head * count; row < (head + 1) * count; ++row) {
        std::copy(queries + row * dim, queries + (row + 1) * dim, queries_.data() + row * padded_);
        Form::lay_row(queries_.data() + row * padded_, padded_);
      }
    }
  }

  // Adds to scores [tokens, kSeen] what places give: of queries [tokens, padded], and of `seen` keys as columns
  // [padded / kNumbers, kSeen]. distance: from the first key to the first query.
  template <typename Form>
  void add(int64_t head, int64_t distance, int64_t tokens, const float* queries, int64_t seen, const float* keys,
           float* scores) const {
    using Product = typename Form::Product;
    static thread_local std::vector<float> of_queries(kQueryTokens * kWindow), of_keys(kWindow * kSeen);
    const int32_t* buckets = buckets_ + far_ + distance;
    const int64_t depth = padded_ / Form::kNumbers, columns = (seen + wide::kLanes - 1) / wide::kLanes * wide::kLanes;
    const int64_t least = buckets[1 - seen], most = buckets[tokens - 1], first = least / kSeen * kSeen;
    for (int64_t from = first; from <= most; from += kSeen) {
      multiply<Product, false>(tokens, queries, padded_, keys_.data() + (head * blocks_ + from / kSeen) * step_, kSeen,
                               kSeen, depth, of_queries.data() + from - first, kWindow);
    }
    multiply<Product, false>(most + 1 - least, queries_.data() + (head * count_ + least) * padded_, padded_, keys,
                             kSeen, columns, depth, of_keys.data(), kSeen);
    for (int64_t i = 0; i < tokens; ++i) {
      const float* own = of_queries.data() + i * kWindow - first;
      for (int64_t k = 0; k < seen; ++k) {
        const int64_t bucket = buckets[i - k];
        scores[i * kSeen + k] += own[bucket] + of_keys[(bucket - least) * kSeen + k];
      }
    }
  }

 private:
  int64_t count_, far_, padded_, blocks_, step_;
  const int32_t* buckets_;
  std::vector<float> keys_;     // [heads, blocks, padded / kNumbers, kSeen]
  std::vector<float> queries_;  // [heads, count, padded]
};
