#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace annulus {

/// Lets tasks that run at the same time add to the same sums in one order. Every task takes the
/// same steps, and tasks of a chain share what they add to in a step: there, a task adds after the
/// task before it. Tasks must start in ascending order.
class AdditionOrder {
 public:
  /// `chains`: of each task. `alone`: tasks of a chain share sums between different steps too.
  AdditionOrder(const std::vector<std::int64_t>& chains, std::int64_t steps, bool alone)
      : before_(chains.size(), -1), passed_(chains.size()), steps_(steps), alone_(alone) {
    std::vector<std::int64_t> last;
    for (std::size_t task = 0; task < chains.size(); ++task) {
      const auto chain = static_cast<std::size_t>(chains[task]);
      last.resize(std::max(last.size(), chain + 1), -1);
      before_[task] = std::exchange(last[chain], static_cast<std::int64_t>(task));
    }
  }

  /// Returns when the task may add in this step; calls `between` while it waits.
  void wait(std::int64_t task, std::int64_t step, const std::function<void()>& between) const {
    const std::int64_t before = before_[static_cast<std::size_t>(task)];
    if (before < 0) return;
    const std::int64_t enough = alone_ ? steps_ : step + 1;
    while (passed_[static_cast<std::size_t>(before)].load(std::memory_order_acquire) < enough) {
      between();
      std::this_thread::yield();
    }
  }
  /// The task, whose turn it was, has added in this step; it need not say so after each.
  void pass(std::int64_t task, std::int64_t step) {
    passed_[static_cast<std::size_t>(task)].store(step + 1, std::memory_order_release);
  }
  /// The task adds no more. One that fails must say so too, without waiting.
  void leave(std::int64_t task) { pass(task, steps_ - 1); }

 private:
  std::vector<std::int64_t> before_;  // the task before in the chain; −1: none
  std::vector<std::atomic<std::int64_t>> passed_;
  std::int64_t steps_;
  bool alone_;
};

}  // namespace annulus
