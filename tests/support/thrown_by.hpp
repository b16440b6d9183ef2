#pragma once

#include <stdexcept>

namespace annulus::test {

/// The exception of this type that `action` throws.
template <class Exception, class Action>
Exception thrown_by(const Action& action) {
  try {
    action();
  } catch (const Exception& error) {
    return error;
  }
  throw std::logic_error("nothing thrown");
}

}  // namespace annulus::test
