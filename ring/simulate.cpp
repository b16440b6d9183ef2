#include <algorithm>
#include <cstddef>
#include <string_view>

#include <annulus/ring/simulate.hpp>

#include "overwriting_steps.hpp"

namespace annulus::ring {
namespace {

// How the transfers of a transport go about it; the executor's and the groups' ways, in short.
struct Conduct {
  bool ahead = false;  // of the computation: they have a stream of their own
  bool takes = false;  // a receiver takes by itself what its peer has offered
};

Conduct conduct_of(std::string_view transport) {
  if (transport == "peer") return {true, true};
  return {transport == "nccl", false};
}

// What one rank has come to.
struct Progress {
  std::vector<double> work;      // seconds of each step's blocks, and of combining what they end
  std::vector<bool> overwrites;  // see overwriting_steps()
  double compute = 0;            // when the compute stream is done
  double communication = 0;      // when the communication stream is
  double offered = 0;            // when peers can take what it sends in the step
  double begin = 0;              // when it can receive in the step
  double taken = 0;              // when peers have all that it has offered before
};

// The results for heads that some blocks have in common are combined when the last of these blocks
// is done: all of them are read, and the whole is written.
std::vector<double> work_of(const RankPlan& rank, DType dtype, const CostModel& model) {
  const double value = static_cast<double>(size_of(dtype)) *
                       static_cast<double>(rank.local.batch * rank.local.value_dim);
  std::vector<double> work(rank.steps.size());
  double parts = 0;  // rows · heads of the results since the heads have changed
  bool merge = false;
  const Block* last = nullptr;
  std::size_t last_step = 0;
  const auto combine = [&] {
    if (merge) {
      const auto whole = static_cast<double>(rank.local.query_length * last->heads.count);
      work[last_step] += (parts + whole) * value / model.merge_bytes_per_second;
    }
    parts = 0;
    merge = false;
  };
  for (std::size_t s = 0; s < rank.steps.size(); ++s) {
    for (const Block& block : rank.steps[s].blocks) {
      if (last != nullptr && !(block.heads == last->heads)) combine();
      work[s] += model.kernel_seconds(rank.flops(block), static_cast<double>(block.rows.count));
      parts += static_cast<double>(block.rows.count * block.heads.count);
      merge = merge || block.merge;
      last = &block;
      last_step = s;
    }
  }
  combine();
  return work;
}

double packing_seconds(const RankPlan& rank, DType dtype, const CostModel& model) {
  double bytes = 0;
  for (const KvBuffer& buffer : rank.buffers) {
    if (buffer.kind != BufferKind::packed) continue;
    bytes += static_cast<double>(buffer.slots * rank.slot_bytes(buffer, dtype));
  }
  return 2 * bytes / model.merge_bytes_per_second;
}

double side_seconds(const std::vector<Transfer>& transfers, const CostModel& model) {
  // Messages of one step follow each other without a pause: what a message costs however short it
  // is counts once.
  const double pause = model.transfer_seconds(0);
  double seconds = transfers.empty() ? 0 : pause;
  for (const Transfer& transfer : transfers) {
    seconds += model.transfer_seconds(static_cast<double>(transfer.bytes)) - pause;
  }
  return seconds;
}

class Simulation {
 public:
  Simulation(const Plan& plan, const CostModel& model)
      : plan_(plan),
        model_(model),
        conduct_(conduct_of(model.transport)),
        timelines_(plan.ranks.size()) {
    for (const RankPlan& rank : plan.ranks) {
      groups_.push_back(plan.mesh.group(rank.rank, plan.sequence_axes));
      Progress progress;
      progress.work = work_of(rank, plan.problem.dtype, model);
      progress.overwrites = overwriting_steps(rank);
      const double packed = packing_seconds(rank, plan.problem.dtype, model);
      progress.compute = progress.communication = packed;
      timelines_[progress_.size()].compute = packed;
      progress_.push_back(std::move(progress));
      steps_ = std::max(steps_, rank.steps.size());
    }
  }

  std::vector<RankTimeline> run() {
    for (std::size_t s = 0; s < steps_; ++s) {
      for_each_rank(s, [&](std::size_t r, const Step& /*step*/) { reach(r, s); });
      for_each_rank(s, [&](std::size_t r, const Step& step) { transfer(r, step); });
      for_each_rank(s, [&](std::size_t r, const Step& step) { compute(r, s, step); });
    }
    for (std::size_t r = 0; r < timelines_.size(); ++r) {
      const Progress& mine = progress_[r];
      RankTimeline& timeline = timelines_[r];
      timeline.finish = std::max({mine.compute, mine.communication, mine.taken});
      timeline.exposed = timeline.finish - timeline.compute;
    }
    return std::move(timelines_);
  }

 private:
  template <class Body>
  void for_each_rank(std::size_t s, const Body& body) {
    for (std::size_t r = 0; r < plan_.ranks.size(); ++r) {
      if (s < plan_.ranks[r].steps.size()) body(r, plan_.ranks[r].steps[s]);
    }
  }

  [[nodiscard]] Progress& peer_of(std::size_t r, const Transfer& transfer) {
    return progress_[static_cast<std::size_t>(groups_[r][static_cast<std::size_t>(transfer.peer)])];
  }

  void reach(std::size_t r, std::size_t s) {
    Progress& mine = progress_[r];
    mine.offered = std::max(mine.communication, mine.taken);
    mine.begin = mine.offered;
    if (!conduct_.ahead || mine.overwrites[s]) mine.begin = std::max(mine.begin, mine.compute);
  }

  void transfer(std::size_t r, const Step& step) {
    if (step.sends.empty() && step.receives.empty()) return;
    Progress& mine = progress_[r];
    double start = mine.begin;
    for (const Transfer& receive : step.receives) {
      const Progress& peer = peer_of(r, receive);
      start = std::max(start, conduct_.takes ? peer.offered : peer.begin);
    }
    double seconds = side_seconds(step.receives, model_);
    if (!conduct_.takes) {
      for (const Transfer& send : step.sends) start = std::max(start, peer_of(r, send).begin);
      seconds = std::max(seconds, side_seconds(step.sends, model_));
    }
    mine.communication = start + seconds;
    timelines_[r].transfer += seconds;
    if (!conduct_.takes) return;
    for (const Transfer& receive : step.receives) {
      Progress& peer = peer_of(r, receive);
      peer.taken = std::max(peer.taken, mine.communication);
    }
  }

  void compute(std::size_t r, std::size_t s, const Step& step) {
    Progress& mine = progress_[r];
    mine.compute += mine.work[s];
    timelines_[r].compute += mine.work[s];
    if (step.sends.empty() && step.receives.empty()) return;
    mine.compute = std::max(mine.compute, mine.communication);
  }

  const Plan& plan_;
  const CostModel& model_;
  Conduct conduct_;
  std::vector<std::vector<int>> groups_;
  std::vector<Progress> progress_;
  std::vector<RankTimeline> timelines_;
  std::size_t steps_ = 0;
};

}  // namespace

std::vector<RankTimeline> simulate(const Plan& plan, const CostModel& model) {
  return Simulation(plan, model).run();
}

double predicted_seconds(const Plan& plan, const CostModel& model) {
  double slowest = 0;
  for (const RankTimeline& timeline : simulate(plan, model)) {
    slowest = std::max(slowest, timeline.finish);
  }
  return slowest;
}

}  // namespace annulus::ring
