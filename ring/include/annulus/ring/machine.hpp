#pragma once

#include <string>
#include <string_view>

#include <annulus/core/place.hpp>

namespace annulus {

/// A description of the machine that the program runs on.

/// The version of this library: "0.1.0".
[[nodiscard]] std::string_view library_version();
/// The first line of the MPI library's version text: "Open MPI v4.1.4, package: …".
[[nodiscard]] std::string mpi_library();
/// "AMD EPYC 9654 96-Core Processor"; "unknown" where the system does not say.
[[nodiscard]] std::string cpu_name();
/// The CPU's or the GPU's name.
[[nodiscard]] std::string device_name(Place place);
/// The loaded libraries that matter for work at `place`: "Open MPI v4.1.4, OpenBLAS 0.3.21".
[[nodiscard]] std::string library_versions(Place place);

}  // namespace annulus
