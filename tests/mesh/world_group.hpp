#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <annulus/core/host_stream.hpp>
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

inline Communicator copy_of_world() {
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(session().world(), &copy), "MPI_Comm_dup");
  return Communicator(copy);
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
  return make_mpi_group(copy_of_world(), watchdog, chunk_bytes);
}

/// As make_world_group(), with the ranks in reverse order.
inline std::unique_ptr<Group> make_reversed_group(Watchdog watchdog = kWatchdog) {
  std::vector<int> members;
  for (int rank = size(); rank-- > 0;) members.push_back(rank);
  if (store()) return group_on_store(std::move(members), watchdog);
  if (session().world() == MPI_COMM_NULL) return make_self_group();
  return make_mpi_group(copy_of_world(), members, watchdog);
}

/// As make_world_group() on a communicator whose ranks are numbered in reverse order.
inline std::unique_ptr<Group> make_renumbered_group(Watchdog watchdog = kWatchdog) {
  if (session().world() == MPI_COMM_NULL) return make_self_group();
  MPI_Comm reversed = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(session().world(), 0, -session().rank(), &reversed), "MPI_Comm_split");
  return make_mpi_group(Communicator(reversed), watchdog);
}

/// An exchange of one message, or of one each way.
inline void send(Group& group, const Send& message, Stream& stream, ExchangeLabel label = {}) {
  group.exchange({&message, 1}, {}, stream, std::move(label));
}
inline void receive(Group& group, const Receive& message, Stream& stream,
                    ExchangeLabel label = {}) {
  group.exchange({}, {&message, 1}, stream, std::move(label));
}
inline void exchange(Group& group, const Send& outgoing, const Receive& incoming, Stream& stream,
                     ExchangeLabel label = {}) {
  group.exchange({&outgoing, 1}, {&incoming, 1}, stream, std::move(label));
}

/// A group, its stream, and the neighbours of this rank in a ring.
struct Ring {
  explicit Ring(std::unique_ptr<Group> group) : group_(std::move(group)) {}

  const std::unique_ptr<Group> group_;
  const int rank_ = group_->rank();
  const int size_ = group_->size();
  const int next_ = (rank_ + 1) % size_;
  const int previous_ = (rank_ + size_ - 1) % size_;
  HostStream stream_{"communication", kWatchdog, nullptr};
};

}  // namespace annulus::test
