#pragma once

#include <string>

namespace annulus::test {

/// What an exception of this type says that `action` throws.
template <class Exception, class Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing thrown";
}

}  // namespace annulus::test
