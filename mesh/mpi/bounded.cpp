#include "mpi/bounded.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/mpi_group.hpp>

#include "control/tree_control.hpp"
#include "mpi/mpi_endpoint.hpp"
#include "mpi/mpi_messenger.hpp"

namespace annulus {
namespace {

// Used on the caller's communicators, so the tags must be unlikely ones. MPI guarantees tags up to
// 32767.
constexpr MpiMessenger::Tags kTags{32650, 32651, 32652};

// Completes a call that all ranks have begun. If one stops within it, the others meet to name it.
void finish(MPI_Request& request, MPI_Comm communicator, const Watchdog& watchdog,
            std::string_view what) {
  constexpr Watchdog::Seconds kPatience{2};
  try {
    watchdog.wait(
        [&] {
          int done = 0;
          check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
          return done != 0;
        },
        [&] { return fmt::format("{}: waiting for MPI, though all ranks have arrived", what); });
  } catch (const TimeoutError&) {
    meet(communicator, Watchdog(std::min(kPatience, watchdog.timeout())), what);
    throw;
  }
}

}  // namespace

Communicator duplicate(MPI_Comm communicator, const Watchdog& watchdog, std::string_view what) {
  meet(communicator, watchdog, what);
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(communicator, &copy, &request), "MPI_Comm_idup");
  finish(request, communicator, watchdog, what);
  Communicator owned(copy);
  check_mpi(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return owned;
}

// MPI has no nonblocking split, so only the end of the process bounds it. Missing ranks are named
// before it begins.
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
  const auto ranks =
      std::make_shared<MpiRanks>(communicator, all_members(communicator), kMpiChunkBytes);
  TreeControl(std::make_unique<MpiMessenger>(ranks, watchdog, kTags, false)).barrier(what);
}

}  // namespace annulus
