#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/mesh/control.hpp>

#include "control/messenger.hpp"

namespace annulus {

/// Control calls as texts along a binomial tree over the ranks, up to rank 0 and down again.
class TreeControl final : public Control {
 public:
  explicit TreeControl(std::unique_ptr<Messenger> messenger);

  [[nodiscard]] int rank() const noexcept override { return messenger_->rank(); }
  [[nodiscard]] int size() const noexcept override { return messenger_->size(); }
  [[nodiscard]] int mesh_rank(int rank) const override { return messenger_->mesh_rank(rank); }
  using Control::computing;
  [[nodiscard]] Computing computing(double timeouts) const override {
    return messenger_->computing(timeouts);
  }
  [[noreturn]] void abort(int exit_code) noexcept override;

 private:
  [[nodiscard]] std::string combine(const Call& call, std::string part, const Merge& merge,
                                    Result where) override;
  /// The head of a part: the number and the purpose of this rank's call.
  [[nodiscard]] std::string head_of(std::string_view what) const;
  /// A part without its head; throws InternalError if it belongs to another call.
  [[nodiscard]] std::string body_of(const std::string& part, std::string_view what, int from) const;

  std::unique_ptr<Messenger> messenger_;
  std::uint64_t calls_ = 0;    // begun so far
  int parent_ = -1;            // rank 0 has none
  std::vector<int> children_;  // in order of rank; each stands for the ranks up to the next child
};

}  // namespace annulus
