#pragma once

#include <memory>
#include <optional>
#include <set>

#include "control/short_messages.hpp"

namespace annulus {

/// Finds the missing rank when a wait has lasted too long: the one at the end of the chain of ranks
/// that wait for each other. A rank asks the one that it waits for, which passes on the question
/// and returns the answer. Two ranks exchange at most three messages, however many ranks ask.
/// Nothing is sent until a rank asks.
class RollCall {
 public:
  /// A rank that does not respond within `patience` seconds counts as absent.
  RollCall(double patience, std::unique_ptr<ShortMessages> messages);

  /// Responds to questions that have arrived, while this rank waits for `awaited`. Never blocks.
  void respond(int awaited);
  /// The missing rank; nothing if the ranks wait for each other.
  [[nodiscard]] std::optional<int> absent(int awaited);

 private:
  struct Question {
    int asked;
    double since;
    bool is_there = false;           // `asked` has responded
    std::optional<int> absent = {};  // the answer
  };

  void ask(int awaited);

  double patience_;
  std::unique_ptr<ShortMessages> messages_;
  std::set<int> askers_;  // ranks without an answer yet
  std::optional<Question> question_;
  std::optional<int> found_;  // the answer to the last question
};

}  // namespace annulus
