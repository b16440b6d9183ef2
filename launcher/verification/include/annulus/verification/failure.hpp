#pragma once

#include <cstdint>
#include <string>

namespace annulus::verification {

/// One way in which a problem failed.
struct Failure {
  enum class Kind : std::uint8_t {
    bound,         ///< an error is above its bound against the oracle
    ratio,         ///< an error is too large beside that of the unsharded run
    repetition,    ///< a repeated run gave different bits
    reproduction,  ///< the unsharded run gave different bits
  };
  Kind kind;
  std::string text;  ///< in a few words
};

}  // namespace annulus::verification
