#pragma once

#include <span>
#include <string>
#include <string_view>

namespace annulus {

/// One environment variable that the library reads.
struct EnvironmentVariable {
  std::string_view name;
  std::string_view default_value;
  std::string_view description;
};

/// The table of all environment variables that the library reads. The program also takes each of
/// its options from ANNULUS_<OPTION>.
[[nodiscard]] std::span<const EnvironmentVariable> environment_variables();

/// The value of a variable in the table, or its default if it is not set. Throws InternalError for
/// a name that is not in the table.
[[nodiscard]] std::string environment(std::string_view name);

/// The value of an on/off variable: 0, off, false, no and empty are off; 1, on, true and yes are
/// on. Throws UserError for anything else.
[[nodiscard]] bool environment_flag(std::string_view name);

}  // namespace annulus
