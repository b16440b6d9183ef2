#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <mpi.h>

namespace annulus {

/// A short message that nobody waits for. Its bytes live until it has been taken, or until the
/// process ends.
class PostedMessage {
 public:
  PostedMessage() = default;
  ~PostedMessage();
  PostedMessage(const PostedMessage&) = delete;
  PostedMessage& operator=(const PostedMessage&) = delete;

  /// Whether another one may be posted. Never blocks.
  [[nodiscard]] bool is_free();
  /// Only if is_free().
  void post(MPI_Comm communicator, int to, int tag, const std::string& bytes);

 private:
  MPI_Request request_ = MPI_REQUEST_NULL;
  std::vector<char> bytes_;
};

/// The message that has come with this tag, if any, and from whom; nothing longer than `most`.
/// Never blocks.
[[nodiscard]] bool take_message(MPI_Comm communicator, int tag, std::size_t most, int& from,
                                std::string& bytes);

}  // namespace annulus
