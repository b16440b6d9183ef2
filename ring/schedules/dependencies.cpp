#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>

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
  [[nodiscard]] Region all_heads(int buffer, LocalRange tokens) const {
    return {buffer, tokens, plan_.buffer(buffer).heads, {0, plan_.local.batch}};
  }

  void visit(Task& task, Copy& copy) {
    queue_ = kComputing;
    Latest latest;
    read(copy.source(), latest);
    write(copy.to, latest);
    task.after = settle(latest);
  }

  void visit(Task& task, Block& block) {
    queue_ = kComputing;
    const HeadRange kv_heads = plan_.kv_heads_of(block.heads);
    Latest latest;
    read({block.query, block.rows, block.heads, block.batches}, latest);
    const Region keys{block.key, block.columns, kv_heads, block.batches};
    if (block.awaits_columns) {
      if (block.value != block.key) throw InternalError("values do not arrive with the keys");
      block.arrivals = await(keys);
    } else {
      read(keys, latest);
      read({block.value, block.columns, kv_heads, block.batches}, latest);
    }
    for (const int scores : {block.bias, block.dense_mask}) {
      if (scores >= 0) read(plan_.scores_of(block, scores), latest);
    }
    if (block.state) each_region(*block.state, [&](const Region& region) { read(region, latest); });
    each_region(block.result, [&](const Region& region) { write(region, latest); });
    task.after = settle(latest);
  }

  void visit(Task& task, Reduce& reduce) {
    queue_ = kComputing;
    Latest latest;
    for (const Result& part : reduce.parts) {
      each_region(part, [&](const Region& region) { read(region, latest); });
    }
    each_region(reduce.into, [&](const Region& region) { write(region, latest); });
    task.after = settle(latest);
  }

  void visit(Task& task, Exchange& exchange) {
    queue_ = exchange.group;
    Latest offer;
    for (const Transfer& send : exchange.sends) read(all_heads(send.buffer, send.tokens), offer);
    task.after = settle(offer);
    Latest take;
    for (const Transfer& receive : exchange.receives) {
      write(all_heads(receive.buffer, receive.tokens), take);
    }
    exchange.receive_after = settle(take);
  }

  template <class Body>
  void each_region(const Result& result, const Body& body) const {
    body(result.output);
    for (const int buffer : {result.lse, result.maximum}) {
      if (buffer < 0) continue;
      Region region = result.output;
      region.buffer = buffer;
      body(region);
    }
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
