// The threads that help one thread with a call, which wake on other cores than its own.

#pragma once

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdint>

// The kernel of a virtual machine takes a core that has slept for one that its host has taken away: it wakes a helper on
// the core of the thread that calls it, where it runs milliseconds later, when a short call is over. So that core is
// not allowed until the helper is awake.
class Helpers {
 public:
  // Those of the calling thread, of which `count` are about to wake.
  static Helpers& of_this_thread(int64_t count) {
    static thread_local Helpers own;
    own.forbid_own_core(count);
    return own;
  }

  // On helper `number`, from 1; the thread itself is 0.
  void awake(int64_t number) {
    if (number == 0 || number > kMost) return;
    static thread_local const pid_t id = gettid();
    ids_[number - 1] = id;
    if (forbids_) sched_setaffinity(0, sizeof cores_, &cores_);
  }

 private:
  static constexpr int64_t kMost = 64;

  void forbid_own_core(int64_t count) {
    forbids_ = count > 0 && sched_getaffinity(0, sizeof cores_, &cores_) == 0 && CPU_COUNT(&cores_) > 1;
    if (!forbids_) return;
    cpu_set_t others = cores_;
    CPU_CLR(sched_getcpu(), &others);
    for (int64_t i = 0; i < count && i < kMost; ++i) {
      // One that has ended may have left its number to a thread of another process.
      if (ids_[i] != 0 && tgkill(getpid(), ids_[i], 0) == 0) sched_setaffinity(ids_[i], sizeof others, &others);
    }
  }

  std::array<pid_t, kMost> ids_{};
  cpu_set_t cores_;
  bool forbids_ = false;
};
