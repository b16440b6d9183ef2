#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/attention/problem_class.hpp>

namespace annulus {

/// A name that restricts the problem or decides the schedule, and leaves the choice of local
/// kernels to `auto`.
struct Strategy {
  std::string name;
  std::string schedule;  ///< a name of docs/semantics.md §5; "auto": any
  std::function<Capability(const AttentionProblem& problem)> accepts;
};

/// The implementations for a problem, and why the others cannot compute it.
struct Selection {
  /// In order of registration. Each block goes to the candidate that takes it and is predicted to
  /// be fastest, the first of equals. A named implementation is the only candidate.
  std::vector<const Implementation*> candidates;
  /// (name, reason) of every implementation that cannot.
  std::vector<std::pair<std::string, std::string>> passed_over;
  /// The schedule that the name implies; "auto" unless it is a strategy with a schedule.
  std::string schedule = "auto";

  /// The schedule to plan if the caller asks for `wanted`, which may be "auto". Throws
  /// ArgumentError("schedule", …) if `wanted` contradicts `schedule`.
  [[nodiscard]] std::string schedule_for(const std::string& wanted) const;
};

/// The machine that computes: this one, or another one that is planned for.
enum class Presence : std::uint8_t { required, assumed };

/// The implementations by name. Names are case-sensitive.
class Registry {
 public:
  /// All implementations, including ones whose backend is not in this build, which refuse every
  /// problem with that reason.
  static Registry standard();

  /// Adds an implementation, which `auto` may choose too. Throws ArgumentError if a name is taken.
  void add(std::unique_ptr<Implementation> implementation);
  /// Throws as add() above does.
  void add(Strategy strategy);

  /// A local kernel by name or alias. Throws ArgumentError, for an unknown name with a list of the
  /// known ones, and for a strategy.
  [[nodiscard]] const Implementation& get(std::string_view name) const;
  /// Throws ArgumentError, listing the known names, unless select() knows the name.
  void check_name(std::string_view name) const;
  /// Names in order of registration. The aliases of an implementation follow its name.
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }
  [[nodiscard]] const std::vector<std::unique_ptr<Implementation>>& implementations() const {
    return implementations_;
  }
  [[nodiscard]] const std::vector<Strategy>& strategies() const noexcept { return strategies_; }

  /// For "auto", and for a strategy that accepts the problem, all implementations that can run it
  /// at `place`; otherwise the named one. Throws UnsupportedError with the reason if the named
  /// implementation or strategy cannot run the problem, and ArgumentError for an unknown name. With
  /// ANNULUS_FORCE_NATIVE=1, "native" is selected for any name. For the backward pass,
  /// Implementation::fits_backward() decides, and Declaration::meant_for does not count.
  [[nodiscard]] Selection select(std::string_view name, const AttentionProblem& problem,
                                 Place place, Presence presence = Presence::required,
                                 Pass pass = Pass::forward) const;

 private:
  [[nodiscard]] const Strategy* strategy(std::string_view name) const;
  void take_names(const std::vector<std::string>& names);

  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Implementation>> implementations_;
  std::vector<Strategy> strategies_;
};

}  // namespace annulus
