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

/// NCCL among all ranks of a mesh: one communicator, from which those of groups are split.
class NcclWorld {
 public:
  virtual ~NcclWorld() = default;
  NcclWorld() = default;
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  /// A group over the ranks of `host`, which takes the control calls and must outlive it.
  /// Collective over the world: ranks with the same `color` (≥ 0) form a group, in order of `key`,
  /// and those are the ranks of `host` in their order. Either all ranks get their group, or all
  /// throw.
  [[nodiscard]] virtual std::unique_ptr<Group> split(Group& host, int color, int key) = 0;
};

/// Brings NCCL up for memory of the CUDA device `place`. Collective over `world`, which must
/// outlive the result. Communicators are non-blocking; waiting for one to come up, or to be let go
/// of, is bounded by the watchdog. Ranks let go of the world and its groups together, in the same
/// order, unless one has failed or an exception is on its way. Throws UnsupportedError on all ranks
/// without NCCL or when two ranks share a device (NCCL cannot), LibraryError when NCCL fails.
[[nodiscard]] std::unique_ptr<NcclWorld> make_nccl_world(Control& world, Place place,
                                                         Watchdog watchdog);

}  // namespace annulus
