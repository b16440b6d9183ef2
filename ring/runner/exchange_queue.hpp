#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <annulus/core/first_error.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/ring/plan.hpp>

#include "runner/plan_memory.hpp"

namespace annulus::ring {

/// The exchanges of one group of a plan, in their order, on one stream. Marks of the stream tell
/// how far a call has come (transfer_wait.hpp).
class ExchangeQueue {
 public:
  /// The references must outlive it.
  ExchangeQueue(const RankPlan& plan, int group_index, Group& group,
                std::shared_ptr<Stream> stream);

  /// Prepares all transfers. Collective over the group. Peers that agree on a failure of one go on
  /// with the others, for which ranks may wait that know of none: `error` keeps it.
  void connect(const PlanMemory& memory, FirstError& error);

  [[nodiscard]] Group& group() const noexcept { return group_; }
  [[nodiscard]] Stream& stream() const noexcept { return *stream_; }
  [[nodiscard]] const std::shared_ptr<Stream>& shared_stream() const noexcept { return stream_; }
  /// By exchange: the index of its task in the plan.
  [[nodiscard]] const std::vector<std::size_t>& tasks() const noexcept { return tasks_; }
  /// Other streams will ask for the release of this exchange.
  void want_release(std::size_t exchange) { wanted_[exchange] = true; }

  /// A new call. Nothing is sent in a rehearsal, so that all is reclaimed from the beginning.
  void begin(bool rehearsing) { reclaimed_.assign(tasks_.size(), rehearsing); }
  void offer(std::size_t exchange);
  void take(std::size_t exchange);
  /// Frees what an exchange has sent, once.
  void reclaim(std::size_t exchange);
  /// After reclaim() or rehearse(), of an exchange whose release is wanted.
  [[nodiscard]] const std::shared_ptr<Event>& released(std::size_t exchange) const {
    return released_[exchange];
  }
  void rehearse(std::size_t exchange);
  /// Reclaims what is left. The end of the call.
  void end();
  /// As end() would, for a call that has failed before.
  void mark_end();

  /// True from the first exchange of a call to its end, of a device.
  [[nodiscard]] bool is_under_way() const { return stream_->marked() != end_mark(); }
  /// The tasks that the next step of the exchanges comes after; null between two calls.
  [[nodiscard]] const std::vector<Dependency>* awaited() const;
  /// Whom the rank waits for: see describe_transfers().
  [[nodiscard]] std::string describe() const;

 private:
  [[nodiscard]] std::uint32_t end_mark() const;
  [[nodiscard]] const Exchange& exchange(std::size_t e) const;
  [[nodiscard]] TraceLabel label_of(std::size_t e) const;

  const RankPlan& plan_;
  int group_index_;
  Group& group_;
  std::shared_ptr<Stream> stream_;
  std::vector<std::size_t> tasks_;
  std::vector<std::unique_ptr<PreparedExchange>> prepared_;
  std::vector<bool> wanted_;
  // These two belong to the call that is being submitted.
  std::vector<bool> reclaimed_;
  std::vector<std::shared_ptr<Event>> released_;
};

}  // namespace annulus::ring
