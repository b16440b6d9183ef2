#include <utility>

#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/mpi_bootstrap.hpp>
#include <annulus/mesh/mpi_group.hpp>

#include "mpi/bounded.hpp"
#include "mpi/mpi_heartbeats.hpp"

namespace annulus {
namespace {

constexpr const char* kStart = "start of the mesh";

class MpiBootstrap final : public Bootstrap {
 public:
  explicit MpiBootstrap(MPI_Comm communicator) : callers_(communicator) {}

  [[nodiscard]] std::shared_ptr<Heartbeats> connect(Watchdog::Seconds interval,
                                                    const Watchdog& watchdog) override {
    communicator_ = duplicate(callers_, watchdog, kStart);
    return make_mpi_heartbeats(copy(watchdog, kStart), interval, watchdog);
  }
  [[nodiscard]] std::shared_ptr<Control> control(const Watchdog& watchdog) override {
    return make_mpi_control(copy(watchdog, kStart), watchdog);
  }
  [[nodiscard]] std::unique_ptr<Group> group(std::vector<int> members, const std::string& axes,
                                             const Watchdog& watchdog) override {
    return make_mpi_group(copy(watchdog, "group of axes " + axes), std::move(members), watchdog);
  }

 private:
  [[nodiscard]] Communicator copy(const Watchdog& watchdog, const std::string& what) const {
    return duplicate(communicator_.get(), watchdog, what);
  }

  MPI_Comm callers_;  // may be freed once connected
  Communicator communicator_;
};

}  // namespace

std::unique_ptr<Bootstrap> make_mpi_bootstrap(MPI_Comm communicator) {
  if (communicator == MPI_COMM_NULL) return nullptr;
  return std::make_unique<MpiBootstrap>(communicator);
}

Mesh::Mesh(const MeshShape& shape, MPI_Comm communicator, const Watchdog& watchdog)
    : Mesh(shape, make_mpi_bootstrap(communicator), watchdog) {}

Mesh::Mesh(const std::string& shape, MPI_Comm communicator, const Watchdog& watchdog)
    : Mesh(shape, make_mpi_bootstrap(communicator), watchdog) {}

}  // namespace annulus
