#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/control.hpp>

#include "mpi/mpi_endpoint.hpp"
#include "mpi/roll_call.hpp"

namespace annulus {

/// Control calls as messages along a binomial tree over the ranks: up to rank 0, and down again.
/// Plain messages rather than MPI's collectives, so that no wait is without the watchdog.
class MpiControl final : public Control {
 public:
  MpiControl(std::shared_ptr<const MpiEndpoint> endpoint, Watchdog watchdog);

  [[nodiscard]] int rank() const noexcept override { return endpoint_->rank; }
  [[nodiscard]] int size() const noexcept override { return endpoint_->size(); }
  [[nodiscard]] int mesh_rank(int rank) const override { return endpoint_->member(rank); }
  void barrier(std::string_view what) override;
  [[nodiscard]] std::vector<std::string> gather_text(const std::string& text,
                                                     std::string_view what) override;
  [[nodiscard]] std::vector<std::string> collect_text(const std::string& text,
                                                      std::string_view what) override;
  [[nodiscard]] std::vector<double> sum(std::span<const double> values,
                                        std::string_view what) override;
  [[nodiscard]] std::vector<double> max(std::span<const double> values,
                                        std::string_view what) override;
  using Control::computing;
  [[nodiscard]] Computing computing(double timeouts) const override {
    return watchdog_.computing(timeouts);
  }
  [[noreturn]] void abort(int exit_code) noexcept override;

 private:
  /// Adds a child's part to that of this rank and of the children before; throws InternalError.
  using Combine = std::function<void(std::string& whole, const std::string& part)>;

  /// For messages: a purpose, and what the peer, or every rank, should do for it ("give 8 B").
  struct Call {
    std::string_view what;
    std::string deed;
    bool by_all = true;
  };

  /// Every rank's part combined, in order of rank, on every rank.
  [[nodiscard]] std::string combine_all(const Call& call, std::string part, const Combine& combine);
  [[nodiscard]] std::vector<double> reduce(std::string_view call, std::span<const double> values,
                                           const std::function<double(double, double)>& combine);
  /// What a part begins with: the number and the purpose of this rank's call.
  [[nodiscard]] std::string head_of(std::string_view call) const;
  /// A part without its head; throws InternalError if it belongs to another call.
  [[nodiscard]] std::string body_of(const std::string& part, std::string_view call, int from) const;
  void send(std::string_view what, const std::vector<int>& to, MpiTag tag, const std::string& text);
  [[nodiscard]] std::string receive(const Call& call, int from, MpiTag tag);
  /// Waits for `done`; a timeout says who has not come to a control call, and what for.
  void wait(const Call& call, int peer, const std::function<bool()>& done) const;
  [[nodiscard]] std::string describe_wait(const Call& call, int peer) const;

  std::shared_ptr<const MpiEndpoint> endpoint_;
  Watchdog watchdog_;
  RollCall roll_call_;
  std::uint64_t calls_ = 0;    // begun so far
  int parent_ = -1;            // rank 0 has none
  std::vector<int> children_;  // in order of rank: each stands for the ranks up to the next
};

}  // namespace annulus
