#include <numeric>
#include <utility>

#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/mpi_group.hpp>

#include "mpi/mpi_control.hpp"
#include "mpi/mpi_endpoint.hpp"
#include "mpi/mpi_exchange.hpp"
#include "mpi/traits.hpp"

namespace annulus {
namespace {

class MpiGroup final : public Group {
 public:
  MpiGroup(std::shared_ptr<const MpiEndpoint> endpoint, Watchdog watchdog)
      : Group(std::make_shared<MpiControl>(endpoint, std::move(watchdog))),
        endpoint_(std::move(endpoint)) {}

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
  int size = 0;
  check_mpi(MPI_Comm_size(communicator.get(), &size), "MPI_Comm_size");
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return make_mpi_group(std::move(communicator), std::move(members), std::move(watchdog),
                        chunk_bytes);
}

std::shared_ptr<Control> make_mpi_control(Communicator communicator, Watchdog watchdog) {
  int size = 0;
  check_mpi(MPI_Comm_size(communicator.get(), &size), "MPI_Comm_size");
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<MpiControl>(
      std::make_shared<MpiEndpoint>(std::move(communicator), std::move(members), kMpiChunkBytes),
      std::move(watchdog));
}

}  // namespace annulus
