#include <utility>

#include <annulus/mesh/group.hpp>

namespace annulus {
namespace {

// For transports that need no preparation.
class RememberedExchange final : public PreparedExchange {
 public:
  RememberedExchange(Group& group, std::vector<Send> sends, std::vector<Receive> receives,
                     ExchangeLabel label)
      : group_(group),
        sends_(std::move(sends)),
        receives_(std::move(receives)),
        label_(std::move(label)) {}

  void take(Stream& stream) override { group_.exchange(sends_, receives_, stream, label_); }

 private:
  Group& group_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  ExchangeLabel label_;
};

}  // namespace

std::unique_ptr<PreparedExchange> Group::prepare(std::vector<Send> sends,
                                                 std::vector<Receive> receives,
                                                 ExchangeLabel label) {
  return std::make_unique<RememberedExchange>(*this, std::move(sends), std::move(receives),
                                              std::move(label));
}

}  // namespace annulus
