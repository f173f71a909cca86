// Threads that do many small pieces of work together and stay in one parallel region.

#pragma once

#include <omp.h>

#include <array>
#include <chrono>
#include <limits>
#include <vector>

#include "common.h"

class Team {
 public:
  // Runs body(team) on every thread of the pool. All call the team with the same work in the same order, at most
  // `shares` times. wanted: how many threads are to go on; the others leave before their next work, for good.
  template <typename Body>
  static void gather(int64_t shares, const std::atomic<int64_t>& wanted, const Body& body) {
    std::vector<Work> works(shares);
#pragma omp parallel num_threads(at::get_num_threads())
    body(Team(works.data(), omp_get_thread_num(), omp_get_num_threads(), wanted));
  }

  template <typename Body>
  static void gather(int64_t shares, const Body& body) {
    const std::atomic<int64_t> all{std::numeric_limits<int64_t>::max()};
    gather(shares, all, body);
  }

  // Of this thread in the team, from 0; the one that gathers it is 0.
  int64_t number() const { return thread_; }

  // Runs each(i) for i in [0, count) and returns when all are done. A thread takes what follows one another, from the part
  // of the work that is its own, and then from the others' parts: what it fetched for the next i is its own to use, and a
  // late thread delays none.
  template <typename Each>
  void operator()(int64_t count, const Each& each) const {
    // The first one stays, whatever is wanted. One that came back would be ahead of the others.
    left_ = left_ || (thread_ > 0 && thread_ >= wanted_.load(std::memory_order_relaxed));
    if (left_) return;
    Work& own = *next_++;
    int64_t mine = 0;
    for (int64_t turn = 0; turn < parts_; ++turn) {
      const int64_t part = (thread_ + turn) % parts_;
      const int64_t first = part * count / parts_, end = (part + 1) * count / parts_;
      std::atomic<int64_t>& taken = own.taken[part].count;
      for (int64_t i = first + taken++; i < end; i = first + taken++, ++mine) each(i);
    }
    if (mine > 0 && own.done.fetch_add(mine, std::memory_order_acq_rel) + mine == count) {
      own.over.store(1, std::memory_order_release);
      own.over.notify_all();
    } else if (count > 0) {
      await(own.over);
    }
  }

 private:
  static constexpr int64_t kMostParts = 8;  // beyond that, threads share a part: each looks at all of them in the end

  struct Taken {
    alignas(64) std::atomic<int64_t> count{0};
  };

  struct Work {
    std::array<Taken, kMostParts> taken;
    alignas(64) std::atomic<int64_t> done{0};
    alignas(64) std::atomic<int32_t> over{0};
  };

  // Longer than almost every piece of work; a piece that takes longer is on a thread that has lost its core.
  static constexpr auto kAwake = std::chrono::microseconds(200);
  static constexpr int kLooks = 32;

  Team(Work* works, int64_t thread, int64_t threads, const std::atomic<int64_t>& wanted)
      : next_(works), thread_(thread), parts_(std::min(threads, kMostParts)), wanted_(wanted) {}

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
  int64_t thread_, parts_;
  const std::atomic<int64_t>& wanted_;
  mutable bool left_ = false;
};
