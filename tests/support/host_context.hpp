#pragma once

#include <annulus/ring/context.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::test {

/// All ranks on CPUs, a thread each.
inline ContextOptions on_host(const char* mesh = "sp=-1") {
  ContextOptions options;
  options.mesh = mesh;
  options.place = Place::host();
  options.timeout = 60;
  options.threads = 1;
  return options;
}

}  // namespace annulus::test
