#include "control/tree_control.hpp"

#include <array>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

#include "control/bytes_of.hpp"

namespace annulus {
namespace {

// The kinds of messages: a part of a call, its result, or the text of an error.
constexpr char kGood = '.';
constexpr char kError = '!';

}  // namespace

TreeControl::TreeControl(std::unique_ptr<Messenger> messenger) : messenger_(std::move(messenger)) {
  const int own = rank();
  if (own > 0) parent_ = own & (own - 1);
  for (int bit = 1; (own & bit) == 0 && own + bit < size(); bit <<= 1) {
    children_.push_back(own + bit);
  }
}

void TreeControl::abort(int exit_code) noexcept {
  messenger_->abort(exit_code);
  std::terminate();  // not reached
}

std::string TreeControl::combine(const Call& call, std::string part, const Merge& merge,
                                 Result where) {
  ++calls_;
  std::string whole = std::move(part);
  std::string error;
  for (const int child : children_) {
    const std::string theirs = messenger_->receive({call.what, call.deed}, child);
    if (!error.empty()) continue;
    try {
      if (theirs.front() == kError) throw InternalError(theirs.substr(1));
      merge(whole, body_of(theirs.substr(1), call.what, child));
    } catch (const InternalError& failure) {
      error = failure.what();
    }
  }
  // An error goes the same way as a result, so that all ranks get it.
  if (parent_ >= 0) {
    messenger_->send(call.what, std::array{parent_},
                     error.empty() ? kGood + head_of(call.what) + whole : kError + error);
    if (where == Result::on_first) {
      if (!error.empty()) throw InternalError(error);
      return {};
    }
  }
  std::string message = error.empty() ? kGood + whole : kError + error;
  if (where == Result::on_all) {
    if (parent_ >= 0) message = messenger_->receive({call.what, call.deed}, parent_);
    // The largest subtree first, as its ranks are farthest away.
    const std::vector<int> largest_first(children_.rbegin(), children_.rend());
    messenger_->send(call.what, largest_first, message);
  }
  if (message.front() == kError) throw InternalError(message.substr(1));
  return message.substr(1);
}

std::string TreeControl::head_of(std::string_view what) const {
  std::string head;
  append(head, calls_);
  append(head, std::uint64_t{what.size()});
  return head.append(what);
}

// Ranks that are out of step must not take each other's parts, which would hide the real error.
std::string TreeControl::body_of(const std::string& part, std::string_view what, int from) const {
  const std::string expected = head_of(what);
  if (part.starts_with(expected)) return part.substr(expected.size());
  const auto number = value_at<std::uint64_t>(part, 0);
  const auto length = value_at<std::uint64_t>(part, sizeof number);
  throw InternalError(
      fmt::format("{} is in another call than {}: '{}', its call {}, and not '{}', call {}",
                  messenger_->name_of(from), messenger_->name_of(rank()),
                  part.substr(sizeof number + sizeof length, length), number, what, calls_));
}

}  // namespace annulus
