#pragma once

#include <exception>

namespace annulus {

/// Keeps the first of several errors until all that can be done has been done.
class FirstError {
 public:
  /// Calls `body`. The first exception is kept; later ones are forgotten.
  template <class Body>
  void of(const Body& body) {
    try {
      body();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }
  /// Throws the error, if there was one.
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

}  // namespace annulus
