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

/// NCCL over all ranks of a mesh: one communicator, from which the groups are split.
class NcclWorld {
 public:
  virtual ~NcclWorld() = default;
  NcclWorld() = default;
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  /// A group of the ranks of `host`, which handles the control calls and must outlive it.
  /// Collective over the world. Ranks with the same `color` (≥ 0) form a group, in order of `key`;
  /// these must be the ranks of `host`, in its order. Either all ranks get their group, or all
  /// throw.
  [[nodiscard]] virtual std::unique_ptr<Group> split(Group& host, int color, int key) = 0;
};

/// Starts NCCL for memory of the CUDA device `place`. Collective over `world`, which must outlive
/// the result. Communicators are non-blocking, and the watchdog bounds the wait for one to start or
/// to end. Ranks destroy the world and its groups together and in the same order, except after a
/// failure or during an exception. Throws, on all ranks, UnsupportedError if the build has no NCCL
/// or if two ranks share a device, which NCCL does not support; and LibraryError if NCCL fails.
[[nodiscard]] std::unique_ptr<NcclWorld> make_nccl_world(Control& world, Place place,
                                                         Watchdog watchdog);

}  // namespace annulus
