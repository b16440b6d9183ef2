#pragma once

namespace annulus::verification {

/// How values come with the calls of a case: those that AttentionProblem::call_arguments names.
struct CalledCase {
  bool sinks = false;             ///< the sinks come with them too
  bool in_device_memory = false;  ///< lengths, offsets and seed do; sinks always are
};

}  // namespace annulus::verification
