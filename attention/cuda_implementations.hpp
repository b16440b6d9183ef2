#pragma once

#include <memory>

#include <annulus/attention/implementation.hpp>

namespace annulus {

// The kernels for CUDA devices. Every build defines these functions; what it does not have is not
// available, with the reason.

/// cuDNN's scaled dot-product attention: "sdpa", "cudnn", "cuda_flash_attn2".
[[nodiscard]] std::unique_ptr<Implementation> make_sdpa_implementation();
/// Our dense flash kernel: "flash_attn2".
[[nodiscard]] std::unique_ptr<Implementation> make_flash_implementation();
/// The same kernel with block masks: "blocksparse".
[[nodiscard]] std::unique_ptr<Implementation> make_blocksparse_implementation();

}  // namespace annulus
