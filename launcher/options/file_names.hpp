#pragma once

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// Checks what the names of files say before any of them is opened: an output must be neither an
/// input nor another output, however it is spelt (--lse, --maximum and --sum may share the
/// .safetensors file of --output), and arrays go to .npy or .safetensors. Looks at the file system;
/// does not communicate. Throws UserErrors naming the options.
void check_file_names(const Options& options);

/// Throws UserError naming those of --query, --key, --value and --output that `run` lacks.
void check_files_are_given(const Options& options);

/// True if this file of --lse, --maximum or --sum is the file of --output.
[[nodiscard]] bool beside_output(const Options& options, const std::string& path);

}  // namespace annulus::launcher
