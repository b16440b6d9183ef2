#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>

#include "schedules/accesses.hpp"
#include "schedules/building/plan_builder.hpp"

namespace annulus::ring {
namespace {

constexpr int kComputing = -1;  // the queue of all tasks but exchanges, which have their group's

bool may_overlap(const Region& a, const Region& b) {
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

// Sends from a piece of memory that a writing queue has not waited for yet. Exchanges are released
// in any order, so the latest one does not stand for earlier ones. A gathered buffer is sent in
// thousands of parts, so the sends are kept by buffer and first token.
class Unreleased {
 public:
  // Adds the sends that are new since the last update.
  void update(const std::vector<Access>& sends) {
    for (; known_ < sends.size(); ++known_) {
      const LocalRange& tokens = sends[known_].region.tokens;
      left_[sends[known_].region.buffer].emplace(tokens.begin.value(), sends[known_]);
      longest_ = std::max(longest_, tokens.count);
    }
  }

  // Calls take() for each send that may overlap the region, and forgets it. Sends of `task` stay.
  template <class Take>
  void take_overlapping(const Region& region, int task, const Take& take) {
    for (auto& [buffer, sends] : left_) {
      const bool same = buffer == region.buffer;
      const std::int64_t begin = region.tokens.begin.value();
      auto send = same ? sends.lower_bound(begin - longest_) : sends.begin();
      const auto end = same ? sends.lower_bound(begin + region.tokens.count) : sends.end();
      while (send != end) {
        if (send->second.task == task || !may_overlap(send->second.region, region)) {
          ++send;
          continue;
        }
        take(send->second.task);
        send = sends.erase(send);
      }
    }
  }

 private:
  std::size_t known_ = 0;  // the number of sends added so far
  std::map<int, std::multimap<std::int64_t, Access>> left_;
  std::int64_t longest_ = 0;  // tokens
};

// The uses of a piece of memory.
struct Uses {
  Accesses reads, writes;
  std::vector<Access> sends;             // reads by exchanges
  std::map<int, Unreleased> unreleased;  // by the queue that waits
};

// The waits of one side of a task: for the latest task of each queue, and for all exchanges whose
// sends must have been taken.
struct Awaited {
  std::map<int, int> done;
  std::vector<int> released;
};

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
    Awaited awaited;
    each_access(plan_, task, [&](const Region& region, Use use) { record(region, use, awaited); });
    task.after = settle(awaited);
  }

  void visit(Task& task, Block& block) {
    if (block.awaits_columns && block.value != block.key) {
      throw InternalError("values do not arrive with the keys");
    }
    queue_ = kComputing;
    Awaited awaited;
    each_access(plan_, task, [&](const Region& region, Use use) {
      if (use == Use::awaited) {
        block.arrivals = await(region);
      } else {
        record(region, use, awaited);
      }
    });
    task.after = settle(awaited);
  }

  void visit(Task& task, Exchange& exchange) {
    queue_ = exchange.group;
    Awaited offer, take;
    keep_pace(exchange, offer);
    each_access(plan_, task, [&](const Region& region, Use use) {
      record(region, use, use == Use::read ? offer : take);
    });
    task.after = settle(offer);
    exchange.receive_after = settle(take);
  }

  // An exchange is offered once the previous one of the same contents has been taken on both sides,
  // so that the hops of a ring do not all read from the same rank. Other contents do not wait, so a
  // gradient without memory at its receiver does not delay keys.
  void keep_pace(const Exchange& exchange, Awaited& offer) {
    const auto& transfers = exchange.sends.empty() ? exchange.receives : exchange.sends;
    if (transfers.empty()) return;
    const auto [before, first] = paced_.try_emplace(
        {exchange.group, plan_.buffer(transfers.front().buffer).contents}, task_);
    if (!first) offer.released.push_back(std::exchange(before->second, task_));
  }

  void record(const Region& region, Use use, Awaited& awaited) {
    if (use != Use::write) read(region, awaited);
    if (use != Use::read) write(region, awaited);
  }

  [[nodiscard]] Uses& uses_of(const Region& region) {
    return uses_[static_cast<std::size_t>(plan_.memory_of(region.buffer))];
  }

  void read(const Region& region, Awaited& awaited) {
    Uses& uses = uses_of(region);
    wait_for(uses.writes, region, awaited);
    auto& reads = queue_ == kComputing ? uses.reads[queue_] : uses.sends;
    reads.push_back({task_, region});
  }

  // The exchanges that bring parts of a region, in order.
  std::vector<Arrival> await(const Region& region) {
    Uses& uses = uses_of(region);
    uses.reads[queue_].push_back({task_, region});
    std::vector<Arrival> arrivals;
    for (const auto& [queue, writes] : uses.writes) {
      if (queue == queue_) continue;
      for (const Access& write : writes) {
        if (!may_overlap(write.region, region)) continue;
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

  void write(const Region& region, Awaited& awaited) {
    Uses& uses = uses_of(region);
    wait_for(uses.writes, region, awaited);
    wait_for(uses.reads, region, awaited);
    wait_for_release(uses, region, awaited);
    uses.writes[queue_].push_back({task_, region});
  }

  // Tasks of one queue run in order, so its latest use stands for earlier ones.
  void wait_for(const Accesses& uses, const Region& region, Awaited& awaited) const {
    for (const auto& [queue, accesses] : uses) {
      if (queue == queue_) continue;
      const auto found =
          std::find_if(accesses.rbegin(), accesses.rend(),
                       [&](const Access& access) { return may_overlap(access.region, region); });
      if (found == accesses.rend()) continue;
      int& task = awaited.done.try_emplace(queue, -1).first->second;
      task = std::max(task, found->task);
    }
  }

  // Sent memory is still being read after its exchange is done.
  void wait_for_release(Uses& uses, const Region& region, Awaited& awaited) {
    Unreleased& unreleased = uses.unreleased[queue_];
    unreleased.update(uses.sends);
    unreleased.take_overlapping(region, task_, [&](int task) { awaited.released.push_back(task); });
  }

  // Leaves out what this queue has already waited for.
  std::vector<Dependency> settle(Awaited& awaited) {
    std::vector<Dependency> dependencies;
    for (const auto& [queue, task] : awaited.done) {
      int& known = done_[queue_].try_emplace(queue, -1).first->second;
      if (task <= known) continue;
      known = task;
      dependencies.push_back({task, Stage::done});
    }
    std::vector<bool>& known = released_[queue_];
    known.resize(plan_.tasks.size());
    std::ranges::sort(awaited.released);
    for (const int task : awaited.released) {
      const auto index = static_cast<std::size_t>(task);
      if (known[index]) continue;
      known[index] = true;
      dependencies.push_back({task, Stage::released});
    }
    return dependencies;
  }

  RankPlan& plan_;
  int task_ = 0;
  int queue_ = kComputing;
  std::vector<Uses> uses_;  // by the first buffer of the memory
  // The waits of each queue so far: by queue, the latest task that is done; by task, its release.
  std::map<int, std::map<int, int>> done_;
  std::map<int, std::vector<bool>> released_;
  std::map<std::pair<int, std::vector<Content>>, int> paced_;  // last exchange
};

}  // namespace

void add_dependencies(RankPlan& plan) {
  Analysis(plan).run();
}

}  // namespace annulus::ring
