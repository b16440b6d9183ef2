#include <cstdio>
#include <cstdlib>
#include <utility>

#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/group.hpp>

#include "self/self_messages.hpp"
#include "self/traits.hpp"

namespace annulus {
namespace {

// A copy in the order of the stream.
class SelfExchange final : public HostOperation {
 public:
  SelfExchange(std::span<const Send> sends, std::span<const Receive> receives, ExchangeLabel label)
      : sends_(sends.begin(), sends.end()),
        receives_(receives.begin(), receives.end()),
        label_(std::move(label)) {}

  void start() override { copy_self_messages(sends_, receives_, 0); }
  bool test() override { return true; }
  [[nodiscard]] std::string describe() const override { return "copy of " + label_.what; }
  [[nodiscard]] TraceLabel label() const override {
    return {TraceCategory::transfer, label_.what, label_.step};
  }

 private:
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  ExchangeLabel label_;
};

class SelfControl final : public Control {
 public:
  explicit SelfControl(int mesh_rank) : mesh_rank_(mesh_rank) {}
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 1; }
  [[nodiscard]] int mesh_rank(int /*rank*/) const override { return mesh_rank_; }
  using Control::computing;
  [[nodiscard]] Computing computing(double /*timeouts*/) const override {
    return {nullptr, Watchdog::Seconds(0)};  // nobody waits
  }
  // The launcher ends the other ranks of the job, if there are any.
  [[noreturn]] void abort(int exit_code) noexcept override {
    std::fflush(nullptr);
    std::_Exit(exit_code);
  }

 private:
  [[nodiscard]] std::string combine(const Call& /*call*/, std::string part, const Merge& /*merge*/,
                                    Result /*where*/) override {
    return part;
  }

  int mesh_rank_;
};

class SelfGroup final : public Group {
 public:
  explicit SelfGroup(int mesh_rank) : Group(std::make_shared<SelfControl>(mesh_rank)) {}
  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] const TransportTraits& traits() const noexcept override { return kSelfTraits; }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    check_messages(sends, receives, rank(), size());
    HostStream::of(stream).submit(
        std::make_unique<SelfExchange>(sends, receives, std::move(label)));
  }
};

}  // namespace

std::unique_ptr<Group> make_self_group(int mesh_rank) {
  return std::make_unique<SelfGroup>(mesh_rank);
}

}  // namespace annulus
