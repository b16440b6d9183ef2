#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus {

/// A LibraryError on which all ranks have agreed. They left together and can still communicate, so
/// the job can end in an orderly way.
class AgreedFailure : public LibraryError {
 public:
  using LibraryError::LibraryError;
};

/// The text of an error, improved where the standard library does not say that memory has run out.
[[nodiscard]] std::string text_of(const std::exception& error);

/// Collective over `ranks`. If any rank passes an error, every rank throws. If any error is not a
/// UserError, they throw an AgreedFailure. If all ranks have the same ArgumentError, FileError or
/// UnsupportedError, each throws its own. Otherwise they throw a UserError. The message is that of
/// the lowest rank that failed, after "rank r: " unless all have the same UserError, and it counts
/// the other ranks whose message differs. `what` says what may have failed; a timeout names it, and
/// it must be the same on all ranks.
void agree(Control& ranks, const Error* error, std::string_view what = {});

/// Runs `body` on every rank and agrees on its outcome: either all ranks return, or all throw.
/// `body` itself must not communicate over `ranks`. Errors that do not derive from Error (such as
/// std::bad_alloc) count as LibraryError. `what` as for agree().
template <class Body>
auto collectively(Control& ranks, std::string_view what, Body&& body)
    -> std::invoke_result_t<Body> {
  using Result = std::invoke_result_t<Body>;
  const auto attempt = [&](auto&& run) {
    try {
      run();
    } catch (const Error& error) {
      agree(ranks, &error, what);
    } catch (const std::exception& error) {
      const LibraryError wrapped(text_of(error));
      agree(ranks, &wrapped, what);
    }
  };
  if constexpr (std::is_void_v<Result>) {
    attempt(std::forward<Body>(body));
    agree(ranks, nullptr, what);
  } else {
    std::optional<Result> result;
    attempt([&] { result.emplace(std::forward<Body>(body)()); });
    agree(ranks, nullptr, what);
    return std::move(*result);
  }
}

template <class Body>
auto collectively(Control& ranks, Body&& body) -> std::invoke_result_t<Body> {
  return collectively(ranks, {}, std::forward<Body>(body));
}

}  // namespace annulus
