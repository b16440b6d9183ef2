#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>

#include "schedules/accesses.hpp"
#include "schedules/plan_builder.hpp"

namespace annulus::ring {
namespace {

constexpr int kComputing = -1;  // the queue of all tasks but exchanges, which have their group's

bool overlap(const LocalRange& a, const LocalRange& b) {
  return a.begin < b.end() && b.begin < a.end();
}

template <class Range>
bool overlap(const Range& a, const Range& b) {
  return a.begin < b.end() && b.begin < a.end();
}

bool overlap(const Region& a, const Region& b) {
  // Two buffers that share memory may lay out tokens differently.
  if (a.buffer != b.buffer) return true;
  return overlap(a.tokens, b.tokens) && overlap(a.heads, b.heads) && overlap(a.batches, b.batches);
}

struct Access {
  int task;
  Region region;
};

// By queue, in order. There are few queues, but thousands of pieces of memory.
class Accesses {
 public:
  std::vector<Access>& operator[](int queue) {
    const auto place =
        std::lower_bound(queues_.begin(), queues_.end(), queue,
                         [](const auto& entry, int wanted) { return entry.first < wanted; });
    if (place != queues_.end() && place->first == queue) return place->second;
    return queues_.insert(place, {queue, {}})->second;
  }
  [[nodiscard]] auto begin() const { return queues_.begin(); }
  [[nodiscard]] auto end() const { return queues_.end(); }

 private:
  std::vector<std::pair<int, std::vector<Access>>> queues_;
};

// The uses of a piece of memory.
struct Uses {
  Accesses reads, writes;
};

// What one side of a task has to wait for: the latest task of each queue.
using Latest = std::map<std::pair<int, Stage>, int>;

class Analysis {
 public:
  explicit Analysis(RankPlan& plan) : plan_(plan), uses_(plan.buffers.size()) {}

  void run() {
    for (std::size_t i = 0; i < plan_.tasks.size(); ++i) {
      task_ = static_cast<int>(i);
      std::visit([&](auto& work) { visit(plan_.tasks[i], work); }, plan_.tasks[i].work);
    }
  }

 private:
  template <class Work>
  void visit(Task& task, Work& /*work*/) {
    queue_ = kComputing;
    Latest latest;
    each_access(plan_, task, [&](const Region& region, Use use) { record(region, use, latest); });
    task.after = settle(latest);
  }

  void visit(Task& task, Block& block) {
    if (block.awaits_columns && block.value != block.key) {
      throw InternalError("values do not arrive with the keys");
    }
    queue_ = kComputing;
    Latest latest;
    each_access(plan_, task, [&](const Region& region, Use use) {
      if (use == Use::awaited) {
        block.arrivals = await(region);
      } else {
        record(region, use, latest);
      }
    });
    task.after = settle(latest);
  }

  void visit(Task& task, Exchange& exchange) {
    queue_ = exchange.group;
    Latest offer, take;
    each_access(plan_, task, [&](const Region& region, Use use) {
      record(region, use, use == Use::read ? offer : take);
    });
    task.after = settle(offer);
    exchange.receive_after = settle(take);
  }

  void record(const Region& region, Use use, Latest& latest) {
    if (use != Use::write) read(region, latest);
    if (use != Use::read) write(region, latest);
  }

  [[nodiscard]] Uses& uses_of(const Region& region) {
    return uses_[static_cast<std::size_t>(plan_.memory_of(region.buffer))];
  }

  void read(const Region& region, Latest& latest) {
    Uses& uses = uses_of(region);
    wait_for(uses.writes, region, Stage::done, latest);
    uses.reads[queue_].push_back({task_, region});
  }

  // The exchanges that bring parts of a region, in order.
  std::vector<Arrival> await(const Region& region) {
    Uses& uses = uses_of(region);
    uses.reads[queue_].push_back({task_, region});
    std::vector<Arrival> arrivals;
    for (const auto& [queue, writes] : uses.writes) {
      if (queue == queue_) continue;
      for (const Access& write : writes) {
        if (!overlap(write.region, region)) continue;
        const LocalPosition begin = std::max(write.region.tokens.begin, region.tokens.begin);
        const LocalRange columns{begin,
                                 std::min(write.region.tokens.end(), region.tokens.end()) - begin};
        if (!arrivals.empty() && arrivals.back().task == write.task) {
          arrivals.back().columns = hull(arrivals.back().columns, columns);
        } else {
          arrivals.push_back({columns, write.task});
        }
      }
    }
    return arrivals;
  }

  void write(const Region& region, Latest& latest) {
    Uses& uses = uses_of(region);
    wait_for(uses.writes, region, Stage::done, latest);
    wait_for(uses.reads, region, Stage::released, latest);
    uses.writes[queue_].push_back({task_, region});
  }

  // Tasks of one queue run in order: its latest use stands for those before.
  void wait_for(const Accesses& uses, const Region& region, Stage stage, Latest& latest) const {
    for (const auto& [queue, accesses] : uses) {
      if (queue == queue_) continue;
      const auto found =
          std::find_if(accesses.rbegin(), accesses.rend(),
                       [&](const Access& access) { return overlap(access.region, region); });
      if (found == accesses.rend()) continue;
      // Only exchanges go on reading after they are done.
      const Stage awaited = queue == kComputing ? Stage::done : stage;
      int& task = latest.try_emplace({queue, awaited}, -1).first->second;
      task = std::max(task, found->task);
    }
  }

  // Leaves out what this queue has already waited for.
  std::vector<Dependency> settle(const Latest& latest) {
    std::vector<Dependency> dependencies;
    for (const auto& [what, task] : latest) {
      int& known = waited_[queue_].try_emplace(what, -1).first->second;
      if (task <= known) continue;
      known = task;
      dependencies.push_back({task, what.second});
    }
    return dependencies;
  }

  RankPlan& plan_;
  int task_ = 0;
  int queue_ = kComputing;
  std::vector<Uses> uses_;  // by the first buffer of the memory
  std::map<int, Latest> waited_;
};

}  // namespace

void add_dependencies(RankPlan& plan) {
  Analysis(plan).run();
}

}  // namespace annulus::ring
