#include <utility>

#include <annulus/mesh/first_ranks.hpp>

#include "mpi/bounded.hpp"

namespace annulus {

Communicator first_ranks(MPI_Comm communicator, int count, const Watchdog& watchdog,
                         MpiSession::LastWord last_word) {
  if (communicator == MPI_COMM_NULL) return {};
  int rank = 0;
  check_mpi(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  return split(communicator, rank < count ? 0 : MPI_UNDEFINED, rank, watchdog, "first ranks",
               std::move(last_word));
}

}  // namespace annulus
