#pragma once

#include <string>

namespace annulus {

struct CudnnVersions {
  std::string built;     ///< cuDNN's headers at build time: "9.19.0"; "not built"
  std::string loaded;    ///< library in use; "none" without cuDNN
  std::string frontend;  ///< headers of cudnn-frontend; "none" without cuDNN
};

[[nodiscard]] CudnnVersions cudnn_versions();

}  // namespace annulus
