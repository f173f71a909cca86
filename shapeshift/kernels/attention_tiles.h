// Products of tiles of queries with keys, and of weights with values, that stay in registers.

#pragma once

#include <limits>

#include "attention_scores.h"
#include "unrolled.h"

constexpr int64_t kSeen = 64;       // keys that a tile of queries scores and mixes together
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the score of a key that a query does not see
constexpr int64_t kQueries = wide::kLanes == 16 ? 8 : 6;  // rows of a product that stay in registers
constexpr int64_t kColumns = 2;                           // vectors of its columns that do

// Products in float.
struct Singles {
  static wide::Wide add(const wide::Wide& sums, float row, const wide::Wide& columns) {
    return sums + row * columns;
  }
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16, each in the place of a float.
struct Pairs {
  static wide::Wide add(const wide::Wide& sums, float row, const wide::Wide& columns) {
    int32_t both;
    std::memcpy(&both, &row, sizeof both);
    return reinterpret_cast<wide::Wide>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums),
                                                         reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)),
                                                         reinterpret_cast<__m512bh>(columns)));
  }
};
#endif

// out [kRows, kVectors vectors] = rows [kRows, count] times columns [count, kVectors vectors], each with its stride;
// kAdded: added to what is there.
template <typename Product, bool kAdded, int64_t kRows, int64_t kVectors>
void multiply_tile(const float* rows, int64_t row_stride, const float* columns, int64_t stride, int64_t count,
                   float* out, int64_t out_stride) {
  using wide::kLanes, wide::Wide;
  Wide held[kRows][kVectors];
  for_constants<kRows>([&](auto row) __attribute__((always_inline)) {
    for_constants<kVectors>([&](auto v) __attribute__((always_inline)) {
      held[row][v] = kAdded ? wide::load(out + row * out_stride + v * kLanes) : Wide{};
    });
  });
  for (int64_t k = 0; k < count; ++k, columns += stride) {
    Wide own[kVectors];
    for_constants<kVectors>([&](auto v) __attribute__((always_inline)) {
      own[v] = wide::load(columns + v * kLanes);
#if defined(__AVX2__) && !defined(__AVX512F__)
      asm("" : "+x"(own[v]));  // else each row reads them again, and loads become the limit
#endif
    });
    for_constants<kRows>([&](auto row) __attribute__((always_inline)) {
      const float given = rows[row * row_stride + k];
      for_constants<kVectors>([&](auto v) __attribute__((always_inline)) {
        held[row][v] = Product::add(held[row][v], given, own[v]);
      });
    });
  }
  for_constants<kRows>([&](auto row) __attribute__((always_inline)) {
    for_constants<kVectors>([&](auto v) __attribute__((always_inline)) {
      wide::store(held[row][v], out + row * out_stride + v * kLanes);
    });
  });
}

// out [count of rows, width] = rows [count of rows, depth] times columns [depth, width], each with its stride; width a
// multiple of kLanes; kAdded: added to what is there.
template <typename Product, bool kAdded, int64_t kRows = kQueries>
void multiply(int64_t count, const float* rows, int64_t row_stride, const float* columns, int64_t stride, int64_t width,
              int64_t depth, float* out, int64_t out_stride) {
  using wide::kLanes;
  for (; count >= kRows; count -= kRows, rows += kRows * row_stride, out += kRows * out_stride) {
    int64_t at = 0;
    for (; at + kColumns * kLanes <= width; at += kColumns * kLanes) {
      multiply_tile<Product, kAdded, kRows, kColumns>(rows, row_stride, columns + at, stride, depth, out + at,
                                                      out_stride);
    }
    for (; at < width; at += kLanes) {
      multiply_tile<Product, kAdded, kRows, 1>(rows, row_stride, columns + at, stride, depth, out + at, out_stride);
    }
  }
  if constexpr (kRows > 1) {
    multiply<Product, kAdded, kRows - 1>(count, rows, row_stride, columns, stride, width, depth, out, out_stride);
  }
}

// Makes weights of scores [kRows, count], whose rows are kSeen apart; count: a multiple of kLanes. best, total [kRows]:
// the largest score so far, and the sum of the weights. What earlier keys gave is to be multiplied by keep [kRows].
// Several rows at once: of one alone, each operation waits for the one before.
template <int64_t kRows>
void soften_tile(float* scores, int64_t count, float* best, float* total, float* keep) {
  using wide::kLanes, wide::Wide;
  Wide tops[kRows], sums[kRows] = {}, rises{};
  for (int64_t row = 0; row < kRows; ++row) tops[row] = Wide{} + best[row];
  for (int64_t k = 0; k < count; k += kLanes) {
    for (int64_t row = 0; row < kRows; ++row) tops[row] = wide::larger(tops[row], wide::load(scores + row * kSeen + k));
  }
  for (int64_t row = 0; row < kRows; ++row) {
    const float top = wide::largest(tops[row]);
    rises[row] = best[row] - top;
    tops[row] = Wide{} + top;
    best[row] = top;
  }
  const Wide factors = wide::exponential(rises);
  for (int64_t k = 0; k < count; k += kLanes) {
    for (int64_t row = 0; row < kRows; ++row) {
      const Wide below = wide::load(scores + row * kSeen + k) - tops[row];
      const Wide weights = below < -87.0f ? Wide{} : wide::exponential(below);
      wide::store(weights, scores + row * kSeen + k);
      sums[row] += weights;
    }
  }
  for (int64_t row = 0; row < kRows; ++row) {
    keep[row] = factors[row];
    total[row] = total[row] * keep[row] + wide::sum(sums[row]);
  }
}

// As `soften_tile`, for `rows` rows; it multiplies what earlier keys gave, sums [rows, dim].
template <int64_t kRows = 4>
void soften_rows(int64_t rows, float* scores, int64_t count, float* best, float* total, float* sums, int64_t dim) {
  for (; rows >= kRows; rows -= kRows, scores += kRows * kSeen, best += kRows, total += kRows, sums += kRows * dim) {
    float keep[kRows];
    soften_tile<kRows>(scores, count, best, total, keep);
    for (int64_t row = 0; row < kRows; ++row) {
      if (keep[row] == 1.0f) continue;
      for (int64_t d = 0; d < dim; d += wide::kLanes) {
        wide::store(wide::load(sums + row * dim + d) * keep[row], sums + row * dim + d);
      }
    }
  }
  if constexpr (kRows > 1) soften_rows<kRows - 1>(rows, scores, count, best, total, sums, dim);
}

// Writes `count` rows of `dim` elements, `stride` apart, as columns of target [dim, kSeen], which start on a multiple
// of kLanes; zeros fill the last vector.
template <typename T>
void turn(const T* from, int64_t stride, int64_t count, int64_t dim, float* target) {
  using wide::kLanes;
  for (int64_t first = 0; first < count; first += kLanes) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      wide::Wide square[kLanes] = {};
      const int64_t here = std::min(kLanes, count - first);
      for (int64_t k = 0; k < here; ++k) square[k] = wide::load(from + (first + k) * stride + d);
      wide::transpose(square);
      for (int64_t i = 0; i < kLanes; ++i) wide::store(square[i], target + (d + i) * kSeen + first);
    }
  }
}

// The form in which queries, keys, weights and values are multiplied: numbers in float.
struct Singly {
  using Product = Singles;
  static constexpr int64_t kNumbers = 1;  // numbers in the place of one

  // Keys [count, dim], `stride` apart, as columns of target [dim / kNumbers, kSeen], which start on a multiple of
  // kLanes.
  template <typename C>
  static void turn_keys(const C* keys, int64_t stride, int64_t count, int64_t dim, float* target) {
    turn(keys, stride, count, dim, target);
  }

  // Values [count, dim], `stride` apart, as target [count / kNumbers, dim].
  template <typename C>
  static void lay_values(const C* values, int64_t stride, int64_t count, int64_t dim, float* target) {
    for (; count > 0; --count, values += stride, target += dim) {
      for (int64_t d = 0; d < dim; d += wide::kLanes) wide::store(wide::load(values + d), target + d);
    }
  }

  // Numbers of a row, in place.
  static void lay_row(float*, int64_t) {}
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16, to which queries and weights are rounded.
struct Paired {
  using Product = Pairs;
  static constexpr int64_t kNumbers = 2;

  // Whether a layer of this `dim` can be read so.
  static bool fits(int64_t dim) { return dim % (2 * wide::kLanes) == 0; }

  static void turn_keys(const BFloat* keys, int64_t stride, int64_t count, int64_t dim, float* target) {
    turn(reinterpret_cast<const float*>(keys), stride / 2, count, dim / 2, target);
  }

  // Behind an odd number of values comes one of zeros.
  static void lay_values(const BFloat* values, int64_t stride, int64_t count, int64_t dim, float* target) {
    for (int64_t k = 0; k < count; k += 2, values += 2 * stride, target += dim) {
      for (int64_t d = 0; d < dim; d += wide::kLanes) {
        const wide::Words one = bits_of(values + d) >> 16;
        const wide::Words other = k + 1 < count ? bits_of(values + stride + d) : wide::Words{};
        wide::store(reinterpret_cast<wide::Wide>(one | other), target + d);
      }
    }
  }

  static void lay_row(float* numbers, int64_t count) {
    auto* target = reinterpret_cast<BFloat*>(numbers);
    for (int64_t i = 0; i < count; i += 2 * wide::kLanes) {
      const auto near = reinterpret_cast<__m512>(wide::load(numbers + i));
      const auto far = reinterpret_cast<__m512>(wide::load(numbers + i + wide::kLanes));
      _mm512_storeu_si512(target + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(far, near)));
    }
  }

 private:
  static wide::Words bits_of(const BFloat* values) { return reinterpret_cast<wide::Words>(wide::load(values)); }
};
#endif
