#include <annulus/core/error.hpp>
#include <annulus/mesh/nccl_group.hpp>

namespace annulus {

NcclVersions nccl_versions() {
  return {"not built", "not built"};
}

std::unique_ptr<NcclGroups> make_nccl_groups(Control& /*world*/, Place /*place*/,
                                             Watchdog /*watchdog*/) {
  throw UnsupportedError("transport nccl: this build has no NCCL");
}

}  // namespace annulus
