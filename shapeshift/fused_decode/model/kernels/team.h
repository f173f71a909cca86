// Threads that do many small pieces of work together and stay in one parallel region.

#pragma once

#include <omp.h>

#include <chrono>
#include <vector>

#include "common.h"

class Team {
 public:
  // Runs body(team) on every thread of the pool. All call the team with the same work in the same order, at most
  // `shares` times.
  template <typename Body>
  static void gather(int64_t shares, const Body& body) {
    std::vector<Work> works(shares);
#pragma omp parallel num_threads(at::get_num_threads())
    body(Team(works.data(), omp_get_num_threads()));
  }

  int64_t threads() const { return threads_; }

  // Runs each(i) for i in [0, count), each on a free thread, and returns when all are done. Threads wait for work, not
  // for one another: a late thread delays none.
  template <typename Each>
  void operator()(int64_t count, const Each& each) const {
    Work& own = *next_++;
    int64_t mine = 0;
    for (int64_t i = own.next++; i < count; i = own.next++, ++mine) each(i);
    if (mine > 0 && own.done.fetch_add(mine, std::memory_order_acq_rel) + mine == count) {
      own.over.store(1, std::memory_order_release);
      own.over.notify_all();
    } else if (count > 0) {
      await(own.over);
    }
  }

 private:
  struct Work {
    alignas(64) std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    alignas(64) std::atomic<int32_t> over{0};
  };

  // Longer than almost every piece of work; a piece that takes longer is on a thread that has lost its core.
  static constexpr auto kAwake = std::chrono::microseconds(200);
  static constexpr int kLooks = 32;

  Team(Work* works, int64_t threads) : next_(works), threads_(threads) {}

  static void await(const std::atomic<int32_t>& over) {
    const auto end = std::chrono::steady_clock::now() + kAwake;
    do {
      for (int look = 0; look < kLooks; ++look) {
        if (over.load(std::memory_order_acquire)) return;
        rest();
      }
    } while (std::chrono::steady_clock::now() < end);
    over.wait(0, std::memory_order_acquire);
  }

  static void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  mutable Work* next_;
  int64_t threads_;
};
