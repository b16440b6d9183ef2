#pragma once

#include <cstddef>
#include <list>
#include <string>
#include <vector>

#include <mpi.h>

#include "control/short_messages.hpp"

namespace annulus {

/// A short message, sent without waiting. Its bytes live until it has been taken, or until the
/// process ends.
class PostedMessage {
 public:
  PostedMessage() = default;
  ~PostedMessage();
  PostedMessage(const PostedMessage&) = delete;
  PostedMessage& operator=(const PostedMessage&) = delete;

  /// True if another one may be posted. Never blocks.
  [[nodiscard]] bool is_free();
  /// Requires is_free().
  void post(MPI_Comm communicator, int to, int tag, const std::string& bytes);

 private:
  MPI_Request request_ = MPI_REQUEST_NULL;
  std::vector<char> bytes_;
};

/// Takes a message that has arrived with this tag, if any, and its sender. Messages have at most
/// `most` bytes. Never blocks.
[[nodiscard]] bool take_message(MPI_Comm communicator, int tag, std::size_t most, int& from,
                                std::string& bytes);

/// Uses a communicator that must outlive the object, and on which nothing else may use the two
/// tags.
class PostedMessages final : public ShortMessages {
 public:
  PostedMessages(MPI_Comm communicator, int question_tag, int answer_tag)
      : communicator_(communicator), question_tag_(question_tag), answer_tag_(answer_tag) {}
  void post(int to, Kind kind, const std::string& text) override;
  [[nodiscard]] bool take(Kind kind, int& from, std::string& text) override;
  [[nodiscard]] double now() const override;
  void pause() override;

 private:
  [[nodiscard]] int tag_of(Kind kind) const {
    return kind == Kind::question ? question_tag_ : answer_tag_;
  }
  MPI_Comm communicator_;
  int question_tag_;
  int answer_tag_;
  std::list<PostedMessage> posted_;
};

}  // namespace annulus
