#pragma once

#include <string>

#include <annulus/ring/tuning_cache.hpp>

namespace annulus::ring {

/// With every kind of member.
inline TuningEntry example_entry(const std::string& shape = "B=1 T=64") {
  return {{{"device", "a CPU"}, {"shape", shape}, {"named", "\"quoted\"\n"}},
          {.implementation = "native",
           .schedule = "hybrid",
           .transport = Transport::peer,
           .ulysses_degree = 2,
           .inner_size = 4,
           .head_group_bytes = std::int64_t{1} << 62},
          "2026-11-22T12:00:00Z",
          {{{.schedule = "ring"}, 1e-3, 0.1, ""},
           {{.schedule = "hybrid", .ulysses_degree = 2}, 1.5e-3, 0, "out of memory"},
           {{}, 0, 3e-5, ""}}};
}

}  // namespace annulus::ring
