#pragma once

#include <string>
#include <vector>

#include <mpi.h>

#include <annulus/core/watchdog.hpp>

namespace annulus {

/// Finds out, once a wait has lasted too long, which ranks have not come to it. Waiting ranks
/// answer() now and then; nothing is sent as long as nobody asks.
class RollCall {
 public:
  /// Among the ranks `members` of `communicator`, which must outlive it. Nothing else may use the
  /// two tags there.
  RollCall(MPI_Comm communicator, std::vector<int> members, int tag_call, int tag_here);

  /// Tells the ranks that have asked meanwhile that this rank is waiting too. Never blocks.
  void answer() const;
  /// Asks all others, and returns those that have not answered after `patience`, in order.
  [[nodiscard]] std::vector<int> absent(Watchdog::Seconds patience) const;

 private:
  MPI_Comm communicator_;
  std::vector<int> members_;
  int own_ = 0;
  int tag_call_;
  int tag_here_;
};

}  // namespace annulus
