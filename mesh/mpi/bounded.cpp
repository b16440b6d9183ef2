#include "mpi/bounded.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/error.hpp>

#include "mpi/mpi_endpoint.hpp"
#include "mpi/roll_call.hpp"

namespace annulus {
namespace {

// Sent on the caller's communicators, so the tags must be unlikely ones. MPI guarantees tags up to
// 32767.
constexpr int kTagCall = 32650;
constexpr int kTagHere = 32651;
constexpr int kPollsPerAnswer = 8;
constexpr Watchdog::Seconds kRollCall{2};

std::string names_of(MPI_Comm communicator, const std::vector<int>& ranks) {
  const std::vector<int> in_world = ranks_in_world(communicator, ranks);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < ranks.size(); ++i) names.push_back(rank_name(ranks[i], in_world[i]));
  return fmt::format("{}", fmt::join(names, ", "));
}

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
        return fmt::format("{}: waiting for {}", what, names_of(communicator, absent));
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

// MPI has no split that returns at once, so only the end of the process bounds it. Ranks that are
// missing are named before it begins.
Communicator split(MPI_Comm communicator, int color, int key, const Watchdog& watchdog,
                   std::string_view what, Deadline::LastWord last_word) {
  meet(communicator, watchdog, what);
  MPI_Comm result = MPI_COMM_NULL;
  {
    const Watchdog::Seconds timeout = watchdog.timeout();
    const Deadline deadline(timeout,
                            fmt::format("{}: waiting for MPI_Comm_split (no progress for {:g} s)",
                                        what, timeout.count()),
                            std::move(last_word), static_cast<int>(ExitCode::failure));
    check_mpi(MPI_Comm_split(communicator, color, key, &result), "MPI_Comm_split");
  }
  if (result == MPI_COMM_NULL) return {};
  Communicator owned(result);
  check_mpi(MPI_Comm_set_errhandler(owned.get(), MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return owned;
}

void meet(MPI_Comm communicator, const Watchdog& watchdog, std::string_view what) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(communicator, &request), "MPI_Ibarrier");
  finish(request, communicator, watchdog, what);
}

}  // namespace annulus
