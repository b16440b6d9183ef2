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

/// Who may compute a problem, and why the others may not.
struct Selection {
  /// In order of registration. Each block goes to the one that is predicted to be fastest of those
  /// that take it, the first of equals. Just one when it was named.
  std::vector<const Implementation*> candidates;
  /// (name, reason) of every implementation that cannot.
  std::vector<std::pair<std::string, std::string>> passed_over;
  /// The schedule that the name stands for; "auto" unless it names a strategy that decides it.
  std::string schedule = "auto";

  /// The schedule to plan if the caller asks for `wanted`, which may be "auto". Throws
  /// ArgumentError("schedule", …) if `wanted` contradicts `schedule`.
  [[nodiscard]] std::string schedule_for(const std::string& wanted) const;
};

/// Whether this machine must be able to compute, or the plan is for another one.
enum class Presence : std::uint8_t { required, assumed };

/// The implementations by name. Names are case-sensitive.
class Registry {
 public:
  /// All implementations. One whose backend is not in this build is listed too; it
  /// refuses every problem with that reason.
  static Registry standard();

  /// For `auto` to choose from, as Selection says. Throws ArgumentError if a name is taken.
  void add(std::unique_ptr<Implementation> implementation);
  /// Throws like the above.
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
  /// ANNULUS_FORCE_NATIVE=1 only "native" is selected, whatever the name. For the backward pass,
  /// implementations are asked for gradients (Implementation::fits_backward()), and what they are
  /// meant for in the forward pass does not count.
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
