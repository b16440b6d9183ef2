#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/host_memory.hpp>
#include <annulus/mesh/agreement.hpp>

#include "control/bytes_of.hpp"

namespace annulus {
namespace {

constexpr std::string_view kNoMemory = "out of memory";

/// The errors of some ranks; an empty text if there are none.
struct Errors {
  // Further messages count as all different.
  static constexpr std::size_t kMaximumCounted = 64;

  int first_rank = 0;                                 ///< lowest failed rank
  bool all_users = true;                              ///< all are UserErrors
  int uncounted = 0;                                  ///< ranks beyond kMaximumCounted messages
  std::vector<std::pair<std::uint64_t, int>> counts;  ///< hash of a message, and its ranks
  std::string message;                                ///< of the first rank; the first in `counts`

  [[nodiscard]] int same() const { return counts.front().second; }
  [[nodiscard]] int others() const {
    int others = uncounted;
    for (std::size_t i = 1; i < counts.size(); ++i) others += counts[i].second;
    return others;
  }

  [[nodiscard]] std::string to_text() const {
    std::string text;
    append(text, first_rank);
    append(text, all_users);
    append(text, uncounted);
    append(text, counts.size());
    for (const auto& [hash, count] : counts) {
      append(text, hash);
      append(text, count);
    }
    return text + message;
  }

  static Errors parse(const std::string& text) {
    std::size_t at = 0;
    const auto next = [&]<class Value>(Value& value) {
      value = value_at<Value>(text, at);
      at += sizeof(Value);
    };
    Errors errors;
    next(errors.first_rank);
    next(errors.all_users);
    next(errors.uncounted);
    std::size_t count = 0;
    next(count);
    errors.counts.resize(count);
    for (auto& [hash, ranks] : errors.counts) {
      next(hash);
      next(ranks);
    }
    errors.message = text.substr(at);
    return errors;
  }
};

void add_later(std::string& whole, const std::string& later) {
  if (whole.empty() || later.empty()) {
    whole += later;
    return;
  }
  Errors errors = Errors::parse(whole);
  const Errors more = Errors::parse(later);
  errors.all_users = errors.all_users && more.all_users;
  errors.uncounted += more.uncounted;
  for (const auto& [hash, ranks] : more.counts) {
    const auto known =
        std::ranges::find(errors.counts, hash, &std::pair<std::uint64_t, int>::first);
    if (known != errors.counts.end()) {
      known->second += ranks;
    } else if (errors.counts.size() < Errors::kMaximumCounted) {
      errors.counts.emplace_back(hash, ranks);
    } else {
      errors.uncounted += ranks;
    }
  }
  whole = errors.to_text();
}

std::string gather_errors(Control& ranks, const Error* error, std::string_view what) {
  constexpr std::string_view kPurpose = "agreement on errors";
  std::string mine;
  if (error != nullptr) {
    std::string message = error->what();
    // std::bad_alloc does not say what the memory was for, but the step does.
    if (message.starts_with(kNoMemory) && !what.empty())
      message = fmt::format("{}: {}", what, message);
    mine = Errors{ranks.rank(),
                  error->exit_code() == ExitCode::usage,
                  0,
                  {{std::hash<std::string>()(message), 1}},
                  message}
               .to_text();
  }
  try {
    return ranks.merge_text(
        std::move(mine), add_later,
        what.empty() ? std::string(kPurpose) : fmt::format("{}: {}", what, kPurpose));
  } catch (const Error& failure) {
    if (error == nullptr) throw;
    // The user needs this rank's own error first; the silence of the others comes second.
    const std::string text = fmt::format("rank {}: {} (and then {})", ranks.mesh_rank(ranks.rank()),
                                         error->what(), failure.what());
    if (dynamic_cast<const TimeoutError*>(&failure) != nullptr) throw TimeoutError(text);
    throw LibraryError(text);
  }
}

// All ranks have the same error, so each can throw its own, with its fields.
void throw_alike(const Error& error) {
  if (const auto* argument = dynamic_cast<const ArgumentError*>(&error)) throw *argument;
  if (const auto* file = dynamic_cast<const FileError*>(&error)) throw *file;
  if (const auto* unsupported = dynamic_cast<const UnsupportedError*>(&error)) throw *unsupported;
}

}  // namespace

std::string text_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    const std::string state = host_memory_state();
    return std::string(kNoMemory) + (state.empty() ? "" : ": " + state);
  }
  const auto* const system = dynamic_cast<const std::system_error*>(&error);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again) {
    return fmt::format("a thread cannot be started: {} (out of memory, or too many threads)",
                       system->what());
  }
  return error.what();
}

void agree(Control& ranks, const Error* error, std::string_view what) {
  const std::string outcome = gather_errors(ranks, error, what);
  if (outcome.empty()) return;
  const Errors errors = Errors::parse(outcome);
  std::string text = errors.message;
  const int others = errors.others();
  // A failure names a rank even if all ranks have failed alike, since the remedy is often on one
  // machine. An argument that is wrong on all ranks names none.
  const bool some = others > 0 || errors.same() < ranks.size();
  const bool names_rank = some || (!errors.all_users && ranks.size() > 1);
  if (names_rank) {
    text = fmt::format("rank {}: {}{}", ranks.mesh_rank(errors.first_rank), text,
                       some ? "" : " (the same on all ranks)");
  }
  if (others > 0) {
    text += fmt::format(" ({} more {} a different error)", others,
                        others == 1 ? "rank has" : "ranks have");
  }
  if (errors.all_users && text == errors.message) throw_alike(*error);
  if (errors.all_users) throw UserError(text);
  throw AgreedFailure(text);
}

}  // namespace annulus
