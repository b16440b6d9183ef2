#pragma once

namespace annulus::verification {

/// How the values that AttentionProblem::call_arguments names come with the calls of a case.
struct CalledCase {
  bool sinks = false;             ///< sinks come with the calls too
  bool in_device_memory = false;  ///< of lengths, offsets and seed; sinks always are
};

}  // namespace annulus::verification
