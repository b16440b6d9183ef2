#pragma once

#include <string>

namespace annulus::test {

/// The message of the exception of this type that `action` throws.
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
