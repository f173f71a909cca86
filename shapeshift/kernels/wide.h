// Vectors of float, read from float, bfloat16 or levels of 8 bits. They are the compiler's, so one source serves every
// width.

#pragma once

#include "common.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace wide {

#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;  // the compiler passes a vector of two registers through memory
#endif

// Read in place, aligned or not; memcpy would copy each half through the stack.
typedef float Wide __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4), may_alias));

inline Wide load(const float* source) { return *reinterpret_cast<const Wide*>(source); }

inline Wide load(const BFloat* source) {
#ifdef __AVX512F__
  // The compiler widens the two halves apart.
  const __m256i near = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return reinterpret_cast<Wide>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(near), 16));
#else
  // Not `auto`, which drops the alignment of the type: the compiler would take every address for aligned.
  const Halves halves = *reinterpret_cast<const Halves*>(source);
  return reinterpret_cast<Wide>(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline Wide load(const int8_t* source) {
#ifdef __AVX512F__
  const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return reinterpret_cast<Wide>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(levels)));
#else
  const Bytes levels = *reinterpret_cast<const Bytes*>(source);
  return __builtin_convertvector(levels, Wide);
#endif
}

// Two vectors of adjacent elements, in the order in which they are read fastest: see `pair_up`.
struct Pair {
  Wide one, other;
};

template <typename T>
Pair load_pair(const T* source) {
  return {load(source), load(source + kLanes)};
}

// The elements at even places, and those at odd ones: neither has to be widened.
inline Pair load_pair(const BFloat* source) {
  const Words both = *reinterpret_cast<const Words*>(source);
  return {reinterpret_cast<Wide>(both << 16), reinterpret_cast<Wide>(both & 0xffff0000u)};
}

inline void store(const Wide& values, float* target) { *reinterpret_cast<Wide*>(target) = values; }

// As `narrow`.
inline void store(const Wide& values, BFloat* target) {
  const Words bits = reinterpret_cast<Words>(values);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words kept = values == values ? rounded : Words{} + 0x7fc0u;
  *reinterpret_cast<Halves*>(target) = __builtin_convertvector(kept, Halves);
}

inline Ints load(const int32_t* source) { return *reinterpret_cast<const Ints*>(source); }

inline Wide numbers(const Ints& values) { return __builtin_convertvector(values, Wide); }

// a b + c, rounded once where the CPU has such an instruction: where results must agree bit for bit, whatever surrounds
// them, that is not left to the compiler.
inline Wide multiply_add(const Wide& a, const Wide& b, const Wide& c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Wide>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__) && defined(__FMA__)
  return reinterpret_cast<Wide>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

inline float multiply_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The lanes, each moved by kStep places. An argument for them would keep the compiler from folding the places.
template <int32_t kStep>
Wide turned(const Wide& values) {
  Places from;
  for (int32_t i = 0; i < kLanes; ++i) from[i] = (i + kStep) % static_cast<int32_t>(kLanes);
  return __builtin_shuffle(values, from);
}

// The larger of each lane's two; the second one where one of them is not a number. From operators the compiler would
// make a comparison and a choice.
inline Wide larger(const Wide& a, const Wide& b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Wide>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Wide>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

// The smaller of each lane's two; the second one where one of them is not a number.
inline Wide smaller(const Wide& a, const Wide& b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Wide>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Wide>(_mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a < b ? a : b;
#endif
}

// The largest whole numbers that are not larger.
inline Wide floor(const Wide& values) {
#if defined(__AVX512F__)
  return reinterpret_cast<Wide>(_mm512_floor_ps(reinterpret_cast<__m512>(values)));
#elif defined(__AVX2__)
  return reinterpret_cast<Wide>(_mm256_floor_ps(reinterpret_cast<__m256>(values)));
#else
  const Wide near = numbers(__builtin_convertvector(values, Ints));
  return near > values ? near - 1.0f : near;
#endif
}

inline float largest(Wide values) {
  if constexpr (kLanes > 8) values = larger(values, turned<8>(values));
  if constexpr (kLanes > 4) values = larger(values, turned<4>(values));
  values = larger(values, turned<2>(values));
  return larger(values, turned<1>(values))[0];
}

inline float sum(Wide values) {
  if constexpr (kLanes > 8) values += turned<8>(values);
  if constexpr (kLanes > 4) values += turned<4>(values);
  values += turned<2>(values);
  return values[0] + values[1];
}

// As the function of one number.
inline Wide exponential(const Wide& given) {
  const Wide x = smaller(Wide{} + 88.0f, larger(Wide{} - 87.0f, given));
  const Wide turns = floor(x * 1.44269504f + 0.5f);
  const Wide rest = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;
  Wide sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
#ifdef __AVX512F__
  return reinterpret_cast<Wide>(_mm512_scalef_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512>(turns)));
#else
  const Wide power = reinterpret_cast<Wide>((__builtin_convertvector(turns, Ints) + 127) << 23);
  return sum * power;
#endif
}

inline float total(const Wide& values) {
  float sum = 0.0f;
  for (int64_t i = 0; i < kLanes; ++i) sum += values[i];
  return sum;
}

// The sums of the lanes of four vectors.
inline void totals(const Wide& a, const Wide& b, const Wide& c, const Wide& d, float* sums) {
  Places low, high, even, odd;
  for (int32_t i = 0; i < kLanes; ++i) {
    // Lanes of two vectors in turns, then pairs of lanes in turns: each group of four lanes gets one lane of each vector.
    low[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * kLanes;
    high[i] = low[i] + 2;
    even[i] = i / 4 * 4 + i % 2 + i % 4 / 2 * kLanes;
    odd[i] = even[i] + 2;
  }
  const Wide ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
  const Wide cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
  Wide all = __builtin_shuffle(ab, cd, even) + __builtin_shuffle(ab, cd, odd);
  if constexpr (kLanes > 8) all += turned<8>(all);
  if constexpr (kLanes > 4) all += turned<4>(all);
  for (int64_t i = 0; i < 4; ++i) sums[i] = all[i];
}

// Puts `count` values into the order in which load_pair reads elements of type T; a last vector alone stays as it is.
template <typename T>
void pair_up(float* values, int64_t count) {
  if constexpr (!std::is_same_v<T, BFloat>) return;
  Places even, odd;
  for (int32_t i = 0; i < kLanes; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
  for (; count >= 2 * kLanes; count -= 2 * kLanes, values += 2 * kLanes) {
    const Wide near = load(values), far = load(values + kLanes);
    store(__builtin_shuffle(near, far, even), values), store(__builtin_shuffle(near, far, odd), values + kLanes);
  }
}

// Takes back what pair_up has done.
template <typename T>
void set_apart(float* values, int64_t count) {
  if constexpr (!std::is_same_v<T, BFloat>) return;
  Places low, high;
  for (int32_t i = 0; i < kLanes; ++i) low[i] = i / 2 + i % 2 * kLanes, high[i] = low[i] + kLanes / 2;
  for (; count >= 2 * kLanes; count -= 2 * kLanes, values += 2 * kLanes) {
    const Wide one = load(values), other = load(values + kLanes);
    store(__builtin_shuffle(one, other, low), values), store(__builtin_shuffle(one, other, high), values + kLanes);
  }
}

// Exchanges rows and columns of a square.
inline void transpose(Wide (&square)[kLanes]) {
#pragma GCC unroll 4
  for (int32_t step = 1; step < kLanes; step *= 2) {
    Places low, high;
    for (int32_t i = 0; i < kLanes; ++i) {
      // Of two rows `step` apart, each takes from the other what lies on the other side of the diagonal.
      low[i] = i & step ? i - step + static_cast<int32_t>(kLanes) : i;
      high[i] = low[i] + step;
    }
#pragma GCC unroll 16
    for (int64_t row = 0; row < kLanes; ++row) {
      if (row & step) continue;
      const Wide one = square[row], other = square[row + step];
      square[row] = __builtin_shuffle(one, other, low);
      square[row + step] = __builtin_shuffle(one, other, high);
    }
  }
}

}  // namespace wide
