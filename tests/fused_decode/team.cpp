// The team of threads under ThreadSanitizer: pieces of work that depend on those before them, and a product of matrices.

#include "team.h"

#include <cstdio>
#include <thread>
#include <vector>

#include "linear.h"

// The OpenMP library is not compiled for ThreadSanitizer, which would not see how it starts and joins threads.
static thread_local int own_number = 0;
static int number_of_threads = 4;

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned, unsigned) {
  std::vector<std::thread> threads;
  for (int number = 1; number < number_of_threads; ++number) {
    threads.emplace_back([=] {
      own_number = number;
      body(data);
    });
  }
  body(data);
  for (auto& thread : threads) thread.join();
}

extern "C" int omp_get_num_threads() { return number_of_threads; }
extern "C" int omp_get_thread_num() { return own_number; }

// Each round reads what other threads wrote in the round before. After so many rounds at least, all but one may leave.
static bool rounds_follow_one_another(int64_t size, int64_t until_leave) {
  constexpr int64_t kRounds = 40;
  std::vector<int64_t> one(size, 1), other(size, 0);
  std::atomic<int64_t> wanted{number_of_threads};
  Team::gather(kRounds, wanted, [&](const Team& team) {
    int64_t *from = one.data(), *to = other.data();
    for (int64_t round = 0; round < kRounds; ++round, std::swap(from, to)) {
      team(size, [&](int64_t i) {
        to[i] = from[(i + 1) % size] + 1;
        if (round >= until_leave && wanted > 1) --wanted;
      });
    }
  });
  for (const int64_t value : one) {
    if (value != kRounds + 1) return false;
  }
  return true;
}

// Weights of 1, inputs of 1: each output is the number of inputs.
static bool product_is_right(int64_t rows, int64_t inputs, int64_t outputs) {
  Panels<float> panels{nullptr, nullptr, inputs, outputs};
  const std::vector<float> weights(panels.elements(), 1.0f), given(rows * inputs, 1.0f);
  panels.weights = weights.data();
  std::vector<float> out(rows * outputs, 0.0f);
  Team::gather(1, [&](const Team& team) { multiply(panels, given.data(), rows, out.data(), team); });
  for (const float value : out) {
    if (value != static_cast<float>(inputs)) return false;
  }
  return true;
}

int main() {
  bool right = true;
  for (number_of_threads = 1; number_of_threads <= 5; ++number_of_threads) {
    for (int64_t size : {1, 2, 7, 64}) {
      for (int again = 0; again < 20; ++again) right = right && rounds_follow_one_another(size, 3 * again);
    }
    for (int64_t rows : {1, 9, 300}) right = right && product_is_right(rows, 70, 200);
  }
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 1;
}
