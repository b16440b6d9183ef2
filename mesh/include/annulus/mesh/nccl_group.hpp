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

/// The NCCL groups of a mesh. Each has its own communicator, over its ranks only; they share the
/// state of a failure.
class NcclGroups {
 public:
  virtual ~NcclGroups() = default;
  NcclGroups() = default;
  NcclGroups(const NcclGroups&) = delete;
  NcclGroups& operator=(const NcclGroups&) = delete;

  /// A group of the ranks of `host`, which handles the control calls and must outlive it.
  /// Collective over the mesh, where each rank passes the group that it is in. Either all ranks get
  /// their group, or all throw.
  [[nodiscard]] virtual std::unique_ptr<Group> make(Group& host) = 0;
};

/// For memory of the CUDA device `place`. Collective over `world`, all ranks of the mesh, which
/// must outlive the result. Communicators are non-blocking, and the watchdog bounds the wait for
/// their start and end. Ranks destroy the groups together and in the same order, except after a
/// failure or during an exception. Throws, on all ranks, UnsupportedError if the build has no NCCL
/// or if two ranks share a device, which NCCL does not support; and make() throws LibraryError if
/// NCCL fails.
[[nodiscard]] std::unique_ptr<NcclGroups> make_nccl_groups(Control& world, Place place,
                                                           Watchdog watchdog);

}  // namespace annulus
