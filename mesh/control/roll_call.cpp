#include "control/roll_call.hpp"

#include <string>
#include <utility>

#include "control/bytes_of.hpp"

namespace annulus {
namespace {

using Kind = ShortMessages::Kind;

constexpr int kHere = -1;  // the answer that only says that the rank waits too

std::string text_of(int rank) {
  std::string text;
  append(text, rank);
  return text;
}

}  // namespace

RollCall::RollCall(double patience, std::unique_ptr<ShortMessages> messages)
    : patience_(patience), messages_(std::move(messages)) {}

void RollCall::ask(int awaited) {
  if (question_ && question_->asked == awaited) return;
  question_ = {awaited, messages_->now()};
  messages_->post(awaited, Kind::question, text_of(kHere));
}

void RollCall::respond(int awaited) {
  int from = 0;
  std::string text;
  while (messages_->take(Kind::question, from, text)) {
    messages_->post(from, Kind::answer, text_of(kHere));
    askers_.insert(from);
  }
  if (!askers_.empty()) ask(awaited);
  if (!question_) return;
  while (messages_->take(Kind::answer, from, text)) {
    if (from != question_->asked) continue;  // a late answer
    question_->is_there = true;
    if (const int absent = value_at<int>(text, 0); absent != kHere) question_->absent = absent;
  }
  if (!question_->is_there && messages_->now() - question_->since > patience_) {
    question_->absent = question_->asked;
  }
  if (!question_->absent) return;
  for (const int asker : askers_) {
    messages_->post(asker, Kind::answer, text_of(*question_->absent));
  }
  askers_.clear();
  found_ = question_->absent;
  question_.reset();
}

std::optional<int> RollCall::absent(int awaited) {
  found_.reset();
  ask(awaited);
  for (const double begin = messages_->now(); messages_->now() - begin < 2 * patience_;
       messages_->pause()) {
    respond(awaited);
    if (found_) break;
  }
  return std::exchange(found_, std::nullopt);
}

}  // namespace annulus
