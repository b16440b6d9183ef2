#pragma once

#include <list>
#include <optional>

#include <mpi.h>

#include <annulus/core/watchdog.hpp>

#include "mpi/posted_message.hpp"

namespace annulus {

/// Finds out, once a wait has lasted too long, which rank has not come to it: the one at the end of
/// the chain of ranks that wait for each other. A rank asks O(log P) others where the ranks wait
/// along a tree. Waiting ranks answer() now and then; nothing is sent as long as nobody asks.
class RollCall {
 public:
  /// Between ranks of `communicator`, which must outlive it. Nothing else may use the two tags
  /// there.
  RollCall(MPI_Comm communicator, int tag_question, int tag_answer);

  /// Tells the ranks that have asked meanwhile which rank this one is waiting for. Never blocks.
  void answer(int awaited);
  /// Follows the chain from `awaited`, for which this rank waits, to the first rank that does not
  /// answer within `patience`; nothing if all do.
  [[nodiscard]] std::optional<int> absent(int awaited, Watchdog::Seconds patience);

 private:
  void post(int to, int tag, int awaited);

  MPI_Comm communicator_;
  int own_ = 0;
  int tag_question_;
  int tag_answer_;
  std::list<PostedMessage> posted_;
};

}  // namespace annulus
