// Products of tiles of queries with keys, and of weights with values, that stay in registers.

#pragma once

#include "attention_scores.h"

constexpr int64_t kSeen = 64;       // keys that a tile of queries scores and mixes together
constexpr int64_t kQueries = wide::kLanes == 16 ? 8 : 4;  // rows of a product that stay in registers
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

// out [kRows, kVectors vectors] += rows [kRows, count] times columns [count, kVectors vectors], each with its stride.
template <typename Product, int64_t kRows, int64_t kVectors>
void add_tile(const float* rows, int64_t row_stride, const float* columns, int64_t stride, int64_t count, float* out,
              int64_t out_stride) {
  using wide::kLanes, wide::Wide;
  Wide held[kRows][kVectors];
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) held[row][v] = wide::load(out + row * out_stride + v * kLanes);
  }
  for (int64_t k = 0; k < count; ++k, columns += stride) {
    Wide own[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) own[v] = wide::load(columns + v * kLanes);
    for (int64_t row = 0; row < kRows; ++row) {
      const float given = rows[row * row_stride + k];
      for (int64_t v = 0; v < kVectors; ++v) held[row][v] = Product::add(held[row][v], given, own[v]);
    }
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) wide::store(held[row][v], out + row * out_stride + v * kLanes);
  }
}

// out [count of rows, width] += rows [count of rows, depth] times columns [depth, width]; width a multiple of kLanes.
// stride: of columns and of `out`.
template <typename Product, int64_t kRows = kQueries>
void add_product(int64_t count, const float* rows, int64_t row_stride, const float* columns, int64_t width,
                 int64_t depth, float* out, int64_t stride) {
  using wide::kLanes;
  for (; count >= kRows; count -= kRows, rows += kRows * row_stride, out += kRows * stride) {
    int64_t at = 0;
    for (; at + kColumns * kLanes <= width; at += kColumns * kLanes) {
      add_tile<Product, kRows, kColumns>(rows, row_stride, columns + at, stride, depth, out + at, stride);
    }
    for (; at < width; at += kLanes) {
      add_tile<Product, kRows, 1>(rows, row_stride, columns + at, stride, depth, out + at, stride);
    }
  }
  if constexpr (kRows > 1) add_product<Product, kRows - 1>(count, rows, row_stride, columns, width, depth, out, stride);
}

// Writes `count` rows of `dim` elements as columns of target [dim, kSeen], which start on a multiple of kLanes; zeros
// fill the last vector.
template <typename T>
void turn(const T* from, int64_t count, int64_t dim, float* target) {
  using wide::kLanes;
  for (int64_t first = 0; first < count; first += kLanes) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      wide::Wide square[kLanes] = {};
      const int64_t here = std::min(kLanes, count - first);
      for (int64_t k = 0; k < here; ++k) square[k] = wide::load(from + (first + k) * dim + d);
      wide::transpose(square);
      for (int64_t i = 0; i < kLanes; ++i) wide::store(square[i], target + (d + i) * kSeen + first);
    }
  }
}

// The form in which queries, keys, weights and values are multiplied: numbers in float.
template <typename C>
struct Singly {
  using Product = Singles;
  static constexpr int64_t kNumbers = 1;  // numbers in the place of one

  // Keys [count, dim] as columns of target [dim / kNumbers, kSeen], which start on a multiple of kLanes.
  static void turn_keys(const C* keys, int64_t count, int64_t dim, float* target) { turn(keys, count, dim, target); }

  // Values [count, dim] as target [count / kNumbers, dim].
  static void lay_values(const C* values, int64_t count, int64_t dim, float* target) {
    const float* found = widened(values, count * dim, target);
    if (found != target) std::copy(found, found + count * dim, target);
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

  static void turn_keys(const BFloat* keys, int64_t count, int64_t dim, float* target) {
    turn(reinterpret_cast<const float*>(keys), count, dim / 2, target);
  }

  // Behind an odd number of values comes one of zeros.
  static void lay_values(const BFloat* values, int64_t count, int64_t dim, float* target) {
    for (int64_t k = 0; k < count; k += 2, values += 2 * dim, target += dim) {
      for (int64_t d = 0; d < dim; d += wide::kLanes) {
        const wide::Words one = bits_of(values + d) >> 16;
        const wide::Words other = k + 1 < count ? bits_of(values + dim + d) : wide::Words{};
        wide::store(reinterpret_cast<wide::Wide>(one | other), target + d);
      }
    }
  }

  static void lay_row(float* numbers, int64_t count) {
    auto* target = reinterpret_cast<BFloat*>(numbers);
    for (int64_t i = 0; i < count; i += wide::kLanes) wide::store(wide::load(numbers + i), target + i);
  }

 private:
  static wide::Words bits_of(const BFloat* values) { return reinterpret_cast<wide::Words>(wide::load(values)); }
};
#endif
