#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/launched.hpp>
#include <annulus/mesh/mpi.hpp>
#include <annulus/mesh/node_order.hpp>

#include "mpi/bounded.hpp"
#include "mpi/deadline.hpp"
#include "mpi/mpi_endpoint.hpp"

namespace annulus {
namespace {

constexpr int kExitCode = static_cast<int>(ExitCode::failure);

bool mpi_is_running() noexcept {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

std::string mpi_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (!mpi_is_running() || MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
    return fmt::format("MPI error {}", code);
  }
  return {text.data(), static_cast<std::size_t>(length)};
}

const char* process_variable(const char* name) {
  return std::getenv(name);
}

}  // namespace

MpiError::MpiError(const std::string& call, int code)
    : LibraryError(fmt::format("{}: {}", call, mpi_text(code))) {}

void check_mpi(int code, const char* call) {
  if (code != MPI_SUCCESS) throw MpiError(call, code);
}

void CommunicatorTraits::release(Raw raw) noexcept {
  // After MPI_Finalize nothing is left to free.
  if (mpi_is_running()) MPI_Comm_free(&raw);
}

MpiSession MpiSession::alone() {
  return {};
}

MpiSession::MpiSession(int* argc, char*** argv, Watchdog::Seconds timeout, LastWord last_word)
    : timeout_(timeout), last_word_(std::move(last_word)) {
  if (mpi_is_running()) {
    active_ = true;
    return;
  }
  if (!started_by_launcher(process_variable)) return;
  int provided = MPI_THREAD_SINGLE;
  {
    const Deadline deadline(
        timeout_,
        fmt::format("start of MPI: waiting for other ranks (no progress for {:g} s)",
                    timeout_.count()),
        last_word_, kExitCode);
    check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  }
  active_ = true;
  owner_ = true;
  if (provided < MPI_THREAD_FUNNELED) {
    MPI_Finalize();
    throw LibraryError("this MPI library offers no MPI_THREAD_FUNNELED");
  }
  // Duplicates and splits inherit the handler, so errors come back as codes everywhere.
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  try {
    check_connected(size(), process_variable);
  } catch (const LibraryError&) {
    MPI_Finalize();
    throw;
  }
}

MpiSession::~MpiSession() {
  if (!owner_ || !mpi_is_running()) return;
  // A rank that fails alone must not hold back its error until the others arrive.
  constexpr Watchdog::Seconds kFailing{5};
  const bool failing = std::uncaught_exceptions() > exceptions_;
  try {
    finish(Watchdog(failing ? std::min(timeout_, kFailing) : timeout_));
  } catch (const std::exception& error) {
    if (!failing && last_word_) last_word_(text_of(error));
  }
}

void MpiSession::finish(const Watchdog& watchdog) {
  if (!owner_ || !mpi_is_running()) return;
  meet(world(), watchdog, "end of the job");
  const Watchdog::Seconds timeout = watchdog.timeout();
  const Deadline deadline(
      timeout,
      fmt::format("end of MPI: waiting for other ranks (no progress for {:g} s)", timeout.count()),
      last_word_, kExitCode);
  by_node_ = {};
  MPI_Finalize();
}

MPI_Comm MpiSession::world() const noexcept {
  if (by_node_) return by_node_.get();
  return active_ ? MPI_COMM_WORLD : MPI_COMM_NULL;
}

int MpiSession::rank() const {
  int rank = 0;
  if (active_) check_mpi(MPI_Comm_rank(world(), &rank), "MPI_Comm_rank");
  return rank;
}

std::string MpiSession::rank_name() const {
  return annulus::rank_name(rank(), mpirun_ranks()[static_cast<std::size_t>(rank())]);
}

void MpiSession::number_by_node(const Watchdog& watchdog) {
  by_node_ = in_node_order(world(), watchdog, last_word_);
}

std::vector<int> MpiSession::mpirun_ranks() const {
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  return active_ ? ranks_in_world(world(), all) : all;
}

int MpiSession::size() const {
  int size = 1;
  if (active_) check_mpi(MPI_Comm_size(world(), &size), "MPI_Comm_size");
  return size;
}

void abort_job(int exit_code) noexcept {
  std::fflush(nullptr);
  // The launcher may be unreachable because the network has failed.
  constexpr Watchdog::Seconds kPatience{10};
  std::optional<Deadline> deadline;
  try {
    deadline.emplace(kPatience, "", Deadline::LastWord(), exit_code);
  } catch (const std::system_error&) {
    // There is no memory for a thread, which may be why the job is aborted.
  }
  if (mpi_is_running()) MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);
}

}  // namespace annulus
