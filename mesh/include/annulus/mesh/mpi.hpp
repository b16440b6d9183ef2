#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <mpi.h>

#include <annulus/core/error.hpp>
#include <annulus/core/handle.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

/// An MPI call returned an error; the message has the call and MPI's own text.
class MpiError : public LibraryError {
 public:
  MpiError(const std::string& call, int code);
};

/// Throws MpiError unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

struct CommunicatorTraits {
  using Raw = MPI_Comm;
  static Raw null() noexcept { return MPI_COMM_NULL; }
  static void release(Raw raw) noexcept;
};
/// Owning MPI communicator. Freeing is collective, so ranks must destroy in the same order.
using Communicator = Handle<CommunicatorTraits>;

/// The value of an environment variable, null if it is not set; std::getenv outside tests.
using EnvironmentLookup = std::function<const char*(const char* name)>;

/// Whether mpirun or srun started this process in a way that lets MPI connect the ranks. Throws
/// LibraryError with the fix when Slurm or torchrun started several that cannot find each other.
[[nodiscard]] bool started_by_launcher(const EnvironmentLookup& lookup);
/// Throws LibraryError with the fix when MPI has come up with one rank in a process that a launcher
/// started as one of several: it speaks another protocol than this MPI library (srun --mpi=pmi2, or
/// the mpiexec of another MPI), and each process would compute everything alone. `ranks` is the
/// size of MPI_COMM_WORLD.
void check_connected(int ranks, const EnvironmentLookup& lookup);

/// Initialises MPI, with errors returned as codes and, if it is offered, MPI_THREAD_SERIALIZED (see
/// Watchdog::computing()); finalises it at the end. Does neither without a launcher, because a
/// single rank needs no MPI, or if MPI is already initialised.
class MpiSession {
 public:
  /// Called with the reason before this process ends itself.
  using LastWord = std::function<void(const std::string& text)>;
  /// What a process does that is one of several, which MPI has no way to connect.
  enum class Unconnected : std::uint8_t { fails, stands_alone };

  /// Throws what started_by_launcher() and check_connected() throw, unless the process may stand
  /// alone, since what it does needs no other one. MPI_Init and MPI_Finalize
  /// cannot be interrupted: if one of them takes longer than `timeout`, as it does when a rank has
  /// stopped, the process calls `last_word` and exits with code 3.
  MpiSession(int* argc, char*** argv, Watchdog::Seconds timeout = Watchdog::kUsual,
             LastWord last_word = {}, Unconnected unconnected = Unconnected::fails);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// All ranks, numbered as in MPI_COMM_WORLD unless number_by_node() was called; MPI_COMM_NULL
  /// when this process stands alone.
  [[nodiscard]] MPI_Comm world() const noexcept;
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  /// "rank 1", or "rank 1 (mpirun rank 2)" where the numbers differ.
  [[nodiscard]] std::string rank_name() const;
  /// Numbers the ranks as in_node_order() does. Collective; to be called before world() is used.
  void number_by_node(const Watchdog& watchdog);
  /// By rank: its number in MPI_COMM_WORLD.
  [[nodiscard]] std::vector<int> mpirun_ranks() const;

  /// Ends MPI once all ranks have come here. Nothing of MPI may be used afterwards. Throws
  /// TimeoutError naming the ranks that do not come. If it was not called, the destructor does the
  /// same and passes errors to the last word. During an exception it waits a few seconds at most
  /// and then leaves MPI running, so that the job can be aborted.
  void finish(const Watchdog& watchdog);

 private:
  Watchdog::Seconds timeout_;
  LastWord last_word_;
  bool active_ = false;
  Communicator by_node_;  // if number_by_node() was called
  bool owner_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

/// Ends every rank of the job with `exit_code`; only this process if MPI is not running or cannot
/// end the others within some seconds. Flushes the C streams first; does not return.
[[noreturn]] void abort_job(int exit_code) noexcept;

}  // namespace annulus
