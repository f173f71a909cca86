// Functions that several kernels share.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

struct BFloat {
  uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(BFloat value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void narrow(float value, float& target) { target = value; }

inline float widen(int8_t level) { return level; }

// Round to nearest, ties to even.
inline void narrow(float value, BFloat& target) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  target.bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}

// e^x to 2 units in the last place, with x clamped to -87..88; not a number where x is none.
inline float exponential(float given) {
  // By min and max: of comparisons g++ makes copies of the caller's loop for both limits. Quotients by e^88 are
  // denormal there, and hundreds of cycles slower, for every lane.
  const float x = std::min(88.0f, std::max(-87.0f, given));
  const float turns = std::floor(x * 1.44269504f + 0.5f);
  const float rest = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const int32_t bits = (static_cast<int32_t>(turns) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return given == given ? sum * power : given;
}

// The hyperbolic tangent: near 0 by its series, where the other form would lose digits.
inline float tangent(float x) {
  const float square = x * x;
  float series = 2.1869489e-2f;
  series = series * square - 5.3968254e-2f;
  series = series * square + 1.3333333e-1f;
  series = series * square - 3.3333333e-1f;
  series = x + x * square * series;
  const float whole = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return square < 0.09f ? series : whole;
}

inline float silu(float x) { return x / (1.0f + exponential(-x)); }

// Runs work(i) for i in [0, count). A thread takes the next i when it is done with one, so a thread that has lost its
// core for a while delays only one i.
template <typename Work>
void share(int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) work(i);
  });
}

// `share` as an object, for kernels that get their way to share work as an argument.
struct Shared {
  template <typename Work>
  void operator()(int64_t count, const Work& work) const {
    share(count, work);
  }
};
