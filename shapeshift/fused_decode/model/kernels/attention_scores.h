// Scores, weights and weighted sums of a query over keys and values that lie one after another.

#pragma once

#include <vector>

#include "wide.h"

// scores[k] = query . keys[k]
template <int64_t kDim>
void score(const float* query, const float* keys, int64_t runtime_dim, int64_t count, float* scores) {
  const int64_t dim = kDim ? kDim : runtime_dim;
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
template <int64_t kDim>
void mix(const float* weights, const float* values, int64_t runtime_dim, int64_t count, float keep, float* target) {
  const int64_t dim = kDim ? kDim : runtime_dim;
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

// Reads the lines of `count` elements into the cache.
template <typename T>
void fetch(const T* from, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i, 0, 2);
}

// As `score`, for keys in memory that only one query reads: widened in registers, while as many elements at `next` are
// fetched. `dim` is a multiple of wide::kLanes.
template <int64_t kDim, typename T>
void score_once(const float* query, const T* keys, int64_t runtime_dim, int64_t count, float* scores, const T* next) {
  using wide::load, wide::Wide;
  constexpr int64_t kLanes = wide::kLanes;
  const int64_t dim = kDim ? kDim : runtime_dim;
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const T* first = keys + k * dim;
    fetch(next + k * dim, 4 * dim);
    Wide sums[4] = {};
#pragma GCC unroll 8
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Wide own = load(query + d);
      for (int64_t i = 0; i < 4; ++i) sums[i] += own * load(first + i * dim + d);
    }
    wide::totals(sums[0], sums[1], sums[2], sums[3], scores + k);
  }
  for (; k < count; ++k) {
    fetch(next + k * dim, dim);
    Wide sum = {};
    for (int64_t d = 0; d < dim; d += kLanes) sum += load(query + d) * load(keys + k * dim + d);
    scores[k] = wide::total(sum);
  }
}

// As `mix`, under the same conditions.
template <int64_t kDim, typename T>
void mix_once(const float* weights, const T* values, int64_t runtime_dim, int64_t count, float keep, float* target,
              const T* next) {
  using wide::load, wide::Wide;
  constexpr int64_t kLanes = wide::kLanes;
  const int64_t dim = kDim ? kDim : runtime_dim;
  // The sums of so many vectors stay in registers over all values.
  constexpr int64_t kHeld = kDim && kDim % kLanes == 0 ? std::min<int64_t>(kDim / kLanes, 8) : 1;
  for (int64_t d = 0; d < dim; d += kHeld * kLanes) {
    Wide sums[kHeld];
    for (int64_t i = 0; i < kHeld; ++i) sums[i] = load(target + d + i * kLanes) * keep;
    for (int64_t k = 0; k < count; ++k) {
      if (d == 0) fetch(next + k * dim, dim);
      for (int64_t i = 0; i < kHeld; ++i) sums[i] += weights[k] * load(values + k * dim + d + i * kLanes);
    }
    for (int64_t i = 0; i < kHeld; ++i) wide::store(sums[i], target + d + i * kLanes);
  }
}

// Replaces scores by weights e^(score - best); returns their sum. `best` becomes the maximum so far; `keep` is the
// factor for the sums of earlier chunks.
inline float soften(float* scores, int64_t count, float& best, float& keep) {
  float top = best;
#pragma omp simd reduction(max : top)
  for (int64_t k = 0; k < count; ++k) top = std::max(top, scores[k]);
  keep = exponential(best - top);
  best = top;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < count; ++k) {
    scores[k] = exponential(scores[k] - top);
    sum += scores[k];
  }
  return sum;
}

// The elements at `source` as float; in `target`, where they are of another type.
template <typename C>
const float* widened(const C* source, int64_t count, float* target) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) target[i] = widen(source[i]);
  return target;
}

inline const float* widened(const float* source, int64_t, float*) { return source; }
