#include "mpi/bounded.hpp"

#include <algorithm>
#include <future>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "mpi/roll_call.hpp"

namespace annulus {
namespace {

// Sent on the caller's communicators, so the tags must be unlikely ones. MPI guarantees tags up to
// 32767.
constexpr int kTagCall = 32650;
constexpr int kTagHere = 32651;
constexpr int kPollsPerAnswer = 8;
constexpr Watchdog::Seconds kRollCall{2};

void finish(MPI_Request& request, MPI_Comm communicator, const Watchdog& watchdog,
            std::string_view what) {
  int size = 0;
  check_mpi(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const RollCall roll_call(communicator, std::move(ranks), kTagCall, kTagHere);
  int polls = 0;
  watchdog.wait(
      [&] {
        int done = 0;
        check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        if (done == 0 && ++polls % kPollsPerAnswer == 0) roll_call.answer();
        return done != 0;
      },
      [&] {
        const std::vector<int> absent = roll_call.absent(std::min(kRollCall, watchdog.timeout()));
        if (absent.empty())
          return fmt::format("{}: waiting for MPI, though all ranks have arrived", what);
        return fmt::format("{}: waiting for rank {}", what, fmt::join(absent, ", rank "));
      });
}

}  // namespace

Communicator duplicate(MPI_Comm communicator, const Watchdog& watchdog, std::string_view what) {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(communicator, &copy, &request), "MPI_Comm_idup");
  finish(request, communicator, watchdog, what);
  Communicator owned(copy);
  check_mpi(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return owned;
}

// MPI has no split that returns at once. Ranks that are missing are named before it begins; it has
// a thread of its own, so that one which dies during the split holds nobody back.
Communicator renumber(MPI_Comm communicator, int rank, const Watchdog& watchdog,
                      std::string_view what) {
  meet(communicator, watchdog, what);
  int level = MPI_THREAD_SINGLE;
  check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
  const bool on_thread = level >= MPI_THREAD_SERIALIZED;
  struct Split {
    int code = MPI_SUCCESS;
    MPI_Comm result = MPI_COMM_NULL;
  };
  std::packaged_task<Split()> task([communicator, rank] {
    Split split;
    split.code = MPI_Comm_split(communicator, 0, rank, &split.result);
    return split;
  });
  std::future<Split> outcome = task.get_future();
  if (on_thread) {
    std::thread(std::move(task)).detach();
  } else {
    task();
  }
  if (outcome.wait_for(watchdog.timeout()) != std::future_status::ready) {
    throw TimeoutError(fmt::format("{}: waiting for MPI_Comm_split (no progress for {:g} s)", what,
                                   watchdog.timeout().count()));
  }
  const Split split = outcome.get();
  check_mpi(split.code, "MPI_Comm_split");
  Communicator owned(split.result);
  check_mpi(MPI_Comm_set_errhandler(owned.get(), MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return owned;
}

void meet(MPI_Comm communicator, const Watchdog& watchdog, std::string_view what) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(communicator, &request), "MPI_Ibarrier");
  finish(request, communicator, watchdog, what);
}

}  // namespace annulus
