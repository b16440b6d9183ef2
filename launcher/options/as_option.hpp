#pragma once

#include <string>
#include <utility>

#include <annulus/core/error.hpp>

namespace annulus::launcher {

/// Runs body() and makes its errors name `option` ("--window", "--query q.npy"): lower layers name
/// their own arguments, or only a file, but the user knows the options. An entry's index is kept:
/// "kv_lengths[2]" becomes "--kv-lengths kv.npy, entry 2".
template <class Body>
auto as_option(const std::string& option, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const ArgumentError& error) {
    const std::string& name = error.argument();
    const std::size_t bracket = name.find('[');
    const std::string entry =
        bracket == std::string::npos || name.back() != ']'
            ? ""
            : ", entry " + name.substr(bracket + 1, name.size() - bracket - 2);
    throw ArgumentError(option + entry, error.value(), error.expected());
  } catch (const FileError& error) {
    throw UserError(option + std::string(error.what()).substr(error.path().size()));
  } catch (const SystemError& error) {
    throw LibraryError(option + ": " + error.what());
  } catch (const UnsupportedError& error) {
    throw UnsupportedError(option + ": " + error.what());
  }
}

}  // namespace annulus::launcher
