// Scores, weights and weighted sums of a query over keys and values that lie one after another.

#pragma once

#include <vector>

#include "wide.h"

// scores[k] = query . keys[k]
inline void score(const float* query, const float* keys, int64_t dim, int64_t count, float* scores) {
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const float *a = keys + k * dim, *b = a + dim, *c = b + dim, *e = c + dim;
    float sa = 0.0f, sb = 0.0f, sc = 0.0f, se = 0.0f;
#pragma omp simd reduction(+ : sa, sb, sc, se)
    for (int64_t d = 0; d < dim; ++d) {
      sa += query[d] * a[d];
      sb += query[d] * b[d];
      sc += query[d] * c[d];
      se += query[d] * e[d];
    }
    scores[k] = sa, scores[k + 1] = sb, scores[k + 2] = sc, scores[k + 3] = se;
  }
  for (; k < count; ++k) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < dim; ++d) sum += query[d] * keys[k * dim + d];
    scores[k] = sum;
  }
}

// target = target * keep + sum over k of weights[k] values[k]
inline void mix(const float* weights, const float* values, int64_t dim, int64_t count, float keep, float* target) {
  if (keep != 1.0f) {
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) target[d] *= keep;
  }
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const float *a = values + k * dim, *b = a + dim, *c = b + dim, *e = c + dim;
    const float wa = weights[k], wb = weights[k + 1], wc = weights[k + 2], we = weights[k + 3];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) target[d] += (wa * a[d] + wb * b[d]) + (wc * c[d] + we * e[d]);
  }
  for (; k < count; ++k) {
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) target[d] += weights[k] * values[k * dim + d];
  }
}

// Replaces scores x by cap tanh(x / cap).
inline void flatten(float* scores, int64_t count, float cap) {
  const float inverse = 1.0f / cap;
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) scores[k] = cap * tangent(scores[k] * inverse);
}

// Replaces scores by weights e^(score - best); returns their sum. `best` becomes the maximum so far; `keep` is the
// factor for the sums of earlier chunks.
inline float soften(float* scores, int64_t count, float& best, float& keep) {
  wide::Wide tops = wide::Wide{} + best;
  int64_t first = 0;
  for (; first + wide::kLanes <= count; first += wide::kLanes) tops = wide::larger(tops, wide::load(scores + first));
  float top = wide::largest(tops);
  for (; first < count; ++first) top = std::max(top, scores[first]);
  keep = exponential(best - top);
  best = top;
  // Of a reduction the compiler adds the lanes one after another, which takes as long as the weights themselves.
  wide::Wide sums{};
  int64_t k = 0;
  for (; k + wide::kLanes <= count; k += wide::kLanes) {
    const wide::Wide weights = wide::exponential(wide::load(scores + k) - top);
    wide::store(weights, scores + k);
    sums += weights;
  }
  if (k < count) {
    float rest[wide::kLanes] = {};
    std::copy(scores + k, scores + count, rest);
    wide::store(wide::exponential(wide::load(rest) - top), rest);
    std::fill(rest + (count - k), std::end(rest), 0.0f);
    std::copy(rest, rest + (count - k), scores + k);
    sums += wide::load(rest);
  }
  return wide::sum(sums);
}

// The elements at `source` as float; in `target`, where they are of another type.
template <typename C>
const float* widened(const C* source, int64_t count, float* target) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) target[i] = widen(source[i]);
  return target;
}

inline const float* widened(const float* source, int64_t, float*) { return source; }
