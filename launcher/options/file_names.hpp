#pragma once

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// Checks what the names of files say before any of them is opened: an output must be neither an
/// input nor another output, however it is spelt (--output and --lse may share a .safetensors
/// file), and arrays go to .npy or .safetensors. Looks at the file system; does not communicate.
/// Throws UserErrors naming the options.
void check_file_names(const Options& options);

/// Whether --lse goes to the file of --output.
[[nodiscard]] bool lse_beside_output(const Options& options);

}  // namespace annulus::launcher
