#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mpi_group.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::test {

/// The ranks `members` on a store.
inline std::unique_ptr<Group> group_on_store(std::vector<int> members, const Watchdog& watchdog) {
  const auto ranks = bootstrap();
  (void)ranks->connect(std::min(Watchdog::Seconds(1), watchdog.timeout() / 4), watchdog);
  return ranks->group(std::move(members), "all", watchdog);
}

/// All ranks of the test program on a communicator of their own, or a self group without mpirun.
inline std::unique_ptr<Group> make_world_group(Watchdog watchdog = kWatchdog,
                                               std::size_t chunk_bytes = kMpiChunkBytes) {
  if (store()) {
    std::vector<int> members(static_cast<std::size_t>(size()));
    std::iota(members.begin(), members.end(), 0);
    return group_on_store(std::move(members), watchdog);
  }
  if (session().world() == MPI_COMM_NULL) return make_self_group();
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(session().world(), &copy), "MPI_Comm_dup");
  return make_mpi_group(Communicator(copy), watchdog, chunk_bytes);
}

/// As make_world_group(), with the ranks in reverse order.
inline std::unique_ptr<Group> make_reversed_group(Watchdog watchdog = kWatchdog) {
  std::vector<int> members;
  for (int rank = size(); rank-- > 0;) members.push_back(rank);
  if (store()) return group_on_store(std::move(members), watchdog);
  if (session().world() == MPI_COMM_NULL) return make_self_group();
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(session().world(), &copy), "MPI_Comm_dup");
  return make_mpi_group(Communicator(copy), members, watchdog);
}

/// As make_world_group() on a communicator whose ranks are numbered in reverse order.
inline std::unique_ptr<Group> make_renumbered_group(Watchdog watchdog = kWatchdog) {
  if (session().world() == MPI_COMM_NULL) return make_self_group();
  MPI_Comm reversed = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(session().world(), 0, -session().rank(), &reversed), "MPI_Comm_split");
  return make_mpi_group(Communicator(reversed), watchdog);
}

}  // namespace annulus::test
