#pragma once

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
/// Owning MPI communicator. Freeing it is collective, so all ranks must destroy theirs in the same
/// order.
using Communicator = Handle<CommunicatorTraits>;

/// Initialises MPI, with errors returned as codes and, if the library offers it,
/// MPI_THREAD_SERIALIZED (see Watchdog::computing()), and finalises it at the end. Does neither if
/// MPI is already initialised, or without a launcher, because a single rank needs no MPI.
class MpiSession {
 public:
  /// Called with the reason before the process exits.
  using LastWord = std::function<void(const std::string& text)>;

  /// Throws LibraryError with the fix if this process is one of several that MPI cannot connect, as
  /// each would compute everything. MPI_Init and MPI_Finalize cannot be interrupted: if one takes
  /// longer than `timeout`, because a rank has stopped, the process calls `last_word` and exits
  /// with code 3.
  MpiSession(int* argc, char*** argv, Watchdog::Seconds timeout = Watchdog::kDefault,
             LastWord last_word = {});
  /// A session without MPI under any launcher, for work that needs no other rank.
  [[nodiscard]] static MpiSession alone();
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// All ranks, numbered as in MPI_COMM_WORLD unless number_by_node() was called; MPI_COMM_NULL if
  /// this process is alone.
  [[nodiscard]] MPI_Comm world() const noexcept;
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  /// "rank 1", or "rank 1 (mpirun rank 2)" where the numbers differ.
  [[nodiscard]] std::string rank_name() const;
  /// Numbers the ranks as in_node_order() does. Collective; must come before any use of world().
  void number_by_node(const Watchdog& watchdog);
  /// The number of every rank in MPI_COMM_WORLD, by rank.
  [[nodiscard]] std::vector<int> mpirun_ranks() const;

  /// Ends MPI once all ranks have called it. MPI must not be used afterwards. Throws TimeoutError
  /// naming missing ranks. Without this call, the destructor does the same and passes errors to the
  /// last word. During an exception, it waits a few seconds at most and then leaves MPI running, so
  /// that the job can be aborted.
  void finish(const Watchdog& watchdog);

 private:
  MpiSession() = default;

  Watchdog::Seconds timeout_ = Watchdog::kDefault;
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
