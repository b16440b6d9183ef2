#include <algorithm>
#include <cstddef>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include <annulus/mesh/agreement.hpp>

namespace annulus {
namespace {

// An error is sent as one character, 'u' for the user's or 'l' for ours, and its message. No error
// is an empty text.
std::string encoded(const Error* error) {
  if (error == nullptr) return {};
  return (error->exit_code() == ExitCode::usage ? "u" : "l") + std::string(error->what());
}

std::vector<std::string> gather_errors(Control& ranks, const Error* error, std::string_view what) {
  constexpr std::string_view kPurpose = "agreement on errors";
  try {
    return ranks.gather_text(encoded(error), what.empty() ? std::string(kPurpose)
                                                          : fmt::format("{}: {}", what, kPurpose));
  } catch (const Error& failure) {
    if (error == nullptr) throw;
    // This rank's own error is what its user needs to see; the silence of the others comes second.
    const std::string text = fmt::format("rank {}: {} (and then {})", ranks.mesh_rank(ranks.rank()),
                                         error->what(), failure.what());
    if (dynamic_cast<const TimeoutError*>(&failure) != nullptr) throw TimeoutError(text);
    throw LibraryError(text);
  }
}

}  // namespace

std::string text_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "out of memory";
  const auto* const system = dynamic_cast<const std::system_error*>(&error);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again) {
    return fmt::format("a thread cannot be started: {} (out of memory, or too many threads)",
                       system->what());
  }
  return error.what();
}

void agree(Control& ranks, const Error* error, std::string_view what) {
  const std::vector<std::string> outcomes = gather_errors(ranks, error, what);
  const auto failed = [](const std::string& outcome) { return !outcome.empty(); };
  const auto first = std::find_if(outcomes.begin(), outcomes.end(), failed);
  if (first == outcomes.end()) return;

  const auto message_of = [](const std::string& outcome) {
    return std::string_view(outcome).substr(1);
  };
  const auto differs = [&](const std::string& outcome) {
    return failed(outcome) && message_of(outcome) != message_of(*first);
  };
  const auto others = std::count_if(first, outcomes.end(), differs);
  std::string text(message_of(*first));
  if (others > 0 || !std::all_of(outcomes.begin(), outcomes.end(), failed)) {
    text = fmt::format("rank {}: {}", ranks.mesh_rank(static_cast<int>(first - outcomes.begin())),
                       text);
  }
  if (others > 0) {
    text += fmt::format(" ({} more {} a different error)", others,
                        others == 1 ? "rank has" : "ranks have");
  }
  const bool all_users = std::all_of(outcomes.begin(), outcomes.end(), [](const std::string& o) {
    return o.empty() || o.front() == 'u';
  });
  if (all_users) throw UserError(text);
  throw AgreedFailure(text);
}

}  // namespace annulus
