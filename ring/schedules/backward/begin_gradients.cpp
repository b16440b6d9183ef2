#include <cstddef>
#include <utility>
#include <vector>

#include "schedules/accesses.hpp"
#include "schedules/backward/backward_builder.hpp"

namespace annulus::ring {
namespace {

class Beginnings {
 public:
  Beginnings(RankPlan& plan, bool adds)
      : plan_(plan), tasks_(std::exchange(plan.tasks, {})), begun_(plan.buffers.size()) {
    for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
      const Buffer& buffer = plan.buffers[i];
      const bool given = buffer.kind == BufferKind::caller && adds;
      begun_[i] = !is_gradient(buffer.contents.front()) || given || buffer.tokens.count == 0;
    }
  }

  void run() {
    for (Task& task : tasks_) {
      each_access(plan_, task, [&](const Region& region, Use use) {
        if (use == Use::read || use == Use::add) zero(region.buffer, task.step);
        begun_[index(region)] = true;
      });
      plan_.tasks.push_back(std::move(task));
    }
    const int last = plan_.tasks.empty() ? 0 : plan_.tasks.back().step;
    for (std::size_t i = 0; i < begun_.size(); ++i) {
      if (plan_.buffers[i].kind == BufferKind::caller) zero(static_cast<int>(i), last);
    }
  }

 private:
  static std::size_t index(const Region& region) { return static_cast<std::size_t>(region.buffer); }

  void zero(int buffer, int step) {
    if (begun_[static_cast<std::size_t>(buffer)]) return;
    begun_[static_cast<std::size_t>(buffer)] = true;
    plan_.tasks.push_back({Reduce{Reduction::sum, {}, {plan_.whole(buffer)}}, step, {}});
  }

  RankPlan& plan_;
  std::vector<Task> tasks_;
  std::vector<bool> begun_;  // by buffer
};

}  // namespace

void begin_gradients(RankPlan& plan, bool adds) {
  Beginnings(plan, adds).run();
}

}  // namespace annulus::ring
