#pragma once

#include <annulus/core/error.hpp>
#include <annulus/core/handle.hpp>

#include <mpi.h>

#include <string>

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

/// MPI from construction to destruction, with MPI_THREAD_FUNNELED. Without a launcher it starts
/// nothing: a single rank needs no MPI.
class MpiSession {
 public:
  /// Initialises MPI if a launcher (mpirun, srun) started this process. Throws LibraryError with the
  /// fix when Slurm started several tasks but gave them no way to find each other.
  MpiSession(int* argc, char*** argv);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// MPI_COMM_WORLD, or MPI_COMM_NULL when this process stands alone.
  [[nodiscard]] MPI_Comm world() const noexcept;
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;

 private:
  bool active_ = false;
};

}  // namespace annulus
