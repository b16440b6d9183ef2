#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <annulus/core/watchdog.hpp>

#include "control/messenger.hpp"
#include "control/roll_call.hpp"
#include "mpi/mpi_endpoint.hpp"

namespace annulus {

/// Plain MPI messages instead of collectives, so that every wait is under the watchdog.
class MpiMessenger final : public Messenger {
 public:
  /// The tags of its messages, which nothing else may use on the communicator.
  struct Tags {
    int text = static_cast<int>(MpiTag::text);
    int question = static_cast<int>(MpiTag::roll_call);
    int answer = static_cast<int>(MpiTag::here);
  };
  /// The communicator and the watchdog's heartbeats must have the same ranks.
  MpiMessenger(std::shared_ptr<const MpiRanks> ranks, Watchdog watchdog)
      : MpiMessenger(std::move(ranks), std::move(watchdog), Tags(), true) {}
  /// `of_mesh`: true if they are.
  MpiMessenger(std::shared_ptr<const MpiRanks> ranks, Watchdog watchdog, Tags tags, bool of_mesh);

  [[nodiscard]] int rank() const noexcept override { return ranks_->rank; }
  [[nodiscard]] int size() const noexcept override { return ranks_->size(); }
  [[nodiscard]] int mesh_rank(int rank) const override { return ranks_->member(rank); }
  [[nodiscard]] std::string name_of(int rank) const override { return ranks_->name_of(rank); }
  void send(std::string_view what, std::span<const int> to, const std::string& text) override;
  [[nodiscard]] std::string receive(const Call& call, int from) override;
  [[nodiscard]] Computing computing(double timeouts) const override {
    return watchdog_.computing(timeouts);
  }
  [[noreturn]] void abort(int exit_code) noexcept override;

 private:
  void wait(const Call& call, int peer, const std::function<bool()>& done);
  [[nodiscard]] std::string describe_wait(const Call& call, int peer);

  std::shared_ptr<const MpiRanks> ranks_;
  Watchdog watchdog_;
  Tags tags_;
  bool of_mesh_;
  RollCall roll_call_;
};

}  // namespace annulus
