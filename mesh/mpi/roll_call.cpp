#include "mpi/roll_call.hpp"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include <annulus/mesh/mpi.hpp>

namespace annulus {
namespace {

// Empty, so that no buffer has to live until it is sent.
void send_word(MPI_Comm communicator, int to, int tag) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Isend(nullptr, 0, MPI_BYTE, to, tag, communicator, &request), "MPI_Isend");
  check_mpi(MPI_Request_free(&request), "MPI_Request_free");
}

// Calls each(rank) for every rank whose message has come.
template <class Each>
void take_words(MPI_Comm communicator, int tag, Each&& each) {
  for (;;) {
    int waiting = 0;
    MPI_Status status;
    check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, tag, communicator, &waiting, &status), "MPI_Iprobe");
    if (waiting == 0) return;
    check_mpi(
        MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, tag, communicator, MPI_STATUS_IGNORE),
        "MPI_Recv");
    each(status.MPI_SOURCE);
  }
}

}  // namespace

RollCall::RollCall(MPI_Comm communicator, std::vector<int> members, int tag_call, int tag_here)
    : communicator_(communicator),
      members_(std::move(members)),
      tag_call_(tag_call),
      tag_here_(tag_here) {
  check_mpi(MPI_Comm_rank(communicator_, &own_), "MPI_Comm_rank");
}

void RollCall::answer() const {
  take_words(communicator_, tag_call_,
             [this](int from) { send_word(communicator_, from, tag_here_); });
}

std::vector<int> RollCall::absent(Watchdog::Seconds patience) const {
  using Clock = std::chrono::steady_clock;
  std::set<int> missing(members_.begin(), members_.end());
  missing.erase(own_);
  for (const int rank : missing) send_word(communicator_, rank, tag_call_);
  const auto begin = Clock::now();
  while (!missing.empty() && Clock::now() - begin < patience) {
    answer();
    take_words(communicator_, tag_here_, [&](int from) { missing.erase(from); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::vector<int> absent;
  std::copy_if(members_.begin(), members_.end(), std::back_inserter(absent),
               [&](int rank) { return missing.contains(rank); });
  return absent;
}

}  // namespace annulus
