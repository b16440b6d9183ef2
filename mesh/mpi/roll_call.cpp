#include "mpi/roll_call.hpp"

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include <annulus/mesh/mpi.hpp>

#include "control/bytes_of.hpp"

namespace annulus {

RollCall::RollCall(MPI_Comm communicator, int tag_question, int tag_answer)
    : communicator_(communicator), tag_question_(tag_question), tag_answer_(tag_answer) {
  check_mpi(MPI_Comm_rank(communicator_, &own_), "MPI_Comm_rank");
}

void RollCall::post(int to, int tag, int awaited) {
  posted_.remove_if([](PostedMessage& message) { return message.is_free(); });
  std::string text;
  append(text, awaited);
  posted_.emplace_back().post(communicator_, to, tag, text);
}

void RollCall::answer(int awaited) {
  int from = 0;
  std::string question;
  while (take_message(communicator_, tag_question_, sizeof(int), from, question)) {
    post(from, tag_answer_, awaited);
  }
}

std::optional<int> RollCall::absent(int awaited, Watchdog::Seconds patience) {
  using Clock = std::chrono::steady_clock;
  std::set<int> asked{own_};
  int next = awaited;
  while (asked.insert(next).second) {
    post(next, tag_question_, awaited);
    bool answered = false;
    const auto begin = Clock::now();
    while (!answered) {
      if (Clock::now() - begin > patience) return next;
      answer(awaited);
      int from = 0;
      std::string text;
      while (!answered && take_message(communicator_, tag_answer_, sizeof(int), from, text)) {
        if (from != next) continue;  // a late answer
        next = value_at<int>(text, 0);
        answered = true;
      }
      if (!answered) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return std::nullopt;
}

}  // namespace annulus
