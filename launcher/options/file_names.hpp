#pragma once

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// Checks the names of files before any is opened. An output must be neither an input nor another
/// output, under any name. But --output, --lse, --maximum and --sum may share a .safetensors file,
/// and gradients may share one of their own. Arrays go to .npy or .safetensors. Reads the file
/// system; does not communicate. Throws UserErrors naming the options.
void check_file_names(const Options& options);

/// Throws UserError naming each of --query, --key, --value and --output that `run` lacks.
void check_files_are_given(const Options& options);

/// True if both are names of one .safetensors file, which holds several arrays.
[[nodiscard]] bool are_one_safetensors(const std::string& first, const std::string& second);

}  // namespace annulus::launcher
