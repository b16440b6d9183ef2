#include <utility>

#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/mpi_group.hpp>

#include "control/tree_control.hpp"
#include "mpi/mpi_endpoint.hpp"
#include "mpi/mpi_exchange.hpp"
#include "mpi/mpi_messenger.hpp"
#include "mpi/traits.hpp"

namespace annulus {
namespace {

std::shared_ptr<Control> make_control(std::shared_ptr<const MpiEndpoint> endpoint,
                                      Watchdog watchdog) {
  return std::make_shared<TreeControl>(
      std::make_unique<MpiMessenger>(std::move(endpoint), std::move(watchdog)));
}

class MpiGroup final : public Group {
 public:
  MpiGroup(std::shared_ptr<const MpiEndpoint> endpoint, Watchdog watchdog)
      : Group(make_control(endpoint, std::move(watchdog))), endpoint_(std::move(endpoint)) {}

  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] const TransportTraits& traits() const noexcept override { return kMpiTraits; }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    HostStream::of(stream).submit(std::make_unique<MpiExchange>(
        *endpoint_, std::vector<Send>(sends.begin(), sends.end()),
        std::vector<Receive>(receives.begin(), receives.end()), std::move(label)));
  }

 private:
  std::shared_ptr<const MpiEndpoint> endpoint_;
};

}  // namespace

std::unique_ptr<Group> make_mpi_group(Communicator communicator, std::vector<int> members,
                                      Watchdog watchdog, std::size_t chunk_bytes) {
  return std::make_unique<MpiGroup>(
      std::make_shared<MpiEndpoint>(std::move(communicator), std::move(members), chunk_bytes),
      std::move(watchdog));
}

std::unique_ptr<Group> make_mpi_group(Communicator communicator, Watchdog watchdog,
                                      std::size_t chunk_bytes) {
  std::vector<int> members = all_members(communicator.get());
  return make_mpi_group(std::move(communicator), std::move(members), std::move(watchdog),
                        chunk_bytes);
}

std::shared_ptr<Control> make_mpi_control(Communicator communicator, Watchdog watchdog) {
  std::vector<int> members = all_members(communicator.get());
  return make_control(
      std::make_shared<MpiEndpoint>(std::move(communicator), std::move(members), kMpiChunkBytes),
      std::move(watchdog));
}

}  // namespace annulus
