#pragma once

#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus {

/// A LibraryError that all ranks have agreed on: they left together and those ranks can go on, so
/// that the job can end in good order.
class AgreedFailure : public LibraryError {
 public:
  using LibraryError::LibraryError;
};

/// Collective over `ranks`. If any rank brings an error, every rank throws: a UserError when all
/// the errors are the user's, otherwise an AgreedFailure. The message is that of the lowest rank
/// that failed, prefixed by "rank r: " unless every rank failed with this very message (an error
/// that all ranks share needs no name), with a count of further ranks whose message is a different
/// one.
void agree(Control& ranks, const Error* error);

/// Runs `body` on every rank and agrees on its outcome: either all ranks return, or all throw.
/// `body` itself must not communicate over `ranks`. Errors that do not derive from Error (such as
/// std::bad_alloc) count as LibraryError.
template <class Body>
auto collectively(Control& ranks, Body&& body) -> std::invoke_result_t<Body> {
  using Result = std::invoke_result_t<Body>;
  const auto attempt = [&](auto&& run) {
    try {
      run();
    } catch (const Error& error) {
      agree(ranks, &error);
    } catch (const std::exception& error) {
      const LibraryError wrapped(error.what());
      agree(ranks, &wrapped);
    }
  };
  if constexpr (std::is_void_v<Result>) {
    attempt(std::forward<Body>(body));
    agree(ranks, nullptr);
  } else {
    std::optional<Result> result;
    attempt([&] { result.emplace(std::forward<Body>(body)()); });
    agree(ranks, nullptr);
    return std::move(*result);
  }
}

}  // namespace annulus
