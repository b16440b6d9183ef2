#include <annulus/core/error.hpp>
#include <annulus/mesh/nccl_group.hpp>

namespace annulus {

NcclVersions nccl_versions() {
  return {"not built", "not built"};
}

std::unique_ptr<Group> make_nccl_group(Group& /*host*/, Place /*place*/, Watchdog /*watchdog*/) {
  throw UnsupportedError("this build has no NCCL");
}

}  // namespace annulus
