#pragma once

#include <memory>
#include <string>

#include <annulus/core/place.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>

namespace annulus {

struct NcclVersions {
  std::string built;   ///< "2.28.3"; "not built"
  std::string loaded;  ///< likewise
};

[[nodiscard]] NcclVersions nccl_versions();

/// A group for memory of the CUDA device `place`, over the ranks of `host`, which takes the control
/// calls and must outlive it. Collective over `host`. Communicators are non-blocking; waiting for
/// one to come up is bounded by the watchdog. Throws UnsupportedError without NCCL, LibraryError
/// when two ranks share a device (NCCL cannot) or NCCL fails.
[[nodiscard]] std::unique_ptr<Group> make_nccl_group(Group& host, Place place, Watchdog watchdog);

}  // namespace annulus
